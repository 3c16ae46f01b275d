"""Asynchronous training on gloo ranks, all steps in one segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.pipeline.asynchronous_stage import AsynchronousProgram, StreamExecutor
from moemesh.parallel.pipeline.message_driven import MessageDrivenExecutor
from moemesh.schedule.action import Schedule
from moemesh.schedule.generators import pipedream, pipedream_2bw
from moemesh.schedule.text import from_text, to_text
from moemesh.train.asynchronous import StreamRecorder, TrainingStream
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import StepResult
from tests.parity.training import (
    Shape,
    assemble,
    build,
    microbatches,
    on_ranks_of,
    owned,
    shared_biases,
)


class Streamed(NamedTuple):
    """Results of a stream. Every step: loss and aux loss; the end: weights and router biases by
    name; every stage: most copies alive and largest lag; and the schedule that was run."""

    losses: list[float]
    aux: list[float]
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    copies: list[int]
    lags: list[int]
    schedule: Schedule | None = None


def stream_on_rank(
    mesh: Mesh,
    model_keys: dict[str, Any],
    plan_keys: dict[str, Any],
    train_keys: dict[str, Any],
    shape: Shape,
    recorded: str | None = None,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """All steps in one segment; `recorded`: the text of a schedule to carry out."""
    config, plan, train = ModelConfig(**model_keys), Plan(**plan_keys), TrainConfig(**train_keys)
    parallel = build(mesh, config, plan, shape, train.dtype, seed=train.seed)
    reported: list[tuple[int, StepResult]] = []
    program, schedule = run_stream(
        parallel,
        Optimizer.of(parallel, train),
        plan,
        train,
        lambda step: microbatches(config, plan, shape, step, mesh),
        reported,
        recorded=recorded,
        # One rank gets the request, while the others are anywhere.
        stop_requested=lambda: (
            stop_after is not None and mesh.rank == 1 and len(reported) >= stop_after
        ),
    )
    return {
        "steps": [(result.loss, result.aux_loss) for _, result in reported],
        "weights": owned(parallel, parallel.reducer.weights),
        "biases": {name: buffer.clone() for name, buffer in parallel.model.named_buffers()},
        "stage": (mesh["pp"].index, program.versions.most_copies, program.versions.lag),
        "schedule": to_text(schedule),
    }


def run_stream(
    parallel: RankModel,
    optimizer: Optimizer,
    plan: Plan,
    train: TrainConfig,
    batches: Callable[[int], list[Batch]],
    reported: list[tuple[int, StepResult]],
    *,
    recorded: str | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> tuple[AsynchronousProgram, Schedule]:
    """All steps of an asynchronous schedule, to their drained end, and what was carried out;
    `reported` fills with the results of steps as they come."""
    mesh, count = parallel.mesh, train.steps * plan.microbatches
    window, reach = plan.num_update_microbatches, plan.max_in_flight or plan.pp
    steps = TrainingStream(
        parallel,
        optimizer,
        train,
        num_microbatches=plan.microbatches,
        window=window,
        reach=reach,
        first=1,
        last=train.steps,
        batches=batches,
        stop_requested=stop_requested,
        on_step=lambda step, result, seconds: reported.append((step, result)),
    )
    (part,) = parallel.pipeline.parts.values()
    channels = parallel.pipeline.channels
    executor: StreamExecutor | MessageDrivenExecutor
    if recorded is not None:
        executor = StreamExecutor(from_text(recorded), channels)
    elif plan.schedule == "ampnet":
        executor = MessageDrivenExecutor(channels, mesh, count, window=window, max_in_flight=reach)
    elif plan.schedule == "pipedream":
        executor = StreamExecutor(pipedream(plan.pp, count), channels)
    else:
        executor = StreamExecutor(pipedream_2bw(plan.pp, count, window=window), channels)
    rule = executor.schedule.update
    assert rule is not None
    program = AsynchronousProgram(
        rule, parallel.model, part, parallel.reducer, steps, backward=plan.ampnet_backward
    )
    recorder = StreamRecorder(mesh.rank, first=1, num_microbatches=plan.microbatches)
    executor.run(program, recorder)
    program.versions.close()
    reported += [(step, result) for step, result, _ in steps.drain()]
    assert [step for step, _ in reported] == list(range(1, steps.last + 1))
    is_recorded = isinstance(executor, MessageDrivenExecutor)
    return program, executor.recorded() if is_recorded else executor.schedule


def stream(
    model: dict[str, Any],
    plan: dict[str, Any],
    train: dict[str, Any],
    shape: Shape,
    *,
    recorded: Schedule | None = None,
    stop_after: int | None = None,
) -> Streamed:
    """Train asynchronously on the gloo ranks of `plan`."""
    text = None if recorded is None else to_text(recorded)
    arguments = (model, plan, train, shape, text, stop_after)
    ranks = on_ranks_of(ModelConfig(**model), Plan(**plan), stream_on_rank, *arguments)
    assert all(rank["schedule"] == ranks[0]["schedule"] for rank in ranks)
    losses, aux = zip(*ranks[0]["steps"], strict=True)
    stages = {rank["stage"][0]: rank["stage"] for rank in ranks}
    return Streamed(
        losses=list(losses),
        aux=list(aux),
        weights=assemble([rank["weights"] for rank in ranks]),
        biases=shared_biases(ranks),
        copies=[stages[stage][1] for stage in sorted(stages)],
        lags=[stages[stage][2] for stage in sorted(stages)],
        schedule=from_text(ranks[0]["schedule"]),
    )
