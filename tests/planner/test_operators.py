"""Operator graphs: construction, joining, and refusals with the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from moemesh.planner.operators.graph import (
    Block,
    Link,
    Operator,
    OperatorError,
    OperatorGraph,
    Strategy,
    connect,
    graph_from_costs,
    join,
)
from tests.planner.graphs import random_block


def test_an_assignment_adds_up_nodes_and_edges() -> None:
    graph = graph_from_costs(
        [[1, 2], [10, 20, 30]],
        {(0, 1): [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]},
        state_bytes=[[1, 2], [3, 4, 5]],
        saved_bytes=[[7, 8], [9, 10, 11]],
    )
    found = graph.assignment([1, 2])
    assert found.seconds == pytest.approx(2 + 30 + 0.6)
    assert (found.state_bytes, found.saved_bytes) == (7, 19)
    assert found.memory_bytes(3) == 7 + 3 * 19


def test_links_are_priced_by_the_layouts_of_their_ends() -> None:
    source = Operator(
        name="a",
        strategies=tuple(Strategy(output=layout, seconds=0.0) for layout in ("rows", "columns")),
    )
    target = Operator(
        name="b",
        strategies=tuple(
            Strategy(inputs=(other, layout), seconds=0.0)
            for other, layout in (("x", "columns"), ("x", "rows"), ("x", "rows"))
        ),
    )
    link = Link(source=0, target=1, input_index=1, tensor="t")
    graph = connect([source, target], [link], lambda tensor, a, b: float(a != b) * len(tensor))
    assert graph.edges[0].seconds.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def test_blocks_in_a_row_share_their_ports() -> None:
    block = random_block(0, 3, num_operators=5)
    row = join([block] * 4)
    assert row.num_operators == 5 + 3 * 4
    assert len(row.edges) == 4 * len(block.graph.edges)
    # The same strategies everywhere: every block but the first leaves its entry's cost out.
    whole = row.assignment([1] * row.num_operators)
    one = block.graph.assignment([1] * 5)
    entry = block.graph.operators[0].strategies[1]
    assert whole.seconds == pytest.approx(4 * one.seconds - 3 * entry.seconds)


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
        ([[[1.0]]], {}, "2 dims"),
    ],
)
def test_what_makes_no_sense_is_refused(nodes: list, edges: dict, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        graph_from_costs(nodes, edges)


def test_bytes_are_finite_and_one_a_strategy() -> None:
    with pytest.raises(OperatorError, match="state_bytes = -1"):
        graph_from_costs([[1.0]], {}, state_bytes=[[-1]])
    with pytest.raises(OperatorError, match=r"\[2\].*\[1\]"):
        graph_from_costs([[1.0]], {}, saved_bytes=[[1, 2]])


def test_wrong_choices_and_ports_are_refused() -> None:
    graph = graph_from_costs([[1.0], [1.0, 2.0]], {})
    with pytest.raises(OperatorError, match="1 choices for 2 operators"):
        graph.assignment([0])
    with pytest.raises(OperatorError, match="0 to 1, not 2"):
        graph.assignment([0, 2])
    with pytest.raises(OperatorError, match="both operator 0"):
        Block(graph=graph, entry=0, exit=0)
    with pytest.raises(OperatorError, match="1 layouts, but the block before leaves 2"):
        join([Block(graph=graph, entry=0, exit=1)] * 2)


def test_blocks_that_number_their_layouts_differently_do_not_join() -> None:
    def ends(*layouts: str) -> OperatorGraph:
        port = tuple(Strategy(output=layout, seconds=0.0) for layout in layouts)
        return OperatorGraph(
            operators=(Operator(name="in", strategies=port), Operator(name="out", strategies=port))
        )

    first, second = ends("a", "b"), ends("b", "a")
    with pytest.raises(OperatorError, match="same order"):
        join([Block(graph=first, entry=0, exit=1), Block(graph=second, entry=0, exit=1)])
