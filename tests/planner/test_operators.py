"""Operator graphs: construction, refusals with the numbers, and HiGHS against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.planner.operators.graph import Operator, OperatorError, Strategy, edge_table
from moemesh.planner.operators.solve import solve
from tests.planner.graphs import brute_force, graph_of, random_graph


def test_a_choice_adds_up_nodes_and_edges_of_all_copies() -> None:
    graph = graph_of(
        [[1, 2], [10, 20, 30]],
        {(0, 1): [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]},
        state=[[1, 2], [3, 4, 5]],
        saved=[[7, 8], [9, 10, 11]],
        groups=["once", "often"],
        counts={"often": 5},
    )
    found = graph.cost([1, 2])
    assert found.seconds == pytest.approx(2 + 5 * (30 + 0.6))
    assert (found.state_bytes, found.saved_bytes) == (2 + 5 * 5, 8 + 5 * 11)
    assert found.memory_bytes(3) == 27 + 3 * 63
    assert graph.group_costs([1, 2])["often"].seconds == pytest.approx(30.6)


def test_edges_are_priced_by_the_layouts_of_their_ends() -> None:
    source = Operator(
        name="a",
        strategies=tuple(Strategy(output=layout, seconds=0.0) for layout in ("rows", "columns")),
    )
    wanted = (("x", "columns"), ("x", "rows"), ("x", "rows"))
    target = Operator(
        name="b", strategies=tuple(Strategy(inputs=pair, seconds=0.0) for pair in wanted)
    )
    table = edge_table(source, target, 1, lambda a, b: float(a != b))
    assert table.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    with pytest.raises(OperatorError, match="2 inputs; a link asks for number 2"):
        edge_table(source, target, 2, lambda a, b: 0.0)


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ([[1.0], []], {}, "no strategy"),
        ([[1.0], [np.nan]], {}, "nan"),
        ([[1.0], [-np.inf]], {}, "-inf"),
        ([[1.0], [1.0, 2.0]], {(0, 1): [[1.0]]}, r"\(1, 2\)"),
        ([[1.0], [1.0]], {(0, 2): [[1.0]]}, "0 to 1"),
        ([[1.0], [1.0]], {(1, 1): [[1.0]]}, "itself"),
        ([[1.0], [1.0]], {(0, 1): [[np.nan]]}, "NaN"),
    ],
)
def test_graphs_without_meaning_are_refused(nodes: list, edges: dict, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        graph_of(nodes, edges)


def test_bytes_are_finite_and_choices_exist() -> None:
    with pytest.raises(OperatorError, match="state_bytes = -1"):
        graph_of([[1.0]], {}, state=[[-1]])
    graph = graph_of([[1.0], [1.0, 2.0]], {})
    with pytest.raises(OperatorError, match="1 choices for 2 operators"):
        graph.cost([0])
    with pytest.raises(OperatorError, match="0 to 1, not 2"):
        graph.cost([0, 2])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_operators=st.integers(0, 6),
    price=st.sampled_from([0.0, 0.003, 0.1, 10.0]),
    in_flight=st.sampled_from([1.0, 3.0]),
)
def test_highs_equals_brute_force(
    seed: int, num_operators: int, price: float, in_flight: float
) -> None:
    graph = random_graph(seed, num_operators)
    found = solve(graph, byte_price=price, in_flight=in_flight)
    assert found.optimal
    total = found.cost.seconds + price * found.cost.memory_bytes(in_flight)
    assert total == pytest.approx(brute_force(graph, price, in_flight), rel=1e-7)
    assert found.cost == graph.cost(found.choices)


def test_forbidden_strategies_are_not_taken() -> None:
    graph = graph_of([[1.0, 9.0], [np.inf, 1.0]], {(0, 1): [[0.0, np.inf], [0.0, 0.0]]})
    assert solve(graph).choices == (1, 1)
    with pytest.raises(OperatorError, match="no choice of strategies is feasible for 2 operators"):
        solve(graph_of([[1.0], [1.0]], {(0, 1): [[np.inf]]}))
