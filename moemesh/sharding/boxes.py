"""Ranges of a flattened tensor as boxes of it, as parts of its rows and of logical tensors."""

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


class Part(NamedTuple):
    """A box of the tensor `name` of logical `shape`: it begins at `offset` and has `sizes`."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def logical_parts(
    name: str,
    shape: tuple[int, ...],
    held: Sequence[Sequence[range]],
    numbers: range,
    experts: Sequence[int] | None = None,
) -> Iterator[tuple[Part, range]]:
    """The parts of logical tensors in the range `numbers` of a flattened local tensor, each with
    its part of `numbers`.

    The local tensor holds blocks of `name`, one after the other: `held` has the ranges of the dims
    of each. A stack of `experts` (ids) holds these blocks of each expert, which is a logical tensor
    of its own: "layers.1.feed_forward.experts.17.gate_up".
    """
    module, _, leaf = name.replace(".experts.rest.", ".experts.").rpartition(".")
    size = math.prod(map(len, held[0]))
    for index, part in rows(len(held) * len(experts or (0,)), size, numbers):
        start = index * size
        place, block = divmod(index, len(held))
        if experts is not None:
            name = f"{module}.{experts[place]}.{leaf}"
        slices = held[block]
        inside = range(part.start - start, part.stop - start)
        for box in boxes([len(dim) for dim in slices], inside):
            ends = zip(slices, box.offset, strict=True)
            offset = tuple(dim.start + first for dim, first in ends)
            whole = range(box.numbers.start + start, box.numbers.stop + start)
            yield Part(name, shape, offset, box.shape), whole


def rows(num_rows: int, row: int, numbers: range) -> Iterator[tuple[int, range]]:
    """(row, its part of `numbers`) of a range of `num_rows` rows of `row` numbers each."""
    for index in range(num_rows):
        start, stop = max(numbers.start, index * row), min(numbers.stop, (index + 1) * row)
        if start < stop:
            yield index, range(start, stop)
