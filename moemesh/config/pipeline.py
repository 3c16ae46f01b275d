"""The rules of pipelines: stages that hold layers, slices of sequences, steps validated late."""

from __future__ import annotations

from typing import Protocol

from moemesh.config.asynchronous import ASYNCHRONOUS_SCHEDULES
from moemesh.config.errors import Problem
from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig

#: Schedules whose ranks hold two stages each, at both arms of a V.
V_SCHEDULES = ("zb_v", "dualpipe_v")

#: Schedules of two pipes: two ranks hold every stage, and sum its gradients.
MIRRORED_SCHEDULES = ("chimera", "dualpipe")

#: Endings by which a schedule in a file is known; any other file is named with a slash.
SCHEDULE_FILES = (".txt", ".csv")


def is_schedule_file(name: str) -> bool:
    """Whether `name` stands for a file and not for a schedule that has a generator."""
    return name.endswith(SCHEDULE_FILES) or "/" in name


class PipelinedPlan(Protocol):
    """What the rules read of a plan."""

    @property
    def schedule(self) -> str: ...
    @property
    def schedule_costs(self) -> str: ...
    @property
    def schedule_memory_cap(self) -> float | None: ...
    @property
    def pp(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def layers_per_stage(self) -> tuple[int, ...] | None: ...
    @property
    def slices(self) -> int | None: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def optimizer_validation(self) -> str: ...


def pipeline_problems(
    plan: PipelinedPlan, model: ModelConfig | None, seq_len: int | None
) -> list[Problem]:
    """Everything that is wrong with them. A length or model that is not known breaks no rule."""
    problems = _slice_rules(plan, seq_len) + _validation_rules(plan) + _search_rules(plan)
    return problems if model is None else problems + _stage_rules(plan, model)


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
    return [_problem(plan, "conflict", "optimizer_validation", message, fix, *keys)]


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
        _problem(
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
        return [_problem(plan, "conflict", "slices", message, fix, "plan.schedule")]
    if seq_len is None or not 0 < seq_len < plan.num_slices:
        return []
    said = f"slices ({plan.slices})" if plan.slices else f"pp ({plan.pp}, slices by default)"
    message = f"{said} exceeds data.seq_len ({seq_len} tokens): some slices would be empty"
    keys = ("plan.pp", "plan.schedule", "data.seq_len")
    return [_problem(plan, "too-large", "slices", message, f"slices = {seq_len}", *keys)]


def _stage_rules(plan: PipelinedPlan, model: ModelConfig) -> list[Problem]:
    """Every stage needs a layer."""
    stages, layers = plan.num_stages, model.num_layers
    if layers < 1:
        return []
    if plan.layers_per_stage is not None:
        return _layers_per_stage_rules(plan, layers)
    if stages <= layers:
        return []
    chunks = stages // plan.pp
    product = f"pp*stages_per_rank ({plan.pp}*{chunks} = {stages})"
    if plan.schedule in V_SCHEDULES:
        product = f"{plan.schedule} puts two stages on a rank: pp*2 ({plan.pp}*2 = {stages})"
    if plan.pp <= layers and plan.schedule not in V_SCHEDULES:
        key, fix = "stages_per_rank", f"stages_per_rank = {layers // plan.pp}"
    else:
        key, fix = "pp", f"pp = {max(layers // chunks, 1)}"
        if chunks > layers and plan.schedule not in V_SCHEDULES:
            fix += ", stages_per_rank = 1"
    return [
        _problem(
            plan,
            "too-large",
            key,
            f"{product} stages need at least as many layers; num_layers is {layers}",
            fix,
            "plan.pp",
            "plan.stages_per_rank",
            "plan.schedule",
            "model.num_layers",
        )
    ]


def _layers_per_stage_rules(plan: PipelinedPlan, layers: int) -> list[Problem]:
    """Explicit cuts: one positive number a stage, all layers used."""
    sizes, stages = plan.layers_per_stage or (), plan.num_stages
    if len(sizes) == stages and sum(sizes) == layers and min(sizes) >= 1:
        return []
    equal = shard_sizes(layers, stages)
    fix = f"layers_per_stage = {list(equal)}" if min(equal) else f"pp = {layers}"
    return [
        _problem(
            plan,
            "stages",
            "layers_per_stage",
            f"layers_per_stage ({len(sizes)} numbers, sum {sum(sizes)}) must be {stages} "
            f"positive numbers that add up to num_layers ({layers})",
            fix,
            "plan.pp",
            "plan.stages_per_rank",
            "model.num_layers",
        )
    ]


def _problem(
    plan: PipelinedPlan, code: str, name: str, message: str, fix: str, *related: str
) -> Problem:
    return Problem(
        code=code,
        key=f"plan.{name}",
        value=getattr(plan, name),
        message=message,
        fix=fix,
        related=related,
    )
