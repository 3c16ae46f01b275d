"""The slicing dynamic program against every way to cut."""

from __future__ import annotations

import itertools
import random

import pytest

from moemesh.schedule.terapipe import best_slices


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
    length, stages, sequences = chance.randint(1, 9), chance.randint(1, 6), chance.randint(1, 4)
    times = {
        (n, c): chance.choice((1, 2, chance.random() * n))
        for n in range(1, length + 1)
        for c in range(length)
    }

    def value(cut: tuple[int, ...]) -> float:
        starts = [sum(cut[:index]) for index in range(len(cut))]
        costs = [times[piece] for piece in zip(cut, starts, strict=True)]
        return sequences * sum(costs) + (stages - 1) * max(costs)

    for number in range(1, length + 1):
        lengths = best_slices(lambda n, c: times[n, c], length, stages, sequences, number)
        assert len(lengths) == number and sum(lengths) == length
        cuts = [cut for cut in every_cut(length) if len(cut) == number]
        assert value(lengths) == pytest.approx(min(map(value, cuts)))


def test_later_slices_are_shorter_when_context_costs() -> None:
    """Attention over the context makes late tokens dearer: equal times mean unequal lengths."""
    lengths = best_slices(lambda n, c: n * (1 + (c + n / 2) / 4), 16, 8, 1, 4)
    assert list(lengths) == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_more_slices_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="num_slices <= 2, got 3 > 2"):
        best_slices(lambda n, c: n, 2, 2, 1, 3)
