"""One measured training step of the tiny preset on gloo ranks, beside what the planner predicts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import RankModel, parallelize
from moemesh.parallel.pipeline.asynchronous_stage import AsynchronousProgram, StreamExecutor
from moemesh.parallel.pipeline.message_driven import MessageDrivenExecutor
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.asynchronous import StreamRecorder, TrainingStream
from moemesh.train.optimizer import Optimizer
from moemesh.train.post_validated import PostValidation
from moemesh.train.records.artifacts import measure_saved, state_bytes
from moemesh.train.step import gradients_of_step, update
from tests.parity.training import Shape, microbatches, model_of
from tests.ranks import mesh_on_ranks
from tests.twins.predictions import recorded_choices

SEQ_LEN = 16


def step_on_rank(
    mesh: Mesh,
    model_keys: dict[str, Any],
    plan_keys: dict[str, Any],
    dtype: str,
    batch: int,
    seq_len: int,
    count_saved: bool,
    tuning: Tuning = FULL,
) -> dict[str, Any]:
    """One step of one rank: ledger, the router's choices, and what memory held."""
    config, plan = model_of(model_keys), Plan(**plan_keys)
    train = TrainConfig(dtype=dtype, steps=1)
    parallel = parallelize(
        config,
        plan,
        mesh,
        seed=0,
        dtype=getattr(torch, dtype),
        tokens_per_rank=plan.tokens_per_rank(seq_len, batch),
        tuning=tuning,
    )
    optimizer = Optimizer.of(parallel, train)
    batches = microbatches(config, plan, Shape(batch, seq_len), 1, mesh)
    saved = measure_saved(parallel.model)
    with recorded_choices() as choices, saved if count_saved else contextlib.nullcontext():
        if parallel.pipeline.schedule.update is not None:
            stream(parallel, optimizer, plan, train, batches)
        elif plan.optimizer_validation == "after":
            steps = PostValidation(parallel, optimizer, train, lambda: False)
            steps.run(1, batches, TimelineRecorder(mesh.rank))
            steps.flush()
        else:
            result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
            update(parallel, optimizer, result, lr=1e-3, clip=1.0)
    return {
        "ledger": mesh.ledger,
        "choices": choices,
        "memory": state_bytes(parallel, optimizer)
        | {"activations": saved.peak_bytes, "kinds": saved.peak_by_kind},
    }


def stream(
    parallel: RankModel, optimizer: Optimizer, plan: Plan, train: TrainConfig, batches: list[Batch]
) -> None:
    """One step of an asynchronous schedule, to its drained end."""
    mesh, window = parallel.mesh, plan.num_update_microbatches
    steps = TrainingStream(
        parallel,
        optimizer,
        train,
        num_microbatches=plan.microbatches,
        window=window,
        reach=plan.max_in_flight or plan.pp,
        first=1,
        last=1,
        batches=lambda step: batches,
        stop_requested=lambda: False,
        on_step=lambda step, result, seconds: None,
    )
    schedule = StagePlacement(parallel.model.config, plan).schedule
    channels, count = parallel.pipeline.channels, plan.microbatches
    executor: StreamExecutor | MessageDrivenExecutor
    if plan.schedule == "ampnet":
        flying = plan.max_in_flight or plan.pp
        executor = MessageDrivenExecutor(channels, mesh, count, window=window, max_in_flight=flying)
    else:
        executor = StreamExecutor(schedule, channels)
    assert executor.schedule.update is not None
    (part,) = parallel.pipeline.parts.values()
    program = AsynchronousProgram(
        executor.schedule.update,
        parallel.model,
        part,
        parallel.reducer,
        steps,
        backward=plan.ampnet_backward,
    )
    executor.run(program, StreamRecorder(mesh.rank, first=1, num_microbatches=count))
    program.versions.close()
    steps.drain()


def measure(
    model: dict[str, Any],
    plan: dict[str, Any],
    dtype: str = "float32",
    batch: int = 8,
    seq_len: int = SEQ_LEN,
    *,
    count_saved: bool = False,
    tuning: Tuning = FULL,
) -> list[dict[str, Any]]:
    """What every rank of `plan` measured."""
    checked = Plan(**plan)
    assert checked.check(model_of(model)) == []
    arguments = (model, plan, dtype, batch, seq_len, count_saved, tuning)
    if checked.world_size == 1:
        return [step_on_rank(Mesh.single("cpu"), *arguments)]
    return mesh_on_ranks(checked.layout, step_on_rank, *arguments)
