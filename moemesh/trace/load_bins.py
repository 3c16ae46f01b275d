"""Bins of steps: loads of any number of steps in bounded room, with exact sums.

Neighbouring steps are summed where there are too many of them, so that what is kept covers the
whole run at one resolution and no token is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce

from moemesh.trace.loads import LayerLoads


def neighbours(
    widths: Sequence[int], most: int, borders: AbstractSet[int] = frozenset()
) -> list[slice]:
    """Bins of `widths` steps to sum, so that at most `most` remain, of widths as even
    as may be: slices that cover all of them, in order.

    Behind the bins at the positions `borders` a slice always ends; so many more may remain.

    >>> neighbours([1, 1, 1, 1], 2)
    [slice(0, 2, None), slice(2, 4, None)]
    >>> neighbours([2, 2, 1, 1, 1], 2, {0})
    [slice(0, 1, None), slice(1, 4, None), slice(4, 5, None)]
    """
    width = math.ceil(sum(widths) / most)
    while True:
        found: list[slice] = []
        start = steps = 0
        for position, own in enumerate(widths):
            if position > start and (steps + own > width or position - 1 in borders):
                found.append(slice(start, position))
                start, steps = position, 0
            steps += own
        if widths:
            found.append(slice(start, len(widths)))
        if len(found) <= most + len(borders):
            return found
        width *= 2


class LoadBins:
    """Loads that are read step by step: at most `most` bins a layer are kept, and at least a third
    of them where there were as many steps; fewer where they would hold more than `most_numbers`."""

    def __init__(self, most: int = 256, most_numbers: int = 1_600_000) -> None:
        self._most, self._most_numbers = most, most_numbers
        self._layers: dict[int, list[LayerLoads]] = {}
        self._numbers = 0

    def add(self, loads: LayerLoads) -> None:
        """The next loads of a layer. A step that was done before (a run that was resumed) counts as
        done now: bins that hold it or later ones go."""
        kept = self._layers.setdefault(loads.layer, [])
        while kept and kept[-1].step >= loads.first_step:
            self._numbers -= _numbers(kept.pop())
        kept.append(loads)
        self._numbers += _numbers(loads)
        if len(kept) > self._most:
            self._thin(kept)
        while self._numbers > self._most_numbers and self._most > 1:
            self._most //= 2
            for others in self._layers.values():
                if len(others) > self._most:
                    self._thin(others)

    def _thin(self, kept: list[LayerLoads]) -> None:
        before = sum(map(_numbers, kept))
        halves = neighbours([one.steps for one in kept], max(self._most // 2, 1))
        kept[:] = [total(kept[part]) for part in halves]
        self._numbers += sum(map(_numbers, kept)) - before

    def all(self) -> tuple[LayerLoads, ...]:
        """Every bin, by step and layer."""
        rows = (loads for kept in self._layers.values() for loads in kept)
        return tuple(sorted(rows, key=lambda loads: (loads.step, loads.layer)))


def _numbers(loads: LayerLoads) -> int:
    return len(loads.tokens_per_expert) + len(loads.tokens_per_rank)


def total(loads: Iterable[LayerLoads]) -> LayerLoads:
    """The sum of one layer's loads in steps that follow one another, one bin at least."""
    return reduce(LayerLoads.plus, loads)
