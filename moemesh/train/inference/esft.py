"""`moemesh esft scores`: how much a task uses each expert, in any plan, and which experts to train.

Legend: L layers with experts, E experts, T tokens, K slots per token.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.config.esft_table import KEPT_TABLE, most_relevant, read_table, relevance
from moemesh.config.run import RunConfig
from moemesh.data.samples import Windows
from moemesh.parallel.parallelize import RankModel
from moemesh.report.heat_maps import relevance_map
from moemesh.trace.strict_json import strict_json
from moemesh.train.inference.esft_request import EsftRequest
from moemesh.train.inference.evaluation import config_on, in_batches, load, on_ranks, open_windows
from moemesh.train.opening import own_batches
from moemesh.train.records.run_folder import RunFolder, RunFolderError
from moemesh.train.step import sum_losses


def write_scores(request: EsftRequest, overrides: Sequence[str], *, as_json: bool) -> int:
    """Score the experts of a model on the ranks of the plan, write table and picture, print;
    returns the exit code. `request`: result of :meth:`EsftRequest.checked`."""
    # All experts are scored, whichever of them the run `source` has trained.
    config = config_on(request.source, request.data, request.seq_len, overrides)
    windows = open_windows(config)

    def work(mesh: Mesh) -> str:
        parallel = load(config, mesh, request.source, best=request.best)
        table = score_table(parallel, config, windows, request)
        parallel.close()
        if mesh.rank == 0:
            table = {"model": str(request.source)} | table
            request.out.parent.mkdir(parents=True, exist_ok=True)
            request.out.write_text(strict_json(table, indent=1) + "\n", encoding="utf-8")
            if request.svg is not None:
                request.svg.parent.mkdir(parents=True, exist_ok=True)
                scores = {int(x): row[table["score"]] for x, row in table["scores"].items()}
                chosen = {int(layer): experts for layer, experts in table["experts"].items()}
                request.svg.write_text(relevance_map(scores, chosen), encoding="utf-8")
        return strict_json(table) if as_json else as_text(table, request.out)

    return on_ranks(config, work)


def score_table(
    parallel: RankModel, config: RunConfig, windows: Windows, request: EsftRequest
) -> dict[str, Any]:
    """The table of a model on these ranks; all ranks call, and all get it."""
    model = config.model
    # Without the extra prediction layers, whose numbers follow those of the model's layers.
    layers = [layer for layer in model.routed_layers if layer < model.num_layers]
    num_windows = min(windows.num_samples, request.samples)
    digest, size = hashlib.sha256(), config.data.global_batch
    with _summed(parallel, layers) as sums_L2E:
        for ids in in_batches(num_windows, size, is_silent=parallel.mesh.rank > 0):
            digest.update(np.ascontiguousarray(windows.windows(ids)).tobytes())
            parts = config.plan.microbatches
            batches = own_batches(windows, parallel.mesh, ids, parts, seed=config.train.seed)
            sum_losses(parallel, batches)
    all_reduce_(sums_L2E, parallel.mesh["world"], caller="esft", phase="forward")
    rows = {
        layer: {"gate": relevance(gate), "token": relevance(token)}
        for layer, (gate, token) in zip(layers, sums_L2E.tolist(), strict=True)
    }
    limits = {"threshold": request.threshold, "count": request.experts_per_layer}
    chosen = {layer: most_relevant(row[request.score], **limits) for layer, row in rows.items()}
    return {
        "num_experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "score": request.score,
        "threshold": request.threshold,
        "experts_per_layer": request.experts_per_layer,
        "data": {
            "path": request.data,
            "seq_len": config.data.seq_len,
            "samples": num_windows,
            "tokens": num_windows * config.data.seq_len,
            "sha256": digest.hexdigest(),
        },
        "experts": {str(layer): list(ids) for layer, ids in chosen.items()},
        # Keys of the published tables: only experts of the table train.
        "shared_experts": False,
        "non_expert_modules": False,
        "scores": {str(layer): row for layer, row in rows.items()},
    }


@contextmanager
def _summed(parallel: RankModel, layers: Sequence[int]) -> Iterator[Tensor]:
    """Context that returns a tensor [L, 2, E], in which forwards add up this rank's gate scores
    ([:, 0]) and numbers of choices ([:, 1]) of each expert."""
    sums = torch.zeros(
        len(layers), 2, parallel.model.config.num_experts, dtype=torch.float64,
        device=parallel.mesh.device,
    )  # fmt: skip

    def add(sums_2E: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> None:
        chosen = experts_TK.flatten()
        valid = chosen >= 0
        weights = weights_TK.detach().flatten()[valid].double()
        sums_2E[0].index_add_(0, chosen[valid], weights)
        sums_2E[1].index_add_(0, chosen[valid], torch.ones_like(weights))

    hooks = [
        moe.observe(partial(add, sums[layers.index(layer)]))
        for layer, moe in parallel.model.moe_layers().items()
        if layer in layers
    ]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def keep_table(table: str, folder: RunFolder) -> None:
    """Record the experts of the file `table` in the run folder. Raises RunFolderError if a resumed
    run would train others."""
    experts = {str(layer): list(ids) for layer, ids in read_table(table).items()}
    file = folder.path / KEPT_TABLE
    if folder.has_run and file.exists():
        before = {str(layer): list(ids) for layer, ids in read_table(file).items()}
        for layer in experts.keys() | before.keys():
            if experts.get(layer) != before.get(layer):
                raise RunFolderError(
                    f"{table} names the experts {experts.get(layer)} of layer {layer}, "
                    f"the run in this folder trains {before.get(layer)}: choose another folder, "
                    "--out, or give the table as it was"
                )
    folder.write_json(KEPT_TABLE, {"experts": experts})


def as_text(table: dict[str, Any], out: Path) -> str:
    """The table as text: a line for each layer."""
    lines = [f"{'layer':>5}  {'experts':>7}  {'share':>6}  chosen"]
    total = 0
    for layer, chosen in table["experts"].items():
        share = sum(table["scores"][layer][table["score"]][expert] for expert in chosen)
        total += len(chosen)
        ids = " ".join(map(str, chosen[:16])) + (" ..." if len(chosen) > 16 else "")
        lines.append(f"{layer:>5}  {len(chosen):>7}  {share:>6.1%}  {ids}")
    num_experts = len(table["experts"]) * table["num_experts"]
    tokens = table["data"]["tokens"]
    lines.append(f"{total} of {num_experts} experts ({total / num_experts:.1%}), {tokens:,} tokens")
    return "\n".join([*lines, f"to train them: --set {shlex.quote(f'train.esft={out}')}"])
