"""Schedules by name, and the schedule that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moemesh.config.errors import Problem, UserError
from moemesh.config.model import ModelConfig
from moemesh.config.paths import nearest_path
from moemesh.config.pipeline import is_schedule_file
from moemesh.config.plan import Plan
from moemesh.config.rules import plan_problem
from moemesh.schedule import (
    ampnet,
    chimera,
    conditions,
    dualpipe,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    terapipe,
    zb_h1,
    zb_h2,
    zb_v,
)
from moemesh.schedule.action import Op, Schedule
from moemesh.schedule.conditions import ALWAYS, Condition, Numbers, one_of, require
from moemesh.schedule.files import load
from moemesh.schedule.stage_times import costs_of_run, estimated_costs

#: More operations than any pipeline has in a step; a slip must not fill the memory.
LARGEST_NUM_OPERATIONS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a schedule is made: its generator, its conditions, what else it can be told.

    `stages_per_rank` are the legal numbers of chunks, empty where any will do; 1 stands for "not
    said" and is always among them. `options` are named as in :func:`build`.
    """

    make: Callable[..., Schedule]
    conditions: Sequence[Condition] = ALWAYS
    options: tuple[str, ...] = ()
    stages_per_rank: tuple[int, ...] = (1,)


RECIPES: dict[str, Recipe] = {
    "1f1b": Recipe(make=one_f_one_b.one_f_one_b),
    "gpipe": Recipe(make=gpipe.gpipe),
    "interleaved_1f1b": Recipe(
        make=interleaved_1f1b.interleaved_1f1b,
        conditions=interleaved_1f1b.CONDITIONS,
        options=("stages_per_rank",),
        stages_per_rank=(),
    ),
    "terapipe": Recipe(
        make=terapipe.terapipe, conditions=terapipe.CONDITIONS, options=("num_slices",)
    ),
    "chimera": Recipe(make=chimera.chimera, conditions=chimera.CONDITIONS),
    "zb_h1": Recipe(make=zb_h1.zb_h1),
    "zb_h2": Recipe(make=zb_h2.zb_h2),
    "zb_v": Recipe(make=zb_v.zb_v, stages_per_rank=(1, 2)),
    "dualpipe": Recipe(make=dualpipe.dualpipe, conditions=dualpipe.DUALPIPE),
    "dualpipe_v": Recipe(
        make=dualpipe.dualpipe_v, conditions=dualpipe.DUALPIPE_V, stages_per_rank=(1, 2)
    ),
    "pipedream": Recipe(make=pipedream.pipedream),
    "pipedream_2bw": Recipe(
        make=pipedream_2bw.pipedream_2bw,
        conditions=pipedream_2bw.CONDITIONS,
        options=("window",),
    ),
    "ampnet": Recipe(
        make=ampnet.ampnet,
        conditions=ampnet.CONDITIONS,
        options=("max_in_flight", "window", "cost", "latency"),
    ),
}


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    num_slices: int | None = None,
    window: int | None = None,
    max_in_flight: int | None = None,
    cost: Callable[[Op], float] | None = None,
    latency: float | None = None,
) -> Schedule:
    """The schedule of that name; `num_microbatches` of all pipes together.

    For an asynchronous schedule they are those of the whole run. `num_slices` (terapipe, by
    default one per rank), `window` (pipedream_2bw, ampnet), `max_in_flight`, `cost` and `latency`
    (ampnet) go to the generators that know them. Raises ValueError with the nearest name for an
    unknown one, for an option that the schedule does not have, and with every condition that fails,
    its numbers and the nearest legal ones.
    """
    recipe = recipe_of(name)
    if name == "terapipe" and num_slices is None:
        num_slices = max(num_ranks, 1)
    given: dict[str, Any] = {
        "num_slices": num_slices,
        "window": window,
        "max_in_flight": max_in_flight,
        "cost": cost,
        "latency": latency,
    }
    options = {key: value for key, value in given.items() if value is not None}
    if strangers := [key for key in options if key not in recipe.options]:
        takes = f"takes {', '.join(recipe.options)}" if recipe.options else "takes no options"
        raise UserError(f"{name} has no {' and no '.join(strangers)}: it {takes}")
    numbers = {key: value for key, value in options.items() if key not in ("cost", "latency")}
    _require(
        name,
        ranks=num_ranks,
        microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        **numbers,
    )
    if "stages_per_rank" in recipe.options:
        options["stages_per_rank"] = stages_per_rank
    return recipe.make(num_ranks, num_microbatches, **options)


def _rules(recipe: Recipe, numbers: Numbers) -> list[Condition]:
    """The conditions that these numbers decide."""
    rules = [rule for rule in recipe.conditions if numbers.keys() >= set(rule.names)]
    if recipe.stages_per_rank:
        rules.append(one_of("stages_per_rank", *recipe.stages_per_rank))
    return rules


def _require(name: str, **numbers: int) -> None:
    """Raise UserError unless the schedule exists for these numbers, and is not too large."""
    recipe = recipe_of(name)
    require(name, _rules(recipe, numbers), **numbers)
    ranks, microbatches = numbers["ranks"], numbers["microbatches"]
    if (largest := _num_operations(recipe, numbers)) > LARGEST_NUM_OPERATIONS:
        fewer = microbatches * LARGEST_NUM_OPERATIONS // largest
        # More ranks than operations: no number of microbatches is small enough.
        most_ranks = ranks * microbatches * LARGEST_NUM_OPERATIONS // largest
        nearest = f"microbatches {fewer}" if fewer else f"microbatches 1, ranks {most_ranks}"
        raise conditions.ScheduleConditionError(
            f"{name} with ranks {ranks}, microbatches {microbatches} would have up to "
            f"{largest} operations, more than {LARGEST_NUM_OPERATIONS} (nearest: {nearest})"
        )


def _num_operations(recipe: Recipe, numbers: Numbers) -> int:
    """At most so many operations has the schedule."""
    chunks = max(recipe.stages_per_rank, default=numbers["stages_per_rank"])
    stages = numbers["ranks"] * chunks
    return stages * numbers["microbatches"] * 3 * numbers.get("num_slices", 1)


def is_defined(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> bool:
    """Whether the schedule exists for these numbers; its stages are not made."""
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    recipe = recipe_of(name)
    holds = all(rule.holds(numbers) for rule in _rules(recipe, numbers))
    return holds and _num_operations(recipe, numbers) <= LARGEST_NUM_OPERATIONS


def build_step(plan: Plan, model: ModelConfig | None = None, seq_len: int = 0) -> Schedule:
    """The schedule of one step of a plan: by name, from a file, or searched for its costs.

    It is the same for equal arguments, and is made once per process. `model` and `seq_len` are
    read only where the plan searches with estimated costs. Raises UserError, with the numbers and
    the nearest legal ones, for a schedule that does not exist, does not fit the plan, or cannot
    run.
    """
    # Frozen pydantic models are hashable, which their types do not say.
    if plan.schedule == "search":
        return _searched(plan, model, seq_len)  # pyright: ignore[reportArgumentType]
    if not is_schedule_file(plan.schedule):
        return _named(plan)  # pyright: ignore[reportArgumentType]
    path = Path(plan.schedule).expanduser()
    try:
        status = path.stat()
    except OSError as error:
        near = "" if path.exists() else f" ({nearest_path(path)})"
        raise UserError(f"{path} cannot be read: {error.strerror}{near}") from error
    schedule = _of_file(path, plan, status.st_mtime_ns, status.st_size)  # pyright: ignore[reportArgumentType]
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
    options: dict[str, Any] = {}
    takes = recipe_of(plan.schedule).options
    if "num_slices" in takes:
        options["num_slices"] = plan.num_slices
    if "window" in takes:
        options["window"] = plan.num_update_microbatches
    if "max_in_flight" in takes:
        options["max_in_flight"] = plan.max_in_flight
    return options


@lru_cache(maxsize=8)
def _of_file(path: Path, plan: Plan, changed: int, size: int) -> Schedule:
    """`changed` and `size` tell versions of a file apart."""
    return fitting(load(path), plan, str(path))


@lru_cache(maxsize=8)
def _searched(plan: Plan, model: ModelConfig | None, seq_len: int) -> Schedule:
    # Brings numpy along, which nothing else here needs.
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
    found = search(
        plan.pp,
        plan.microbatches,
        costs,
        memory_cap=plan.schedule_memory_cap,
        stages_per_rank=plan.stages_per_rank,
        # A step that updates all stages together ends when its last rank does.
        objective="span" if plan.optimizer_validation == "after" else "makespan",
    )
    return fitting(found.schedule, plan, "search")


def fitting(schedule: Schedule, plan: Plan, source: str) -> Schedule:
    """`schedule`, read from `source`, when a run of `plan` can carry it out.

    Raises UserError with every number in which the two differ, or with what the checker finds.
    """
    # Only here: most plans name a schedule, which needs no proof.
    from moemesh.schedule.check import check

    if schedule.update is not None:
        raise UserError(
            f"{source} updates weights while microbatches are under way (update="
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
        f"{found} {words}, the plan has {given}: plan.{key} = {found}, or a schedule for {given}"
        for key, words, found, given in numbers
        if found != given
    ]
    if schedule.num_pipes > 1 and not _is_mirrored(schedule):
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


def _is_mirrored(schedule: Schedule) -> bool:
    """Whether two pipes run over the same ranks from both ends, as gradients are summed."""
    if schedule.num_pipes != 2 or schedule.num_ranks % 2:
        return False
    first, second = schedule.placement
    return all(a + b == schedule.num_ranks - 1 for a, b in zip(first, second, strict=False))


def step_problems(plan: Plan, model: ModelConfig | None = None, seq_len: int = 0) -> list[Problem]:
    """Why a plan has no schedule; empty where :func:`build_step` makes one. One with a name is
    not made for the answer."""
    try:
        if plan.schedule == "search" or is_schedule_file(plan.schedule):
            build_step(plan, model, seq_len)
        else:
            numbers = {key: n for key, n in _options(plan).items() if n is not None}
            chunks = plan.stages_per_rank
            counts = {"ranks": plan.pp, "microbatches": plan.microbatches}
            _require(plan.schedule, **counts, stages_per_rank=chunks, **numbers)
    except UserError as error:
        keys = ("plan.pp", "plan.microbatches", "plan.stages_per_rank")
        return [plan_problem(plan, "schedule", "schedule", str(error), "", *keys)]
    return []


def recipe_of(name: str) -> Recipe:
    """The recipe of a name. Raises ValueError with the nearest name for an unknown one."""
    if name not in RECIPES:
        # Only for the message: it reads the whole schema of the configuration.
        from moemesh.config.suggest import nearest_choice

        hint = nearest_choice(name, tuple(RECIPES))
        raise UserError(f"there is no schedule {name!r}: {hint}")
    return RECIPES[name]
