"""Schedules by name: made by their generators, and their closed formulas at given numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from moemesh.config.conditions import (
    Numbers,
    ScheduleConditionError,
    require,
)
from moemesh.config.errors import UserError, public
from moemesh.config.schedule_table import (
    SCHEDULES,
    FormNumbers,
    MicrobatchTimes,
    ScheduleRow,
    holds,
    value_of,
)
from moemesh.schedule.action import Op, Schedule

#: Largest number of operations of a schedule, more than any pipeline has: a typing error must not
#: fill the memory.
LARGEST_NUM_OPERATIONS = 2_000_000


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
    (ampnet) go to the generators that take them. Raises ValueError with the nearest name for an
    unknown one, for an option that the schedule does not have, and with every condition that fails,
    its numbers and the nearest legal ones.
    """
    row = schedule_row(name)
    if "num_slices" in row.options and num_slices is None:
        num_slices = max(num_ranks, 1)
    given: dict[str, Any] = {
        "num_slices": num_slices,
        "window": window,
        "max_in_flight": max_in_flight,
        "cost": cost,
        "latency": latency,
    }
    options = {key: value for key, value in given.items() if value is not None}
    if unknown := [key for key in options if key not in row.options]:
        takes = f"takes {', '.join(row.options)}" if row.options else "takes no options"
        raise UserError(f"{name} has no {' and no '.join(unknown)}: it {takes}")
    numbers = {key: value for key, value in options.items() if key not in ("cost", "latency")}
    require_defined(
        name,
        ranks=num_ranks,
        microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        **numbers,
    )
    if "stages_per_rank" in row.options:
        options["stages_per_rank"] = stages_per_rank
    return resolve_name(row.make)(num_ranks, num_microbatches, **options)


def require_defined(name: str, **numbers: int) -> None:
    """Raise UserError unless the schedule exists for these numbers, and is not too large."""
    row = schedule_row(name)
    require(name, row.rules(numbers), **numbers)
    ranks, microbatches = numbers["ranks"], numbers["microbatches"]
    if (largest := _num_operations(row, numbers)) > LARGEST_NUM_OPERATIONS:
        fewer = microbatches * LARGEST_NUM_OPERATIONS // largest
        # More ranks than operations: no number of microbatches is small enough.
        most_ranks = ranks * microbatches * LARGEST_NUM_OPERATIONS // largest
        nearest = f"microbatches {fewer}" if fewer else f"microbatches 1, ranks {most_ranks}"
        if not most_ranks:  # more slices, or stages on a rank, than operations
            name_of = "num_slices" if "num_slices" in numbers else "stages_per_rank"
            fewest = max(numbers[name_of] * LARGEST_NUM_OPERATIONS // largest, 1)
            nearest = f"{name_of} {fewest}"
        raise ScheduleConditionError(
            f"{name} with ranks {ranks}, microbatches {microbatches} would have up to "
            f"{largest} operations, more than {LARGEST_NUM_OPERATIONS} (nearest: {nearest})"
        )


def _num_operations(row: ScheduleRow, numbers: Numbers) -> int:
    """Upper bound on the number of operations of the schedule."""
    chunks = max(row.stages_per_rank, default=numbers["stages_per_rank"])
    stages = numbers["ranks"] * chunks
    return stages * numbers["microbatches"] * 3 * numbers.get("num_slices", 1)


def is_defined(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> bool:
    """Whether the schedule exists for these numbers, without building it."""
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    row = schedule_row(name)
    is_legal = all(rule.holds(numbers) for rule in row.rules(numbers))
    return is_legal and _num_operations(row, numbers) <= LARGEST_NUM_OPERATIONS


def schedule_row(name: str) -> ScheduleRow:
    """The row of a schedule. Raises ValueError with the nearest name for an unknown one."""
    if name not in SCHEDULES:
        # Imported late: it reads the whole schema of the configuration.
        from moemesh.config.suggest import nearest_choice

        hint = nearest_choice(name, tuple(SCHEDULES))
        raise UserError(f"unknown schedule {name!r}: {hint}")
    return SCHEDULES[name]


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """A schedule's formulas at its numbers: bubble and peak are None where they do not hold."""

    row: ScheduleRow
    bubble: float | None
    peak_activation: tuple[float, ...] | None


def closed_form(
    schedule: Schedule, times: MicrobatchTimes, *, held: float = 1.0
) -> ClosedForm | None:
    """Formulas for equal stages and slices and no latency; None if the schedule has none. `held` is
    M_w / M_a."""
    row = SCHEDULES.get(schedule.name)
    if row is None:
        return None
    numbers = FormNumbers(
        ranks=schedule.num_ranks,
        microbatches=schedule.total_microbatches,
        chunks=schedule.stages_per_rank,
        times=times,
        held=held,
        slice_share=1 / schedule.num_slices,
    )
    bubble, peak = None, None
    if not row.is_asynchronous and holds(row.bubble_where, numbers):
        bubble = value_of(row.bubble, numbers)
    if holds(row.peak_where, numbers):
        peak = tuple(value_of(row.peak, numbers, rank) for rank in range(schedule.num_ranks))
    return ClosedForm(row=row, bubble=bubble, peak_activation=peak)
