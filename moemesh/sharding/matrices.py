"""Weight matrices inside parameters, and the rank that computes the update of each.

Muon updates a weight matrix as a whole (:mod:`moemesh.train.muon`), and a parameter may hold
several: gate and up of an MLP, or q, k and v. A tensor here is a parameter under its name in a
checkpoint, where each expert has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeAlias

from moemesh.config.optimizer_table import has_matrices
from moemesh.sharding.boxes import Part
from moemesh.sharding.buckets import unit_of


class Matrix(NamedTuple):
    """A matrix inside a tensor: the part `box` of it, as `rows` times `columns`."""

    box: tuple[slice, ...]
    rows: int
    columns: int


def matrices(name: str, shape: Sequence[int]) -> tuple[Matrix, ...]:
    """The matrices of the tensor `name` of logical `shape`; empty for a tensor of another kind."""
    if not has_matrices(name):
        return ()
    leaf = name.rpartition(".")[2]
    if leaf == "gate_up":  # [2, width, hidden]
        parts = [(slice(place, place + 1),) for place in range(shape[0])]
    elif leaf == "qkv":  # [key heads, query heads of each + key + value, head size, hidden]
        groups, heads = slice(0, shape[0]), shape[1]
        ends = ((0, heads - 2), (heads - 2, heads - 1), (heads - 1, heads))
        parts = [(groups, slice(*end)) for end in ends]
    else:  # one matrix, with rows in all dims but the last
        parts = [(slice(0, shape[0]),)]
    rows = [[part.stop - part.start for part in box] + [*shape[len(box) : -1]] for box in parts]
    return tuple(
        Matrix(box, prod(sizes), shape[-1]) for box, sizes in zip(parts, rows, strict=True)
    )


#: (source, destination) -> parts that the source sends to the destination, in order.
Parts: TypeAlias = dict[tuple[int, int], list[Part]]


def splits(parts: Parts, rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Counts of the numbers that `rank` sends to each rank and receives from each."""

    def numbers(pair: tuple[int, int]) -> int:
        return sum(prod(part.sizes) for part in parts.get(pair, ()))

    others = range(num_ranks)
    return [numbers((rank, other)) for other in others], [
        numbers((other, rank)) for other in others
    ]


@dataclass
class MatrixExchange:
    """Tensors of one unit of the model that no rank holds as a whole.

    `owners`: the rank that updates each tensor. `there`: the parts that travel from a source to a
    destination before the update, by (source, destination); `back`: those of the update. Every rank
    has the same parts in the same order.
    """

    owners: dict[str, int] = field(default_factory=dict[str, int])
    there: Parts = field(default_factory=dict[tuple[int, int], list[Part]])
    back: Parts = field(default_factory=dict[tuple[int, int], list[Part]])


def exchanges(parts_by_rank: Sequence[Sequence[Part]]) -> dict[str, MatrixExchange]:
    """The exchange of each unit that needs one, from the parts that each rank of an axis holds.

    The owner of a tensor is the rank with the least work so far among those that hold parts of it.
    A part that several ranks hold comes from the owner itself or from the first of them, and its
    update goes to all of them. Ranks that hold a tensor as a whole update it without an exchange.
    """
    holders: dict[str, dict[Part, list[int]]] = {}
    for rank, parts in enumerate(parts_by_rank):
        for part in parts:
            holders.setdefault(part.name, {}).setdefault(part, []).append(rank)
    work = [0] * len(parts_by_rank)
    by_unit: dict[str, MatrixExchange] = {}
    for name in sorted(holders, key=lambda name: (-_work(holders[name]), name)):
        by_part = holders[name]
        if all(part.sizes == part.shape for part in by_part):
            continue
        owner = min(
            sorted({rank for ranks in by_part.values() for rank in ranks}), key=work.__getitem__
        )
        work[owner] += _work(by_part)
        unit = by_unit.setdefault(unit_of(name), MatrixExchange())
        unit.owners[name] = owner
        for part, ranks in sorted(by_part.items()):
            if owner not in ranks:
                unit.there.setdefault((ranks[0], owner), []).append(part)
            for rank in ranks:
                if rank != owner:
                    unit.back.setdefault((owner, rank), []).append(part)
    return dict(sorted(by_unit.items()))


def _work(by_part: Iterable[Part]) -> int:
    """Multiplications of the update of a tensor, up to a constant factor."""
    part = next(iter(by_part))
    return sum(
        matrix.rows * matrix.columns * min(matrix.rows, matrix.columns)
        for matrix in matrices(part.name, part.shape)
    )
