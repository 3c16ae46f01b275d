"""Static placement: drop-in maps, never worse than published, optimal where that can be checked."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.balance import load_shapes
from moemesh.balance import (
    BalanceError,
    balance_of,
    gpu_loads,
    lower_bound,
    rebalance_experts,
    rebalance_published,
)
from moemesh.balance.inputs import Policy
from moemesh.config.errors import ConfigError
from tests.balance.cases import (
    Floats,
    check_groups,
    check_maps,
    hottest,
    least_possible,
    num_twins,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/seed_examples.json").read_text())
EXAMPLE = GOLDEN["expert_balance"]
SIZES = tuple(EXAMPLE[f"num_{name}"] for name in ("replicas", "groups", "nodes", "gpus"))
SAME = 1 + 1e-12
#: Replicas, groups, nodes, GPUs for 64 experts: 2 to 9 slots per GPU, both policies.
PLACES = (
    (96, 1, 1, 48),
    (96, 8, 4, 32),
    (80, 4, 2, 20),
    (80, 4, 2, 16),
    (72, 8, 4, 8),
    (72, 1, 1, 8),
)


def test_the_example_of_the_seed() -> None:
    """The published algorithm gives 156 / 179.5; the optimum is 151 / 179.5."""
    loads = np.array(EXAMPLE["loads"], float)
    maps = rebalance_experts(loads, *SIZES)
    check_maps(maps, 12, 16)
    check_groups(maps[0], 12, 4, 2)
    assert hottest(loads, maps[0], 8).tolist() == [151.0, 179.5]
    assert num_twins(maps[0], 8) == 0
    published = rebalance_published(loads, *SIZES)
    assert published[0].tolist() == EXAMPLE["reference_physical_to_logical"]
    assert hottest(loads, published[0], 8).tolist() == [156.0, 179.5]


def test_results_are_of_the_kind_that_came_in() -> None:
    loads = EXAMPLE["loads"]
    lists = rebalance_experts(loads, *SIZES)
    arrays = rebalance_experts(np.array(loads), *SIZES)
    for kind in (torch.tensor(loads), torch.tensor(loads, dtype=torch.bfloat16)):
        tensors = rebalance_experts(kind, *SIZES)
        assert all(tensor.dtype == torch.int64 for tensor in tensors)
        assert [tensor.tolist() for tensor in tensors] == list(lists)
        assert lower_bound(kind, *SIZES).dtype == torch.float64
    assert all(array.dtype == np.int64 for array in arrays)
    assert [array.tolist() for array in arrays] == list(lists)
    assert isinstance(lower_bound(loads, *SIZES), list)


@pytest.mark.representative("(72, 8, 4, 8)")
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_never_worse_and_no_twins(place: tuple[int, int, int, int]) -> None:
    """Both efforts on every shape: bounds hold, and groups stay on one node."""
    replicas, groups, nodes, gpus = place
    for name, loads in load_shapes(1, 64, seed=3).items():
        published = hottest(loads, rebalance_published(loads, *place)[0], gpus)
        bound = lower_bound(loads, *place)
        for effort in ("fast", "quality"):
            maps = rebalance_experts(loads, *place, effort=effort)
            check_maps(maps, 64, replicas)
            check_groups(maps[0], 64, groups, nodes)
            top = hottest(loads, maps[0], gpus)
            assert (top <= published * SAME).all(), (name, effort)
            assert (top >= bound * (1 - 1e-9)).all(), (name, effort)
            assert num_twins(maps[0], gpus) == 0, (name, effort)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, int, int, int, int]:
    """Loads of one or two layers and sizes: 1 to 4 slots per GPU, groups or none."""
    nodes = draw(st.integers(1, 3))
    node_gpus = draw(st.integers(1, 4))
    per_gpu = draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 2))
    size = draw(st.integers(1, max(nodes * node_gpus * per_gpu // groups, 1)))
    gpus = nodes * node_gpus
    experts = groups * size
    if experts > gpus * per_gpu:
        groups, experts = 1, gpus * per_gpu
    load = st.integers(0, 60) | st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 1e-300, 1e300])
    row = st.lists(load, min_size=experts, max_size=experts)
    loads = draw(st.lists(row, min_size=1, max_size=2))
    return np.array(loads, float), gpus * per_gpu, groups, nodes, gpus


@given(problems(), st.sampled_from(["fast", "quality"]))
@example((np.full((1, 2), 5e-324), 6, 1, 1, 3), "fast")
@settings(max_examples=40)
def test_invariants(problem: tuple[Floats, int, int, int, int], effort: str) -> None:
    """Random sizes: one GPU, one slot per GPU, no redundancy, all-zero loads among them."""
    loads, replicas, groups, nodes, gpus = problem
    maps = rebalance_experts(loads, replicas, groups, nodes, gpus, effort=effort)
    check_maps(maps, loads.shape[1], replicas)
    if groups % nodes == 0 and nodes > 1:
        check_groups(maps[0], loads.shape[1], groups, nodes)
    scale = loads.max(axis=1, initial=1e-300)[:, None]
    top = hottest(loads / scale, maps[0], gpus)
    published = rebalance_published(loads, replicas, groups, nodes, gpus)[0]
    assert (top <= hottest(loads / scale, published, gpus) * (1 + 1e-9)).all()
    bound = np.asarray(lower_bound(loads, replicas, groups, nodes, gpus))
    rounded = np.maximum(bound - np.finfo(float).smallest_subnormal, 0) / scale[:, 0]
    assert (top >= rounded * (1 - 1e-6)).all()
    again = rebalance_experts(loads, replicas, groups, nodes, gpus, effort=effort)
    assert all(np.array_equal(one, two) for one, two in zip(maps, again, strict=True))


@given(st.data())
@settings(max_examples=40)
def test_small_problems_are_solved_exactly(data: st.DataObject) -> None:
    """Against all counts and all packings; twins only where no placement without is as good."""
    gpus = data.draw(st.integers(1, 4))
    per_gpu = data.draw(st.integers(1, 3 if gpus < 4 else 2))
    experts = data.draw(st.integers(1, gpus * per_gpu))
    loads = np.array([data.draw(st.lists(st.integers(1, 99), min_size=experts, max_size=experts))])
    slots = rebalance_experts(loads, gpus * per_gpu, 1, 1, gpus)[0]
    without_twins, best = least_possible(loads[0], gpus * per_gpu, gpus)
    assert hottest(loads, slots, gpus)[0] == pytest.approx(best, rel=1e-9)
    assert num_twins(slots, gpus) == 0 or best < without_twins * (1 - 1e-9)
    assert lower_bound(loads, gpus * per_gpu, 1, 1, gpus)[0] <= best * (1 + 1e-9)


def test_a_second_copy_on_a_gpu_where_that_is_best() -> None:
    """By hand: 90 in three copies, two of them next to 27; the other GPU has 30 + 51 + 1."""
    loads = np.array([[27.0, 90.0, 1.0, 51.0]])
    slots = rebalance_experts(loads, 6, 1, 1, 2)[0]
    assert hottest(loads, slots, 2)[0] == 87.0 and num_twins(slots, 2) == 1
    assert least_possible(loads[0], 6, 2) == (96.5, 87.0)


@pytest.mark.parametrize(
    ("loads", "replicas", "gpus", "best"),
    [
        ([121, 103, 85, 111, 148], 8, 4, 448 / 3),
        ([135, 28, 230, 333, 189, 175], 9, 3, 365.0),
        ([16, 7, 18], 8, 4, 10.75),
        ([137, 172, 269, 512], 9, 3, 363.6),
    ],
)
def test_complete_search(loads: list[int], replicas: int, gpus: int, best: float) -> None:
    """Small boxes where counts and swaps alone end above the optimum."""
    slots = rebalance_experts([loads], replicas, 1, 1, gpus)[0]
    assert hottest(np.array([loads]), np.array(slots), gpus)[0] == pytest.approx(best)


def test_without_redundancy_it_is_a_permutation() -> None:
    loads = load_shapes(3, 64)["zipf 0.8"]
    maps = rebalance_experts(loads, 64, 1, 1, 8)
    assert (np.sort(maps[0], axis=1) == np.arange(64)).all() and maps[2].max() == 1
    before = loads.reshape(3, 8, 8).sum(axis=2)
    assert (balance_of(gpu_loads(loads, maps[0], 8)) < balance_of(before)).all()


def test_more_slots_per_gpu_than_experts() -> None:
    """Twins are unavoidable: every GPU holds everything, and all carry the mean."""
    maps = rebalance_experts(np.array([[5.0, 1.0, 2.0]]), 20, 1, 1, 4)
    check_maps(maps, 3, 20)
    assert hottest(np.array([[5.0, 1.0, 2.0]]), maps[0], 4)[0] == pytest.approx(2.0)
    assert num_twins(maps[0], 4) == 4 * 2


def test_layers_without_load() -> None:
    """All-zero loads are legal: every expert has two replicas, next to a layer with loads."""
    loads = np.stack([np.zeros(6), np.arange(6.0)])
    maps = rebalance_experts(loads, 12, 1, 1, 4)
    check_maps(maps, 6, 12)
    assert maps[2][0].tolist() == [2] * 6 and num_twins(maps[0][:1], 4) == 0
    assert balance_of(gpu_loads(loads, maps[0], 4))[0] == 1.0


def test_loads_of_any_size() -> None:
    """Factors that are powers of two change nothing: squares neither overflow nor underflow."""
    loads = load_shapes(1, 32, seed=5)["lognormal 1.0"]
    maps = rebalance_experts(loads, 48, 1, 1, 16)
    for factor in (2.0**900, 2.0**-900):
        scaled = rebalance_experts(loads * factor, 48, 1, 1, 16)
        assert np.array_equal(maps[0], scaled[0])
    largest = np.full((1, 4), np.finfo(np.float64).max)
    assert lower_bound(largest, 8, 1, 1, 8)[0] == pytest.approx(largest[0, 0] / 2, rel=1e-6)


def test_policies() -> None:
    loads = load_shapes(1, 16)["bursty"]

    def slots(*sizes: int, policy: Policy | None = None) -> Any:
        return rebalance_experts(loads, 24, *sizes, 8, effort="fast", policy=policy)[0]

    assert np.array_equal(slots(8, 4), slots(8, 4, policy="hierarchical"))
    everywhere = slots(8, 4, policy="global")
    assert np.array_equal(everywhere, slots(1, 1))
    # 3 nodes do not divide 8 groups: the global policy, although 3 does not divide 8 GPUs.
    assert np.array_equal(everywhere, slots(8, 3))
    assert not np.array_equal(everywhere, slots(8, 4))


def test_a_time_budget_is_used_well(monkeypatch) -> None:
    """An effort in seconds: at least as good as fast, and within the time limit."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # other processes cost nothing
    loads = load_shapes(2, 64, seed=1)["lognormal 1.5"]
    fast = hottest(loads, rebalance_experts(loads, 96, 1, 1, 32, effort="fast")[0], 32)
    spent = hottest(loads, rebalance_experts(loads, 96, 1, 1, 32, effort=1)[0], 32)
    at_once = hottest(loads, rebalance_experts(loads, 96, 1, 1, 32, effort=0)[0], 32)
    assert (spent <= fast * SAME).all() and spent.sum() < fast.sum()
    assert (at_once <= fast * SAME).all()


GOOD = [[1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize(
    ("loads", "sizes", "message"),
    [
        (GOOD, (5, 1, 1, 2), r"num_gpus \(2\) must divide num_replicas \(5\): take 4 or 6"),
        (GOOD, (7, 1, 1, 3), r"num_replicas \(7\): take 6 or 9"),
        (GOOD, (2, 1, 1, 2), r"num_replicas \(2\) must hold every one of 4 experts: at least 4"),
        (GOOD, (3, 1, 1, 3), r"at least 6 on 3 GPUs"),
        (GOOD, (8, 8, 1, 2), r"num_groups \(8\) must not exceed the 4 experts"),
        (GOOD, (8, 3, 1, 2), r"num_groups \(3\) must divide the 4 experts: take 2 or 4$"),
        (GOOD, (6, 2, 2, 3), r"num_nodes \(2\) must divide num_gpus \(3\): take 1 or 3 nodes"),
        (GOOD, (8, 0, 1, 2), r"num_groups must be a whole number of at least 1, and is 0"),
        (GOOD, (8, 1, 1, -2), r"num_gpus must be .* at least 1, and is -2"),
        ([[1.0, -2.0]], (2, 1, 1, 1), r"expert 1 in layer 0 is -2"),
        (
            [[1.0, 2.0], [float("nan"), -1.0]],
            (2, 1, 1, 1),
            r"expert 0 in layer 1 is nan \(and 1 more",
        ),
        ([[float("inf")]], (2, 1, 1, 1), r"expert 0 in layer 0 is inf"),
        ([1.0, 2.0], (2, 1, 1, 1), r"layers x experts, and has 1 dims; .* \[loads\]"),
        ([[[1.0]]], (1, 1, 1, 1), r"has 3 dims"),
        ([], (1, 1, 1, 1), r"has 1 dims"),
        ([[]], (1, 1, 1, 1), r"empty: 1 layers x 0 experts"),
        ([[1.0, 2.0], [1.0]], (2, 1, 1, 1), r"rows have different lengths"),
        ([["a"]], (1, 1, 1, 1), r"must be numbers"),
        (
            torch.ones(1, 1, device="meta"),
            (1, 1, 1, 1),
            r"dense tensor, and is a tensor on the meta",
        ),
        (torch.ones(1, 1).to_sparse(), (1, 1, 1, 1), r"dense tensor, and is of torch.sparse_coo"),
    ],
)
def test_mistakes(loads: list, sizes: tuple, message: str) -> None:
    for function in (rebalance_experts, lower_bound, rebalance_published):
        with pytest.raises(BalanceError, match=message):
            function(loads, *sizes)
    assert issubclass(BalanceError, ValueError)


def test_mistakes_in_choices() -> None:
    with pytest.raises(BalanceError, match=r"take 1 nodes, or the global policy"):
        rebalance_experts(GOOD, 4, 1, 2, 2, policy="hierarchical")
    with pytest.raises(ConfigError, match="policy cannot be 'flat'"):
        rebalance_experts(GOOD, 4, 1, 1, 2, policy="flat")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"num_replicas must be a whole number, not 8\.5"):
        rebalance_experts(GOOD, 8.5, 1, 1, 2)  # type: ignore[arg-type]
    for effort in ("slow", -1.0, True, float("nan")):
        with pytest.raises((TypeError, ValueError), match="effort"):
            rebalance_experts(GOOD, 4, 1, 1, 2, effort=effort)  # type: ignore[arg-type]


def test_few_groups_are_divided_in_every_way() -> None:
    """The best of the ten divisions of six groups onto two nodes is the fifth in their order."""
    loads = np.array([[1.0, 5.0, 1.0, 4.0, 2.0, 2.0]])
    slots, _, _ = rebalance_experts(loads, 8, 6, 2, 4)
    assert gpu_loads(loads, slots, 4).max() == 4.0
    assert lower_bound(loads, 8, 6, 2, 4)[0] == pytest.approx(4.0)
