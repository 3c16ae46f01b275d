"""Operator graphs under a memory cap: prices, bounds, Pareto sets.

A cap on bytes couples all operators. Pricing it, seconds + price * bytes, gives back a problem that
elimination solves; the best price gives a lower bound

    L(price) - price * budget  <=  seconds of every assignment within the budget

and an assignment near it. What lies between the two is searched with labels (`labels`), which the
bound keeps few. State and saved bytes stay apart: only the second is multiplied by the microbatches
in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moemesh.planner.operators.elimination import (
    chain_assignment,
    check_row,
    eliminate,
    graph_factors,
    solve_chain,
    transfer,
)
from moemesh.planner.operators.graph import (
    Assignment,
    Block,
    Edge,
    FloatArray,
    Operator,
    OperatorError,
    OperatorGraph,
)
from moemesh.planner.operators.labels import LabelTable, Limits, eliminate_labels, graph_tables

#: Relative differences below this are rounding.
_ROUNDING = 1e-12
#: Labels a cell, tried one after the other: a good incumbent makes the next search small.
_LABEL_CAPS = (16, 128, 1024)


class MemoryCapError(OperatorError):
    """Nothing fits; `smallest_bytes` is the smallest cap that something fits in."""

    def __init__(self, message: str, smallest_bytes: float) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@dataclass(frozen=True, kw_only=True)
class MemorySolution:
    """The fastest assignment found within a budget, and what is known about better ones.

    No assignment within the budget takes less than `lower_bound` seconds. `price` is the seconds
    that one more byte would save, by the dual bound. `gap` is 0 when the answer is proven optimal.
    """

    assignment: Assignment
    num_bytes: float
    lower_bound: float
    price: float

    @property
    def gap(self) -> float:
        """(seconds - lower bound) / seconds."""
        seconds = self.assignment.seconds
        return (seconds - self.lower_bound) / seconds if seconds > self.lower_bound else 0.0


@dataclass(frozen=True, kw_only=True)
class _Dual:
    """The best price of a budget: its bound and the fastest assignment that it met."""

    lower_bound: float
    price: float
    incumbent: Assignment


def solve_under_memory(
    graph: OperatorGraph, budget_bytes: float, *, in_flight: float = 1.0, tolerance: float = 0.0
) -> MemorySolution:
    """Least seconds with state + in_flight * saved bytes <= budget, over a whole graph.

    The search stops at a gap of `tolerance`, or when its sets of labels outgrow their caps; what
    is then not proven shows as `gap`. Raises MemoryCapError with the smallest budget that works,
    OperatorError as `elimination.solve`.
    """

    def priced(price: float) -> Assignment:
        factors = graph_factors(graph, price, in_flight * price)
        chosen = eliminate(graph.num_strategies, factors).choices()
        return graph.assignment([chosen[index] for index in range(graph.num_operators)])

    light = bytes_graph(graph, in_flight)
    chosen = eliminate(light.num_strategies, graph_factors(light)).choices()
    lightest = graph.assignment([chosen[index] for index in range(graph.num_operators)])
    dual = _dual(priced, lightest, budget_bytes, in_flight)
    tables = graph_tables(graph, in_flight)

    def search(limits: Limits) -> tuple[Assignment | None, bool]:
        table = eliminate_labels(graph.num_strategies, tables, limits)
        if not len(table.cell):
            return None, table.thinned
        values, _ = table.taken(int(table.seconds.argmin()))
        choices = [values[index] for index in range(graph.num_operators)]
        return graph.assignment(choices), table.thinned

    return _close(dual, search, budget_bytes, in_flight, tolerance)


def solve_chain_under_memory(
    blocks: Sequence[Block],
    budget_bytes: float,
    *,
    in_flight: float = 1.0,
    tolerance: float = 1e-4,
) -> MemorySolution:
    """`solve_under_memory` for blocks in a row; the same block object is worked through once.

    The assignment is in the order of `operators.join(blocks)`.
    """
    check_row(blocks)
    light = {id(block): bytes_block(block, in_flight) for block in blocks}
    light_row = solve_chain([light[id(block)] for block in blocks])
    lightest = chain_assignment(blocks, light_row.choices)

    def priced(price: float) -> Assignment:
        return solve_chain(blocks, price, in_flight * price).assignment

    dual = _dual(priced, lightest, budget_bytes, in_flight)

    def search(limits: Limits) -> tuple[Assignment | None, bool]:
        return _search_row(blocks, in_flight, limits)

    return _close(dual, search, budget_bytes, in_flight, tolerance)


def smallest_bytes(graph: OperatorGraph, *, in_flight: float = 1.0) -> float:
    """The smallest budget for which `graph` has an assignment."""
    light = bytes_graph(graph, in_flight)
    found = eliminate(light.num_strategies, graph_factors(light))
    return float(found.table)


def bytes_graph(graph: OperatorGraph, in_flight: float) -> OperatorGraph:
    """The same choices with bytes in place of seconds; what is forbidden stays so."""
    operators = tuple(
        Operator(
            name=operator.name,
            strategies=tuple(
                replace(
                    strategy,
                    seconds=strategy.state_bytes + in_flight * strategy.saved_bytes
                    if np.isfinite(strategy.seconds)
                    else np.inf,
                )
                for strategy in operator.strategies
            ),
        )
        for operator in graph.operators
    )
    edges = tuple(
        Edge(
            source=edge.source,
            target=edge.target,
            seconds=np.where(np.isfinite(edge.seconds), 0.0, np.inf),
        )
        for edge in graph.edges
    )
    return OperatorGraph(operators=operators, edges=edges)


def bytes_block(block: Block, in_flight: float) -> Block:
    """`bytes_graph` of a block."""
    return replace(block, graph=bytes_graph(block.graph, in_flight))


def pin(graph: OperatorGraph, choices: dict[int, int]) -> OperatorGraph:
    """The graph in which operator i must take strategy choices[i]; numbering is unchanged."""
    operators = list(graph.operators)
    for index, choice in choices.items():
        operators[index] = Operator(
            name=operators[index].name,
            strategies=tuple(
                strategy if place == choice else replace(strategy, seconds=np.inf)
                for place, strategy in enumerate(operators[index].strategies)
            ),
        )
    return OperatorGraph(operators=tuple(operators), edges=graph.edges)


def pareto_points(
    graph: OperatorGraph,
    *,
    in_flights: Sequence[float] = (1.0,),
    max_points: int = 20,
) -> tuple[Assignment, ...]:
    """Assignments that trade seconds for state and saved bytes, fastest first.

    For each number of microbatches in flight, prices are taken from the slopes between points
    found so far, widest first, so all are optimal at some price. At most `max_points` stay, none
    beaten by another in all three figures. Raises OperatorError when nothing is finite.
    """
    if max_points < 2 or not in_flights:
        raise OperatorError(
            f"max_points is {max_points} and {len(in_flights)} in-flight counts are given; at "
            "least 2 and 1 are needed"
        )
    found: dict[tuple[int, ...], Assignment] = {}
    for in_flight in in_flights:
        for point in _hull(graph, in_flight, max_points):
            found[point.choices] = point
    points = sorted(found.values(), key=lambda p: (p.seconds, p.state_bytes, p.saved_bytes))
    kept: list[Assignment] = []
    for point in points:
        if not any(
            other.state_bytes <= point.state_bytes and other.saved_bytes <= point.saved_bytes
            for other in kept
        ):
            kept.append(point)
    if len(kept) > max_points:
        places = np.unique(np.linspace(0, len(kept) - 1, max_points).round().astype(int))
        kept = [kept[place] for place in places]
    return tuple(kept)


def _hull(graph: OperatorGraph, in_flight: float, max_points: int) -> list[Assignment]:
    """The lower convex hull of (bytes, seconds), widest gaps first."""

    def priced(state: float, saved: float, of: OperatorGraph = graph) -> Assignment:
        found = eliminate(of.num_strategies, graph_factors(of, state, saved))
        if not np.isfinite(found.table):
            raise OperatorError("no choice of strategies is finite")
        chosen = found.choices()
        return graph.assignment([chosen[index] for index in range(graph.num_operators)])

    fastest = priced(0.0, 0.0)
    lightest = priced(0.0, 0.0, bytes_graph(graph, in_flight))
    points = [fastest, lightest]
    gaps = [(fastest, lightest)]
    while gaps and len(points) < max_points:
        gaps.sort(key=lambda gap: gap[1].seconds - gap[0].seconds)
        left, right = gaps.pop()
        fewer = left.memory_bytes(in_flight) - right.memory_bytes(in_flight)
        if fewer <= 0:
            continue
        price = (right.seconds - left.seconds) / fewer
        middle = priced(price, in_flight * price)
        line = left.seconds + price * left.memory_bytes(in_flight)
        if middle.seconds + price * middle.memory_bytes(in_flight) < line * (1 - _ROUNDING):
            points.append(middle)
            gaps += [(left, middle), (middle, right)]
    return points


def _dual(
    priced: Callable[[float], Assignment],
    lightest: Assignment,
    budget_bytes: float,
    in_flight: float,
) -> _Dual:
    """Maximise L(price) - price * budget along chords between a point over and one within it."""
    if np.isnan(budget_bytes):
        raise OperatorError("the memory budget is NaN")
    over = priced(0.0)
    if not np.isfinite(over.seconds):
        raise OperatorError("no choice of strategies avoids an infinite cost")
    if over.memory_bytes(in_flight) <= budget_bytes:
        return _Dual(lower_bound=over.seconds, price=0.0, incumbent=over)
    smallest = lightest.memory_bytes(in_flight)
    if smallest > budget_bytes:
        raise MemoryCapError(
            f"nothing fits in {budget_bytes:.0f} bytes with {in_flight:g} microbatches in flight; "
            f"the smallest cap that works is {smallest:.0f} bytes",
            smallest,
        )
    within = incumbent = lightest
    bound, best_price = over.seconds, 0.0
    while True:
        fewer = over.memory_bytes(in_flight) - within.memory_bytes(in_flight)
        price = max(0.0, (within.seconds - over.seconds) / fewer)
        point = priced(price)
        value = point.seconds + price * point.memory_bytes(in_flight)
        if value - price * budget_bytes > bound:
            bound, best_price = value - price * budget_bytes, price
        fits = point.memory_bytes(in_flight) <= budget_bytes
        if fits and point.seconds < incumbent.seconds:
            incumbent = point
        line = over.seconds + price * over.memory_bytes(in_flight)
        if value >= line - _ROUNDING * abs(line) or point in (over, within):
            return _Dual(lower_bound=bound, price=best_price, incumbent=incumbent)
        if fits:
            within = point
        else:
            over = point


def _close(
    dual: _Dual,
    search: Callable[[Limits], tuple[Assignment | None, bool]],
    budget_bytes: float,
    in_flight: float,
    tolerance: float,
) -> MemorySolution:
    """Search between bound and incumbent, with more labels each time, until they meet."""
    best, bound = dual.incumbent, dual.lower_bound
    for max_labels in _LABEL_CAPS:
        rounding = _ROUNDING * abs(best.seconds)
        slack = best.seconds - bound
        if slack <= rounding:
            bound = best.seconds
        if slack <= max(rounding, tolerance * abs(best.seconds)):
            break
        limits = Limits(
            budget_bytes=budget_bytes * (1 + _ROUNDING),
            price=dual.price,
            slack=slack + 10 * rounding,
            max_labels=max_labels,
        )
        found, thinned = search(limits)
        if found is not None and found.seconds < best.seconds:
            best = found
        if not thinned:
            bound = best.seconds
    return MemorySolution(
        assignment=best,
        num_bytes=best.memory_bytes(in_flight),
        lower_bound=float(min(bound, best.seconds)),
        price=dual.price,
    )


def _search_row(
    blocks: Sequence[Block], in_flight: float, limits: Limits
) -> tuple[Assignment | None, bool]:
    """The fastest labels of blocks in a row: a path graph over their ports."""
    first = blocks[0]
    head = OperatorGraph(operators=(first.graph.operators[first.entry],))
    tables = graph_tables(head, in_flight)
    inner = _block_labels(blocks, in_flight, limits)
    rows = [inner[id(block)] for block in blocks]
    tables += [replace_scope(row, (index, index + 1)) for index, row in enumerate(rows)]
    place_of = {id(table): index for index, table in enumerate(tables[1:])}
    sizes = [len(head.operators[0].strategies)]
    sizes += [block.graph.num_strategies[block.exit] for block in blocks]
    table = eliminate_labels(sizes, tables, limits)
    if not len(table.cell):
        return None, table.thinned
    ports, used = table.taken(int(table.seconds.argmin()))
    choices: list[tuple[int, ...]] = [()] * len(blocks)
    for part, row in used:
        index = place_of.get(id(part))
        if index is None:
            continue
        block = blocks[index]
        values, _ = rows[index].taken(row)
        values |= {block.entry: ports[index], block.exit: ports[index + 1]}
        choices[index] = tuple(values[place] for place in range(block.graph.num_operators))
    return chain_assignment(blocks, choices), table.thinned


def _block_labels(
    blocks: Sequence[Block], in_flight: float, limits: Limits
) -> dict[int, LabelTable]:
    """Labels of each block over (entry, exit), without the entry's own cost, by id."""
    state, saved = limits.price, in_flight * limits.price
    matrices = {id(block): transfer(block, state, saved).table for block in blocks}
    first = blocks[0]
    before = [first.graph.priced(state, saved)[first.entry]]
    for block in blocks[:-1]:
        before.append((before[-1][:, None] + matrices[id(block)]).min(axis=0))
    after = np.zeros(blocks[-1].graph.num_strategies[blocks[-1].exit])
    # For each block object, the cheapest surroundings that any of its places has.
    around: dict[int, FloatArray] = {}
    for block, ahead in zip(reversed(blocks), reversed(before), strict=True):
        here = ahead[:, None] + after[None, :]
        around[id(block)] = np.minimum(around.get(id(block), np.inf), here)
        after = (matrices[id(block)] + after[None, :]).min(axis=1)
    found: dict[int, LabelTable] = {}
    for block in blocks:
        if id(block) not in found:
            tables = graph_tables(block.graph, in_flight, without_node=block.entry)
            ports = (block.entry, block.exit)
            sizes = block.graph.num_strategies
            found[id(block)] = eliminate_labels(sizes, tables, limits, ports, around[id(block)])
    return found


def replace_scope(table: LabelTable, scope: tuple[int, ...]) -> LabelTable:
    """The labels of a solved block as an input table over other variables."""
    return LabelTable(
        scope=scope,
        cell=table.cell,
        seconds=table.seconds,
        num_bytes=table.num_bytes,
        thinned=table.thinned,
    )
