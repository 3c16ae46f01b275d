"""One measured training step of the tiny preset on gloo ranks, beside what the planner predicts."""

from __future__ import annotations

import contextlib
from typing import Any

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.post_validated import PostValidation
from moemesh.train.records.artifacts import measure_saved, state_bytes
from moemesh.train.step import gradients_of_step, update
from tests.parity.asynchronous import run_stream
from tests.parity.training import Shape, build, microbatches, model_of, on_ranks_of
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
    shape = Shape(batch, seq_len)
    parallel = build(mesh, config, plan, shape, dtype, tuning=tuning)
    optimizer = Optimizer.of(parallel, train)
    batches = microbatches(config, plan, shape, 1, mesh)
    saved = measure_saved(parallel.model)
    with recorded_choices() as choices, saved if count_saved else contextlib.nullcontext():
        if parallel.pipeline.schedule.update is not None:
            run_stream(parallel, optimizer, plan, train, lambda step: batches, [])
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
    """Measurements of every rank of `plan`."""
    arguments = (model, plan, dtype, batch, seq_len, count_saved, tuning)
    return on_ranks_of(model_of(model), Plan(**plan), step_on_rank, *arguments)
