"""Elimination with sets of (seconds, bytes) in place of single costs.

A label is one way to choose the variables taken out so far: its seconds, its bytes and where it
came from. Each cell of a table holds the labels that no other one of the cell beats in both. Most
labels go by a bound: with a price (seconds per byte) and an incumbent known, a label stays only if
its priced cost, plus the least priced cost of everything that is not in it, can still beat the
incumbent. Those completions come from one elimination without labels, inwards and outwards.

All tables are flat arrays sorted by cell; every step works on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.operators.elimination import Factor, add_factors
from moemesh.planner.operators.elimination_order import Order, elimination_order
from moemesh.planner.operators.graph import FloatArray, OperatorGraph

IntArray = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be dropped without losing the optimum, and a cap that may lose it.

    A solution may cost at most `slack` seconds more, at `price` seconds a byte, than the cheapest
    one, and have at most `budget_bytes`. A cell keeps `max_labels`, those of least priced cost.
    """

    budget_bytes: float = np.inf
    price: float = 0.0
    slack: float = np.inf
    max_labels: int = 2**12


@dataclass(kw_only=True, eq=False)
class LabelTable:
    """Labels over the cells of `scope`, sorted by cell, then by bytes.

    `parents[i]` are the labels of `children` that label i was made of; `choice[i]` is the value
    of `variable`, which was taken out (-1 for an input table). `thinned` says that `max_labels`
    has cut labels here or below.
    """

    scope: tuple[int, ...]
    cell: IntArray
    seconds: FloatArray
    num_bytes: FloatArray
    variable: int = -1
    choice: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    parents: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.intp))
    children: tuple[LabelTable, ...] = ()
    thinned: bool = False

    def taken(self, row: int) -> tuple[dict[int, int], list[tuple[LabelTable, int]]]:
        """Values of the variables below label `row`, and the input labels that it uses."""
        values: dict[int, int] = {}
        inputs: list[tuple[LabelTable, int]] = []
        stack: list[tuple[LabelTable, int]] = [(self, row)]
        while stack:
            table, index = stack.pop()
            if table.variable >= 0:
                values[table.variable] = int(table.choice[index])
            if not table.children:
                inputs.append((table, index))
                continue
            for child, parent in zip(table.children, table.parents[index], strict=True):
                stack.append((child, int(parent)))
        return values, inputs


def undominated(cell: IntArray, seconds: FloatArray, num_bytes: FloatArray) -> IntArray:
    """Rows that no row of the same cell beats in seconds and bytes, sorted by (cell, bytes).

    Of equal rows one stays.
    """
    if not len(cell):
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((seconds, num_bytes, cell))
    # Ranks in place of seconds, lowered from cell to cell, make one running minimum serve all.
    ranks = np.unique(seconds, return_inverse=True)[1][order]
    segment = np.cumsum(np.diff(cell[order], prepend=cell[order[0]]) != 0)
    keys = ranks - segment * len(cell)
    least = np.minimum.accumulate(keys)
    kept = np.ones(len(order), dtype=bool)
    kept[1:] = keys[1:] < least[:-1]
    return order[kept]


def input_table(scope: tuple[int, ...], seconds: FloatArray, num_bytes: FloatArray) -> LabelTable:
    """One label a cell, from dense tables; infinite seconds leave a cell empty."""
    flat = seconds.ravel()
    cell = np.flatnonzero(np.isfinite(flat))
    spread = np.broadcast_to(num_bytes, seconds.shape).ravel()
    return LabelTable(scope=scope, cell=cell, seconds=flat[cell], num_bytes=spread[cell])


def graph_tables(
    graph: OperatorGraph, in_flight: float, *, without_node: int | None = None
) -> list[LabelTable]:
    """Input tables of a graph; bytes are state + in_flight * saved."""
    tables = [
        input_table((index,), seconds, state + in_flight * saved)
        for index, (seconds, state, saved) in enumerate(
            zip(graph.node_seconds, graph.node_state_bytes, graph.node_saved_bytes, strict=True)
        )
        if index != without_node
    ]
    tables += [
        input_table((edge.source, edge.target), edge.seconds, np.zeros(())) for edge in graph.edges
    ]
    return tables


def eliminate_labels(
    sizes: Sequence[int],
    tables: Sequence[LabelTable],
    limits: Limits,
    keep: tuple[int, ...] = (),
    completion: FloatArray | None = None,
) -> LabelTable:
    """The labels over `keep` that the sum of `tables` leaves when all else is taken out.

    `completion` is the least priced cost, for each cell of `keep`, of what lies outside `tables`.
    """
    factors = [least_priced(table, sizes, limits.price) for table in tables]
    order = elimination_order(sizes, (table.scope for table in tables), keep)
    outside = np.zeros(tuple(sizes[variable] for variable in keep))
    if completion is not None:
        outside = outside + completion
    buckets = _inwards(sizes, factors, order)
    root = _Bucket(variable=-1, rest=keep, factors=_left_over(factors, buckets))
    least = float((add_factors(root.factors, keep, sizes) + outside).min())
    completions = _outwards(sizes, buckets, root, outside)
    live = list(zip(tables, factors, strict=True))
    for bucket in buckets:
        variable, rest = bucket.variable, bucket.rest
        mine = [pair for pair in live if variable in pair[0].scope]
        live = [pair for pair in live if variable not in pair[0].scope]
        allowed = _allowed(least + limits.slack, completions[variable])[..., None]
        joined = _join(mine, (*rest, variable), sizes, limits, allowed)
        dropped = _drop_variable(joined, rest, variable, sizes[variable], limits)
        live.append((dropped, bucket.message))
    return _join(live, keep, sizes, limits, _allowed(least + limits.slack, outside))


def _allowed(most: float, completion: FloatArray) -> FloatArray:
    """What a label may cost if `most` is allowed in all; nothing where it cannot be completed."""
    return np.where(
        np.isfinite(completion), most - np.where(np.isfinite(completion), completion, 0.0), -np.inf
    )


def least_priced(table: LabelTable, sizes: Sequence[int], price: float) -> Factor:
    """The least priced cost of each cell, infinite where there is no label."""
    shape = tuple(sizes[variable] for variable in table.scope)
    flat = np.full(prod(shape), np.inf)
    np.minimum.at(flat, table.cell, table.seconds + price * table.num_bytes)
    return Factor(scope=table.scope, table=flat.reshape(shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bucket:
    """A variable, the neighbours it had when it was taken out, the tables that mention it."""

    variable: int
    rest: tuple[int, ...]
    factors: list[Factor]
    message: Factor = field(default_factory=lambda: Factor(scope=(), table=np.zeros(())))


def _inwards(sizes: Sequence[int], factors: Sequence[Factor], order: Order) -> list[_Bucket]:
    """Take the variables out one by one; what each bucket tells its neighbours."""
    live = list(factors)
    buckets: list[_Bucket] = []
    for variable in order.variables:
        mine = [factor for factor in live if variable in factor.scope]
        live = [factor for factor in live if variable not in factor.scope]
        rest = tuple({other: None for f in mine for other in f.scope if other != variable})
        total = add_factors(mine, (*rest, variable), sizes)
        message = Factor(scope=rest, table=total.min(axis=-1))
        buckets.append(_Bucket(variable=variable, rest=rest, factors=mine, message=message))
        live.append(message)
    return buckets


def _left_over(factors: Sequence[Factor], buckets: Sequence[_Bucket]) -> list[Factor]:
    """Tables and messages that no bucket holds: they speak of kept variables only."""
    held = {id(factor) for bucket in buckets for factor in bucket.factors}
    everything = [*factors, *(bucket.message for bucket in buckets)]
    return [factor for factor in everything if id(factor) not in held]


def _outwards(
    sizes: Sequence[int], buckets: Sequence[_Bucket], root: _Bucket, outside: FloatArray
) -> dict[int, FloatArray]:
    """variable -> least cost, for each cell of its neighbours, of all that is not below it."""
    home = {id(factor): bucket for bucket in (*buckets, root) for factor in bucket.factors}
    completions: dict[int, FloatArray] = {}
    for bucket in reversed(buckets):
        parent = home[id(bucket.message)]
        others = [factor for factor in parent.factors if factor is not bucket.message]
        if parent is root:
            scope, beyond = root.rest, outside
        else:
            scope = (*parent.rest, parent.variable)
            beyond = completions[parent.variable][..., None]
        total = add_factors(others, scope, sizes) + beyond
        gone = tuple(axis for axis, other in enumerate(scope) if other not in bucket.rest)
        left = [other for other in scope if other in bucket.rest]
        axes = [left.index(other) for other in bucket.rest]
        completions[bucket.variable] = total.min(axis=gone).transpose(axes)
    return completions


def _join(
    pairs: Sequence[tuple[LabelTable, Factor]],
    scope: tuple[int, ...],
    sizes: Sequence[int],
    limits: Limits,
    allowed: FloatArray,
) -> LabelTable:
    """Labels over `scope`: one of every table, added up.

    Each table comes with the least priced cost of its cells; `allowed` is the most that the labels
    of a cell may cost.
    """
    shape = tuple(sizes[variable] for variable in scope)
    # Tables with one label a cell first: they grow nothing and cut early.
    pairs = sorted(pairs, key=lambda pair: len(pair[0].cell) / pair[1].table.size)
    room = np.broadcast_to(allowed, shape)
    still = add_factors([factor for _, factor in pairs], scope, sizes)
    cell = np.flatnonzero((still <= room) & np.isfinite(still))
    places = np.unravel_index(np.arange(prod(shape)), shape) if scope else ()
    columns = dict(zip(scope, places, strict=True))
    seconds, num_bytes = np.zeros(len(cell)), np.zeros(len(cell))
    parents = np.zeros((len(cell), 0), dtype=np.intp)
    thinned = any(table.thinned for table, _ in pairs)
    for number, (table, factor) in enumerate(pairs):
        # The cell of `table` that belongs to each cell of `scope`.
        theirs = np.zeros(prod(shape), dtype=np.intp)
        if table.scope:
            mine = tuple(columns[variable] for variable in table.scope)
            theirs = np.ravel_multi_index(mine, factor.table.shape)
        starts = np.searchsorted(table.cell, np.arange(factor.table.size + 1))
        first, count = starts[theirs[cell]], np.diff(starts)[theirs[cell]]
        ours = np.repeat(np.arange(len(cell)), count)
        offsets = np.arange(len(ours)) - np.repeat(np.cumsum(count) - count, count)
        other = np.repeat(first, count) + offsets
        cell = cell[ours]
        seconds = seconds[ours] + table.seconds[other]
        num_bytes = num_bytes[ours] + table.num_bytes[other]
        parents = np.column_stack([parents[ours], other])
        still = add_factors([rest for _, rest in pairs[number + 1 :]], scope, sizes)
        fits = num_bytes <= limits.budget_bytes
        fits &= seconds + limits.price * num_bytes <= (room - still).ravel()[cell]
        rows, cut = _filter(cell, seconds, num_bytes, np.flatnonzero(fits), limits)
        thinned |= cut
        cell, seconds, num_bytes, parents = (
            cell[rows],
            seconds[rows],
            num_bytes[rows],
            parents[rows],
        )
    return LabelTable(
        scope=scope,
        cell=cell,
        seconds=seconds,
        num_bytes=num_bytes,
        parents=parents,
        children=tuple(table for table, _ in pairs),
        thinned=thinned,
    )


def _drop_variable(
    joined: LabelTable, rest: tuple[int, ...], variable: int, size: int, limits: Limits
) -> LabelTable:
    """Take out the last variable of a joined table: its value becomes part of the label."""
    cell, choice = np.divmod(joined.cell, size)
    everything = np.arange(len(cell))
    rows, cut = _filter(cell, joined.seconds, joined.num_bytes, everything, limits)
    return LabelTable(
        scope=rest,
        cell=cell[rows],
        seconds=joined.seconds[rows],
        num_bytes=joined.num_bytes[rows],
        variable=variable,
        choice=choice[rows],
        parents=joined.parents[rows],
        children=joined.children,
        thinned=joined.thinned or cut,
    )


def _filter(
    cell: IntArray, seconds: FloatArray, num_bytes: FloatArray, rows: IntArray, limits: Limits
) -> tuple[IntArray, bool]:
    """Those of `rows` to keep, sorted by (cell, bytes), and whether the cap cut any."""
    rows = rows[undominated(cell[rows], seconds[rows], num_bytes[rows])]
    if len(rows) <= limits.max_labels or np.bincount(cell[rows]).max() <= limits.max_labels:
        return rows, False
    priced = seconds[rows] + limits.price * num_bytes[rows]
    ranked = np.lexsort((priced, cell[rows]))
    counts = np.bincount(cell[rows])
    starts = (np.cumsum(counts) - counts)[cell[rows[ranked]]]
    kept = ranked[np.arange(len(ranked)) - starts < limits.max_labels]
    # The lightest of every cell stays too: it leads to something that fits.
    lightest = np.flatnonzero(np.diff(cell[rows], prepend=-1))
    return rows[np.union1d(kept, lightest)], True
