"""Ownership: which numbers of a parameter a rank updates, counts in the norm, and saves.

Under ``plan.data = replicate`` that is its whole local tensor. Where states are sharded it is a
range of the flattened local tensor, which begins and ends anywhere: as a part of a logical tensor
it is a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OwnRange:
    """The `numbers` of a flattened local tensor (row-major) whose states this rank keeps; whether
    it is the one rank that counts and saves them."""

    numbers: range
    is_first: bool


class Box(NamedTuple):
    """A part of a tensor that begins at `offset` and has `shape`; it is the range `numbers` of the
    flattened tensor."""

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


def part_of(tensor: Tensor, own: OwnRange, numbers: range) -> Tensor:
    """The range `numbers` of the local tensor, from the part that this rank owns, flat."""
    start = numbers.start - own.numbers.start
    return tensor.view(-1)[start : start + len(numbers)]
