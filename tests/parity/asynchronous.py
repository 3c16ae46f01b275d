"""Asynchronous training on gloo ranks, all steps in one segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import parallelize
from moemesh.parallel.pipeline.asynchronous_stage import AsynchronousProgram, StreamExecutor
from moemesh.parallel.pipeline.message_driven import MessageDrivenExecutor
from moemesh.schedule.action import Schedule
from moemesh.schedule.generators import pipedream, pipedream_2bw
from moemesh.schedule.text import from_text, to_text
from moemesh.train.asynchronous import StreamRecorder, TrainingStream
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import StepResult
from tests.parity.training import Shape, assemble, microbatches, owned
from tests.ranks import mesh_on_ranks


class Streamed(NamedTuple):
    """Of every step: loss and aux loss; of the end: weights and router biases by name; of every
    stage: most copies alive and largest lag; and the schedule that was run."""

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
    mutate: Callable[[], None] | None = None,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """All steps in one segment; `recorded`: the text of a schedule to carry out."""
    if mutate is not None:
        mutate()
    config, plan, train = ModelConfig(**model_keys), Plan(**plan_keys), TrainConfig(**train_keys)
    tokens = plan.tokens_per_rank(shape.seq_len, shape.global_batch)
    dtype = getattr(torch, train.dtype)
    parallel = parallelize(config, plan, mesh, seed=train.seed, dtype=dtype, tokens_per_rank=tokens)
    optimizer = Optimizer.of(parallel, train)
    count, window = train.steps * plan.microbatches, plan.num_update_microbatches
    reported: list[tuple[int, StepResult]] = []
    stream = TrainingStream(
        parallel,
        optimizer,
        train,
        num_microbatches=plan.microbatches,
        window=window,
        reach=plan.max_in_flight or plan.pp,
        first=1,
        last=train.steps,
        batches=lambda step: microbatches(config, plan, shape, step, mesh),
        # One rank is asked, while the others are anywhere.
        stop_requested=lambda: (
            stop_after is not None and mesh.rank == 1 and len(reported) >= stop_after
        ),
        on_step=lambda step, result, seconds: reported.append((step, result)),
    )
    (part,) = parallel.pipeline.parts.values()
    channels = parallel.pipeline.channels
    schedule: Schedule | None = None
    if recorded is not None:
        schedule = from_text(recorded)
    elif plan.schedule == "pipedream":
        schedule = pipedream(plan.pp, count)
    elif plan.schedule == "pipedream_2bw":
        schedule = pipedream_2bw(plan.pp, count, window=window)
    recorder = StreamRecorder(mesh.rank, first=1, num_microbatches=plan.microbatches)
    if schedule is not None:
        executor = StreamExecutor(schedule, channels)
    else:
        executor = MessageDrivenExecutor(
            channels, mesh, count, window=window, max_in_flight=plan.max_in_flight or plan.pp
        )
    rule = executor.schedule.update
    assert rule is not None
    program = AsynchronousProgram(
        rule, parallel.model, part, parallel.reducer, stream, backward=plan.ampnet_backward
    )
    executor.run(program, recorder)
    if isinstance(executor, MessageDrivenExecutor):
        schedule = executor.recorded()
    program.versions.close()
    reported += [(step, result) for step, result, _ in stream.drain()]
    assert [step for step, _ in reported] == list(range(1, stream.last + 1))
    return {
        "steps": [(result.loss, result.aux_loss) for _, result in reported],
        "weights": owned(parallel, parallel.reducer.weights),
        "biases": {name: buffer.clone() for name, buffer in parallel.model.named_buffers()},
        "stage": (mesh["pp"].index, program.versions.most_copies, program.versions.lag),
        "schedule": None if schedule is None else to_text(schedule),
    }


def stream(
    model: dict[str, Any],
    plan: dict[str, Any],
    train: dict[str, Any],
    shape: Shape,
    *,
    recorded: Schedule | None = None,
    mutate: Callable[[], None] | None = None,
    stop_after: int | None = None,
) -> Streamed:
    """Train asynchronously under `plan` on as many gloo ranks as it needs."""
    checked = Plan(**plan)
    assert checked.check(ModelConfig(**model)) == []
    text = None if recorded is None else to_text(recorded)
    arguments = (model, plan, train, shape, text, mutate, stop_after)
    if checked.world_size == 1:
        ranks = [stream_on_rank(Mesh.single("cpu"), *arguments)]
    else:
        ranks = mesh_on_ranks(checked.layout, stream_on_rank, *arguments)
    for rank in ranks[1:]:
        assert rank["steps"] == ranks[0]["steps"], "ranks report different numbers"
        assert rank["schedule"] == ranks[0]["schedule"]
    losses, aux = zip(*ranks[0]["steps"], strict=True)
    stages = {rank["stage"][0]: rank["stage"] for rank in ranks}
    biases: dict[str, Tensor] = {}
    for rank in ranks:
        for name, bias in rank["biases"].items():
            assert torch.equal(biases.setdefault(name, bias), bias)
    return Streamed(
        losses=list(losses),
        aux=list(aux),
        weights=assemble([rank["weights"] for rank in ranks]),
        biases=biases,
        copies=[stages[stage][1] for stage in sorted(stages)],
        lags=[stages[stage][2] for stage in sorted(stages)],
        schedule=from_text(ranks[0]["schedule"]),
    )
