"""The slicing dynamic program against every way to cut."""

from __future__ import annotations

import itertools
import random

import pytest

from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate
from moemesh.schedule.terapipe import best_slices, terapipe


def every_cut(units: int) -> list[tuple[int, ...]]:
    """All ordered sums of `units`."""
    divisions: list[tuple[int, ...]] = []
    for number in range(units):
        for cuts in itertools.combinations(range(1, units), number):
            ends = (0, *cuts, units)
            divisions.append(tuple(b - a for a, b in itertools.pairwise(ends)))
    return divisions


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_better(seed: int) -> None:
    chance = random.Random(seed)
    units, granularity = chance.randint(1, 9), chance.choice((1, 4))
    stages, sequences = chance.randint(1, 6), chance.randint(1, 4)
    times = {
        (n * granularity, c * granularity): chance.choice((1, 2, chance.random() * n))
        for n in range(1, units + 1)
        for c in range(units)
    }

    def value(cut: tuple[int, ...]) -> float:
        starts = [sum(cut[:index]) for index in range(len(cut))]
        costs = [times[n * granularity, c * granularity] for n, c in zip(cut, starts, strict=True)]
        return sequences * sum(costs) + (stages - 1) * max(costs)

    def cost(n: int, context: int) -> float:
        return times[n, context]

    length = units * granularity
    slicing = best_slices(cost, length, granularity, stages, sequences)
    assert slicing.seconds == pytest.approx(min(map(value, every_cut(units))))
    assert value(tuple(n // granularity for n in slicing.lengths)) == pytest.approx(slicing.seconds)
    for number in range(1, units + 1):
        fixed = best_slices(cost, length, granularity, stages, sequences, number)
        assert len(fixed.lengths) == number and sum(fixed.lengths) == length
        cuts = [cut for cut in every_cut(units) if len(cut) == number]
        assert fixed.seconds == pytest.approx(min(map(value, cuts)))


def test_later_slices_are_shorter_when_context_costs() -> None:
    """Attention over the context makes late tokens dearer: equal times mean unequal lengths."""
    slicing = best_slices(lambda n, c: n * (1 + (c + n / 2) / 16), 64, 4, 8, 1, 4)
    assert list(slicing.lengths) == sorted(slicing.lengths, reverse=True)
    assert slicing.lengths[0] > slicing.lengths[-1]


def test_the_value_is_the_simulated_time() -> None:
    """A third of a slice's time forward: both maxima fall on one slice, the formula is exact."""

    def cost(n: int, context: int) -> float:
        return 3 * n * (8 + context + n)

    slicing = best_slices(cost, 48, 8, 4, 2)
    starts = [sum(slicing.lengths[:index]) for index in range(len(slicing.lengths))]
    parts = [cost(n, c) / 3 for n, c in zip(slicing.lengths, starts, strict=True)]
    costs = Costs(forward=lambda op: parts[op.slice], backward=lambda op: 2 * parts[op.slice])
    assert simulate(terapipe(4, 2, len(parts)), costs).makespan == pytest.approx(slicing.seconds)


@pytest.mark.parametrize(
    ("length", "granularity", "num_slices", "message"),
    [
        (10, 4, None, r"length % granularity == 0, got 10 % 4 == 2 \(nearest: length 8 or 12"),
        (0, 1, None, "length >= 1, got 0"),
        (8, 0, None, "granularity >= 1, got 0"),
        (8, 4, 3, "num_slices <= 2, got 3 > 2"),
    ],
)
def test_what_cannot_be_cut(
    length: int, granularity: int, num_slices: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        best_slices(lambda n, c: n, length, granularity, 2, 1, num_slices)
