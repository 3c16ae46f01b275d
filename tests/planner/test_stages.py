"""Division into stages: dynamic program = integer program = brute force; baselines never better."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.planner.stages.division import (
    StageCosts,
    baseline_division,
    best_division,
    pipeline_seconds,
)
from moemesh.planner.stages.partition import solve_division
from tests.planner.graphs import brute_force_stages


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCosts:
    num_layers = draw(st.integers(1, 5))
    num_stages = draw(st.integers(1, num_layers))
    microbatches = draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 3)), num_layers)
    in_flight = [min(microbatches, num_stages - stage) for stage in range(num_stages)]
    return StageCosts(
        seconds=1.0 + generator.integers(0, 9, shape),
        state_bytes=generator.integers(0, 9, shape).astype(float),
        saved_bytes=generator.integers(0, 9, shape).astype(float),
        in_flight=tuple(map(float, in_flight)),
        num_microbatches=microbatches,
        cap_bytes=draw(st.one_of(st.just(np.inf), st.integers(4, 60).map(float))),
        boundary_seconds=float(generator.random()),
    )


@settings(max_examples=100, deadline=None)
@given(costs=stage_costs())
def test_both_exact_methods_equal_brute_force(costs: StageCosts) -> None:
    best, smallest = brute_force_stages(costs)
    assert costs.smallest_cap() == smallest
    optimum = best_division(costs.table(), costs.num_microbatches)
    program = solve_division(costs.table(), costs.num_microbatches)
    if not np.isfinite(best):
        assert optimum is None
        assert program is None
        assert smallest > costs.cap_bytes
        return
    assert optimum is not None
    assert program is not None
    assert optimum.seconds == pytest.approx(best)
    assert program.seconds == pytest.approx(best, rel=1e-7)
    for division in (optimum, program):
        assert sum(division.layers_per_stage) == costs.seconds.shape[1]
        total = pipeline_seconds(division.stage_seconds, costs.num_microbatches)
        assert division.seconds == pytest.approx(total)


@settings(max_examples=30, deadline=None)
@given(costs=stage_costs(), seed=st.integers(0, 9))
def test_baselines_are_never_better_and_repeat_themselves(costs: StageCosts, seed: int) -> None:
    table = costs.table()
    best = best_division(table, costs.num_microbatches)
    for method in ("random", "learned"):
        baseline = baseline_division(method, table, costs.num_microbatches, 200, seed)
        assert baseline == baseline_division(method, table, costs.num_microbatches, 200, seed)
        if best is None:
            assert baseline is None
        elif baseline is not None:
            assert baseline.seconds >= best.seconds - 1e-12
            assert baseline.evaluations == 200
            sizes = baseline.layers_per_stage
            assert (sum(sizes), len(sizes)) == (costs.seconds.shape[1], len(costs.in_flight))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_layers=st.integers(1, 9), microbatches=st.integers(1, 9))
def test_any_table_equals_brute_force(seed: int, num_layers: int, microbatches: int) -> None:
    """Costs other than sums over layers, with holes: the search over largest times is exact."""
    generator = np.random.default_rng(seed)
    num_stages = int(generator.integers(1, num_layers + 1))
    table = generator.random((num_stages, num_layers + 1, num_layers + 1))
    table[generator.random(table.shape) < 0.2] = np.inf
    best = np.inf
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        borders = (0, *cuts, num_layers)
        times = [table[i, borders[i], borders[i + 1]] for i in range(num_stages)]
        best = min(best, pipeline_seconds(times, microbatches))
    optimum = best_division(table, microbatches)
    assert (np.inf if optimum is None else optimum.seconds) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_largest_time_may_lie_anywhere_between(seed: int) -> None:
    """Cuts of one kind of trade: the slower the first stage, the faster the second."""
    generator = np.random.default_rng(seed)
    first = 10 + np.sort(generator.uniform(0, 3, 60))
    second = 10 * np.exp(-2 * (first - 10)) + generator.uniform(0, 0.1, 60)
    order = generator.permutation(60)
    table = np.full((2, 62, 62), np.inf)
    table[0, 0, 1:61] = first[order]
    table[1, 1:61, 61] = second[order]
    totals = first + second + 2 * first
    assert 0 < totals.argmin() < 59
    optimum = best_division(table, 3)
    assert optimum is not None
    assert optimum.seconds == pytest.approx(totals.min())
    assert optimum.evaluations < 40
