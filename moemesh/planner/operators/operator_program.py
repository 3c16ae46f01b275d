"""The operator graph as an integer program: an independent check of elimination.

Marginal form (default): s_i is the one-hot choice of node i, e_ij >= 0 is continuous with
sum over t of e_ij[s, t] = s_i[s] and sum over s of e_ij[s, t] = s_j[t]. Its relaxation is exact on
trees. Alpa's form (arXiv:2201.12023, section 4.2): e_ij is binary, sums to 1 and is bounded by the
choices of its ends. Both have the same optimum; the second is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moemesh.planner.operators.graph import Assignment, Edge, OperatorError, OperatorGraph
from moemesh.planner.operators.integer_program import Program, ProgramAnswer

ProgramForm = Literal["marginal", "alpa"]


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The best assignment that HiGHS found, its own lower bound, and whether they met."""

    assignment: Assignment
    lower_bound: float
    optimal: bool


def solve_program(
    graph: OperatorGraph,
    *,
    form: ProgramForm = "marginal",
    budget_bytes: float | None = None,
    in_flight: float = 1.0,
    time_limit: float | None = None,
) -> ProgramResult:
    """Least seconds, subject to state + in_flight * saved bytes <= budget when one is given.

    Raises OperatorError when nothing is feasible, or nothing was found within `time_limit`.
    """
    if not graph.operators:
        empty = Assignment(choices=(), seconds=0.0, state_bytes=0.0, saved_bytes=0.0)
        return ProgramResult(assignment=empty, lower_bound=0.0, optimal=True)
    program = Program()
    # HiGHS stops at an absolute gap of 1e-6: costs are scaled to 1000 to make that 1e-9 of them.
    scale = _scale(graph)
    nodes = [[program.variable(cost * scale) for cost in costs] for costs in graph.node_seconds]
    for variables in nodes:
        program.row([(variable, 1.0) for variable in variables], low=1.0, high=1.0)
    for edge in graph.edges:
        _add_edge(program, nodes, edge, scale, form)
    if budget_bytes is not None:
        _add_budget(program, nodes, graph, budget_bytes, in_flight)
    answer = program.solve(time_limit=time_limit)
    return _result(graph, nodes, answer, scale)


def _scale(graph: OperatorGraph) -> float:
    tables = [*graph.node_seconds, *(edge.seconds.ravel() for edge in graph.edges)]
    values = np.abs(np.concatenate(tables))
    finite = values[np.isfinite(values)]
    largest = float(finite.max()) if len(finite) else 0.0
    return 1e3 / largest if largest > 0 else 1.0


def _add_edge(
    program: Program, nodes: list[list[int]], edge: Edge, scale: float, form: ProgramForm
) -> None:
    pairs = [
        [program.variable(float(cost) * scale, integral=form == "alpa") for cost in row]
        for row in edge.seconds
    ]
    # Equality in the marginal form, "at most" in Alpa's.
    low = 0.0 if form == "marginal" else -np.inf
    for row, node in zip(pairs, nodes[edge.source], strict=True):
        program.row([*((pair, 1.0) for pair in row), (node, -1.0)], low=low, high=0.0)
    for column, node in zip(zip(*pairs, strict=True), nodes[edge.target], strict=True):
        program.row([*((pair, 1.0) for pair in column), (node, -1.0)], low=low, high=0.0)
    if form == "alpa":
        program.row([(pair, 1.0) for row in pairs for pair in row], low=1.0, high=1.0)


def _add_budget(
    program: Program,
    nodes: list[list[int]],
    graph: OperatorGraph,
    budget_bytes: float,
    in_flight: float,
) -> None:
    largest = max(abs(budget_bytes), 1.0)
    terms = [
        (variable, float(state + in_flight * saved) / largest)
        for variables, states, saves in zip(
            nodes, graph.node_state_bytes, graph.node_saved_bytes, strict=True
        )
        for variable, state, saved in zip(variables, states, saves, strict=True)
    ]
    program.row(terms, high=budget_bytes / largest)


def _result(
    graph: OperatorGraph, nodes: list[list[int]], answer: ProgramAnswer, scale: float
) -> ProgramResult:
    values = answer.values
    if values is None:
        why = "no choice of strategies is feasible" if answer.infeasible else "HiGHS found nothing"
        raise OperatorError(f"{why} for {graph.num_operators} operators")
    choices = [int(np.argmax(values[variables])) for variables in nodes]
    return ProgramResult(
        assignment=graph.assignment(choices),
        lower_bound=answer.lower_bound / scale,
        optimal=answer.optimal,
    )
