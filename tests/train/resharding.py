"""A chain of layouts: each reads the checkpoint that the one before has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.console import Console
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.step import gradients_of_step, update
from moemesh.train.weights import saving
from moemesh.train.weights.saving import Checkpoints
from tests.parity.training import Part, Shape, assemble, microbatches, owned
from tests.ranks import end_meshes, run_on_ranks
from tests.waiting import PATIENCE

SHAPE = Shape(global_batch=5, seq_len=4)


def chain_on_rank(
    rank: int,
    folder: str,
    model: dict[str, Any],
    plans: list[dict[str, Any]],
    train: dict[str, Any],
) -> list[dict[str, list[Part]]]:
    """Of each plan, the states that this rank owns: the first takes two steps, the others read
    what the one before has saved."""
    found: list[dict[str, list[Part]]] = []
    config, keys = ModelConfig(**model), TrainConfig(**train)
    run = RunFolder(Path(folder), has_run=False)
    for number, plan_keys in enumerate(plans):
        plan = Plan(**plan_keys)
        assert plan.check(config) == []
        mesh = Mesh.create(plan.layout, "cpu")
        parallel = parallelize(
            config,
            plan,
            mesh,
            seed=17 + number,  # what is not read shows
            dtype=getattr(torch, keys.dtype),
            tokens_per_rank=plan.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch),
        )
        optimizer = Optimizer.of(parallel, keys)
        if not number:
            for step in (1, 2):
                batches = microbatches(config, plan, SHAPE, step, mesh)
                result = gradients_of_step(parallel, batches, TimelineRecorder(rank))
                update(parallel, optimizer, result, lr=keys.lr, clip=keys.clip)
        else:
            checkpoint = saving.newest(run, parallel, lambda step, why: None)
            assert checkpoint is not None and checkpoint.step == number - 1
            saving.load(checkpoint, parallel, optimizer)
        found.append(states(parallel, optimizer))
        Checkpoints(run, parallel, optimizer, keys, Console(silent=True)).save_last(
            number, {"step": number}
        )
        parallel.close()
        end_meshes()
    return found


def states(parallel: RankModel, optimizer: Optimizer) -> dict[str, list[Part]]:
    """Weights as they are used, masters and moments, of what this rank owns."""
    held = {
        "weights": parallel.reducer.weights,
        "masters": optimizer.masters,
        **optimizer.state(),
    }
    found = {kind: owned(parallel, tensors) for kind, tensors in held.items()}
    # What a rank gathers is what the owners have.
    reducer = parallel.reducer
    for name, _ in parallel.model.named_parameters():
        whole = reducer.whole_weights(name).flatten()
        if name in reducer.owned:
            own, part = reducer.owned[name].numbers, reducer.weights[name].detach().flatten()
            assert torch.equal(whole[own.start : own.stop], part), name
    return found


def chain(
    folder: Path,
    model: dict[str, Any],
    plans: list[dict[str, Any]],
    train: dict[str, Any],
    *,
    timeout: float = PATIENCE,
) -> list[dict[str, Tensor]]:
    """Of each plan, logical name -> state."""
    size = Plan(**plans[0]).world_size
    ranks = run_on_ranks(size, chain_on_rank, str(folder), model, plans, train, timeout=timeout)
    found: list[dict[str, Tensor]] = []
    for number in range(len(plans)):
        state: dict[str, Tensor] = {}
        kinds = sorted({kind for rank in ranks for kind in rank[number]})
        for kind in kinds:
            whole = assemble([rank[number].get(kind, []) for rank in ranks])
            state |= {f"{kind}.{name}": tensor for name, tensor in whole.items()}
        found.append(state)
    return found
