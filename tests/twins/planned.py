"""One measured training step of the tiny preset on gloo ranks, beside what the planner predicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.moe import MoE
from moemesh.model.segments import Steps
from moemesh.ops.saved import SavedForBackward
from moemesh.parallel.parallelize import ParallelModel, parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, update
from tests.parity.training import Shape, microbatches
from tests.ranks import mesh_on_ranks

SEQ_LEN = 16


def step_on_rank(
    mesh: Mesh,
    model_keys: dict[str, Any],
    plan_keys: dict[str, Any],
    dtype: str,
    batch: int,
    seq_len: int,
    count_saved: bool,
) -> dict[str, Any]:
    """One step of one rank: ledger, the router's choices, and what memory held."""
    config, plan = ModelConfig(**model_keys), Plan(**plan_keys)
    train = TrainConfig(dtype=dtype, steps=1)
    parallel = parallelize(
        config,
        plan,
        mesh,
        seed=0,
        dtype=getattr(torch, dtype),
        tokens_per_rank=plan.tokens_per_rank(seq_len, batch),
    )
    optimizer = Optimizer(dict(parallel.model.named_parameters()), train)
    batches = microbatches(config, plan, Shape(batch, seq_len), 1, mesh)
    saved = SavedForBackward(parallel.model.parameters())
    with recorded_choices() as choices, saved if count_saved else contextlib.nullcontext():
        result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
    update(parallel, optimizer, result, lr=1e-3, clip=1.0)
    return {
        "ledger": mesh.ledger.rows(),
        "choices": in_sample_order(parallel, choices),
        "memory": memory_of(parallel, optimizer) | {"activations": saved.peak_bytes},
    }


@contextlib.contextmanager
def recorded_choices() -> Iterator[dict[int, list[list[list[int]]]]]:
    """Layer -> the expert ids of each of its forwards, in the order in which they ran."""
    found: dict[int, list[list[list[int]]]] = {}
    original = MoE.expert_steps

    def apply(self: MoE, x_TH: Tensor, routing: Any, context: Any) -> Steps[Tensor]:
        found.setdefault(self.router.layer, []).append(routing.experts_TK.tolist())
        return original(self, x_TH, routing, context)

    MoE.expert_steps = apply
    try:
        yield found
    finally:
        MoE.expert_steps = original


def in_sample_order(
    parallel: ParallelModel, choices: dict[int, list[list[list[int]]]]
) -> dict[tuple[int, int], list[list[int]]]:
    """(microbatch of the step, layer) -> expert ids: schedules run microbatches in their order."""
    pipeline = parallel.pipeline
    found: dict[tuple[int, int], list[list[int]]] = {}
    for layer, forwards in choices.items():
        samples = [
            pipeline.schedule.sample(op)
            for op in pipeline.schedule.ops(pipeline.rank)
            if op.kind == "F" and layer in pipeline.parts[op.stage].layers
        ]
        for sample, experts in zip(samples, forwards, strict=True):
            found[sample, layer] = experts
    return found


def memory_of(parallel: ParallelModel, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer, as a run's memory.json counts them."""
    weights = {True: 0, False: 0}
    for name, parameter in parallel.model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        weights[parallel.placements[name].is_expert] += size
    gradients = parallel.reducer.gradients.values()
    return {
        "dense_weights": weights[False],
        "expert_weights": weights[True],
        "gradients": sum(g.numel() * g.element_size() for g in gradients),
        "optimizer": optimizer.num_state_bytes(),
    }


def measure(
    model: dict[str, Any],
    plan: dict[str, Any],
    dtype: str = "float32",
    batch: int = 8,
    seq_len: int = SEQ_LEN,
    *,
    count_saved: bool = False,
) -> list[dict[str, Any]]:
    """What every rank of `plan` measured."""
    checked = Plan(**plan)
    assert checked.check(ModelConfig(**model)) == []
    arguments = (model, plan, dtype, batch, seq_len, count_saved)
    if checked.world_size == 1:
        return [step_on_rank(Mesh.single("cpu"), *arguments)]
    return mesh_on_ranks(checked.layout, step_on_rank, *arguments)
