"""The best strategies of an operator graph, by HiGHS.

Marginal form of Alpa's integer program (arXiv:2201.12023, section 4.2): s_i is the one-hot choice
of operator i, e_ij >= 0 is continuous with sum over t of e_ij[s, t] = s_i[s] and sum over s of
e_ij[s, t] = s_j[t]. Its relaxation is exact on trees. Strategies whose rows of an edge are equal
(they leave the same layout) share the variables of that edge.

Memory enters by a price in seconds per byte: every price gives a point of the (bytes, seconds)
frontier that no mixture of others improves on, and the program keeps the tight relaxation that a
row over all operators would destroy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.operators.graph import Cost, OperatorError, OperatorGraph
from moemesh.planner.operators.integer_program import IntegerProgram

IntArray = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One strategy per operator (by position), and what all of them cost together.

    `optimal` says that HiGHS proved it.
    """

    choices: tuple[int, ...]
    cost: Cost
    optimal: bool


def solve(
    graph: OperatorGraph,
    *,
    byte_price: float = 0.0,
    in_flight: float = 1.0,
    time_limit: float | None = None,
) -> Assignment:
    """Least seconds + byte_price * (state + in_flight * saved bytes).

    Raises OperatorError when no choice is finite, or none was found within `time_limit` seconds.
    """
    if not graph.operators:
        return Assignment(choices=(), cost=Cost(), optimal=True)
    costs = graph.node_costs(byte_price, in_flight)
    # HiGHS stops at an absolute gap of 1e-6: costs are scaled to 1000 to make that 1e-9 of them.
    values = np.abs(
        np.concatenate(
            [table.ravel() for table in [*costs, *(edge.seconds for edge in graph.edges)]]
        )
    )
    finite = values[np.isfinite(values)]
    largest = float(finite.max(initial=0.0))
    scale = 1e3 / largest if largest > 0 else 1.0
    program = IntegerProgram()
    nodes: list[list[int]] = []
    for operator, row in zip(graph.operators, costs, strict=True):
        weight = scale * graph.count(operator.group)
        nodes.append([program.variable(float(cost) * weight) for cost in row])
        program.row([(variable, 1.0) for variable in nodes[-1]], low=1.0, high=1.0)
    for edge in graph.edges:
        rows, row_class = _classes(edge.seconds)
        columns, column_class = _classes(edge.seconds.T)
        seconds = edge.seconds[np.ix_(rows, columns)] * (scale * graph.count(edge.group))
        pairs = [[program.variable(float(cost), integral=False) for cost in row] for row in seconds]
        for ends, classes, lines in (
            (nodes[edge.source], row_class, pairs),
            (nodes[edge.target], column_class, list(map(list, zip(*pairs, strict=True)))),
        ):
            for number, line in enumerate(lines):
                members = [end for end, place in zip(ends, classes, strict=True) if place == number]
                terms = [*((pair, 1.0) for pair in line), *((end, -1.0) for end in members)]
                program.row(terms, low=0.0, high=0.0)
    answer = program.solve(time_limit=time_limit)
    if answer.values is None:
        why = "no choice of strategies is feasible" if answer.infeasible else "HiGHS found nothing"
        raise OperatorError(f"{why} for {len(graph.operators)} operators")
    choices = tuple(int(np.argmax(answer.values[variables])) for variables in nodes)
    return Assignment(choices=choices, cost=graph.cost(choices), optimal=answer.optimal)


def _classes(table: np.ndarray) -> tuple[IntArray, IntArray]:
    """One row of each class of equal rows, and the class of every row."""
    _, first, of_row = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, of_row.reshape(-1)
