"""Loads, brute force and checks that the tests of the balancers share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def hottest(loads: Floats, slots: Ints, num_gpus: int) -> Floats:
    """Load of the hottest GPU [layers], computed the slow way."""
    tops = []
    for weight, row in zip(np.asarray(loads, float), np.asarray(slots), strict=True):
        counts = [list(row).count(expert) for expert in range(len(weight))]
        per_gpu = len(row) // num_gpus
        tops.append(
            max(
                sum(weight[e] / counts[e] for e in row[gpu * per_gpu : (gpu + 1) * per_gpu])
                for gpu in range(num_gpus)
            )
        )
    return np.array(tops)


def num_twins(slots: Ints, num_gpus: int) -> int:
    """Second and further copies of an expert on one GPU, in all layers."""
    parts = np.asarray(slots).reshape(-1, np.shape(slots)[1] // num_gpus)
    return sum(len(part) - len(set(part.tolist())) for part in parts)


def check_maps(maps: tuple, num_experts: int, num_replicas: int) -> None:
    """The three maps agree, every expert has a slot, and padding entries are -1 and last."""
    physical, logical, counts = (np.asarray(table) for table in maps)
    num_layers = len(physical)
    assert physical.shape == (num_layers, num_replicas)
    assert counts.shape == (num_layers, num_experts) and counts.min() >= 1
    assert logical.shape == (num_layers, num_experts, counts.max())
    for layer in range(num_layers):
        assert (np.bincount(physical[layer], minlength=num_experts) == counts[layer]).all()
        for expert in range(num_experts):
            slots = logical[layer, expert, : counts[layer, expert]]
            assert len(set(slots.tolist())) == len(slots)
            assert (physical[layer, slots] == expert).all()
            assert (logical[layer, expert, counts[layer, expert] :] == -1).all()


def check_groups(slots: Ints, num_experts: int, num_groups: int, num_nodes: int) -> None:
    """Every group lives on one node, equally many groups on each."""
    for row in slots:
        groups = row.reshape(num_nodes, -1) // (num_experts // num_groups)
        held = [set(node.tolist()) for node in groups]
        assert sum(map(len, held)) == num_groups
        assert {len(node) for node in held} == {num_groups // num_nodes}


def least_possible(weight: Floats, num_slots: int, num_gpus: int) -> tuple[float, float]:
    """Load of the hottest GPU of the best placement without twins (infinite: there is none), and of
    the best of all, by brute force."""
    maxima: list[float] = []
    for twins in (False, True):
        best = np.inf
        for counts in _counts(len(weight), num_slots):
            unit = tuple(load / count for load, count in zip(weight, counts, strict=True))
            best = min(best, _pack(tuple(counts), unit, num_gpus, num_slots // num_gpus, twins))
        maxima.append(float(best))
    return maxima[0], maxima[1]


def _counts(num_experts: int, num_slots: int) -> Iterator[list[int]]:
    extra = num_slots - num_experts
    for more in combinations_with_replacement(range(num_experts), extra):
        yield [1 + more.count(expert) for expert in range(num_experts)]


def _pack(
    counts: tuple[int, ...], unit: tuple[float, ...], gpus: int, per_gpu: int, twins: bool
) -> float:
    pick = combinations_with_replacement if twins else combinations

    @cache
    def rest(left: tuple[int, ...], gpu: int) -> float:
        if gpu == gpus:
            return 0.0
        best = np.inf
        for chosen in pick(range(len(left)), per_gpu):
            after = list(left)
            for expert in chosen:
                after[expert] -= 1
            if min(after) < 0:
                continue
            load = sum(unit[expert] for expert in chosen)
            best = min(best, max(load, rest(tuple(after), gpu + 1)))
        return best

    return rest(counts, 0)
