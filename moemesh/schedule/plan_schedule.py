"""The schedule of one step of a plan: by name, from a file, or searched for its costs."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from moemesh.config.errors import Problem, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan, is_schedule_file
from moemesh.config.rules import plan_problem
from moemesh.schedule.action import Schedule
from moemesh.schedule.build import build, require_defined, schedule_row
from moemesh.schedule.stage_times import TIMELINE, costs_of_run, estimated_costs
from moemesh.schedule.text import load


def build_step(plan: Plan, model: ModelConfig | None = None, seq_len: int = 0) -> Schedule:
    """The schedule of one step of a plan: by name, from a file, or searched for its costs.

    It is cached, and equal for equal arguments unless a file that the plan names has changed.
    `seq_len` is read only where the plan searches with estimated costs, `model` there and where a
    file must fit its tied embeddings or extra prediction layers. Raises UserError, with the numbers
    and the nearest legal ones, for a schedule that does not exist, does not fit the plan, or cannot
    run.
    """
    # Frozen pydantic models are hashable, though their types do not declare it.
    if plan.schedule == "search":
        run = Path(plan.schedule_costs).expanduser()
        version = () if plan.schedule_costs == "estimated" else _version(run / TIMELINE)
        return _searched(plan, model, seq_len, version)  # pyright: ignore[reportArgumentType]
    if not is_schedule_file(plan.schedule):
        return _named(plan)  # pyright: ignore[reportArgumentType]
    path = Path(plan.schedule).expanduser()
    schedule = _of_file(path, plan, _version(path))  # pyright: ignore[reportArgumentType]
    if model is not None and model.ends_share_a_table:
        first, last = (schedule.placement[0][stage] for stage in (0, -1))
        if first != last and first + last != plan.pp - 1:
            why, fix = "tied embeddings", "tied_embeddings = false"
            if model.num_mtp_layers:
                why, fix = "extra prediction layers", "num_mtp_layers = 0"
            raise UserError(
                f"{path} has the first stage on rank {first} and the last on rank {last}, but "
                f"{why} sum the gradient of the embedding over opposite ranks: put the last stage "
                f"on rank {first} or {plan.pp - 1 - first}, or set model.{fix}"
            )
    return schedule


def _version(path: Path) -> tuple[int, ...]:
    """Time and size of a file; () if its reader will report that it cannot be read."""
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return ()


@lru_cache(maxsize=8)
def _named(plan: Plan) -> Schedule:
    return build(
        plan.schedule,
        plan.pp,
        plan.microbatches,
        stages_per_rank=plan.stages_per_rank,
        **_options(plan),
    )


def _options(plan: Plan) -> dict[str, Any]:
    """Options of the schedule that a plan names, as in :func:`build`."""
    options = {
        "num_slices": plan.num_slices,
        "window": plan.num_update_microbatches,
        "max_in_flight": plan.max_in_flight,
    }
    takes = schedule_row(plan.schedule).options
    return {key: value for key, value in options.items() if key in takes}


@lru_cache(maxsize=8)
def _of_file(path: Path, plan: Plan, version: tuple[int, ...]) -> Schedule:
    """Schedule of the file; a new `version` invalidates the cached one."""
    return fitting(load(path), plan, str(path))


@lru_cache(maxsize=8)
def _searched(
    plan: Plan, model: ModelConfig | None, seq_len: int, version: tuple[int, ...]
) -> Schedule:
    """Schedule of the search; a new `version` of measured costs invalidates the cached one."""
    # Imported late: only a search needs it.
    from moemesh.schedule.search import search

    if plan.schedule_costs != "estimated":
        costs, measured = costs_of_run(Path(plan.schedule_costs).expanduser())
        if measured != plan.num_stages:
            near = f"plan.stages_per_rank = {measured // plan.pp}, or " * (not measured % plan.pp)
            raise UserError(
                f"the run in {plan.schedule_costs} measured {measured} stages, the plan has "
                f"pp*stages_per_rank = {plan.pp}*{plan.stages_per_rank} = {plan.num_stages}: take "
                f"{near}the costs of a run with {plan.num_stages}"
            )
    elif model is not None and seq_len:
        costs = estimated_costs(plan, model, seq_len)
    else:
        raise UserError(
            "plan.schedule = search estimates its costs from the model and the length of its "
            "sequences: give both, or plan.schedule_costs = the folder of a run"
        )
    searched = search(
        plan.pp,
        plan.microbatches,
        costs,
        memory_cap=plan.schedule_memory_cap,
        stages_per_rank=plan.stages_per_rank,
        # A step that updates all stages together ends when its last rank does.
        objective="span" if plan.optimizer_validation == "after" else "makespan",
    )
    return fitting(searched.schedule, plan, "search")


def fitting(schedule: Schedule, plan: Plan, source: str) -> Schedule:
    """Returns `schedule`, which comes from `source`, if a run of `plan` can carry it out. Raises
    UserError with every number in which the two differ, or with what the checker finds."""
    # Imported late: most plans name a schedule, which needs no proof.
    from moemesh.schedule.check import check

    if schedule.update is not None:
        raise UserError(
            f"{source} updates weights while microbatches are in flight (update="
            f"{schedule.update.kind}), and a stream has no end that a file could hold: take the "
            "schedule by its name (pipedream, pipedream_2bw, ampnet), or plan.replay for AMPNet"
        )
    ranks, stages = schedule.num_ranks, schedule.num_stages
    numbers = [
        ("pp", "ranks", ranks, plan.pp),
        ("microbatches", "microbatches", schedule.total_microbatches, plan.microbatches),
        ("slices", "slices of a sequence", schedule.num_slices, plan.num_slices),
    ]
    problems: list[str] = []
    if stages % ranks:
        near = " or ".join(
            str(n) for n in (stages // ranks * ranks, -(-stages // ranks) * ranks) if n
        )
        problems.append(
            f"{stages} stages on {ranks} ranks, not equally many each (nearest: {near})"
        )
    else:
        chunks = schedule.stages_per_rank
        numbers.append(("stages_per_rank", "stages per rank", chunks, plan.stages_per_rank))
    problems += [
        f"{number} {words}, the plan has {given}: plan.{key} = {number}, or a schedule for {given}"
        for key, words, number, given in numbers
        if number != given
    ]
    # Two pipes from both ends: gradients of a stage are summed over opposite ranks.
    is_mirrored = (
        schedule.num_pipes == 2
        and ranks % 2 == 0
        and all(a + b == ranks - 1 for a, b in zip(*schedule.placement, strict=False))
    )
    if schedule.num_pipes > 1 and not is_mirrored:
        problems.append(
            f"{schedule.num_pipes} pipes; a run takes one, or two over an even number of ranks "
            "that meet end to end: stage s of the second on the rank opposite that of the first"
        )
    if schedule.num_pipes > 1 and plan.optimizer_validation == "after":
        problems.append(
            "two replicas of every stage: plan.optimizer_validation = after needs one pipe"
        )
    if plan.data == "zero3" and schedule.split_backwards:
        problems.append(
            "weight gradients apart from their backwards, which read weights that plan.data = "
            "zero3 has freed by then: plan.data = zero2, or plan.schedule = 1f1b"
        )
    if problems:
        raise UserError("\n".join(f"{source} has {problem}" for problem in problems))
    try:
        check(schedule, post_validation=plan.optimizer_validation == "after")
    except UserError as error:
        raise UserError(f"{source} cannot run: {error}") from error
    return schedule


def step_problems(plan: Plan, model: ModelConfig | None = None, seq_len: int = 0) -> list[Problem]:
    """Why a plan has no schedule; empty where :func:`build_step` makes one."""
    try:
        if plan.schedule == "search" or is_schedule_file(plan.schedule):
            build_step(plan, model, seq_len)
        else:
            numbers = {key: n for key, n in _options(plan).items() if n is not None}
            chunks = plan.stages_per_rank
            counts = {"ranks": plan.pp, "microbatches": plan.microbatches}
            require_defined(plan.schedule, **counts, stages_per_rank=chunks, **numbers)
    except UserError as error:
        keys = ("plan.pp", "plan.microbatches", "plan.stages_per_rank")
        message, _, near = str(error).partition(" (nearest: ")
        fix = re.sub(r"(microbatches|stages_per_rank|ranks) ", r"\1 = ", near.rstrip(")"))
        fix = fix.replace("ranks =", "pp =")
        return [plan_problem(plan, "schedule", "schedule", message, fix, *keys)]
    return []
