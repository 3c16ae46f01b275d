"""Stages: the dynamic program equals brute force and the integer program; caps are said exactly."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.planner.operators.pareto import MemoryCapError, pareto_points
from moemesh.planner.stages.division import (
    StageError,
    best_partition,
    pipeline_seconds,
    smallest_bottleneck,
    submeshes,
)
from moemesh.planner.stages.partition_program import solve_partition_program
from moemesh.planner.stages.stage_costs import (
    Layer,
    Pipeline,
    layer_from_points,
    layers_from_costs,
    plan_stages,
    stage_table,
)
from moemesh.planner.stages.submeshes import MeshCosts, additive_costs, plan_submeshes
from tests.planner.graphs import brute_force_stages, random_block


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    num_layers = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32))
    generator = np.random.default_rng(seed)
    options = draw(st.integers(1, 3))
    columns = [generator.integers(0, 9, (num_layers, options)) for _ in range(3)]
    return Pipeline(
        layers=layers_from_costs(columns[0] + 1, columns[1], columns[2]),
        num_stages=draw(st.integers(1, num_layers)),
        num_microbatches=draw(st.integers(1, 6)),
        in_flight=draw(st.sampled_from(["1f1b", "gpipe"])),
        cap_bytes=draw(st.one_of(st.none(), st.integers(4, 60).map(float))),
        boundary_seconds=generator.random(num_layers - 1),
        fixed_bytes=draw(st.sampled_from([0.0, 3.0])),
    )


@settings(max_examples=120, deadline=None)
@given(pipeline=pipelines())
def test_any_small_pipeline_equals_brute_force(pipeline: Pipeline) -> None:
    best, smallest = brute_force_stages(pipeline)
    if not np.isfinite(best):
        with pytest.raises(MemoryCapError, match=f"{smallest:.0f} bytes") as caught:
            plan_stages(pipeline)
        assert caught.value.smallest_bytes == smallest
        return
    plan = plan_stages(pipeline)
    assert plan.exact
    assert plan.partition.seconds == pytest.approx(best)
    assert plan.partition.lower_bound == pytest.approx(best)
    assert plan.partition.seconds == pytest.approx(
        pipeline_seconds(plan.partition.stage_seconds, pipeline.num_microbatches)
    )
    assert sum(plan.partition.layers_per_stage) == len(pipeline.layers)
    assert len(plan.options) == len(pipeline.layers)
    for stage, run in enumerate(plan.partition.stages):
        chosen = [(pipeline.layers[index], plan.options[index]) for index in run]
        time = sum(layer.seconds[o] for layer, o in chosen) + pipeline.boundaries[run.start]
        assert time == pytest.approx(plan.partition.stage_seconds[stage])
        assert plan.stage_bytes[stage] - pipeline.fixed_bytes <= pipeline.caps[stage]


@settings(max_examples=25, deadline=None)
@given(pipeline=pipelines())
def test_the_integer_program_agrees(pipeline: Pipeline) -> None:
    try:
        plan = plan_stages(pipeline)
    except MemoryCapError as error:
        with pytest.raises(MemoryCapError) as caught:
            solve_partition_program(pipeline)
        assert caught.value.smallest_bytes == error.smallest_bytes
        return
    program = solve_partition_program(pipeline)
    assert program.optimal
    assert program.seconds == pytest.approx(plan.partition.seconds, rel=1e-7)
    narrow = solve_partition_program(pipeline, goal="bottleneck")
    assert narrow.bottleneck == pytest.approx(smallest_bottleneck(stage_table(pipeline)), rel=1e-7)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_layers=st.integers(1, 10), microbatches=st.integers(1, 9))
def test_any_cost_table_equals_brute_force(seed: int, num_layers: int, microbatches: int) -> None:
    """Costs that are no sums of layers, with holes: the search over largest times is exact."""
    generator = np.random.default_rng(seed)
    num_stages = int(generator.integers(1, num_layers + 1))
    table = generator.random((num_stages, num_layers + 1, num_layers + 1))
    table[generator.random(table.shape) < 0.2] = np.inf
    best = np.inf
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        borders = (0, *cuts, num_layers)
        times = [table[i, borders[i], borders[i + 1]] for i in range(num_stages)]
        best = min(best, pipeline_seconds(times, microbatches))
    if not np.isfinite(best):
        with pytest.raises(StageError, match="finite"):
            best_partition(table, microbatches)
        return
    assert best_partition(table, microbatches).seconds == pytest.approx(best)
    loose = best_partition(table, microbatches, tolerance=0.1)
    assert loose.lower_bound <= best + 1e-12
    assert best <= loose.seconds + 1e-12
    assert loose.seconds <= loose.lower_bound / 0.9 + 1e-12


@pytest.mark.parametrize("seed", range(10))
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
    found = best_partition(table, 3)
    assert found.seconds == pytest.approx(totals.min())
    assert found.evaluations < 40


def test_every_stage_is_charged_with_its_own_microbatches_in_flight() -> None:
    # Equal layers: by time two on each stage, but the first stage holds three microbatches.
    layers = layers_from_costs([1.0] * 6, [0.0] * 6, [1.0] * 6)
    free = plan_stages(Pipeline(layers=layers, num_stages=3, num_microbatches=8))
    assert free.partition.layers_per_stage == (2, 2, 2)
    tight = plan_stages(Pipeline(layers=layers, num_stages=3, num_microbatches=8, cap_bytes=4))
    assert tight.partition.layers_per_stage == (1, 2, 3)
    assert tight.stage_bytes == (3, 4, 3)
    gpipe = Pipeline(
        layers=layers, num_stages=3, num_microbatches=8, in_flight="gpipe", cap_bytes=15
    )
    with pytest.raises(MemoryCapError, match="smallest cap that works is 16 bytes"):
        plan_stages(gpipe)


def test_caps_and_counts_may_be_given_by_stage() -> None:
    layers = layers_from_costs([1, 1, 1, 1], [0] * 4, [1] * 4)
    pipeline = Pipeline(
        layers=list(layers),
        num_stages=2,
        num_microbatches=4,
        in_flight=[1, 2],
        cap_bytes=np.array([3.0, 2.0]),
    )
    assert plan_stages(pipeline).partition.layers_per_stage == (3, 1)
    short = Pipeline(layers=layers, num_stages=2, num_microbatches=4, cap_bytes=(1.0, 1.0))
    with pytest.raises(MemoryCapError, match="every stage needs 2 bytes more"):
        plan_stages(short)


def test_recomputation_is_chosen_only_where_memory_asks_for_it() -> None:
    layer = Layer(seconds=(3.0, 4.0), state_bytes=(0.0, 0.0), saved_bytes=(10.0, 1.0))
    plan = plan_stages(Pipeline(layers=[layer] * 8, num_stages=4, num_microbatches=4, cap_bytes=45))
    per_stage = [plan.options[run.start : run.stop] for run in plan.partition.stages]
    assert [sum(options) for options in per_stage] == [1, 1, 0, 0]


def test_pareto_points_of_a_block_are_options_of_a_layer() -> None:
    points = pareto_points(random_block(0, 4).graph, in_flights=(1, 2))
    layer = layer_from_points(points)
    plan = plan_stages(
        Pipeline(layers=[layer] * 6, num_stages=2, num_microbatches=4, cap_bytes=30_000)
    )
    assert max(plan.stage_bytes) <= 30_000


def test_one_layer_one_stage_one_microbatch() -> None:
    plan = plan_stages(Pipeline(layers=layers_from_costs([2.5]), num_stages=1, num_microbatches=1))
    assert plan.partition.seconds == 2.5
    assert plan.partition.first_layers == (0,)


@pytest.mark.parametrize(
    ("layers", "stages", "microbatches", "words"),
    [
        (3, 4, 1, "4 stages cannot each hold one of 3 layers; at most 3"),
        (3, 0, 1, "at least 1"),
        (3, 1, 0, "at least 1"),
        (0, 1, 1, "at least 1"),
    ],
)
def test_impossible_counts(layers: int, stages: int, microbatches: int, words: str) -> None:
    with pytest.raises(StageError, match=words):
        Pipeline(
            layers=layers_from_costs([1.0] * layers),
            num_stages=stages,
            num_microbatches=microbatches,
        )
    with pytest.raises(StageError, match=words):
        best_partition(np.ones((stages, layers + 1, layers + 1)), microbatches)


def test_tables_that_make_no_sense() -> None:
    with pytest.raises(StageError, match="NaN"):
        best_partition(np.full((1, 2, 2), np.nan), 1)
    with pytest.raises(StageError, match="3 axes"):
        best_partition(np.ones((2, 2)), 1)
    with pytest.raises(StageError, match="2 numbers; 3 are needed"):
        Pipeline(
            layers=layers_from_costs([1] * 3), num_stages=3, num_microbatches=1, cap_bytes=[1, 2]
        )
    with pytest.raises(StageError, match="'1f2b'"):
        Pipeline(layers=layers_from_costs([1]), num_stages=1, num_microbatches=1, in_flight="1f2b")  # type: ignore[arg-type]


def test_alpas_submeshes_tile_a_cluster() -> None:
    assert submeshes(2, 4) == ((1, 1), (1, 2), (1, 4), (2, 4))
    with pytest.raises(StageError, match="nearest: 4 or 8"):
        submeshes(2, 6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_layers=st.integers(1, 4), num_devices=st.integers(1, 8))
def test_submeshes_equal_brute_force(seed: int, num_layers: int, num_devices: int) -> None:
    generator = np.random.default_rng(seed)
    costs = additive_costs(
        (1, 2, 4), *(generator.integers(0, 9, (3, num_layers)).astype(float) for _ in range(3))
    )
    microbatches, cap = int(generator.integers(1, 5)), float(generator.integers(4, 40))
    best = _brute_force_meshes(costs, num_devices, microbatches, cap)
    try:
        found = plan_submeshes(costs, num_devices, microbatches, cap_bytes=cap)
    except MemoryCapError as error:
        assert not np.isfinite(best)
        works = error.smallest_bytes
        assert np.isfinite(_brute_force_meshes(costs, num_devices, microbatches, works))
        assert not np.isfinite(_brute_force_meshes(costs, num_devices, microbatches, works - 0.5))
    except StageError:
        assert not np.isfinite(_brute_force_meshes(costs, num_devices, microbatches, np.inf))
    else:
        assert found.seconds == pytest.approx(best)
        assert sum(costs.devices[kind] for kind in found.submeshes) == num_devices


def _brute_force_meshes(
    costs: MeshCosts, num_devices: int, num_microbatches: int, cap: float
) -> float:
    best = np.inf
    for count in range(1, costs.num_layers + 1):
        for cuts in combinations(range(1, costs.num_layers), count - 1):
            borders = (0, *cuts, costs.num_layers)
            for kinds in product(range(len(costs.devices)), repeat=count):
                if sum(costs.devices[kind] for kind in kinds) != num_devices:
                    continue
                places = [(kinds[i], borders[i], borders[i + 1]) for i in range(count)]
                if all(
                    costs.bytes(count - i, num_microbatches)[place] <= cap
                    for i, place in enumerate(places)
                ):
                    times = [costs.seconds[place] for place in places]
                    best = min(best, pipeline_seconds(times, num_microbatches))
    return best
