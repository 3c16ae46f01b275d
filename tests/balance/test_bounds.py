"""Lower bounds: never above what can be reached, and each family of arguments is needed."""

from __future__ import annotations

import numpy as np
import pytest

from moemesh.balance import lower_bound, rebalance_experts
from tests.balance.cases import hottest, least_possible, shapes


def bound(weight: list[float], replicas: int, gpus: int, groups: int = 1, nodes: int = 1) -> float:
    return float(lower_bound(np.array([weight], float), replicas, groups, nodes, gpus)[0])


def test_mean_and_largest_replica() -> None:
    assert bound([4, 4, 4, 4], 4, 2) == pytest.approx(8)
    # One slot to spare halves the 9: no replica can be smaller than 5 then.
    assert bound([9, 5, 1], 4, 4) == pytest.approx(5)


def test_pigeonhole() -> None:
    """Nine equal experts and three halves on four GPUs: some GPU has two whole ones and a half.

    In general at most j - 1 replicas over T / j fit a GPU.
    """
    assert bound([6.0] * 7, 8, 4) == pytest.approx(12, rel=1e-3)
    best, _ = least_possible(np.array([6.0] * 7), 8, 4)
    assert best == 12


def test_heavy_replicas_need_light_companions() -> None:
    """Two replicas of 10 and six of 4 in four pairs: one pair holds 14, the mean is 11."""
    assert bound([10, 10, 4, 4, 4, 4, 4, 4], 8, 4) == pytest.approx(14, rel=1e-3)


def test_groups_on_nodes() -> None:
    """Groups of 9, 5, 5, 5 on two nodes of one GPU: 14 and 10, though the mean is 12."""
    weight = [8.0, 1.0, 4.0, 1.0, 4.0, 1.0, 4.0, 1.0]
    assert bound(weight, 8, 2, groups=4, nodes=2) == pytest.approx(14, rel=1e-4)
    assert bound(weight, 8, 2) == pytest.approx(12, rel=1e-4)


def test_a_heavy_expert_needs_slots_of_its_node() -> None:
    """An expert of 90 and a spare slot per node: no replica below 45, for any companions."""
    weight = [90.0, 1.0, 1.0, 1.0]
    assert bound(weight, 6, 6, groups=2, nodes=2) == pytest.approx(45)
    assert bound(weight, 6, 6) == pytest.approx(30)


@pytest.mark.representative("72-8")
@pytest.mark.parametrize(("replicas", "gpus"), [(96, 48), (96, 32), (80, 20), (72, 8)])
def test_tight_enough_to_be_of_use(replicas: int, gpus: int) -> None:
    """The mean gap of placements over all shapes: 2 % with two slots per GPU, less with more."""
    gaps = []
    for loads in shapes(1, 64, seed=7).values():
        slots = rebalance_experts(loads, replicas, 1, 1, gpus)[0]
        gaps.append(hottest(loads, slots, gpus) / lower_bound(loads, replicas, 1, 1, gpus) - 1)
    per_gpu = replicas // gpus
    assert np.mean(gaps) <= (0.025 if per_gpu == 2 else 0.015 if per_gpu < 5 else 0.003)


def test_layers_without_load() -> None:
    assert lower_bound(np.zeros((2, 4)), 6, 1, 1, 2).tolist() == [0.0, 0.0]
