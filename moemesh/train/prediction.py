"""The planner's prediction of one rank of a run: what the report sets beside the measurement."""

from __future__ import annotations

from typing import Any

from moemesh.config.run import RunConfig
from moemesh.planner.run_estimate import estimate_run
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.trace.run import PlannedStep


def predicted_for(config: RunConfig, rank: int, *, on_accelerator: bool) -> dict[str, Any] | None:
    """Memory and the ledger of one step of `rank`, for uniform routing; None where a schedule comes
    from a file of which the planner knows nothing."""
    common: dict[str, Any] = {
        "seq_len": config.data.seq_len,
        "global_batch": config.data.global_batch,
        "dtype": config.train.dtype,
        "rank": rank,
        "tuning": config.tuning,
    }
    model, plan, train = config.model, config.plan, config.train
    try:
        memory = predict_memory(
            model, plan, **common, optimizer=train.optimizer, momentum=train.momentum
        )
        ledger = predict_ledger(model, plan, **common, on_accelerator=on_accelerator)
    except ValueError:
        return None
    return {"memory": memory.to_json(), "ledger": ledger.rows()}


def planned_step(config: RunConfig, cluster: str) -> PlannedStep:
    """The planner's price of a step on `cluster`. Raises ConfigError where it has none."""
    seconds = estimate_run(config, cluster).seconds
    parts = {name: value for name, value in seconds.items() if name != "total"}
    return PlannedStep(cluster=cluster, seconds=seconds["total"], parts=parts)
