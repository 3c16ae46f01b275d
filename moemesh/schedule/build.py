"""Schedules by name: their generators, conditions and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moemesh.config.conditions import (
    ALWAYS,
    Condition,
    Numbers,
    ScheduleConditionError,
    one_of,
    require,
)
from moemesh.config.errors import UserError, public
from moemesh.config.schedule_table import FORMS, Form, FormNumbers, MicrobatchTimes
from moemesh.schedule import ampnet, generators, terapipe
from moemesh.schedule.action import Op, Schedule

#: More operations than any pipeline has in a step; a slip must not fill the memory.
LARGEST_NUM_OPERATIONS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Recipe of a schedule: its generator, its conditions and its options.

    `stages_per_rank` are the legal numbers of chunks, empty if all are legal; 1, the value of a
    user who gives none, is always among them. `options` are named as in :func:`build`.
    """

    make: Callable[..., Schedule]
    conditions: Sequence[Condition] = ALWAYS
    options: tuple[str, ...] = ()
    stages_per_rank: tuple[int, ...] = (1,)


RECIPES: dict[str, Generator] = {
    "1f1b": Generator(make=generators.one_f_one_b),
    "gpipe": Generator(make=generators.gpipe),
    "interleaved_1f1b": Generator(
        make=generators.interleaved_1f1b,
        conditions=generators.INTERLEAVED,
        options=("stages_per_rank",),
        stages_per_rank=(),
    ),
    "terapipe": Generator(
        make=terapipe.terapipe, conditions=terapipe.CONDITIONS, options=("num_slices",)
    ),
    "chimera": Generator(make=generators.chimera, conditions=generators.CHIMERA),
    "zb_h1": Generator(make=generators.zb_h1),
    "zb_h2": Generator(make=generators.zb_h2),
    "zb_v": Generator(make=generators.zb_v, stages_per_rank=(1, 2)),
    "dualpipe": Generator(make=generators.dualpipe, conditions=generators.DUALPIPE),
    "dualpipe_v": Generator(
        make=generators.dualpipe_v, conditions=generators.DUALPIPE_V, stages_per_rank=(1, 2)
    ),
    "pipedream": Generator(make=generators.pipedream),
    "pipedream_2bw": Generator(
        make=generators.pipedream_2bw,
        conditions=generators.PIPEDREAM_2BW,
        options=("window",),
    ),
    "ampnet": Generator(
        make=ampnet.ampnet,
        conditions=ampnet.CONDITIONS,
        options=("max_in_flight", "window", "cost", "latency"),
    ),
}


@public
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
    require_defined(
        name,
        ranks=num_ranks,
        microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        **numbers,
    )
    if "stages_per_rank" in recipe.options:
        options["stages_per_rank"] = stages_per_rank
    return recipe.make(num_ranks, num_microbatches, **options)


def _rules(recipe: Generator, numbers: Numbers) -> list[Condition]:
    """The conditions that these numbers decide."""
    rules = [rule for rule in recipe.conditions if numbers.keys() >= set(rule.names)]
    if recipe.stages_per_rank:
        rules.append(one_of("stages_per_rank", *recipe.stages_per_rank))
    return rules


def require_defined(name: str, **numbers: int) -> None:
    """Raise UserError unless the schedule exists for these numbers, and is not too large."""
    recipe = recipe_of(name)
    require(name, _rules(recipe, numbers), **numbers)
    ranks, microbatches = numbers["ranks"], numbers["microbatches"]
    if (largest := _num_operations(recipe, numbers)) > LARGEST_NUM_OPERATIONS:
        fewer = microbatches * LARGEST_NUM_OPERATIONS // largest
        # More ranks than operations: no number of microbatches is small enough.
        most_ranks = ranks * microbatches * LARGEST_NUM_OPERATIONS // largest
        nearest = f"microbatches {fewer}" if fewer else f"microbatches 1, ranks {most_ranks}"
        raise ScheduleConditionError(
            f"{name} with ranks {ranks}, microbatches {microbatches} would have up to "
            f"{largest} operations, more than {LARGEST_NUM_OPERATIONS} (nearest: {nearest})"
        )


def _num_operations(recipe: Generator, numbers: Numbers) -> int:
    """Upper bound on the number of operations of the schedule."""
    chunks = max(recipe.stages_per_rank, default=numbers["stages_per_rank"])
    stages = numbers["ranks"] * chunks
    return stages * numbers["microbatches"] * 3 * numbers.get("num_slices", 1)


def is_defined(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> bool:
    """Whether the schedule exists for these numbers; its stages are not made."""
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    recipe = recipe_of(name)
    holds = all(rule.holds(numbers) for rule in _rules(recipe, numbers))
    return holds and _num_operations(recipe, numbers) <= LARGEST_NUM_OPERATIONS


def recipe_of(name: str) -> Generator:
    """The recipe of a name. Raises ValueError with the nearest name for an unknown one."""
    if name not in RECIPES:
        # Only for the message: it reads the whole schema of the configuration.
        from moemesh.config.suggest import nearest_choice

        hint = nearest_choice(name, tuple(RECIPES))
        raise UserError(f"unknown schedule {name!r}: {hint}")
    return RECIPES[name]


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """A schedule's formulas at its numbers: the bubble is None where the formula does not hold,
    and so is the peak."""

    form: Form
    bubble: float | None
    peak_activation: tuple[float, ...] | None
    weight_copies: tuple[int, ...]


def closed_form(
    schedule: Schedule, times: MicrobatchTimes, *, held: float = 1.0
) -> ClosedForm | None:
    """The formulas of a generated schedule for equal stages and slices and no latency; None without
    any. `held` is M_w / M_a."""
    form = FORMS.get(schedule.name)
    if form is None:
        return None
    numbers = FormNumbers(
        ranks=schedule.num_ranks,
        microbatches=schedule.total_microbatches,
        chunks=schedule.stages_per_rank,
        times=times,
        held=held,
        slice_share=1 / schedule.num_slices,
    )
    ranks = range(schedule.num_ranks)
    peak = tuple(form.peak(numbers, rank) for rank in ranks) if form.peak_holds(numbers) else None
    return ClosedForm(
        form=form,
        bubble=form.bubble(numbers) if form.bubble_holds(numbers) else None,
        peak_activation=peak,
        weight_copies=tuple(form.copies(numbers, rank) for rank in ranks),
    )
