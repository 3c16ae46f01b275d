"""Device placement: dynamic program = integer program = brute force, also on the branch network."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.cluster import load_cluster
from moemesh.planner.operators.strategies import cost_model
from moemesh.planner.stages.division import StageError
from moemesh.planner.stages.placement import (
    ALEXNET,
    NetworkLayer,
    PlacementProblem,
    baseline_placement,
    best_placement,
    branching_network,
    placement_problem,
    solve_placement,
)
from tests.planner.graphs import brute_force_placement, placement_seconds


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    count = draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = tuple(pair for pair in pairs if generator.random() < 0.4)
    near = generator.integers(0, 4, (len(edges), 1)).astype(float)
    return PlacementProblem(
        seconds=generator.integers(1, 9, (2, count)).astype(float),
        num_bytes=generator.integers(1, 9, count).astype(float),
        edges=edges,
        transfers=np.concatenate([near, near + 2], axis=1),
        num_devices=draw(st.integers(1, 3)),
        node_size=draw(st.integers(1, 3)),
        cap_bytes=draw(st.one_of(st.just(np.inf), st.integers(6, 30).map(float))),
    )


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 9))
def test_both_exact_methods_equal_brute_force(problem: PlacementProblem, seed: int) -> None:
    best = brute_force_placement(problem)
    if not np.isfinite(best):
        for method in (best_placement, solve_placement):
            with pytest.raises(StageError):
                method(problem)
        return
    placement = best_placement(problem)
    assert placement.seconds == pytest.approx(best)
    assert placement_seconds(problem, placement.choices) == pytest.approx(best)
    assert solve_placement(problem).seconds == pytest.approx(best, rel=1e-6)
    for name in ("random", "learned"):
        tried = baseline_placement(name, problem, 100, seed)
        assert tried == baseline_placement(name, problem, 100, seed)
        assert tried.seconds >= best - 1e-9


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**32))
def test_many_placements_at_once_are_priced_like_one(problem: PlacementProblem, seed: int) -> None:
    size = (5, problem.num_operators)
    placements = np.random.default_rng(seed).integers(0, problem.num_devices, size)
    expected = [placement_seconds(problem, row) for row in placements]
    assert problem.evaluate(placements) == pytest.approx(expected)


Problem = tuple[tuple[str, ...], PlacementProblem]


def branches(batch: int, num_devices: int = 2, **sizes: Any) -> Problem:
    cluster = load_cluster("dgx_h100")
    graph = branching_network(batch, cost_model(cluster, {"devices": 1}), **sizes)
    return placement_problem(graph, cluster, num_devices, np.inf)


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_the_branch_network_on_two_devices_equals_brute_force(batch: int) -> None:
    names, problem = branches(batch)
    everything = np.array(list(product(range(2), repeat=len(names))))
    seconds = problem.evaluate(everything)
    for place in (0, 77, 12_345, int(seconds.argmin())):
        assert seconds[place] == pytest.approx(placement_seconds(problem, everything[place]))
    assert best_placement(problem).seconds == pytest.approx(seconds.min(), rel=1e-12)
    assert solve_placement(problem).seconds == pytest.approx(seconds.min(), rel=1e-7)


def test_a_short_branch_network_on_three_devices_equals_brute_force() -> None:
    crossing = ("conv1a", "conv1b")
    layers = [
        *ALEXNET[:2],
        *(NetworkLayer(f"conv2{branch}", crossing, 48, 128, 5, 27, 13) for branch in "ab"),
        NetworkLayer("concatenate", ("conv2a", "conv2b"), 128 * 13**2, 2 * 128 * 13**2, 0),
        NetworkLayer("dense1", ("concatenate",), 2 * 128 * 13**2, 1000),
    ]
    _, problem = branches(64, 3, layers=layers)
    assert best_placement(problem).seconds == pytest.approx(brute_force_placement(problem))


def test_a_large_batch_puts_each_branch_on_its_own_device() -> None:
    """The split of the original network, which had one tower on each of two cards."""
    names, problem = branches(128)
    device = dict(zip(names, best_placement(problem).choices, strict=True))
    for tower in "ab":
        assert len({device[f"conv{layer}{tower}"] for layer in range(1, 6)}) == 1
    assert device["conv1a"] != device["conv1b"]


def test_a_placement_that_cannot_fit_names_the_bytes() -> None:
    _, problem = branches(16)
    tight = replace(problem, cap_bytes=1000.0)
    with pytest.raises(StageError, match="fits in 1000 bytes a device"):
        best_placement(tight)
