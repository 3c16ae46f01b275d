"""In which order variables are eliminated: greedily, by table size, then by new pairs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Above this size of table a second order is tried.
_SMALL_TABLE = 2**14


@dataclass(frozen=True, kw_only=True)
class Order:
    """Variables in the order in which they go, and the tables that this makes."""

    variables: tuple[int, ...]
    width: int
    largest_table: int
    total_entries: int


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], keep: Sequence[int] = ()
) -> Order:
    """A good order for variables of `sizes` choices under cost tables over `scopes`.

    Greedy: the variable whose table is smallest goes next (min-weight). Where that meets a large
    table, the order that joins the fewest new pairs (min-fill) is tried as well.
    """
    neighbours = _neighbours(len(sizes), scopes)
    order = _greedy(
        sizes,
        neighbours,
        keep,
        lambda variable, around: _entries(sizes, variable, around[variable]),
    )
    if order.largest_table <= _SMALL_TABLE:
        return order
    other = _greedy(sizes, neighbours, keep, _num_new_pairs)
    return min(order, other, key=lambda found: found.total_entries)


def _neighbours(num_variables: int, scopes: Iterable[tuple[int, ...]]) -> list[set[int]]:
    around: list[set[int]] = [set() for _ in range(num_variables)]
    for scope in scopes:
        for variable in scope:
            around[variable].update(scope)
    for variable, others in enumerate(around):
        others.discard(variable)
    return around


def _entries(sizes: Sequence[int], variable: int, others: Iterable[int]) -> int:
    """Size of the table over a variable and its neighbours."""
    entries = sizes[variable]
    for other in others:
        entries *= sizes[other]
    return entries


def _num_new_pairs(variable: int, around: Sequence[set[int]]) -> int:
    """Pairs of neighbours that are not neighbours yet (counted twice)."""
    others = around[variable]
    return sum(len(others) - 1 - len(others & around[other]) for other in others)


def _greedy(
    sizes: Sequence[int],
    neighbours: Sequence[set[int]],
    keep: Sequence[int],
    score: Callable[[int, Sequence[set[int]]], int],
) -> Order:
    """Always the variable of the least score; scores are brought up to date when they change."""
    around = [set(others) for others in neighbours]
    kept = set(keep)
    current = {v: score(v, around) for v in range(len(sizes)) if v not in kept}
    heap = [(value, variable) for variable, value in current.items()]
    heapq.heapify(heap)
    variables: list[int] = []
    width = largest = total = 0
    while heap:
        value, variable = heapq.heappop(heap)
        if current.get(variable) != value:
            continue
        del current[variable]
        others = around[variable]
        entries = _entries(sizes, variable, others)
        width, largest, total = max(width, len(others)), max(largest, entries), total + entries
        variables.append(variable)
        for other in others:
            mine = around[other]
            mine |= others
            mine -= {other, variable}
        for other in others & current.keys():
            renewed = score(other, around)
            if renewed != current[other]:
                current[other] = renewed
                heapq.heappush(heap, (renewed, other))
    return Order(
        variables=tuple(variables), width=width, largest_table=largest, total_entries=total
    )
