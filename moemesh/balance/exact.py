"""Small boxes by complete search: all replica counts, all packings, pruned by the best so far."""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, entry, inner_loop

#: A box with more slots is not searched completely.
MOST_SLOTS = 12
#: Placements of one replica that may be tried in all; then the search is given up.
MAX_STEPS = 60_000


@entry
def exact_box(weight: Floats, num_gpus: int, top: float, slots: Ints) -> tuple[float, bool]:
    """Improve on the load `top`; fills `slots` if that is possible, never twice on one GPU.

    Returns the best load of the hottest GPU and whether nothing better exists.
    """
    num_experts = len(weight)
    extra = np.zeros(num_experts, np.int64)
    extra[0] = len(slots) - num_experts
    unit = np.empty(num_experts)
    steps = MAX_STEPS
    while True:
        heaviest = 0.0
        most = 0
        for expert in range(num_experts):
            unit[expert] = weight[expert] / (extra[expert] + 1)
            heaviest = max(heaviest, unit[expert])
            most = max(most, extra[expert] + 1)
        if most <= num_gpus and heaviest < top:
            top, steps = exact_packing(extra, unit, num_gpus, top, steps, slots)
        if steps <= 0:
            return top, False
        # The next way to share out the slots beyond one per expert.
        first = 0
        while first < num_experts - 1 and extra[first] == 0:
            first += 1
        if first == num_experts - 1:
            return top, True
        moved = extra[first]
        extra[first] = 0
        extra[0] = moved - 1
        extra[first + 1] += 1
        steps -= 1


@inner_loop
def exact_packing(
    extra: Ints, unit: Floats, num_gpus: int, top: float, steps: int, slots: Ints
) -> tuple[float, int]:
    """The best packing of given counts below `top`, heaviest replica first; fills `slots`.

    Returns the load reached (`top` if nothing better exists) and the steps that are left.
    """
    num_slots = len(slots)
    per_gpu = num_slots // num_gpus
    replicas = np.empty(num_slots, np.int64)
    place = 0
    for expert in np.argsort(-unit, kind="mergesort"):
        for _ in range(extra[expert] + 1):
            replicas[place] = expert
            place += 1
    chosen = np.full(num_slots, -1)
    load = np.zeros(num_gpus)
    held = np.zeros(num_gpus, np.int64)
    depth = 0
    while steps > 0:
        steps -= 1
        expert = replicas[depth]
        last = chosen[depth]
        first = last + 1
        if last >= 0:
            held[last] -= 1
            load[last] -= unit[expert]
            if held[last] == 0:
                first = num_gpus  # empty GPUs are all alike
        elif depth > 0 and replicas[depth - 1] == expert:
            first = chosen[depth - 1] + 1  # copies ascend: never two on a GPU, no order twice
        gpu = -1
        for candidate in range(first, num_gpus):
            fits = held[candidate] < per_gpu
            if fits and load[candidate] + unit[expert] < top * (1.0 - 1e-12):
                gpu = candidate
                break
            if held[candidate] == 0:
                break
        chosen[depth] = gpu
        if gpu < 0:
            depth -= 1
            if depth < 0:
                break
            continue
        held[gpu] += 1
        load[gpu] += unit[expert]
        if depth < num_slots - 1:
            depth += 1
            continue
        top = 0.0
        held[:] = 0
        for slot in range(num_slots):
            slots[chosen[slot] * per_gpu + held[chosen[slot]]] = replicas[slot]
            held[chosen[slot]] += 1
        for index in range(num_gpus):
            top = max(top, load[index])
    return top, steps
