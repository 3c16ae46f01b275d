"""Train with the optimizer's validation before or after its step, with gradients gone wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.faults import RoutingError
from moemesh.parallel.parallelize import RankModel
from moemesh.trace.timeline import TimelineRecorder, WorkRecord
from moemesh.train.optimizer import Optimizer
from moemesh.train.post_validated import PostValidation, Step
from moemesh.train.step import StepResult, gradients_of_step, update
from tests.parity.training import (
    Shape,
    assemble,
    build,
    microbatches,
    on_ranks_of,
    owned,
    shared_biases,
)
from tests.waiting import until


class Fault(NamedTuple):
    """A factor on the gradients of `layer`'s attention in step `step`, after their sums over
    replicas."""

    step: int
    layer: int
    factor: float


class Case(NamedTuple):
    """Training of a rank. `broken`: (step, layer) in which a router's weight becomes infinite."""

    model: dict[str, Any]
    plan: dict[str, Any]
    train: dict[str, Any]
    shape: Shape
    faults: tuple[Fault, ...] = ()
    arm_after: int = 0
    broken: tuple[int, int] | None = None


class Outcome(NamedTuple):
    """Results that must not depend on the time of validation, to the bit, and times of events."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    loads: list[list[list[int]]]
    aux: list[float]
    state: dict[str, Tensor]
    num_updates: int
    records: list[list[WorkRecord]]

    def redone(self, rank: int = 0) -> list[int]:
        """Steps whose warm-up `rank` has run twice."""
        return [r.step for r in self.records[rank] if r.kind == "redo" and r.step is not None]


def _spoil(parallel: RankModel, faults: tuple[Fault, ...]) -> Callable[[int], None]:
    """Plant the faults after the sums over replicas; call the result before each step."""
    factors: dict[str, float] = {}
    finish = parallel.reducer.finish

    def spoiled() -> None:
        finish()
        for prefix, factor in factors.items():
            for name, gradient in parallel.reducer.gradients.items():
                if name.startswith(prefix):
                    gradient.mul_(factor)

    def prepare(step: int) -> None:
        factors.clear()
        factors.update({f"layers.{f.layer}.attention": f.factor for f in faults if f.step == step})

    parallel.reducer.finish = spoiled  # type: ignore[method-assign]
    return prepare


class LateLast(PostValidation):
    """The last pipeline rank does not begin to sum up before all others have stepped."""

    folder: Path

    def _end(self, step: Step) -> None:
        axis = self.parallel.mesh["pp"]
        others = [self.folder / f"{step.number}-{rank}" for rank in range(axis.size - 1)]
        if axis.index < axis.size - 1:
            super()._end(step)
            assert step.undo is not None, "has not stepped"
            others[axis.index].touch()
            return
        # Else the others wait for the whole gradient.
        until(lambda: all(other.exists() for other in others))
        super()._end(step)


def _break(parallel: RankModel, layer: int) -> None:
    moe = parallel.model.moe_layers().get(layer)
    if moe is not None:
        with torch.no_grad():
            moe.router.weight[0, 0] = torch.inf


def error_on_rank(mesh: Mesh, case: Case) -> str:
    """Message of the error with which the run stops."""
    try:
        on_rank(mesh, case)
    except RoutingError as error:
        return str(error)
    return "nothing"


def _configs(case: Case) -> tuple[ModelConfig, Plan, TrainConfig]:
    return ModelConfig(**case.model), Plan(**case.plan), TrainConfig(**case.train)


def _start(mesh: Mesh, case: Case) -> tuple[RankModel, Optimizer]:
    config, plan, train = _configs(case)
    parallel = build(mesh, config, plan, case.shape, train.dtype, seed=train.seed)
    return parallel, Optimizer.of(parallel, train)


def stop_on_rank(mesh: Mesh, case: Case, rank: int, request_step: int) -> list[bool]:
    """Whether the run is stopping, after each step; `rank` gets one request, in `request_step`."""
    config, plan, train = _configs(case)
    parallel, optimizer = _start(mesh, case)
    stopping: list[bool] = []
    steps = PostValidation(
        parallel,
        optimizer,
        train,
        lambda: mesh.rank == rank and len(stopping) == request_step - 1,
        arm_after=case.arm_after,
    )
    for step in range(1, train.steps + 1):
        batches = microbatches(config, plan, case.shape, step, mesh)
        steps.run(step, batches, TimelineRecorder(mesh.rank))
        stopping.append(steps.stopping)
    steps.flush()
    return stopping


def on_rank(mesh: Mesh, case: Case, folder: Path | None = None) -> dict[str, Any]:
    config, plan, train = _configs(case)
    shape = case.shape
    parallel, optimizer = _start(mesh, case)
    prepare = _spoil(parallel, case.faults)
    kind = PostValidation if folder is None else LateLast
    early = None
    if plan.optimizer_validation == "after":
        early = kind(parallel, optimizer, train, lambda: False, arm_after=case.arm_after)
        if isinstance(early, LateLast):
            early.folder = folder or Path()
    results: list[StepResult] = []
    records: list[WorkRecord] = []
    recorders: list[TimelineRecorder] = []
    for step in range(1, train.steps + 1):
        batches = microbatches(config, plan, shape, step, mesh)
        recorders.append(recorder := TimelineRecorder(mesh.rank))
        recorder.step = step
        prepare(step)
        if case.broken is not None and case.broken[0] == step:
            _break(parallel, case.broken[1])
        if early is None:
            result = gradients_of_step(parallel, batches, recorder)
            update(parallel, optimizer, result, lr=train.learning_rate(step), clip=train.clip)
            results.append(result)
            continue
        early.run(step, batches, recorder)
        if step == train.steps:
            early.flush()
        results += [taken.result for taken in early.take() if taken.result is not None]
    for recorder in recorders:
        records += recorder.timeline().records
    state = {"weight": dict(parallel.reducer.weights), **optimizer.state()}
    return {
        "steps": [
            (r.loss, r.grad_norm, r.skipped, r.counts_LE.tolist(), r.aux_loss) for r in results
        ],
        "state": {kind: owned(parallel, tensors) for kind, tensors in state.items()},
        "biases": {name: buffer.clone() for name, buffer in parallel.model.named_buffers()},
        "num_updates": optimizer.num_updates,
        "records": records,
    }


def train(case: Case, folder: Path | None = None) -> Outcome:
    """Train on the gloo ranks of the plan; a plan of one rank trains in this process."""
    ranks = on_ranks_of(ModelConfig(**case.model), Plan(**case.plan), on_rank, case, folder)
    assert len({rank["num_updates"] for rank in ranks}) == 1
    losses, norms, skipped, loads, aux = zip(*ranks[0]["steps"], strict=True)
    state: dict[str, Tensor] = {}
    for kind in ranks[0]["state"]:
        whole = assemble([rank["state"][kind] for rank in ranks])
        state |= {f"{kind}.{name}": tensor for name, tensor in whole.items()}
    state |= shared_biases(ranks)
    return Outcome(
        losses=list(losses),
        norms=list(norms),
        skipped=list(skipped),
        loads=list(loads),
        aux=list(aux),
        state=state,
        num_updates=ranks[0]["num_updates"],
        records=[rank["records"] for rank in ranks],
    )
