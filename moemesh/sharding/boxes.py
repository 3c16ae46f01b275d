"""Ranges of a flattened tensor as boxes of it, and as parts of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor at `offset` of `shape`; the range `numbers` if flattened."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    numbers: range


def boxes(shape: Sequence[int], numbers: range) -> Iterator[Box]:
    """The fewest boxes, in order, that make up the range `numbers` of a flattened tensor: at most
    ``2 n - 1`` of a tensor of n dims; none of an empty range."""
    if not numbers:
        return
    if len(shape) <= 1:
        yield Box((numbers.start,) * len(shape), (len(numbers),) * len(shape), numbers)
        return
    row = math.prod(shape[1:])
    place = numbers.start
    while place < numbers.stop:
        index, inside = divmod(place, row)
        whole_rows = (numbers.stop - place) // row
        if inside == 0 and whole_rows:
            stop = place + whole_rows * row
            offset = (index, *(0 for _ in shape[1:]))
            yield Box(offset, (whole_rows, *shape[1:]), range(place, stop))
        else:
            stop = min((index + 1) * row, numbers.stop)
            part = range(inside, inside + stop - place)
            for box in boxes(shape[1:], part):
                start = index * row + box.numbers.start
                covered = range(start, start + len(box.numbers))
                yield Box((index, *box.offset), (1, *box.shape), covered)
        place = stop


def rows(num_rows: int, row: int, numbers: range) -> Iterator[tuple[int, range]]:
    """(row, its part of `numbers`) of a range of `num_rows` rows of `row` numbers each."""
    for index in range(num_rows):
        start, stop = max(numbers.start, index * row), min(numbers.stop, (index + 1) * row)
        if start < stop:
            yield index, range(start, stop)
