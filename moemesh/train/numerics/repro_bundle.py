"""Replay bundles: all inputs of a non-finite step, in a folder of its own.

    failures/step-12/
      bundle.json          step, seed, sample ids, origin of the fault, content of the folder
      config.toml          the resolved configuration, the plan in it
      batch.safetensors    tokens, targets, documents and masks of every sample of the step
      weights/step-12/     weights and buffers before the step, as a checkpoint without moments,
                           unless the bundle would be larger than train.bundle_gib

Random numbers have the key (seed, step, place in the model), so the seed is all of their state.
`moemesh replay` repeats the forward and backward of the step from the bundle alone, or with
the folder of a packed base.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from moemesh.checkpoint import store
from moemesh.checkpoint.store import CheckpointError
from moemesh.comm.collectives import barrier, gather_json
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, UserError
from moemesh.config.limits import parse_json
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_CONFIG
from moemesh.config.trainable import refusals
from moemesh.data.samples import Windows
from moemesh.parallel.parallelize import RankModel
from moemesh.sharding.load_run import load_recorded
from moemesh.trace.run import FAILURES
from moemesh.trace.strict_json import strict_json
from moemesh.train.numerics.nan_check import NonfiniteOrigin, examine
from moemesh.train.opening import construct, own_batches
from moemesh.train.optimizer import Optimizer, has_master
from moemesh.train.weights import saving

BODY = "bundle.json"
BATCH, WEIGHTS = "batch.safetensors", "weights"
#: Largest number of kept bundles of a run, the newest ones.
MOST_KEPT = 2
_NAME = re.compile(r"step-(\d+)")
_FORMAT = 1


def begin_bundle(
    run: Path,
    config: RunConfig,
    parallel: RankModel,
    optimizer: Optimizer,
    step: int,
    samples: Windows,
    ids: np.ndarray,
) -> Path | None:
    """Write the inputs of step `step` of the run in the folder `run`, before it is repeated; in an
    asynchronous schedule other stages have updated their weights. Returns the folder of the bundle,
    or None if train.bundle_gib is 0 or writing fails. All ranks call."""
    limit = config.train.bundle_gib * 2**30
    if not limit:
        return None
    folder, mesh = run / FAILURES / f"step-{step}", parallel.mesh
    batch = samples.arrays(ids)
    size = sum(array.nbytes for array in batch.values())
    dtype = next(parallel.model.parameters()).dtype
    width = 4 if has_master(dtype) else dtype.itemsize
    num_elements = sum(where.num_elements for where in parallel.placements.values())
    has_weights = size + width * num_elements <= limit
    problem = None
    if mesh.rank == 0:
        try:
            # Remove older bundles, and an earlier one of the same step.
            bundles = sorted(
                (int(match[1]), path)
                for path in (run / FAILURES).glob("step-*")
                if (match := _NAME.fullmatch(path.name)) and (path / BODY).is_file()
            )
            kept = [path for number, path in bundles if number != step][-(MOST_KEPT - 1) :]
            for _, path in bundles:
                if path not in kept:
                    shutil.rmtree(path)
            folder.mkdir(parents=True)
            save_file(batch, folder / BATCH)
            (folder / RUN_CONFIG).write_text(resolved_toml(config), encoding="utf-8")
            body = {"format": _FORMAT, "step": step, "seed": config.train.seed}
            body |= {"samples": ids.tolist(), "weights": has_weights}
            (folder / BODY).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            problem = str(error)
    if gather_json(problem, mesh.control)[0] is not None:
        return None
    if has_weights:
        try:
            shards, _ = saving.contents(parallel, optimizer, {}, moments=False)
            store.save_together(folder / WEIGHTS, step, shards, {}, mesh.control)
        except CheckpointError:
            return None
    return folder


def finish_bundle(folder: Path, origin: NonfiniteOrigin, num_updates: int, mesh: Mesh) -> None:
    """Add the origin and the number of updates before the step to ``bundle.json``; all ranks
    call."""
    if mesh.rank == 0:
        body = parse_json((folder / BODY).read_text(encoding="utf-8"))
        body |= {"num_updates": num_updates, "found": origin.facts(), "text": str(origin)}
        (folder / BODY).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    barrier(mesh.control)


class ReproBundle:
    """A bundle that was read: its configuration (with `overrides`), its samples (:meth:`arrays`
    replaces a run's data), and `text`, the origin that the run reported."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        """Raises UserError if `folder` is not a complete bundle."""
        try:
            body: dict[str, Any] = parse_json((folder / BODY).read_text(encoding="utf-8"))
            if body["format"] != _FORMAT:
                raise UserError(f"{folder}: a bundle of format {body['format']}, not {_FORMAT}")
            self._batch = load_file(folder / BATCH)
            self.step, self.ids = int(body["step"]), np.array(body["samples"], dtype=np.int64)
            has_weights = bool(body["weights"])
        except UserError:
            raise
        except Exception as error:  # safetensors has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{folder}: not a replay bundle ({BODY}: {reason})") from error
        if not has_weights:
            raise UserError(
                f"{folder}: the bundle was written without weights, which were larger than "
                "train.bundle_gib: nothing can be run from it"
            )
        self.weights, self.text = folder / WEIGHTS, str(body.get("text", ""))
        sections = ("model", "plan", "data", "train", "lora")
        self.config = load_recorded(folder / RUN_CONFIG, overrides, sections=sections)

    def arrays(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """See :meth:`Windows.arrays`."""
        row_of = {sample: row for row, sample in enumerate(self.ids.tolist())}
        rows = [row_of[id_] for id_ in ids.tolist()]
        return {name: array[rows] for name, array in self._batch.items()}


# `moemesh replay`: repeat a non-finite step from its bundle.

#: Overrides that make a plan of one rank. The bundle has whole weights and all samples.
ALONE = (
    *(f"plan.{degree}=1" for degree in ("dp", "tp", "cp", "pp", "ep")),
    *("plan.schedule=1f1b", "plan.data=replicate", "plan.dispatcher=auto"),
)


def replay(
    folder: Path, overrides: Sequence[str] = (), *, alone: bool = False, as_json: bool = False
) -> int:
    """Replay the bundle in `folder` on the ranks of its plan, or on one, and print; returns the
    exit code. Raises UserError for any other folder."""
    # Late: ranks of a run do not need the code that reads and converts other weights.
    from moemesh.train.inference.evaluation import on_ranks

    bundle = ReproBundle(folder, [*(ALONE if alone else ()), *overrides])
    if problems := refusals(bundle.config):
        raise ConfigError(problems)

    def work(mesh: Mesh) -> str:
        origin = replay_step(bundle, mesh)
        if as_json:
            return strict_json({"step": bundle.step, "text": str(origin), **origin.facts()})
        before = f"the run found   {bundle.text}\n" if bundle.text else ""
        return f"step {bundle.step}, {len(bundle.ids)} samples\n{before}the replay finds  {origin}"

    return on_ranks(bundle.config, work)


def replay_step(bundle: ReproBundle, mesh: Mesh) -> NonfiniteOrigin:
    """Repeat the step; all ranks call."""
    config = bundle.config
    train = config.train
    parallel = construct(config, mesh)
    optimizer = Optimizer.of(parallel, train.model_copy(update={"optimizer": "sgd"}))
    checkpoint, _ = store.open_together(bundle.weights, mesh.control, bundle.step)
    assert checkpoint is not None, "a step that is named is opened or refused"
    saving.load_weights(checkpoint, parallel, optimizer)
    if config.lora.is_packed:
        from moemesh.train.weights.conversion import load_base  # late, as in `replay`

        load_base(config, parallel)
    batches = own_batches(
        bundle, mesh, bundle.ids, config.plan.microbatches, seed=train.seed, step=bundle.step
    )
    origin = examine(parallel, optimizer, batches, bundle.ids.tolist())
    parallel.close()
    return origin
