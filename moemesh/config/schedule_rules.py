"""The rules of schedules: slices of sequences, steps that are validated late."""

from __future__ import annotations

from typing import Protocol

from moemesh.config.asynchronous import ASYNCHRONOUS_SCHEDULES
from moemesh.config.errors import Problem
from moemesh.config.rules import plan_problem

#: Schedules of two pipes: two ranks hold every stage, and sum its gradients.
MIRRORED_SCHEDULES = ("chimera", "dualpipe")

#: Endings by which a schedule in a file is known; any other file is named with a slash.
SCHEDULE_FILES = (".txt", ".csv")


def is_schedule_file(name: str) -> bool:
    """Whether `name` stands for a file and not for a schedule that has a generator."""
    return name.endswith(SCHEDULE_FILES) or "/" in name


class PipelinedPlan(Protocol):
    """Values of a plan that the rules read."""

    @property
    def schedule(self) -> str: ...
    @property
    def schedule_costs(self) -> str: ...
    @property
    def schedule_memory_cap(self) -> float | None: ...
    @property
    def pp(self) -> int: ...
    @property
    def slices(self) -> int | None: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def optimizer_validation(self) -> str: ...


def pipeline_problems(plan: PipelinedPlan, seq_len: int | None) -> list[Problem]:
    """Everything that is wrong with them. A length that is not known breaks no rule."""
    return _slice_rules(plan, seq_len) + _validation_rules(plan) + _search_rules(plan)


def _validation_rules(plan: PipelinedPlan) -> list[Problem]:
    """Stepping early needs stages that wait for each other, and nothing else between them."""
    if plan.optimizer_validation == "before":
        return []
    fix = "optimizer_validation = before"
    if plan.schedule in ASYNCHRONOUS_SCHEDULES:
        message = f"{plan.schedule} updates every stage by itself: no step is taken together"
    elif plan.schedule in MIRRORED_SCHEDULES:
        message = (
            f"{plan.schedule} keeps two replicas of every stage, whose gradients and loads are "
            f"summed between both ends of pp ({plan.pp}) before a step"
        )
        fix += f", or schedule = {'zb_v' if plan.schedule == 'chimera' else 'dualpipe_v'}"
    elif plan.pp < 2:
        message = f"pp ({plan.pp}) is one stage: its step waits for no other"
        fix += ", or pp = 2"
    else:
        return []
    keys = ("plan.schedule", "plan.pp")
    return [plan_problem(plan, "conflict", "optimizer_validation", message, fix, *keys)]


def _search_rules(plan: PipelinedPlan) -> list[Problem]:
    """Only the automatic scheduler reads costs and a memory cap."""
    if plan.schedule == "search":
        return []
    given = [
        name
        for name, default in (("schedule_costs", "estimated"), ("schedule_memory_cap", None))
        if getattr(plan, name) != default
    ]
    fix = "leave {} out, or schedule = search"
    message = "{} belongs to schedule = search, not {}"
    return [
        plan_problem(
            plan,
            "conflict",
            name,
            message.format(name, plan.schedule),
            fix.format(name),
            "plan.schedule",
        )
        for name in given
    ]


def _slice_rules(plan: PipelinedPlan, seq_len: int | None) -> list[Problem]:
    """Only one schedule, or a file, cuts sequences, and no slice may be empty."""
    if plan.schedule != "terapipe" and not is_schedule_file(plan.schedule):
        if plan.slices is None:
            return []
        message = f"slices belongs to schedule = terapipe, not {plan.schedule}"
        fix = "leave slices out, or schedule = terapipe"
        return [plan_problem(plan, "conflict", "slices", message, fix, "plan.schedule")]
    if seq_len is None or not 0 < seq_len < plan.num_slices:
        return []
    said = f"slices ({plan.slices})" if plan.slices else f"pp ({plan.pp}, slices by default)"
    message = f"{said} exceeds data.seq_len ({seq_len} tokens): some slices would be empty"
    keys = ("plan.pp", "plan.schedule", "data.seq_len")
    return [plan_problem(plan, "too-large", "slices", message, f"slices = {seq_len}", *keys)]
