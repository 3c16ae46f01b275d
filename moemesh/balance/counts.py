"""How many replicas each expert gets: by largest quotient, or with slots kept for light ones."""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, inner_loop


@inner_loop
def counts_by_quotient(weight: Floats, num_slots: int, limit: int, counts: Ints) -> None:
    """Fill `counts` [experts]: one each, every further slot to the largest load per replica.

    The smallest possible largest replica (Adams' method of apportionment). No count exceeds
    `limit`; ties go to the lowest expert. A heap makes it O(experts + slots log experts).
    """
    num_experts = len(weight)
    key = weight.copy()
    heap = np.empty(num_experts, np.int64)
    for expert in range(num_experts):
        counts[expert] = 1
        heap[expert] = expert
        if limit < 2:
            key[expert] = -1.0
    for place in range(num_experts // 2 - 1, -1, -1):
        sift_down(heap, key, place)
    for _ in range(num_slots - num_experts):
        top = heap[0]
        counts[top] += 1
        key[top] = weight[top] / counts[top] if counts[top] < limit else -1.0
        sift_down(heap, key, 0)


@inner_loop
def sift_down(heap: Ints, key: Floats, place: int) -> None:
    """Restore a heap of experts, largest key (then lowest number) on top, below `place`."""
    size = len(heap)
    moving = heap[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            key[heap[other]] > key[heap[child]]
            or (key[heap[other]] == key[heap[child]] and heap[other] < heap[child])
        ):
            child = other
        candidate = heap[child]
        if key[candidate] < key[moving] or (key[candidate] == key[moving] and candidate > moving):
            break
        heap[place] = candidate
        place = child
    heap[place] = moving


@inner_loop
def slots_at(weight: Floats, threshold: float) -> int:
    """Slots that are needed if no replica may be heavier than `threshold`."""
    used = len(weight)
    for expert in range(len(weight)):
        if weight[expert] > threshold:
            used += int(np.ceil(weight[expert] / threshold - 1e-9)) - 1
    return used


@inner_loop
def counts_with_companions(
    weight: Floats,
    num_slots: int,
    num_free: int,
    limit: int,
    ascending: Ints,
    start: int,
    counts: Ints,
) -> None:
    """Fill `counts`: all but `num_free` slots by quotient, the free ones split light experts.

    The halves of light experts are the small companions that heavy replicas need beside them. They
    are taken from place `start` of `ascending` (experts by load), unsplit ones first.
    """
    num_experts = len(weight)
    counts_by_quotient(weight, num_slots - num_free, limit, counts)
    step = 0
    while num_free > 0:
        expert = ascending[(start + step) % num_experts]
        if counts[expert] < limit and (step >= num_experts or counts[expert] == 1):
            counts[expert] += 1
            num_free -= 1
        step += 1


@inner_loop
def largest(values: Floats) -> float:
    """The largest of some values that are not negative, without numpy's call overhead."""
    top = 0.0
    for index in range(len(values)):
        if values[index] > top:
            top = values[index]
    return top


@inner_loop
def total(values: Floats) -> float:
    """Sum from left to right (numpy's own order of summation is not the same when compiled)."""
    result = 0.0
    for index in range(len(values)):
        result += values[index]
    return result
