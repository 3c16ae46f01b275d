"""Trained models in use, without training: from a run or a folder of transformers onto ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moemesh.checkpoint import store
from moemesh.checkpoint.store import CheckpointError
from moemesh.comm import launch
from moemesh.comm.collectives import barrier
from moemesh.comm.mesh import Mesh
from moemesh.config.huggingface.folder import CONFIG
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import RankModel
from moemesh.train.opening import construct
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.run_folder import checkpoints_of
from moemesh.train.weights import saving
from moemesh.train.weights.conversion import open_weights, to_stderr


def on_ranks(
    config: RunConfig,
    arguments: Sequence[str],
    overrides: Sequence[str],
    work: Callable[[Mesh], str],
) -> int:
    """Print what `work` gives on the first rank, unless it is empty; returns the exit code.

    Starts the ranks of the plan, each ``moemesh`` with these `arguments` and `overrides` of the
    configuration, or is one of them.
    """
    arguments = [*arguments, *(word for one in overrides for word in ("--set", one))]
    if not launch.joined() and config.plan.world_size > 1:
        return launch.launch(config.plan.world_size, arguments)
    ranks = launch.start(config.train.device, config.train.timeout_seconds, config.train.dtype)
    alone = ranks.world_size == 1
    mesh = Mesh.single(ranks.device) if alone else Mesh.create(config.plan.layout, ranks.device)
    found = work(mesh)
    if mesh.rank == 0 and found:
        print(found, flush=True)
    barrier(mesh.control)
    launch.stop()
    return 0


def load(config: RunConfig, mesh: Mesh, source: Path) -> RankModel:
    """The model of a run's newest checkpoint, or of a folder of transformers, on these ranks."""
    parallel = construct(config, mesh)
    # Masters, so that weights are rounded once; an optimizer without state beside them.
    optimizer = Optimizer.of(parallel, TrainConfig(optimizer="sgd", momentum=0.0))
    if (source / CONFIG).exists():
        say = to_stderr if mesh.rank == 0 else lambda note: None
        saving.load_weights(open_weights(config, say), parallel, optimizer)
        return parallel
    folder = checkpoints_of(source)
    checkpoint, skipped = store.open_together(folder, mesh.control)
    if checkpoint is None:
        why = "".join(f"\n  step {step}: {reason}" for step, reason in skipped)
        raise CheckpointError(f"{folder}: holds no readable checkpoint{why}")
    for step, reason in skipped if mesh.rank == 0 else ():
        to_stderr(
            f"moemesh: warning: the checkpoint of step {step} is left out: {reason}; "
            f"these are the weights of step {checkpoint.step}"
        )
    saving.load_weights(checkpoint, parallel, optimizer)
    return parallel
