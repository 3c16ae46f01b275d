"""Elimination is exact: equal to brute force, to both integer programs, and fast enough."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.planner.operators.elimination import solve, solve_chain
from moemesh.planner.operators.elimination_order import elimination_order
from moemesh.planner.operators.graph import OperatorError, graph_from_costs, join
from moemesh.planner.operators.operator_program import solve_program
from tests.planner.graphs import brute_force, random_block, random_graph


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 6), density=st.floats(0, 1))
def test_any_small_graph_equals_brute_force(seed: int, size: int, density: float) -> None:
    graph = random_graph(seed, size, 3, density)
    found = solve(graph)
    assert found == graph.assignment(found.choices)
    assert found.seconds == pytest.approx(brute_force(graph)[0], abs=1e-12)


@pytest.mark.parametrize("form", ["marginal", "alpa"])
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_equal_the_integer_program(seed: int, form: str) -> None:
    graph = random_graph(seed, 14, 5, 0.25)
    program = solve_program(graph, form=form)  # type: ignore[arg-type]
    assert program.optimal
    assert solve(graph).seconds == pytest.approx(program.assignment.seconds, rel=1e-9)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_layers_equal_the_integer_program(num_layers: int) -> None:
    blocks = [random_block(num_layers, 4)] * num_layers
    row = join(blocks)
    program = solve_program(row)
    assert solve(row).seconds == pytest.approx(program.assignment.seconds, rel=1e-9)
    assert solve_chain(blocks).assignment.seconds == pytest.approx(
        program.assignment.seconds, rel=1e-9
    )


@pytest.mark.parametrize("pattern", ["a", "aaaaaaa", "abab", "aabbbcaaa"])
def test_a_row_of_blocks_equals_its_joined_graph(pattern: str) -> None:
    kinds = {name: random_block(ord(name), 3) for name in "abc"}
    blocks = [kinds[name] for name in pattern]
    row = join(blocks)
    found = solve_chain(blocks)
    assert found.assignment.seconds == pytest.approx(solve(row).seconds, rel=1e-12)
    # Its choices are those of the joined graph, in its order.
    again = row.assignment(found.assignment.choices)
    assert again.seconds == pytest.approx(found.assignment.seconds, rel=1e-12)
    assert again.state_bytes == pytest.approx(found.assignment.state_bytes)


def test_prices_steer_to_fewer_bytes() -> None:
    block = random_block(5, 4)
    free, priced = solve_chain([block] * 3), solve_chain([block] * 3, 1.0, 2.0)
    assert priced.assignment.memory_bytes(2) < free.assignment.memory_bytes(2)
    expected = priced.assignment.seconds + priced.assignment.memory_bytes(2)
    assert priced.total == pytest.approx(expected)


def test_forbidden_combinations_are_avoided() -> None:
    never = np.inf
    graph = graph_from_costs([[0, 0], [0, 5]], {(0, 1): [[never, never], [never, 1]]})
    assert solve(graph).choices == (1, 1)
    closed = graph_from_costs([[0], [0]], {(0, 1): [[never]]})
    with pytest.raises(OperatorError, match="infinite"):
        solve(closed)
    with pytest.raises(OperatorError, match="feasible"):
        solve_program(closed)


def test_a_graph_that_is_too_dense_says_so_at_once() -> None:
    graph = random_graph(0, 24, 8, 1.0)
    with pytest.raises(OperatorError, match=r"induced width 23.*solve_program"):
        solve(graph)


def test_orders_find_small_width() -> None:
    # A ring has induced width 2, a star 1, whatever the numbering.
    ring = [(i, (i * 7 + 7) % 49) for i in range(49)]
    assert elimination_order([4] * 49, [(i, (i + 1) % 49) for i in range(49)]).width == 2
    assert elimination_order([4] * 49, [(0, i) for i in range(1, 49)]).width == 1
    assert elimination_order([4] * 49, ring).width <= 2


def test_128_layers_are_fast() -> None:
    # The figure (0.2 s) is published in docs/results/partitioning.md; here only a loose guard.
    block = random_block(0, 6)
    row = join([block] * 128)
    started = time.perf_counter()
    whole = solve(row)
    middle = time.perf_counter()
    chain = solve_chain([block] * 128)
    ended = time.perf_counter()
    assert chain.assignment.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert middle - started < 2.0
    assert ended - middle < 0.5
