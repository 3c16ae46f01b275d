"""Exact variable elimination: the best strategies of an operator graph, without search.

Non-serial dynamic programming (U. Bertelè and F. Brioschi, 1972). Taking a variable out replaces
all cost tables that mention it by one table over its neighbours, which holds its best choice for
every combination of theirs. The work is the sum of the sizes of those tables, which a good order
keeps small: blocks of transformers have induced width 2 or 3.

Identical blocks in a row are solved once. What a block costs between its ports is a matrix, putting
blocks in a row is a product of matrices in the (min, +) algebra, and n equal blocks take log2 n of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.operators.elimination_order import elimination_order
from moemesh.planner.operators.graph import (
    Assignment,
    Block,
    FloatArray,
    OperatorError,
    OperatorGraph,
    check_ports,
)

IntArray = NDArray[np.intp]
#: Largest table that is built: 256 MiB of float64.
MAX_TABLE_ENTRIES = 2**25


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """A cost table: axis number i of `table` is the choice of variable scope[i]."""

    scope: tuple[int, ...]
    table: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Elimination:
    """What is left: `table` over `keep`, and how to undo the rest.

    `steps` are (variable, its neighbours, best choice for each combination of theirs).
    """

    keep: tuple[int, ...]
    table: FloatArray
    steps: tuple[tuple[int, tuple[int, ...], IntArray], ...]

    def choices(self, kept: Sequence[int] = ()) -> dict[int, int]:
        """The best choice of every variable, given the choices of the kept ones."""
        chosen = dict(zip(self.keep, kept, strict=True))
        for variable, neighbours, best in reversed(self.steps):
            chosen[variable] = int(best[tuple(chosen[other] for other in neighbours)])
        return chosen


def graph_factors(
    graph: OperatorGraph, state_price: float = 0.0, saved_price: float = 0.0
) -> list[Factor]:
    """Cost tables of a graph, with prices in seconds per byte added to its nodes."""
    nodes = graph.priced(state_price, saved_price)
    factors = [Factor(scope=(index,), table=table) for index, table in enumerate(nodes)]
    factors += [
        Factor(scope=(edge.source, edge.target), table=edge.seconds) for edge in graph.edges
    ]
    return factors


def eliminate(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    keep: Sequence[int] = (),
    *,
    max_table_entries: int = MAX_TABLE_ENTRIES,
) -> Elimination:
    """Minimise the sum of `factors` over every variable that is not kept.

    Raises OperatorError when the tables would not fit (dense graphs with many strategies).
    """
    order = elimination_order(sizes, (factor.scope for factor in factors), keep)
    if order.largest_table > max_table_entries:
        raise OperatorError(
            f"exact elimination of {len(sizes)} operators has induced width {order.width} and "
            f"needs a table of {order.largest_table} entries; at most {max_table_entries} are "
            "built. Use fewer strategies, or operator_program.solve_program"
        )
    holding: list[dict[int, Factor]] = [{} for _ in sizes]
    number = 0

    def hold(factor: Factor) -> None:
        nonlocal number
        for variable in factor.scope:
            holding[variable][number] = factor
        number += 1

    constant = 0.0
    for factor in factors:
        if factor.scope:
            hold(factor)
        else:
            constant += float(factor.table)
    steps: list[tuple[int, tuple[int, ...], IntArray]] = []
    for variable in order.variables:
        mine = holding[variable]
        rest = tuple({other: None for f in mine.values() for other in f.scope if other != variable})
        total = add_factors(mine.values(), (*rest, variable), sizes)
        best: IntArray = total.argmin(axis=-1)
        least = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        steps.append((variable, rest, best))
        for key, factor in tuple(mine.items()):
            for other in factor.scope:
                del holding[other][key]
        if rest:
            hold(Factor(scope=rest, table=least))
        else:
            constant += float(least)
    left = {key: factor for variable in keep for key, factor in holding[variable].items()}
    table = add_factors(left.values(), tuple(keep), sizes) + constant
    return Elimination(keep=tuple(keep), table=table, steps=tuple(steps))


def add_factors(
    factors: Iterable[Factor], scope: tuple[int, ...], sizes: Sequence[int]
) -> FloatArray:
    """The sum of tables, spread over `scope` (which holds all of theirs)."""
    axis_of = {variable: axis for axis, variable in enumerate(scope)}
    total = np.zeros(tuple(sizes[variable] for variable in scope))
    for factor in factors:
        axes = [axis_of[variable] for variable in factor.scope]
        table = factor.table
        if len(axes) > 1 and axes != sorted(axes):
            table = table.transpose(np.argsort(axes))
        shape = [1] * len(scope)
        for axis in axes:
            shape[axis] = total.shape[axis]
        total += table.reshape(shape)
    return total


def solve(graph: OperatorGraph, *, max_table_entries: int = MAX_TABLE_ENTRIES) -> Assignment:
    """The assignment of least seconds; of equal ones, any.

    Raises OperatorError when every assignment takes infinitely long, or tables would not fit.
    """
    found = eliminate(
        graph.num_strategies, graph_factors(graph), max_table_entries=max_table_entries
    )
    if not np.isfinite(found.table):
        raise OperatorError(
            f"no choice of strategies of the {graph.num_operators} operators avoids an infinite "
            "cost"
        )
    chosen = found.choices()
    return graph.assignment([chosen[index] for index in range(graph.num_operators)])


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer:
    """Cost of a block between its ports, without the entry's own: table[entry, exit]."""

    block: Block
    elimination: Elimination

    @property
    def table(self) -> FloatArray:
        return self.elimination.table

    def choices(self, entry: int, exit: int) -> tuple[int, ...]:
        """The best choice of every operator of the block, in its own order."""
        chosen = self.elimination.choices((entry, exit))
        return tuple(chosen[index] for index in range(self.block.graph.num_operators))


def transfer(block: Block, state_price: float = 0.0, saved_price: float = 0.0) -> Transfer:
    """Eliminate everything inside a block."""
    factors = [
        factor
        for factor in graph_factors(block.graph, state_price, saved_price)
        if factor.scope != (block.entry,)
    ]
    found = eliminate(block.graph.num_strategies, factors, (block.entry, block.exit))
    return Transfer(block=block, elimination=found)


@dataclass(frozen=True, kw_only=True)
class ChainSolution:
    """The best strategies of blocks in a row.

    `ports` are the choices at the borders (one more than blocks), `choices[i]` those of block i in
    the order of its own operators, `total` is `seconds` plus the priced bytes.
    """

    assignment: Assignment
    ports: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    total: float


def solve_chain(
    blocks: Sequence[Block], state_price: float = 0.0, saved_price: float = 0.0
) -> ChainSolution:
    """Least seconds + priced bytes of blocks in a row; the same block object is solved once.

    The assignment is in the order of `operators.join(blocks)`. Raises OperatorError as `solve`.
    """
    if not blocks:
        raise OperatorError("a row of blocks needs at least 1 block, not 0")
    check_row(blocks)
    transfers: dict[int, Transfer] = {}
    runs: list[_Row] = []
    for key, run in groupby(blocks, key=id):
        equal = list(run)
        if key not in transfers:
            transfers[key] = transfer(equal[0], state_price, saved_price)
        runs.append(_power(_Row(table=transfers[key].table, length=1), len(equal)))
    row = _product_of(runs)
    first = blocks[0]
    entry_costs = first.graph.priced(state_price, saved_price)[first.entry]
    totals = entry_costs[:, None] + row.table
    entry, exit = divmod(int(totals.argmin()), totals.shape[1])
    if not np.isfinite(totals[entry, exit]):
        raise OperatorError(f"no choice of strategies of the {len(blocks)} blocks is finite")
    ports = row.ports(entry, exit)
    choices = tuple(
        transfers[id(block)].choices(ports[index], ports[index + 1])
        for index, block in enumerate(blocks)
    )
    return ChainSolution(
        assignment=chain_assignment(blocks, choices),
        ports=ports,
        choices=choices,
        total=float(totals[entry, exit]),
    )


def check_row(blocks: Sequence[Block]) -> None:
    """Raise OperatorError unless every block can follow the one before."""
    seen: set[tuple[int, int]] = set()
    for index, (before, block) in enumerate(pairwise(blocks), 1):
        if (id(before), id(block)) not in seen:
            seen.add((id(before), id(block)))
            ours = before.graph.operators[before.exit]
            check_ports(ours, block.graph.operators[block.entry], index)


def chain_assignment(blocks: Sequence[Block], choices: Sequence[Sequence[int]]) -> Assignment:
    """Costs of blocks in a row, and their choices in the order of `operators.join`."""
    priced: dict[tuple[int, tuple[int, ...]], Assignment] = {}
    flat: list[int] = []
    sums = np.zeros(3)
    for index, (block, chosen) in enumerate(zip(blocks, choices, strict=True)):
        key = (id(block), tuple(chosen))
        if key not in priced:
            priced[key] = block.graph.assignment(chosen)
        part = priced[key]
        sums += (part.seconds, part.state_bytes, part.saved_bytes)
        if index:
            # The entry is the exit of the block before, which has paid for it.
            entry = block.graph.operators[block.entry].strategies[chosen[block.entry]]
            sums -= (entry.seconds, entry.state_bytes, entry.saved_bytes)
        flat += [choice for place, choice in enumerate(chosen) if not index or place != block.entry]
    return Assignment(
        choices=tuple(flat),
        seconds=float(sums[0]),
        state_bytes=float(sums[1]),
        saved_bytes=float(sums[2]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """Blocks in a row: the cost between its ends, and the best port in its middle."""

    table: FloatArray
    length: int
    left: _Row | None = None
    right: _Row | None = None
    middle: IntArray | None = None

    def ports(self, entry: int, exit: int) -> tuple[int, ...]:
        if self.left is None or self.right is None or self.middle is None:
            return (entry, exit)
        middle = int(self.middle[entry, exit])
        return (*self.left.ports(entry, middle), *self.right.ports(middle, exit)[1:])


def _product(left: _Row, right: _Row) -> _Row:
    """Two rows in a row: the (min, +) product of their matrices."""
    middle = np.empty((left.table.shape[0], right.table.shape[1]), dtype=np.intp)
    table = np.empty(middle.shape)
    for entry, costs in enumerate(left.table):
        total = costs[:, None] + right.table
        middle[entry] = total.argmin(axis=0)
        table[entry] = total.min(axis=0)
    return _Row(
        table=table, length=left.length + right.length, left=left, right=right, middle=middle
    )


def _power(row: _Row, exponent: int) -> _Row:
    """`exponent` equal rows in a row, by repeated squaring."""
    result: _Row | None = None
    while exponent:
        if exponent & 1:
            result = row if result is None else _product(result, row)
        exponent >>= 1
        if exponent:
            row = _product(row, row)
    assert result is not None
    return result


def _product_of(rows: Sequence[_Row]) -> _Row:
    """All rows in a row, halved so that undoing it never nests deeply."""
    if len(rows) == 1:
        return rows[0]
    half = len(rows) // 2
    return _product(_product_of(rows[:half]), _product_of(rows[half:]))
