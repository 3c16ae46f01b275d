"""`moemesh evaluate`: the loss of a run or of a folder of transformers on a text, in any plan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moemesh.checkpoint import together
from moemesh.checkpoint.store import CheckpointError
from moemesh.comm import launch
from moemesh.comm.collectives import barrier
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, Problem, UserError
from moemesh.config.huggingface.folder import CONFIG
from moemesh.config.load import load_recorded, load_run
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.config.trainable import refusals
from moemesh.parallel.parallelize import ParallelModel, parallelize
from moemesh.train import saving
from moemesh.train.conversion import open_weights
from moemesh.train.corpus import Corpus
from moemesh.train.data import Windows, own_batches
from moemesh.train.folder import CHECKPOINTS
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import sum_losses


class Evaluation(NamedTuple):
    """Mean negative log-likelihood in nats a token, its exponential, and the tokens predicted."""

    loss: float
    perplexity: float
    tokens: int


def evaluation_config(source: Path, data: str, seq_len: int, overrides: Sequence[str]) -> RunConfig:
    """The configuration to evaluate `source` with: its model and tokenizer on one device, and what
    `overrides` say. Raises ConfigError with every problem found."""
    given = [f"data.path={data}", f"data.seq_len={seq_len}", *overrides]
    if (source / CONFIG).exists():
        return load_run([], [f"model.path={source}", *given]).config
    if not (source / "config.toml").exists():
        message = "neither a run nor a folder with config.json"
        raise ConfigError([Problem(code="no-file", key=str(source), message=message)])
    return load_recorded(source / "config.toml", given, sections=("model", "data", "train"))


def evaluate(
    source: Path, data: str, seq_len: int, overrides: Sequence[str] = (), *, as_json: bool = False
) -> int:
    """Evaluate and print: start the ranks of the plan, or be one of them; returns the exit code."""
    config = evaluation_config(source, data, seq_len, overrides)
    if problems := refusals(config):
        raise ConfigError(problems)
    if not launch.joined() and config.plan.world_size > 1:
        _open(config, source)
        arguments = ["evaluate", str(source), "--data", data, "--seq-len", str(seq_len)]
        for override in overrides:
            arguments += ["--set", override]
        arguments += ["--json"] if as_json else []
        return launch.launch(config.plan.world_size, arguments)
    ranks = launch.start(config.train.device, config.train.timeout_seconds)
    mesh = (
        Mesh.single(ranks.device)
        if ranks.world_size == 1
        else Mesh.create(config.plan.layout, ranks.device)
    )
    found = run(config, mesh, source)
    if mesh.rank == 0:
        print(_text(found, as_json), flush=True)
    barrier(mesh.control)
    launch.stop()
    return 0


def run(config: RunConfig, mesh: Mesh, source: Path) -> Evaluation:
    """The loss over consecutive windows in order; all ranks call, and all get it."""
    windows = _open(config, source)
    parallel = load(config, mesh, source)
    total = count = 0.0
    size = config.data.global_batch
    for start in range(0, windows.num_samples, size):
        ids = np.arange(start, min(start + size, windows.num_samples), dtype=np.int64)
        batches = own_batches(windows, mesh, ids, config.plan.microbatches, seed=config.train.seed)
        part, tokens = sum_losses(parallel, batches)
        total, count = total + part, count + tokens
    parallel.close()
    loss = total / count
    return Evaluation(loss, math.exp(min(loss, 700.0)), int(count))


def load(config: RunConfig, mesh: Mesh, source: Path) -> ParallelModel:
    """The model of a run's newest checkpoint, or of a folder of transformers, on these ranks."""
    data, train = config.data, config.train
    parallel = parallelize(
        config.model,
        config.plan,
        mesh,
        seed=train.seed,
        dtype=getattr(torch, train.dtype),
        tokens_per_rank=config.plan.tokens_per_rank(data.seq_len, data.global_batch),
    )
    # Masters, so that weights are rounded once; an optimizer without state beside them.
    optimizer = Optimizer.of(parallel, TrainConfig(optimizer="sgd", momentum=0.0))
    if (source / CONFIG).exists():
        saving.load_weights(open_weights(config), parallel, optimizer)
        return parallel
    checkpoint, skipped = together.open_together(source / CHECKPOINTS, mesh.control)
    if checkpoint is None:
        why = "".join(f"\n  step {step}: {reason}" for step, reason in skipped)
        raise CheckpointError(f"{source / CHECKPOINTS}: holds no readable checkpoint{why}")
    saving.load_weights(checkpoint, parallel, optimizer)
    return parallel


def _open(config: RunConfig, source: Path) -> Windows:
    """The text in windows. Raises UserError when it does not make one."""
    data = config.data
    corpus = Corpus.open(data.path, data.format, data.tokenizer, config.model.vocab_size)
    windows = Windows(corpus, data.seq_len)
    if not windows.num_samples:
        raise UserError(
            f"{data.path} holds {len(corpus.tokens)} tokens; one window of --seq-len "
            f"{data.seq_len} and its targets need {data.seq_len + 1}"
        )
    return windows


def _text(found: Evaluation, as_json: bool) -> str:
    if as_json:
        return json.dumps(found._asdict())
    return (
        f"loss        {found.loss:.6f} nats a token\n"
        f"perplexity  {found.perplexity:.4f}\n"
        f"tokens      {found.tokens:,}"
    )
