"""Ranges of a flattened tensor, split into boxes, into rows, or into parts of logical tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor: `offset` and `shape` in each dim; `numbers`: its range if flattened."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    numbers: range


def boxes(shape: Sequence[int], numbers: range) -> Iterator[Box]:
    """The fewest boxes, in order, that make up the range `numbers` of a flattened tensor: at most
    ``2 n - 1`` of a tensor of n dims; none of an empty range."""
    if not numbers:
        return
    if len(shape) <= 1:  # a vector, or a scalar with the offset ()
        yield Box((numbers.start,) * len(shape), (len(numbers),) * len(shape), numbers)
        return
    row_size = math.prod(shape[1:])
    position = numbers.start
    while position < numbers.stop:
        index, column = divmod(position, row_size)
        whole_rows = (numbers.stop - position) // row_size
        if column == 0 and whole_rows:
            stop = position + whole_rows * row_size
            offset = (index, *(0 for _ in shape[1:]))
            yield Box(offset, (whole_rows, *shape[1:]), range(position, stop))
        else:
            stop = min((index + 1) * row_size, numbers.stop)
            part = range(column, column + stop - position)
            for box in boxes(shape[1:], part):
                start = index * row_size + box.numbers.start
                covered = range(start, start + len(box.numbers))
                yield Box((index, *box.offset), (1, *box.shape), covered)
        position = stop


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

    The local tensor holds blocks of the tensor `name` in sequence; `held` has the range of each
    block in each dim. A local stack of `experts` (ids) holds these blocks for each expert, and each
    expert is a logical tensor: "layers.1.feed_forward.experts.17.gate_up".
    """
    # "rest" is the stack of frozen experts (:func:`moemesh.sharding.parameters.tuned_tensors`).
    module, _, leaf = name.replace(".experts.rest.", ".experts.").rpartition(".")
    size = math.prod(map(len, held[0]))
    for index, part in rows(len(held) * len(experts or (0,)), size, numbers):
        start = index * size
        position, block = divmod(index, len(held))
        if experts is not None:
            name = f"{module}.{experts[position]}.{leaf}"
        ranges = held[block]
        inside = range(part.start - start, part.stop - start)
        for box in boxes([len(dim) for dim in ranges], inside):
            ends = zip(ranges, box.offset, strict=True)
            offset = tuple(dim.start + first for dim, first in ends)
            flat = range(box.numbers.start + start, box.numbers.stop + start)
            yield Part(name, shape, offset, box.shape), flat


def rows(num_rows: int, row: int, numbers: range) -> Iterator[tuple[int, range]]:
    """(index, part of `numbers`) for each of `num_rows` rows of `row` elements that has a part."""
    for index in range(num_rows):
        start, stop = max(numbers.start, index * row), min(numbers.stop, (index + 1) * row)
        if start < stop:
            yield index, range(start, stop)
