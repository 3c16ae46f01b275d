"""One step of a schedule by its numbers: how long it takes, and how much each rank holds.

Prices of layouts take the bubble of a schedule, and the microbatches that it keeps in flight, from
this module. The results are those of :mod:`moemesh.schedule.simulate` and of a walk over the
orders. A step of many microbatches is not laid out operation by operation. Beyond a few more
microbatches than ranks a schedule repeats itself, so that

    T(m + u) = T(m) + u x (busiest rank, its messages included)

for u microbatches at once. T is convex in m there and never grows faster than that, so it is enough
to find this slope once; if very uneven stages reach it later, twice the microbatches are laid out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from moemesh.config.rules import (
    DEFERRING_SCHEDULES,
    MIRRORED_SCHEDULES,
    SLICED_SCHEDULES,
    V_SCHEDULES,
)
from moemesh.config.schedule_table import SCHEDULES, FormNumbers, MicrobatchTimes, value_of
from moemesh.schedule.action import Schedule
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.program import LoweredProgram, lower
from moemesh.schedule.simulate import entry_times

#: Relative difference up to which two slopes are equal.
_ROUNDING = 1e-9


class Duration(NamedTuple):
    """Seconds of one step.

    `makespan`: from the first start to the last end, what a step takes when the next one waits for
    all ranks. `span`: the longest from first start to last end of a rank, what it takes when ranks
    start the next step by themselves (`optimizer_validation = after`, and streams). `busy`: work
    and messages of the busiest rank, which is number `rank`.
    """

    makespan: float
    span: float
    busy: float
    rank: int


class PipelineStep(NamedTuple):
    """Name and sizes of a schedule; `microbatches` of all pipes in one step."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int = 1
    slices: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of one pipe."""
        return self.ranks * (2 if self.schedule in V_SCHEDULES else self.chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, in the order of its chunks; of both pipes where there are two."""
        p, last = self.ranks, self.num_stages - 1
        if self.schedule in V_SCHEDULES:
            return (rank, last - rank)
        if self.schedule in MIRRORED_SCHEDULES and p > 1:
            return (rank, p - 1 - rank)
        return tuple(chunk * p + rank for chunk in range(self.chunks))

    @property
    def share(self) -> float:
        """The part of the step's microbatches that each stage on a rank runs."""
        return 0.5 if self.schedule in MIRRORED_SCHEDULES and self.ranks > 1 else 1.0

    def sent_by(self, rank: int) -> tuple[int, int]:
        """Activations and gradients that a rank sends to other ranks for a microbatch (a slice) of
        each of its stages."""
        stages, last = self.stages_of(rank), self.num_stages - 1
        # On a single rank, and at the turn of a V, neighbours are on the same rank.
        local = stages if self.ranks == 1 or self.schedule in V_SCHEDULES else ()
        activations = sum(stage < last and stage + 1 not in local for stage in stages)
        gradients = sum(stage > 0 and stage - 1 not in local for stage in stages)
        return activations, gradients

    def messages_of(self, rank: int) -> int:
        """Messages that a rank sends for a microbatch (a slice) of each of its stages."""
        return sum(self.sent_by(rank))

    @property
    def is_stream(self) -> bool:
        """Whether no step waits for another: its time is that of an endless stream."""
        return SCHEDULES[self.schedule].is_asynchronous

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients may be computed after everything else."""
        return self.schedule in DEFERRING_SCHEDULES

    @property
    def unit(self) -> int:
        """Microbatches by which a step grows."""
        first, second = _legal_counts(self.schedule, self.ranks, self.chunks)
        return second - first

    def of(self, microbatches: int) -> PipelineStep:
        """The same schedule with another number of microbatches."""
        return self._replace(microbatches=microbatches)

    def rounded_up(self, at_least: int) -> int:
        """Smallest number of microbatches >= `at_least` that differs from this step's by whole
        units."""
        return at_least + (self.microbatches - at_least) % self.unit


def duration(
    step: PipelineStep,
    forward: Sequence[float],
    input_gradient: Sequence[float],
    weight_gradient: Sequence[float],
    message: float = 0.0,
) -> Duration:
    """Seconds of a step, from the seconds that each stage needs for each part of a microbatch. A
    message between two ranks (of a slice, where there are slices) occupies its sender. Raises
    ValueError for a schedule that does not exist."""
    costs = Costs(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        message=message,
    )
    # (seconds of a microbatch, -rank): of equally busy ranks, max takes the first.
    seconds: list[tuple[float, int]] = []
    for rank in range(step.ranks):
        work = message * step.messages_of(rank) * step.slices
        for stage in step.stages_of(rank):
            work += forward[stage] + input_gradient[stage] + weight_gradient[stage]
        seconds.append((work * step.share, -rank))
    busy, negative_rank = max(seconds)
    rank, whole = -negative_rank, busy * step.microbatches
    if step.is_stream:
        return Duration(whole, whole, whole, rank)
    count = step.rounded_up(2 * step.ranks + 2 * step.unit)
    while count < step.microbatches:
        before, after = (_laid_out(step.of(n), costs) for n in (count - step.unit, count))
        slope = busy * step.unit
        growth = (after[0] - before[0], after[1] - before[1])
        if all(abs(more - slope) <= _ROUNDING * slope for more in growth):
            rest = busy * (step.microbatches - count)
            return Duration(after[0] + rest, after[1] + rest, whole, rank)
        count = step.rounded_up(2 * count)
    return Duration(*_laid_out(step, costs), whole, rank)


def _laid_out(step: PipelineStep, costs: Costs) -> tuple[float, float]:
    """(makespan, span) by simulation."""
    program = _program(step)
    starts, ends, _ = entry_times(program, costs.bind(program.schedule), "blocking")
    first = program.first
    spans = [ends[b - 1] - starts[a] for a, b in pairwise(first) if b > a]
    return max(ends), max(spans)


@lru_cache(maxsize=512)
def _program(step: PipelineStep) -> LoweredProgram:
    return lower(_schedule(step))


@lru_cache(maxsize=64)
def _schedule(step: PipelineStep) -> Schedule:
    return build(
        step.schedule,
        step.ranks,
        step.microbatches,
        stages_per_rank=step.chunks,
        num_slices=step.slices if step.schedule in SLICED_SCHEDULES else None,
    )


@lru_cache(maxsize=4096)
def alive(step: PipelineStep) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Per rank, how many microbatches each of its stages keeps at the rank's peaks. One tuple (a
    number for each of :meth:`PipelineStep.stages_of`) for every moment that no other exceeds on all
    stages. Activations live until the weight gradients that need them are computed."""
    if step.ranks == 1 and step.schedule in MIRRORED_SCHEDULES:
        return (((1.0,),),)
    row = SCHEDULES[step.schedule]
    if row.holds_form_peak:
        numbers = _form_numbers(step, step.microbatches)
        peaks = [value_of(row.peak, numbers, rank) for rank in range(step.ranks)]
        return tuple(((float(min(step.microbatches, peak)),) * step.chunks,) for peak in peaks)
    per_stage = step.microbatches * step.share
    # Lay out `count` microbatches: more do not raise the peaks, and fewer than the schedule is
    # defined for (`least`) hold a part of the peaks of `least`.
    whole_units = step.of(-(-step.microbatches // step.unit) * step.unit)
    count = whole_units.rounded_up(2 * step.ranks + 2 * step.unit)
    if not step.is_stream:
        least, _ = _legal_counts(step.schedule, step.ranks, step.chunks)
        count = min(count, max(whole_units.microbatches, least))
    # No stage keeps more than all microbatches of its pipe.
    limit = math.inf if step.is_stream or per_stage >= count * step.share else per_stage
    return _laid_out_alive(step.of(count), limit)


@lru_cache(maxsize=4096)
def _laid_out_alive(step: PipelineStep, limit: float) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """:func:`alive` by the operations of the step, at most `limit` microbatches a stage."""
    schedule = _schedule(step)
    by_rank: list[tuple[tuple[float, ...], ...]] = []
    for rank in range(step.ranks):
        place = {stage: index for index, stage in enumerate(step.stages_of(rank))}
        held, has_grown = [0] * len(place), False
        # Counts per stage before each release that follows a forward: at other times less is alive.
        moments: set[tuple[int, ...]] = set()
        for entry in schedule.orders[rank]:
            for op in entry:
                if op.kind == "F":
                    held[place[op.stage]] += 1
                    has_grown = True
            for op in entry:
                if op.kind in ("B", "W"):
                    if has_grown:
                        moments.add(tuple(held))
                        has_grown = False
                    held[place[op.stage]] -= 1
        if has_grown:
            moments.add(tuple(held))
        assert schedule.num_pipes > 1 or not any(held)
        peaks: list[tuple[float, ...]] = []
        shares = {
            tuple(min(count / schedule.num_slices, limit) for count in moment) for moment in moments
        }
        for share in sorted(shares, reverse=True):
            # In this order the first numbers fall, so that of pairs the last peak has the largest
            # second number.
            others = peaks[-1:] if len(share) <= 2 else peaks
            if not any(all(a >= b for a, b in zip(other, share, strict=True)) for other in others):
                peaks.append(share)
        by_rank.append(tuple(peaks))
    return tuple(by_rank)


def weight_copies(step: PipelineStep, rank: int) -> int:
    """Versions of the weights that a rank keeps of each of its stages (of both pipes)."""
    if not step.is_stream:
        return 1
    numbers = _form_numbers(step, max(step.microbatches, 4 * step.ranks))
    return int(value_of(SCHEDULES[step.schedule].copies, numbers, rank))


def _form_numbers(step: PipelineStep, microbatches: int) -> FormNumbers:
    times = MicrobatchTimes()
    return FormNumbers(ranks=step.ranks, microbatches=microbatches, chunks=step.chunks, times=times)


@lru_cache(maxsize=512)
def _legal_counts(schedule: str, ranks: int, chunks: int) -> tuple[int, int]:
    """The two smallest numbers of microbatches that the schedule is defined for."""
    numbers = {"ranks": ranks, "microbatches": 1, "stages_per_rank": chunks}
    rules = SCHEDULES[schedule].rules(numbers)
    rules = [rule for rule in rules if "microbatches" in rule.names]
    counts = (
        count
        for count in itertools.count(1)
        if all(rule.holds(numbers | {"microbatches": count}) for rule in rules)
    )
    return next(counts), next(counts)
