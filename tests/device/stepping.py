"""Whole training steps and single layers on the simulated device, on ranks of gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.simulated_device import SimulatedDevice
from benchmarks.simulated_device.counts import Queued
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.batch import Batch
from moemesh.model.experts import Experts
from moemesh.parallel.parallelize import RankModel
from moemesh.schedule.plan_schedule import build_step
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import gradients_of_step, update
from tests.parallel.dispatching import NUM_EXPERTS, NUM_SLOTS, make
from tests.parity.training import Shape, build, microbatches, model_of

HIDDEN, WIDTH, TOKENS = 32, 16, 16


class Counted(NamedTuple):
    """Counts of one rank: waits by region with the lines that caused them, kernels by region,
    losses of the steps, their ledger, and operations queued on the device by region."""

    waits: dict[str, Counter[str]]
    kernels: dict[str, int]
    losses: list[float]
    ledger: list[dict[str, Any]]
    queued: dict[str, list[Queued]]


def counted(device: SimulatedDevice, losses: list[float], mesh: Mesh) -> Counted:
    regions = {name: totals for name, totals in device.regions.items() if name}
    waits = {
        name: Counter(f"{wait.why}, {wait.line}" for wait in totals.waited)
        for name, totals in regions.items()
    }
    kernels = {name: totals.kernels for name, totals in regions.items()}
    queued = {name: totals.queued for name, totals in regions.items()}
    return Counted(waits, kernels, losses, mesh.ledger.rows(), queued)


def steps_on_rank(
    rank: int,
    model_keys: dict[str, Any],
    plan_keys: dict[str, Any],
    shape: Shape,
    steps: int,
    change: Callable[[RankModel], None] | None = None,
    after: Callable[[RankModel, list[Batch]], None] | None = None,
    tuning: Tuning = FULL,
) -> Counted:
    """`steps` steps; the regions are "gradients" and "update" of the last one. `change` is made to
    the model before them, `after` is called with the last batches."""
    config, plan = model_of(model_keys), Plan(**plan_keys)
    train = TrainConfig(dtype="bfloat16", optimizer="adamw", lr=1e-3, clip=1.0)
    with SimulatedDevice() as device:
        world = plan.layout.world_size
        on_one = Mesh.single("cuda:0") if world == 1 else None
        mesh = on_one or Mesh.create(plan.layout, "cuda:0")
        schedule = build_step(plan, config, shape.seq_len)
        parallel = build(mesh, config, plan, shape, "bfloat16", schedule=schedule, tuning=tuning)
        if change is not None:
            change(parallel)
        optimizer = Optimizer.of(parallel, train)
        losses: list[float] = []
        batches: list[Batch] = []
        for step in range(1, steps + 1):
            batches = microbatches(config, plan, shape, step, mesh)
            suffix = "" if step == steps else " before"
            with device.region(f"gradients{suffix}"):
                result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
            with device.region(f"update{suffix}"):
                update(parallel, optimizer, result, lr=train.lr, clip=1e-3)
            losses.append(result.loss)
        if after is not None:
            after(parallel, batches)
        return counted(device, losses, mesh)


def dispatch_on_rank(rank: int, name: str, num_ranks: int, empty_rank: int = -1) -> Counted:
    """One forward and backward of a dispatcher with experts; some pairs have no expert."""
    with SimulatedDevice() as device:
        nodes = 2 if name.startswith("hierarchical") else 0
        layout = Layout(dp=num_ranks, ep=num_ranks, ranks_per_node=nodes)
        mesh = Mesh.create(layout, "cuda:0")
        dispatcher = make(name, mesh)
        if hasattr(dispatcher, "num_slots"):
            dispatcher.num_slots = TOKENS * NUM_SLOTS
        generator = torch.Generator().manual_seed(rank)
        count = 0 if rank == empty_rank else TOKENS
        experts_TK = torch.rand(count, NUM_EXPERTS, generator=generator).argsort(1)[:, :NUM_SLOTS]
        experts_TK = experts_TK.masked_fill(torch.arange(count)[:, None] == 3, -1)
        weights_TK = torch.rand(count, NUM_SLOTS, generator=generator)
        weights_TK = weights_TK.masked_fill(experts_TK < 0, 0.0)
        x_TH = torch.randn(count, HIDDEN, generator=generator).bfloat16()
        experts = Experts(NUM_EXPERTS // num_ranks, HIDDEN, WIDTH)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        experts = experts.bfloat16().to("cuda")
        x_TH, weights_TK = x_TH.to("cuda"), weights_TK.to("cuda")
        x_TH.requires_grad_()
        weights_TK.requires_grad_()
        experts_TK = experts_TK.to("cuda")
        with device.region("forward"):
            plan = dispatcher.plan(experts_TK)
            rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
            y_TH = dispatcher.combine(experts(rows), plan).wait()
        upstream_TH = torch.ones_like(y_TH)
        with device.region("backward"):
            y_TH.backward(upstream_TH)
        assert x_TH.grad is not None and weights_TK.grad is not None
        numbers = x_TH.grad.float().sum() + weights_TK.grad.sum()
        return counted(device, [float(y_TH.float().sum()), float(numbers)], mesh)
