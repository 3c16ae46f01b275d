"""Operator graphs under a memory cap: exact on small cases, bounded on large ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.planner.operators.elimination import solve, solve_chain
from moemesh.planner.operators.graph import OperatorError, graph_from_costs, join
from moemesh.planner.operators.labels import undominated
from moemesh.planner.operators.operator_program import solve_program
from moemesh.planner.operators.pareto import (
    MemoryCapError,
    bytes_block,
    pareto_points,
    pin,
    smallest_bytes,
    solve_chain_under_memory,
    solve_under_memory,
)
from tests.planner.graphs import brute_force, random_block, random_graph


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 6),
    in_flight=st.integers(1, 5),
    share=st.floats(0, 1),
)
def test_a_capped_graph_equals_brute_force(
    seed: int, size: int, in_flight: int, share: float
) -> None:
    graph = random_graph(seed, size, 3)
    fewest = smallest_bytes(graph, in_flight=in_flight)
    most = solve(graph).memory_bytes(in_flight)
    cap = float(np.floor(fewest + share * max(0.0, most - fewest)))
    best, lightest = brute_force(graph, cap, in_flight)
    assert fewest == lightest
    found = solve_under_memory(graph, cap, in_flight=in_flight)
    assert found.assignment.seconds == pytest.approx(best, abs=1e-12)
    assert found.num_bytes <= cap
    assert found.gap == 0
    with pytest.raises(MemoryCapError, match=f"{fewest:.0f} bytes") as caught:
        solve_under_memory(graph, fewest - 1, in_flight=in_flight)
    assert caught.value.smallest_bytes == fewest


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_capped_layers_equal_the_integer_program(share: float) -> None:
    blocks = [random_block(1, 4)] * 4
    cap = _cap(blocks, share)
    program = solve_program(join(blocks), budget_bytes=cap, in_flight=3)
    assert program.optimal
    for found in (
        solve_chain_under_memory(blocks, cap, in_flight=3, tolerance=0.0),
        solve_under_memory(join(blocks), cap, in_flight=3),
    ):
        assert found.assignment.seconds == pytest.approx(program.assignment.seconds, rel=1e-9)
        assert found.gap == 0


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_many_layers_stay_within_their_gap(share: float) -> None:
    blocks = [random_block(2, 4), *[random_block(3, 4)] * 30, random_block(4, 4)]
    cap = _cap(blocks, share)
    found = solve_chain_under_memory(blocks, cap, in_flight=3)
    assert found.num_bytes <= cap
    assert 0 <= found.gap < 1e-3
    assert found.lower_bound <= found.assignment.seconds
    assert found.price > 0
    again = join(blocks).assignment(found.assignment.choices)
    assert again.seconds == pytest.approx(found.assignment.seconds, rel=1e-12)
    assert again.memory_bytes(3) == pytest.approx(found.num_bytes)


def _cap(blocks: list, share: float) -> float:
    most = solve_chain(blocks).assignment.memory_bytes(3)
    light = {id(block): bytes_block(block, 3) for block in blocks}
    fewest = solve_chain([light[id(block)] for block in blocks]).assignment.seconds
    return float(np.floor(fewest + share * (most - fewest)))


def test_an_ample_cap_changes_nothing() -> None:
    graph = random_graph(3, 8)
    found = solve_under_memory(graph, np.inf)
    assert found.assignment == solve(graph)
    assert (found.price, found.gap) == (0.0, 0.0)


def test_between_two_hull_points_lies_a_better_answer() -> None:
    # Seconds against bytes: (0, 10), (4, 6), (5, 0). The second is on no convex hull, so no price
    # finds it, but with 6 bytes it is the answer.
    graph = graph_from_costs([[0, 4, 5]], {}, state_bytes=[[10, 6, 0]])
    assert solve_under_memory(graph, 6).assignment.choices == (1,)
    assert [point.choices for point in pareto_points(graph)] == [(0,), (2,)]


@pytest.mark.parametrize("seed", range(4))
def test_pareto_points_are_few_optimal_and_undominated(seed: int) -> None:
    graph = random_block(seed, 5).graph
    points = pareto_points(graph, in_flights=(1, 4, 16), max_points=20)
    assert 2 <= len(points) <= 20
    assert points[0].seconds == pytest.approx(solve(graph).seconds)
    triples = np.array([(p.seconds, p.state_bytes, p.saved_bytes) for p in points])
    for one in triples:
        beaten = (triples <= one).all(axis=1) & (triples < one).any(axis=1)
        assert not beaten.any()
    for point in points:
        # Hull points are optimal among all with no more bytes at one of the in-flight counts.
        best = min(
            solve_under_memory(graph, point.memory_bytes(f), in_flight=f).assignment.seconds
            / point.seconds
            for f in (1, 4, 16)
        )
        assert best <= 1 + 1e-9


def test_pinned_operators_stay() -> None:
    graph = random_graph(5, 6)
    free = solve(graph).choices
    pinned = {0: graph.num_strategies[0] - 1, 3: 0}
    found = solve(pin(graph, pinned))
    assert all(found.choices[index] == choice for index, choice in pinned.items())
    assert found.seconds >= graph.assignment(free).seconds


def test_undominated_keeps_the_lower_staircase_of_each_cell() -> None:
    cell = np.array([0, 0, 0, 0, 1, 1])
    seconds = np.array([3.0, 1.0, 2.0, 2.0, 9.0, 9.0])
    num_bytes = np.array([1.0, 5.0, 3.0, 4.0, 2.0, 2.0])
    kept = undominated(cell, seconds, num_bytes)
    assert [(seconds[i], num_bytes[i]) for i in kept] == [(3, 1), (2, 3), (1, 5), (9, 2)]


def test_bad_requests_are_refused() -> None:
    graph = random_graph(0, 3)
    with pytest.raises(OperatorError, match="NaN"):
        solve_under_memory(graph, float("nan"))
    with pytest.raises(OperatorError, match="max_points is 1"):
        pareto_points(graph, max_points=1)
