"""Conflicts of expert replicas and expert migration with other settings, found before a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from moemesh.config.asynchronous import ASYNCHRONOUS_SCHEDULES
from moemesh.config.errors import Problem
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig

#: (whether there is a conflict, why, suggested fix).
Clash: TypeAlias = tuple[bool, str, str]


def balancing_problems(config: RunConfig, origins: dict[str, str]) -> Iterator[Problem]:
    """Of `plan.spare_slots` and `train.rebalance_every` with the rest of the plan."""
    plan = config.plan
    if plan.spare_slots:
        yield from _clashes(config, origins, _replica_clashes(plan), "plan.spare_slots")
    if config.train.rebalance_every:
        yield from _clashes(config, origins, _move_clashes(plan), "train.rebalance_every")


def _replica_clashes(plan: Plan) -> dict[str, Clash]:
    return {
        "dispatcher": (
            plan.dispatcher not in ("all_to_all", "auto"),
            "sends rows to the homes of experts, not to their replicas",
            "dispatcher = all_to_all",
        ),
        "combine": (
            plan.combine == "exact",
            "adds rows in an order that does not depend on where experts are",
            "combine = fast",
        ),
        "ampnet_backward": (
            plan.schedule == "ampnet" and plan.ampnet_backward == "live",
            "reads weights in the backward that replicas have fetched in the forward",
            "ampnet_backward = recompute",
        ),
    }


def _move_clashes(plan: Plan) -> dict[str, Clash]:
    asynchronous = plan.schedule in ASYNCHRONOUS_SCHEDULES
    return {
        "combine": (
            plan.combine == "exact",
            "adds rows in the order of the experts' places, which may not change",
            "combine = fast",
        ),
        "schedule": (
            asynchronous,
            "never drains: there is no moment at which experts could move",
            "schedule = 1f1b",
        ),
        "optimizer_validation": (
            plan.optimizer_validation == "after" and not asynchronous,
            "takes a step back when the next one has begun, and experts have moved in between",
            "optimizer_validation = before",
        ),
    }


def _clashes(
    config: RunConfig, origins: dict[str, str], clashes: dict[str, Clash], wanted: str
) -> Iterator[Problem]:
    section, _, key = wanted.partition(".")
    setting = f"{key} = {getattr(getattr(config, section), key)}"
    for name, (clash, why, fix) in clashes.items():
        if clash:
            value = getattr(config.plan, name)
            yield Problem(
                code="conflict",
                key=f"plan.{name}",
                value=value,
                origin=origins.get(f"plan.{name}", ""),
                message=f"{name} = {value} {why}: it cannot be trained with {setting}",
                fix=f"{fix}, or {key} = 0",
                related=(wanted,),
            )
