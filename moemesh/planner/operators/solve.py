"""Integer programs through HiGHS, and the best strategies of an operator graph by one.

Marginal form of Alpa's integer program (arXiv:2201.12023, section 4.2): s_i is the one-hot choice
of operator i, e_ij >= 0 is continuous with sum over t of e_ij[s, t] = s_i[s] and sum over s of
e_ij[s, t] = s_j[t]. Its relaxation is exact on trees. Strategies whose rows of an edge are equal
(they leave the same layout) share the variables of that edge.

Memory enters by a price in seconds per byte: every price gives a point of the (bytes, seconds)
frontier that no mixture of others improves on, and the program keeps the tight relaxation that a
row over all operators would destroy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.operators.graph import Cost, OperatorError, OperatorGraph

# Mixed-integer linear programs through scipy's HiGHS, with a typed door.
#
# Built row by row: `Program.variable`, `Program.row`, `Program.solve`. It solves the operator
# graphs and checks the dynamic programs of the planner.


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramAnswer:
    """The result of HiGHS: `values` is None when it found nothing feasible.

    `optimal` says that the values reach the bound of the program within HiGHS's tolerances
    (relative gap 0 is asked for).
    """

    values: NDArray[np.float64] | None
    optimal: bool
    infeasible: bool
    num_nodes: int


@dataclass(kw_only=True)
class IntegerProgram:
    """minimise sum of cost * variable, subject to rows low <= sum of coefficient * x <= high."""

    costs: list[float] = field(default_factory=list[float])
    highs: list[float] = field(default_factory=list[float])
    integral: list[bool] = field(default_factory=list[bool])
    _entries: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    _row_lows: list[float] = field(default_factory=list[float])
    _row_highs: list[float] = field(default_factory=list[float])

    def variable(self, cost: float = 0.0, *, high: float = 1.0, integral: bool = True) -> int:
        """A new variable of 0 to `high`; its position. An infinite cost fixes it to 0."""
        forbidden = cost == np.inf
        self.costs.append(0.0 if forbidden else cost)
        self.highs.append(0.0 if forbidden else high)
        self.integral.append(integral)
        return len(self.costs) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf
    ) -> None:
        """A new row; terms are (variable, coefficient)."""
        number = len(self._row_lows)
        self._entries += [(number, variable, value) for variable, value in terms]
        self._row_lows.append(low)
        self._row_highs.append(high)

    def solve(self, *, time_limit: float | None = None) -> ProgramAnswer:
        """Run HiGHS, at most `time_limit` seconds."""
        # Late and untyped: scipy ships no type stubs, and importing it takes a third of a second.
        optimize: Any = import_module("scipy.optimize")
        sparse: Any = import_module("scipy.sparse")
        rows, columns, values = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        shape = (len(self._row_lows), len(self.costs))
        matrix = sparse.coo_array((values, (rows, columns)), shape=shape).tocsr()
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if time_limit is not None:
            options["time_limit"] = time_limit
        answer: Any = optimize.milp(
            np.array(self.costs),
            integrality=np.array(self.integral, dtype=int),
            bounds=optimize.Bounds(np.zeros(len(self.highs)), np.array(self.highs)),
            constraints=optimize.LinearConstraint(
                matrix, np.array(self._row_lows), np.array(self._row_highs)
            ),
            options=options,
        )
        return ProgramAnswer(
            values=None if answer.x is None else np.asarray(answer.x, dtype=float),
            optimal=int(answer.status) == 0,
            infeasible=int(answer.status) == 2,
            num_nodes=int(getattr(answer, "mip_node_count", 0) or 0),
        )


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
    costs = [
        np.array([
            one.seconds + byte_price * (one.state_bytes + in_flight * one.saved_bytes)
            for one in operator.strategies
        ])
        for operator in graph.operators
    ]  # fmt: skip
    # HiGHS stops at an absolute gap of 1e-6: costs are scaled to 1000 to make that 1e-9 of them.
    tables = [*costs, *(edge.seconds for edge in graph.edges)]
    values = np.abs(np.concatenate([table.ravel() for table in tables]))
    largest = float(values[np.isfinite(values)].max(initial=0.0))
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
