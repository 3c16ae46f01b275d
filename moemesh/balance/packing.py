"""Replica counts, and packing of replicas on GPUs with equal slots: sorted folds, then swaps.

An expert is twice on a GPU only if that is unavoidable.

In all functions `weight` [experts] are loads and `counts` [experts] numbers of replicas; `slots`
[GPUs x slots per GPU] holds experts, GPU after GPU; `unit` [experts] is the load of one replica;
`load` [GPUs], the sum of `unit` over the slots of each GPU, is kept up to date with `slots`.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled


@compiled
def counts_by_quotient(weight: Floats, num_slots: int, limit: int) -> Ints:
    """Counts [experts]: each expert gets one slot, and each further slot goes to the expert with
    the largest load per replica. This minimises the largest replica (Adams' method of
    apportionment). No count exceeds `limit` as long as num_slots <= experts x limit; ties go to the
    lowest expert. With a heap it takes O(experts + slots log experts)."""
    num_experts = len(weight)
    key = weight.copy()  # load per replica; -1 for an expert at its limit
    heap = np.arange(num_experts)
    counts = np.ones(num_experts, np.int64)
    if limit < 2:
        key[:] = -1.0
    for place in range(num_experts // 2 - 1, -1, -1):
        sift_down(heap, key, place)
    for _ in range(num_slots - num_experts):
        top = heap[0]
        counts[top] += 1
        key[top] = weight[top] / counts[top] if counts[top] < limit else -1.0
        sift_down(heap, key, 0)
    return counts


@compiled
def sift_down(heap: Ints, key: Floats, place: int) -> None:
    """Restore the order of a heap of experts below `place`: the largest key is on top, of equal
    keys the lowest expert."""
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


@compiled
def slots_at(weight: Floats, threshold: float) -> int:
    """Number of slots that are needed so that no replica is heavier than `threshold`."""
    heavy = weight[weight > threshold]
    return len(weight) - len(heavy) + int(np.ceil(heavy / threshold - 1e-9).sum())


@compiled
def counts_with_companions(
    weight: Floats, num_slots: int, num_free: int, limit: int, ascending: Ints, start: int
) -> Ints:
    """Counts [experts]: all but `num_free` slots by quotient; the free slots split light experts,
    since heavy replicas need light companions on their GPU. Experts are split in the order of
    `ascending` (experts by load) from its place `start` on, unsplit ones first."""
    num_experts = len(weight)
    counts = counts_by_quotient(weight, num_slots - num_free, limit)
    step = 0
    while num_free > 0:
        expert = ascending[(start + step) % num_experts]
        if counts[expert] < limit and (step >= num_experts or counts[expert] == 1):
            counts[expert] += 1
            num_free -= 1
        step += 1
    return counts


@compiled
def total(values: Floats) -> float:
    """Sum from left to right (numpy sums in another order, which differs in compiled code)."""
    result = 0.0
    for index in range(len(values)):
        result += values[index]
    return result


#: Smallest relative gain of a swap, above rounding errors.
SMALLEST_GAIN = 1e-9
#: Largest number of GPUs that are sorted by insertion, which is faster than a library's sort.
FEW_GPUS = 24


@compiled
def pack(weight: Floats, counts: Ints, num_gpus: int, goal: float, slots: Ints) -> float:
    """Pack the replicas, then swap until the largest load is at most `goal`, no swap helps, or the
    limits of :func:`swap_opposite` and :func:`swap_hottest` are reached. Fills `slots`; returns the
    largest load."""
    unit = weight / counts
    load = np.empty(num_gpus)
    fold(counts, unit, num_gpus, slots, load)
    if not separate(slots, unit, load):
        # Deal replicas round robin: up to `num_gpus` copies in a row land on different GPUs.
        replicas = np.repeat(np.arange(len(counts)), counts)
        per_gpu = len(slots) // num_gpus
        for slot in range(len(slots)):
            slots[slot] = replicas[slot % per_gpu * num_gpus + slot // per_gpu]
        add_up(slots, unit, load)
    swap_opposite(slots, unit, load, goal)
    return swap_hottest(slots, unit, load, goal)


@compiled
def fold(counts: Ints, unit: Floats, num_gpus: int, slots: Ints, load: Floats) -> None:
    """Deal the replicas to the GPUs row by row (balanced largest differencing); fills `slots` and
    `load`. A row has `num_gpus` replicas, the heaviest row is first; inside a row the heaviest
    replica goes to the least loaded GPU. Two rows (two slots per GPU) are paired optimally."""
    per_gpu = len(slots) // num_gpus
    lightest = np.empty(num_gpus, np.int64)
    load[:] = 0.0
    row = -1
    place = num_gpus
    for expert in np.argsort(-unit, kind="mergesort"):
        for _ in range(counts[expert]):
            if place == num_gpus:
                row += 1
                place = 0
                sort_gpus(load, lightest)
            gpu = lightest[place]
            slots[gpu * per_gpu + row] = expert
            load[gpu] += unit[expert]
            place += 1


@compiled
def sort_gpus(load: Floats, lightest: Ints) -> None:
    """Fill `lightest` with the GPUs by load, lightest first, then by number."""
    if len(load) > FEW_GPUS:
        lightest[:] = np.argsort(load, kind="mergesort")
        return
    for gpu in range(len(load)):
        place = gpu
        while place > 0 and load[lightest[place - 1]] > load[gpu]:
            lightest[place] = lightest[place - 1]
            place -= 1
        lightest[place] = gpu


@compiled
def add_up(slots: Ints, unit: Floats, load: Floats) -> None:
    """Fill `load` with the loads of the experts in the slots."""
    per_gpu = len(slots) // len(load)
    for gpu in range(len(load)):
        load[gpu] = 0.0
        for slot in range(gpu * per_gpu, (gpu + 1) * per_gpu):
            load[gpu] += unit[slots[slot]]


@compiled
def holds(slots: Ints, gpu: int, per_gpu: int, expert: int) -> bool:
    """Whether a GPU has a replica of an expert."""
    for slot in range(gpu * per_gpu, (gpu + 1) * per_gpu):  # noqa: SIM110 (a loop to compile)
        if slots[slot] == expert:
            return True
    return False


@compiled
def swap(slots: Ints, unit: Floats, load: Floats, first: int, second: int) -> None:
    """Swap the experts of two slots."""
    per_gpu = len(slots) // len(load)
    difference = unit[slots[first]] - unit[slots[second]]
    load[first // per_gpu] -= difference
    load[second // per_gpu] += difference
    slots[first], slots[second] = slots[second], slots[first]


@compiled
def is_second(slots: Ints, per_gpu: int, slot: int) -> bool:
    """Whether an earlier slot of the same GPU holds the same expert."""
    for earlier in range(slot - slot % per_gpu, slot):  # noqa: SIM110 (a loop to compile)
        if slots[earlier] == slots[slot]:
            return True
    return False


@compiled
def best_swap(
    slots: Ints, unit: Floats, load: Floats, start: int, stop: int, peer: int, best: float
) -> tuple[float, int, int]:
    """The swap of a slot in [start, stop), all of one GPU, with a slot of GPU `peer` that
    minimises the heavier of their two loads. Returns that load and the two slots; -1 for both slots
    if no load is below `best`."""
    per_gpu = len(slots) // len(load)
    gpu = start // per_gpu
    give = -1
    take = -1
    for first in range(start, stop):
        for second in range(peer * per_gpu, (peer + 1) * per_gpu):
            difference = unit[slots[first]] - unit[slots[second]]
            heavier = max(load[gpu] - difference, load[peer] + difference)
            if (
                heavier < best
                and not holds(slots, peer, per_gpu, slots[first])
                and not holds(slots, gpu, per_gpu, slots[second])
            ):
                best = heavier
                give = first
                take = second
    return best, give, take


@compiled
def separate(slots: Ints, unit: Floats, load: Floats) -> bool:
    """Swap second replicas of an expert on a GPU to other GPUs, each by the swap after which the
    heavier of the two GPUs has the least load. False if one remains."""
    num_slots = len(slots)
    per_gpu = num_slots // len(load)
    done = True
    for slot in range(num_slots):
        if not is_second(slots, per_gpu, slot):
            continue
        best = np.inf
        partner = -1
        for peer in range(len(load)):
            if peer != slot // per_gpu:
                best, give, take = best_swap(slots, unit, load, slot, slot + 1, peer, best)
                partner = take if give >= 0 else partner
        if partner < 0:
            done = False
        else:
            swap(slots, unit, load, slot, partner)
    return done


@compiled
def swap_opposite(slots: Ints, unit: Floats, load: Floats, goal: float) -> None:
    """At most 8 sweeps of swaps between the k-th heaviest and the k-th lightest GPU, as long as the
    heavier one is over `goal`."""
    num_gpus = len(load)
    per_gpu = len(slots) // num_gpus
    ascending = np.empty(num_gpus, np.int64)
    for _ in range(8):
        sort_gpus(load, ascending)
        changed = False
        for place in range(num_gpus // 2):
            cold = ascending[place]
            hot = ascending[num_gpus - 1 - place]
            if load[hot] <= goal:
                break
            best = float(load[hot]) * (1.0 - SMALLEST_GAIN)
            start = hot * per_gpu
            _, give, take = best_swap(slots, unit, load, start, start + per_gpu, cold, best)
            if give >= 0:
                swap(slots, unit, load, give, take)
                changed = True
        if not changed:
            return


@compiled
def swap_hottest(slots: Ints, unit: Floats, load: Floats, goal: float) -> float:
    """Best swaps of the hottest GPU, or the first one found that reaches `goal`: until the largest
    load is at most `goal` or no swap helps, but at most 4 swaps for each slot. Returns the largest
    load."""
    num_slots = len(slots)
    per_gpu = num_slots // len(load)
    for _ in range(4 * num_slots):
        hot = int(np.argmax(load))
        if load[hot] <= goal:
            break
        best = load[hot] * (1.0 - SMALLEST_GAIN)
        give = -1
        take = -1
        for slot in range(num_slots):
            peer = slot // per_gpu
            if peer == hot or load[peer] >= best:
                continue
            best, first, second = best_swap(slots, unit, load, slot, slot + 1, hot, best)
            if first >= 0:
                give = first
                take = second
            if best <= goal:
                break
        if give < 0:
            break
        swap(slots, unit, load, take, give)
    return load.max()
