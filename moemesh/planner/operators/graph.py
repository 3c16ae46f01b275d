"""Operator graphs: strategies of operators, edges that cost a change of layout, the best choice.

A strategy has the layouts of an operator's inputs and output, its time (internal collectives
included), its state bytes and the bytes it saves for the backward pass. An edge holds the time of
the layout change for every pair of strategies of its two ends. Choosing one strategy per operator
so that the sum of node seconds and edge seconds is least is the intra-operator problem of Alpa
(L. Zheng et al., OSDI 2022, arXiv:2201.12023, section 4).

Operators belong to groups (a kind of layer, the embedding). A group has a number of equal copies,
by which its costs are multiplied: a model of 60 layers of two kinds is a graph of two layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.operators.resharding import MeshLayout

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to carry an operator out.

    `inputs` has one layout an input, in the order of the operator's inputs. `seconds` may be
    infinite (forbidden) but not NaN; bytes are those of one device.
    """

    name: str = ""
    inputs: tuple[MeshLayout, ...] = ()
    output: MeshLayout = ()
    seconds: float
    state_bytes: float = 0.0
    saved_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A node: its name, its strategies (at least one), the group that it belongs to, and the bytes
    of its output over all devices."""

    name: str
    strategies: tuple[Strategy, ...]
    group: str = ""
    output_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """Two operators (by position) and seconds[i, j] when they take strategies i and j.

    The source's output is input number `input_index` of the target.
    """

    source: int
    target: int
    seconds: FloatArray
    input_index: int = 0
    group: str = ""


class Cost(NamedTuple):
    """Seconds and bytes of a choice of strategies; saved bytes are those of one microbatch."""

    seconds: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0

    def plus(self, other: Cost, count: int = 1) -> Cost:
        """This cost and `count` times another."""
        return Cost(*(x + count * y for x, y in zip(self, other, strict=True)))

    def memory_bytes(self, in_flight: float = 1.0) -> float:
        """State and the saved bytes of the microbatches in flight."""
        return self.state_bytes + in_flight * self.saved_bytes


@dataclass(kw_only=True, eq=False)
class OperatorGraph:
    """Operators, edges, and the number of equal copies of each group (default: one)."""

    operators: list[Operator] = field(default_factory=list[Operator])
    edges: list[Edge] = field(default_factory=list[Edge])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def count(self, group: str) -> int:
        return self.counts.get(group, 1)

    def edge_seconds(self, edge: Edge, choices: Sequence[int]) -> float:
        return float(edge.seconds[choices[edge.source], choices[edge.target]])

    def group_costs(self, choices: Sequence[int]) -> dict[str, Cost]:
        """The cost of one copy of each group under one strategy per operator, by position."""
        costs: dict[str, Cost] = {}
        for operator, choice in zip(self.operators, choices, strict=True):
            strategy = operator.strategies[choice]
            cost = Cost(strategy.seconds, strategy.state_bytes, strategy.saved_bytes)
            costs[operator.group] = costs.get(operator.group, Cost()).plus(cost)
        for edge in self.edges:
            cost = Cost(self.edge_seconds(edge, choices))
            costs[edge.group] = costs.get(edge.group, Cost()).plus(cost)
        return costs

    def cost(self, choices: Sequence[int]) -> Cost:
        """The cost of all copies of all groups together."""
        total = Cost()
        for group, cost in self.group_costs(choices).items():
            total = total.plus(cost, self.count(group))
        return total


# Mixed-integer linear programs through scipy's HiGHS, with types.
#
# A program is built row by row and solved: `IntegerProgram.variable`, `row`, `solve`. Operator
# graphs have the marginal form of Alpa's integer program (section 4.2): s_i is the one-hot choice
# of operator i, e_ij >= 0 is continuous with sum over t of e_ij[s, t] = s_i[s] and sum over s of
# e_ij[s, t] = s_j[t]. The relaxation of this form is exact on trees. Strategies with equal rows of
# an edge (the same output layout) share the variables of that edge. Other programs check the
# dynamic programs of `planner.stages`.
#
# Memory has a price in seconds per byte: every price gives a point of the (bytes, seconds) frontier
# that no mixture of others improves on. A memory row over all operators would destroy the tight
# relaxation.


class IntegerProgram:
    """minimise sum of cost * variable, subject to rows low <= sum of coefficient * x <= high."""

    def __init__(self) -> None:
        #: (cost, upper bound, whether it is integral) of each variable.
        self._variables: list[tuple[float, float, bool]] = []
        #: Bounds of each row.
        self._rows: list[tuple[float, float]] = []
        #: (row, variable, coefficient)
        self._entries: list[tuple[int, int, float]] = []

    def variable(self, cost: float = 0.0, *, high: float = 1.0, integral: bool = True) -> int:
        """A new variable of 0 to `high`; its position. An infinite cost fixes it to 0."""
        self._variables.append((0.0, 0.0, integral) if cost == np.inf else (cost, high, integral))
        return len(self._variables) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf
    ) -> None:
        """A new row; terms are (variable, coefficient)."""
        self._entries += [(len(self._rows), variable, value) for variable, value in terms]
        self._rows.append((low, high))

    def solve(self, *, time_limit: float | None = None) -> tuple[FloatArray | None, int]:
        """Run HiGHS for at most `time_limit` seconds: the values of the variables, None when it
        found nothing feasible, and the number of nodes of its search tree."""
        # Late and untyped: scipy ships no type stubs, and importing it takes a third of a second.
        optimize: Any = import_module("scipy.optimize")
        sparse: Any = import_module("scipy.sparse")
        rows, columns, values = zip(*self._entries, strict=True)
        shape = (len(self._rows), len(self._variables))
        matrix = sparse.coo_array((values, (rows, columns)), shape=shape).tocsr()
        costs, highs, integrality = np.array(self._variables, dtype=float).T
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if time_limit is not None:
            options["time_limit"] = time_limit
        answer: Any = optimize.milp(
            costs,
            integrality=integrality,
            bounds=optimize.Bounds(np.zeros(len(highs)), highs),
            constraints=optimize.LinearConstraint(matrix, *np.array(self._rows, dtype=float).T),
            options=options,
        )
        values = None if answer.x is None else np.asarray(answer.x, dtype=float)
        return values, int(getattr(answer, "mip_node_count", 0) or 0)


class Assignment(NamedTuple):
    """One strategy per operator (by position), and their total cost."""

    choices: tuple[int, ...]
    cost: Cost


def solve(graph: OperatorGraph, *, byte_price: float = 0.0, in_flight: float = 1.0) -> Assignment:
    """The assignment of least seconds + byte_price * (state + in_flight * saved bytes).

    Some assignment must be finite; in a graph of a model, that of whole operators is.
    """
    costs = [
        np.array([
            strategy.seconds
            + byte_price * (strategy.state_bytes + in_flight * strategy.saved_bytes)
            for strategy in operator.strategies
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
        # The pairs with a class of strategies at one end sum to the choice of that class.
        for ends, classes, lines in (
            (nodes[edge.source], row_class, pairs),
            (nodes[edge.target], column_class, list(map(list, zip(*pairs, strict=True)))),
        ):
            for number, line in enumerate(lines):
                members = [
                    end for end, of_end in zip(ends, classes, strict=True) if of_end == number
                ]
                terms = [*((pair, 1.0) for pair in line), *((end, -1.0) for end in members)]
                program.row(terms, low=0.0, high=0.0)
    chosen, _ = program.solve()
    assert chosen is not None, "no choice of strategies is feasible"
    choices = tuple(int(np.argmax(chosen[variables])) for variables in nodes)
    return Assignment(choices, graph.cost(choices))


def least_seconds(graph: OperatorGraph) -> dict[str, float]:
    """Lower bound of the seconds of one copy of each group under any assignment: the least if the
    operators of all other groups cost nothing."""
    least: dict[str, float] = {}
    for group in dict.fromkeys(operator.group for operator in graph.operators):
        edges = [edge for edge in graph.edges if edge.group == group]
        ends = {end for edge in edges for end in (edge.source, edge.target)}
        place: dict[int, int] = {}
        operators: list[Operator] = []
        for number, operator in enumerate(graph.operators):
            if operator.group == group or number in ends:
                place[number] = len(operators)
                if operator.group != group:
                    # An operator of another group at an edge of this one costs nothing here.
                    free = tuple(replace(one, seconds=0.0) for one in operator.strategies)
                    operator = replace(operator, strategies=free)
                operators.append(operator)
        moved = [
            replace(edge, source=place[edge.source], target=place[edge.target]) for edge in edges
        ]
        least[group] = solve(OperatorGraph(operators=operators, edges=moved)).cost.seconds
    return least


def _classes(table: np.ndarray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One row of each class of equal rows, and the class of every row."""
    _, first, of_row = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, of_row.reshape(-1)
