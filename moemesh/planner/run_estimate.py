"""The estimate of a run: its number type and optimizer, and only the weights that train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.run import RunConfig
from moemesh.config.tuning import num_trained
from moemesh.planner.estimate import Estimate, estimate
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.memory import MemoryEstimate, RankMemory
from moemesh.planner.quantities import with_headroom
from moemesh.planner.shapes.load_shape import load_both
from moemesh.planner.traffic.carried_out import resolved, why_not_exact
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import ELEMENT_BYTES
from moemesh.planner.traffic.own_states import predict_states
from moemesh.planner.traffic.tensors import StagePlacement
from moemesh.planner.tuned import trained_shares
from moemesh.trace.run import PlannedStep


def estimate_run(
    config: RunConfig,
    cluster: str | Path | Cluster,
    *,
    rank: str | int = "worst",
    headroom: str | float | None = None,
) -> Estimate:
    """Price what `moemesh train` would run: the configuration's model, plan, batch, dtype and
    optimizer. Raises ConfigError with every problem found."""
    problems: list[Problem] = []
    known, machine = load_both(config.model, cluster, problems)
    if known is None or machine is None:
        raise ConfigError(problems)
    machine = with_headroom(machine, headroom)
    train, data = config.train, config.data
    layout = from_plan(
        config.plan,
        config.model,
        seq_len=data.seq_len,
        global_batch=data.global_batch,
        dtype=train.dtype,
    )
    if train.optimizer == "sgd" and layout.optimizer_bytes:
        moments = layout.gradient_bytes * (2 - (train.momentum > 0))
        layout = layout.changed(optimizer_bytes=layout.optimizer_bytes - moments)
    text, layout = layout.text, layout.changed(**trained_shares(config))
    found = replace(estimate(known, layout, machine, config.plan, rank=rank), text=text)
    return found if config.tuning.is_full else _of_what_trains(found, config)


def _of_what_trains(found: Estimate, config: RunConfig) -> Estimate:
    """The estimate of a run of which some weights do not train: their model states and traffic."""
    train, layout = config.train, found.layout
    if reason := why_not_exact(config.model, config.plan):
        note = f"memory and traffic are those of training every weight: {reason}"
        return replace(found, notes=(*found.notes, note))
    plan = resolved(config.plan)
    assert plan is not None  # there is a reason why not, else
    placement = StagePlacement(config.model, plan, layout.seq_len, config.tuning)
    element = ELEMENT_BYTES[train.dtype]
    ranks: list[RankMemory] = []
    for memory in found.memory.ranks:
        rank = memory.rank * layout.stage_ranks
        states = predict_states(
            placement,
            plan.layout,
            element=element,
            optimizer=train.optimizer,
            momentum=train.momentum,
            rank=rank,
        )
        ranks.append(
            replace(
                memory,
                dense_weights=states.dense_weights + states.gathered_weights,
                expert_weights=states.expert_weights,
                gradients=states.gradients,
                optimizer=states.optimizer,
            )
        )
    tuned = MemoryEstimate(ranks=tuple(ranks))
    less = found.memory.worst.total - tuned.worst.total
    needed = found.peak["needed_bytes"] - less
    peak = {
        "peak_bytes": found.peak["peak_bytes"] - less,
        "needed_bytes": needed,
        "fits": bool(needed <= found.cluster.memory_bytes * found.usable_share),
    }
    ledger = predict_ledger(
        config.model,
        plan,
        seq_len=layout.seq_len,
        global_batch=layout.global_batch,
        dtype=train.dtype,
        rank=found.traffic_rank * layout.stage_ranks,
        tuning=config.tuning,
        on_accelerator=bool(found.cluster.accelerator),
    )
    trained = num_trained(config.tuning, config.model, plan)
    note = (
        f"{trained:,} parameters train: weights, gradients, optimizer and traffic are those of "
        "this choice, activations "
        + ("" if layout.adapters else "and seconds ")
        + "those of training everything"
    )
    instead = None if peak["fits"] else found.instead
    return replace(
        found, memory=tuned, peak=peak, traffic=ledger, instead=instead, notes=(*found.notes, note)
    )


def planned_step(config: RunConfig, cluster: str) -> PlannedStep:
    """The planner's price of a step on `cluster`. Raises ConfigError where it has none."""
    seconds = estimate_run(config, cluster).seconds
    parts = {name: value for name, value in seconds.items() if name != "total"}
    return PlannedStep(cluster=cluster, seconds=seconds["total"], parts=parts)
