"""`moemesh evaluate`: the loss of a run or of a folder of transformers on a text, in any plan."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moemesh.checkpoint import store
from moemesh.checkpoint.retention import best_step
from moemesh.checkpoint.store import CheckpointError
from moemesh.comm import launch
from moemesh.comm.collectives import barrier
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.huggingface.adapters import is_adapter_folder
from moemesh.config.huggingface.folder import CONFIG
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.data.samples import Windows
from moemesh.data.sources import open_source
from moemesh.parallel.parallelize import RankModel
from moemesh.trace.step_seconds import duration
from moemesh.trace.strict_json import strict_json
from moemesh.train.opening import construct, own_batches
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.run_folder import checkpoints_of
from moemesh.train.step import sum_losses
from moemesh.train.weights import saving
from moemesh.train.weights.conversion import load_base, open_adapters, open_weights, to_stderr
from moemesh.train.weights.weight_sources import config_of


def on_ranks(config: RunConfig, work: Callable[[Mesh], str], *more: str) -> int:
    """Run `work` on the ranks of the plan, and print its result of the first rank, unless it is
    empty; returns the exit code. The call starts the ranks, with the arguments of this command and
    `more`, or, in a started process or with a plan of one rank, runs that rank."""
    if not launch.joined() and config.plan.world_size > 1:
        return launch.launch(config.plan.world_size, [*sys.argv[1:], *more])
    ranks = launch.start(config.train.device, config.train.timeout_seconds, config.train.dtype)
    alone = ranks.world_size == 1
    mesh = Mesh.single(ranks.device) if alone else Mesh.create(config.plan.layout, ranks.device)
    output = work(mesh)
    if mesh.rank == 0 and output:
        print(output, flush=True)
    barrier(mesh.control)
    launch.stop()
    return 0


def load(config: RunConfig, mesh: Mesh, source: Path, *, best: bool = False) -> RankModel:
    """The model of a run's newest checkpoint or its `best` one, or of a folder of transformers or
    PEFT, on the ranks of `mesh`; all ranks call."""
    # Weights are opened first: those that cannot be read raise before a model takes memory.
    weights: saving.WeightSource
    adapters = state = None
    if (source / CONFIG).exists() or is_adapter_folder(source):
        weights = open_weights(config, to_stderr if mesh.rank == 0 else lambda note: None)
        adapters = open_adapters(config, trains=False)
    else:
        weights = checkpoint = open_checkpoint(mesh, source, best=best)
        state = checkpoint.state
    parallel = construct(config, mesh)
    # Weights are loaded into fp32 masters and rounded once; SGD without momentum has no state.
    optimizer = Optimizer.of(parallel, TrainConfig(optimizer="sgd", momentum=0.0))
    saving.load_weights(weights, parallel, optimizer)
    if config.lora.is_packed:
        load_base(config, parallel, state)
    if adapters is not None:
        saving.load_weights(adapters, parallel, optimizer)
    return parallel


def open_checkpoint(mesh: Mesh, run: Path, *, best: bool) -> store.Checkpoint:
    """The newest readable checkpoint of a run, or its `best` one; all ranks get the same. Raises
    CheckpointError without one."""
    folder = checkpoints_of(run)
    step = store.first_of(partial(best_step, folder), mesh.control) if best else None
    checkpoint, skipped = store.open_together(folder, mesh.control, step)
    if checkpoint is None:
        why = "".join(f"\n  step {step}: {reason}" for step, reason in skipped)
        raise CheckpointError(f"{folder}: holds no readable checkpoint{why}")
    for step, reason in skipped if mesh.rank == 0 else ():
        to_stderr(
            f"moemesh: warning: the checkpoint of step {step} is left out: {reason}; "
            f"these are the weights of step {checkpoint.step}"
        )
    return checkpoint


#: Seconds between lines of a long evaluation.
_LINE_SECONDS = 30.0


class Evaluation(NamedTuple):
    """`loss`: mean negative log-likelihood in `unit`: "nats a token", or "nats a byte" with the
    tokenizer "bytes"; `perplexity`: its exponential; `tokens`: number of predicted tokens.

    Losses of two models are comparable if `seq_len` is the same: longer sequences give more
    context, and truncate fewer conversations."""

    loss: float
    perplexity: float
    tokens: int
    unit: str = "nats a token"
    seq_len: int = 0

    def text(self) -> str:
        return (
            f"loss        {self.loss:.6f} {self.unit}\n"
            f"perplexity  {self.perplexity:.4f}\n"
            f"tokens      {self.tokens:,} in sequences of up to {self.seq_len:,}"
        )


def evaluate(
    source: Path,
    data: str,
    seq_len: int,
    overrides: Sequence[str] = (),
    *,
    best: bool = False,
    as_json: bool = False,
) -> int:
    """Evaluate `source` on the ranks of the plan and print; returns the exit code."""
    config = config_on(source, data, seq_len, overrides)
    windows = open_windows(config)  # errors in the data before any process starts
    notes = list(windows.notes)
    if config.data.documents == "mask" and not windows.masks_documents:
        notes.append("windows go over the ends of documents: data.documents = mask is for training")
    for note in notes if not launch.launched() and launch.own_rank() == 0 else ():
        print(f"note: {note}", file=sys.stderr, flush=True)

    def work(mesh: Mesh) -> str:
        evaluation = run(config, mesh, source, best=best)
        return strict_json(evaluation._asdict()) if as_json else evaluation.text()

    return on_ranks(config, work)


def config_on(source: Path, data: str, seq_len: int, overrides: Sequence[str]) -> RunConfig:
    """The configuration of `source` on the text `data`. Keys of the data that a run was trained on
    (data.sources, data.format) are reset, unless `overrides` set them."""
    settings = [f"data.path={data}", f"data.seq_len={seq_len}", *overrides]
    for key, value in (("sources", "[]"), ("format", "auto")):
        if not any(override.startswith(f"data.{key}=") for override in settings):
            settings.append(f"data.{key}={value}")
    return config_of(source, settings)


def run(config: RunConfig, mesh: Mesh, source: Path, *, best: bool = False) -> Evaluation:
    """The loss over consecutive windows in order; all ranks call, and all get it. Raises UserError
    for one that is not finite."""
    windows = open_windows(config)
    parallel = load(config, mesh, source, best=best)
    total = count = 0.0
    size = config.data.global_batch
    for ids in in_batches(windows.num_samples, size, is_silent=mesh.rank > 0):
        batches = own_batches(windows, mesh, ids, config.plan.microbatches, seed=config.train.seed)
        part, tokens = sum_losses(parallel, batches)
        total, count = total + part, count + tokens
    parallel.close()
    loss = total / max(count, 1)
    if not math.isfinite(loss):
        raise UserError(f"the loss of {source} is {loss}: its weights are not all finite numbers")
    perplexity, data = math.exp(min(loss, 700.0)), config.data  # exp(710) overflows
    return Evaluation(loss, perplexity, int(count), data.loss_unit, data.seq_len)


def in_batches(number: int, size: int, *, is_silent: bool) -> Iterator[np.ndarray]:
    """The ids of `number` windows, `size` at a time, with a line on stderr every half minute."""
    began = line_at = time.monotonic()
    for start in range(0, number, size):
        now = time.monotonic()
        if start and not is_silent and now - line_at >= _LINE_SECONDS:
            line_at, left = now, duration((now - began) * (number - start) / start)
            line = f"note: {start:,} of {number:,} windows, about {left} to go"
            print(line, file=sys.stderr, flush=True)
        yield np.arange(start, min(start + size, number), dtype=np.int64)


def open_windows(config: RunConfig) -> Windows:
    """The text in windows. Raises UserError when it does not make one."""
    data = config.data
    (source,) = data.all_sources
    cache = None if data.cache is None else Path(data.cache).expanduser()
    corpora = open_source(source, data, config.model.vocab_size, cache, lambda note: None)
    # Windows of a text go over the ends of documents; conversations are read one by one.
    documents = "ignore" if data.documents == "ignore" else "auto"
    windows = Windows(corpora, data.seq_len, documents=documents, long=data.long_conversations)
    if not windows.num_samples and windows.packed[0] is not None:
        raise UserError(
            f"{data.path} holds no conversation with loss in its first {data.seq_len} tokens, "
            "--seq-len"
        )
    if not windows.num_samples:
        raise UserError(
            f"{data.path} holds {windows.num_tokens} tokens; one window of --seq-len "
            f"{data.seq_len} and its targets need {data.seq_len + 1}"
        )
    return windows
