"""Weight matrices inside parameters, and the rank that computes the update of each.

Muon updates a weight matrix as a whole (:mod:`moemesh.train.muon`), and a parameter may hold
several: gate and up of an MLP, or q, k and v. In this module, a tensor is a parameter as it is in a
checkpoint, where each expert has separate tensors.
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
    """A matrix inside a tensor: the slice `box` of the tensor, seen as [`rows`, `columns`]."""

    box: tuple[slice, ...]
    rows: int
    columns: int


def matrices(name: str, shape: Sequence[int]) -> tuple[Matrix, ...]:
    """The matrices of the tensor `name` of logical `shape`; empty for one without matrices, such as
    a norm."""
    if not has_matrices(name):
        return ()
    leaf = name.rpartition(".")[2]
    if leaf == "gate_up":  # [2, width, hidden]
        parts = [(slice(index, index + 1),) for index in range(shape[0])]
    elif leaf == "qkv":  # [key heads, query heads of each + key + value, head size, hidden]
        groups, heads = slice(0, shape[0]), shape[1]
        ends = ((0, heads - 2), (heads - 2, heads - 1), (heads - 1, heads))
        parts = [(groups, slice(*end)) for end in ends]
    else:  # one matrix: all dims but the last are its rows
        parts = [(slice(0, shape[0]),)]
    row_dims = [[part.stop - part.start for part in box] + [*shape[len(box) : -1]] for box in parts]
    return tuple(
        Matrix(box, prod(sizes), shape[-1]) for box, sizes in zip(parts, row_dims, strict=True)
    )


#: (source, destination) -> parts that the source sends to the destination, in order.
Parts: TypeAlias = dict[tuple[int, int], list[Part]]


def splits(parts: Parts, rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Counts of elements that `rank` sends to each rank, and that it receives from each rank."""

    def count(source: int, destination: int) -> int:
        return sum(prod(part.sizes) for part in parts.get((source, destination), ()))

    ranks = range(num_ranks)
    return [count(rank, other) for other in ranks], [count(other, rank) for other in ranks]


@dataclass
class MatrixExchange:
    """Exchange of the tensors of one unit of the model that no rank holds as a whole.

    `owners`: the rank that updates each tensor. `there`: the parts that are sent to the owners
    before the update, by (source, destination). `back`: parts of the update that the owners return.
    Every rank has the same `MatrixExchange`.
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
        ranks_of = holders[name]
        if all(part.sizes == part.shape for part in ranks_of):
            continue
        owner = min(
            sorted({rank for ranks in ranks_of.values() for rank in ranks}), key=work.__getitem__
        )
        work[owner] += _work(ranks_of)
        exchange = by_unit.setdefault(unit_of(name), MatrixExchange())
        exchange.owners[name] = owner
        for part, ranks in sorted(ranks_of.items()):
            if owner not in ranks:
                exchange.there.setdefault((ranks[0], owner), []).append(part)
            for rank in ranks:
                if rank != owner:
                    exchange.back.setdefault((owner, rank), []).append(part)
    return dict(sorted(by_unit.items()))


def _work(by_part: Iterable[Part]) -> int:
    """Multiplications of the update of a tensor, up to a constant factor."""
    part = next(iter(by_part))
    return sum(
        matrix.rows * matrix.columns * min(matrix.rows, matrix.columns)
        for matrix in matrices(part.name, part.shape)
    )
