"""The rules of sharded states: `plan.reshard` and `plan.shard_group` belong to what they cut."""

from __future__ import annotations

from typing import Protocol

from moemesh.config.divisors import nearest_divisors
from moemesh.config.errors import Problem
from moemesh.config.rules import plan_problem

SHARDED_DATA = ("zero1", "zero2", "zero3")


class ShardedPlan(Protocol):
    """Values of a plan that the rules read."""

    @property
    def dp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def data(self) -> str: ...
    @property
    def reshard(self) -> str: ...
    @property
    def shard_group(self) -> int | None: ...


def sharding_problems(plan: ShardedPlan) -> list[Problem]:
    """Everything that is wrong with them."""
    problems: list[Problem] = []
    if plan.reshard != "always" and plan.data != "zero3":
        message = f"reshard = {plan.reshard} keeps weights that zero3 gathers, not {plan.data}"
        fix = "leave reshard out, or data = zero3"
        problems.append(plan_problem(plan, "conflict", "reshard", message, fix, "plan.data"))
    group, ranks = plan.shard_group, plan.dp * plan.cp
    if group is None or group < 1:
        return problems
    if plan.data not in SHARDED_DATA:
        message = f"shard_group ({group}) cuts states that data = {plan.data} does not shard"
        fix = "leave shard_group out, or data = zero1, zero2 or zero3"
        problems.append(plan_problem(plan, "conflict", "shard_group", message, fix, "plan.data"))
    elif ranks % group:
        keys = ("plan.dp", "plan.cp")
        message = f"shard_group ({group}) must divide the data-parallel ranks dp*cp ({ranks})"
        fix = f"shard_group = {nearest_divisors(ranks, group)}"
        problems.append(plan_problem(plan, "not-divisible", "shard_group", message, fix, *keys))
    return problems
