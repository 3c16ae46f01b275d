"""One box of GPUs (a node, or all): replica counts and packing together, near the bound.

`pack_box` is quick and almost always good enough from five slots per GPU on. Where it leaves a gap,
the module `search` also tries other replica counts (`pack_pairs`, `pack_with_companions`), the
descent of `polish`, and a complete search of small boxes (`exact_box`).
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.packing import (
    counts_by_quotient,
    counts_with_companions,
    pack,
    slots_at,
    total,
)

# Replica counts of a box with two slots per GPU: every heavy replica needs a light companion.
#
# Given the replicas, the best pairing is a fold, the heaviest with the lightest. At a target T, a
# replica heavier than T / 2 needs a companion of at most T minus its load. By Hall's theorem all
# have one if, for every x, the number of replicas above T - x does not exceed the number of
# replicas up to x. Both are counted on a grid of `CELLS` values of x, rounded to the safe side, and
# a search by threshold accepting reduces the number of missing companions to zero.

#: Number of values of x, from 0 to T / 2.
CELLS = 128
#: Number of missing companions that a step may add at the beginning of the search.
FIRST_THRESHOLD = 3
#: Constants of the linear congruential generator (31 bits) for the search.
RANDOM_FACTOR, RANDOM_SHIFT, RANDOM_MASK = 1103515245, 12345, 0x7FFFFFFF


@compiled
def add_replicas(balance: Ints, load: float, copies: int, target: float) -> None:
    """Add `copies` replicas of `load` (remove them if negative) to `balance` [CELLS]: for each x
    the number of replicas up to x, minus that of replicas above T - x; T is `target`."""
    width = 0.5 * target / CELLS
    if 2.0 * load > target:
        cell = int(np.floor((target - load) / width))
        balance[max(0, min(cell, CELLS)) :] -= copies
    else:
        cell = int(np.ceil(load / width))
        balance[max(0, min(cell, CELLS)) :] += copies


@compiled
def missing(balance: Ints) -> int:
    """Number of missing companions, summed over all x."""
    return -int(np.minimum(balance, 0).sum())


@compiled
def companions(
    weight: Floats, limit: int, target: float, num_steps: int, seed: int, counts: Ints
) -> None:
    """Move slots between random experts until every heavy replica has a companion at `target`.
    Threshold accepting: a step may increase the number of missing companions by a threshold that
    falls to zero. `counts` [experts], at most `limit`, end with the fewest missing companions."""
    num_experts = len(weight)
    balance = np.zeros(CELLS, np.int64)
    trial = np.empty(CELLS, np.int64)
    split = np.empty(num_experts, np.int64)  # experts with two replicas or more
    num_split = 0
    for expert in range(num_experts):
        add_replicas(balance, weight[expert] / counts[expert], counts[expert], target)
        if counts[expert] > 1:
            split[num_split] = expert
            num_split += 1
    fewest = current = missing(balance)
    best = counts.copy()
    random = seed
    for step in range(num_steps):
        if fewest == 0 or num_split == 0:
            break
        random = (random * RANDOM_FACTOR + RANDOM_SHIFT) & RANDOM_MASK
        place = (random >> 8) % num_split
        loser = split[place]
        random = (random * RANDOM_FACTOR + RANDOM_SHIFT) & RANDOM_MASK
        winner = (random >> 8) % num_experts
        if loser == winner or counts[winner] >= limit:
            continue
        if weight[loser] > target * (counts[loser] - 1):
            continue  # each replica left would exceed the target
        trial[:] = balance
        for expert, change in ((loser, -1), (winner, 1)):
            copies = counts[expert]
            add_replicas(trial, weight[expert] / copies, -copies, target)
            copies += change
            add_replicas(trial, weight[expert] / copies, copies, target)
        result = missing(trial)
        if (result - current) * num_steps > FIRST_THRESHOLD * (num_steps - step):
            continue
        current = result
        balance[:] = trial
        counts[loser] -= 1
        counts[winner] += 1
        if counts[loser] == 1:
            num_split -= 1
            split[place] = split[num_split]
        if counts[winner] == 2:
            split[num_split] = winner
            num_split += 1
        if current < fewest:
            fewest = current
            best[:] = counts
    counts[:] = best


@compiled
def pack_box(weight: Floats, num_gpus: int, floor: float, tolerance: float, slots: Ints) -> float:
    """Fill `slots` with the experts 0 .. len(weight) - 1; returns the largest load of a GPU.
    Replicas in counts by quotient are folded, then swapped until that load is within `tolerance`
    of the bound or of `floor`, the load of another box: lower loads have no effect."""
    num_experts = len(weight)
    num_slots = len(slots)
    per_gpu = num_slots // num_gpus
    if per_gpu >= num_experts:
        # All GPUs hold the same experts, so all loads are the mean; duplicates are unavoidable.
        for slot in range(num_slots):
            slots[slot] = slot % per_gpu % num_experts
        return total(weight) / num_gpus
    counts = counts_by_quotient(weight, num_slots, num_gpus)
    bound = max(floor, total(weight) / num_gpus, (weight / counts).max())
    return pack(weight, counts, num_gpus, bound * (1.0 + tolerance), slots)


@compiled
def pack_pairs(
    weight: Floats,
    num_gpus: int,
    bound: float,
    tolerance: float,
    num_steps: int,
    seed: int,
    slots: Ints,
) -> float:
    """Fill `slots`, two per GPU, after a search over counts; returns the hottest GPU's load. The
    search lowers the largest folded pair by bisection, in at most ten turns, until it is at most
    `bound` (1 + tolerance): a load that is reached is the new upper end, a target that is not the
    new lower end."""
    counts = counts_by_quotient(weight, len(slots), num_gpus)
    best = heaviest_pair(weight, counts)
    trial = counts.copy()
    low = bound
    for turn in range(10):
        if best <= bound * (1.0 + tolerance) or best <= low * (1.0 + tolerance):
            break
        target = 0.5 * (low + best)
        trial[:] = counts
        companions(weight, num_gpus, target, num_steps, seed + turn, trial)
        reached = heaviest_pair(weight, trial)
        if reached < best:
            best = reached
            counts[:] = trial
        if best > target:
            low = target
    return pack(weight, counts, num_gpus, bound * (1.0 + tolerance), slots)


@compiled
def pack_with_companions(
    weight: Floats,
    num_gpus: int,
    bound: float,
    tolerance: float,
    num_kept: int,
    num_places: int,
    seed: int,
    starts: Ints,
    tops: Floats,
) -> int:
    """Fill `starts` from row 1 on with packings of other counts; returns the number of rows in use.

    `num_kept` increasing numbers of slots are withheld from the quotient method, as long as no
    replica exceeds the bound; they split light experts, each from `num_places` different places
    on. Fills `tops` [rows] with the loads of the hottest GPUs. Stops at a packing within the
    tolerance.
    """
    num_experts = len(weight)
    num_slots = starts.shape[1]
    goal = bound * (1.0 + tolerance)
    ascending = np.argsort(weight, kind="mergesort")
    most = num_slots - slots_at(weight, bound * (1.0 + 1e-9))
    # Every seed tries other numbers and places: multiples of the golden ratio are evenly spread.
    jitter = (seed * 0.6180339887498949) % 1.0
    rows = 1
    previous = 0
    for step in range(num_kept):
        kept = int(np.ceil(most * (step + 1 - jitter) / num_kept))
        if kept <= previous or kept > num_slots - num_experts:
            continue
        previous = kept
        for position in range(num_places):
            place = int((position + jitter) * num_experts / num_places)
            counts = counts_with_companions(weight, num_slots, kept, num_gpus, ascending, place)
            tops[rows] = pack(weight, counts, num_gpus, goal, starts[rows])
            rows += 1
            if tops[rows - 1] <= goal:
                return rows
    return rows


@compiled
def heaviest_pair(weight: Floats, counts: Ints) -> float:
    """Largest load of a pair if these replicas are folded."""
    loads = np.sort(np.repeat(weight / counts, counts))
    return (loads + loads[::-1]).max()


#: Largest number of slots of a box with a complete search.
MOST_EXACT_SLOTS = 12
#: Number of tried placements of single replicas after which a complete search gives up.
MAX_EXACT_STEPS = 60_000


@compiled
def exact_box(
    weight: Floats, num_gpus: int, top: float, twins: bool, slots: Ints
) -> tuple[float, bool]:
    """Search for a load below `top`, and fill `slots` if one exists. An expert may be twice on one
    GPU only if `twins` are allowed. Returns the best load of the hottest GPU and whether it is the
    optimum."""
    num_experts = len(weight)
    extra = np.zeros(num_experts, np.int64)  # slots of each expert beyond its first
    extra[0] = len(slots) - num_experts
    steps = MAX_EXACT_STEPS
    while True:
        unit = weight / (extra + 1)
        if (twins or extra.max() < num_gpus) and unit.max() < top:
            top, steps = exact_packing(extra, unit, num_gpus, top, steps, twins, slots)
        if steps <= 0:
            return top, False
        # The next distribution of these slots over the experts.
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


@compiled
def exact_packing(
    extra: Ints,
    unit: Floats,
    num_gpus: int,
    top: float,
    steps: int,
    twins: bool,
    slots: Ints,
) -> tuple[float, int]:
    """Depth-first search, heaviest replica first, for the best packing of `extra` + 1 replicas with
    a load below `top`; fills `slots`. An expert may be twice on one GPU only if `twins` are
    allowed. Returns the load reached (`top` if nothing better exists) and the remaining steps."""
    num_slots = len(slots)
    per_gpu = num_slots // num_gpus
    order = np.argsort(-unit, kind="mergesort")
    replicas = np.repeat(order, extra[order] + 1)
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
                first = num_gpus  # empty GPUs are interchangeable: one is enough to try
        elif depth > 0 and replicas[depth - 1] == expert:
            # GPUs of copies ascend, so that each set of GPUs is tried once.
            first = chosen[depth - 1] + (0 if twins else 1)
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
        top = load.max()
        held[:] = 0
        for slot in range(num_slots):
            slots[chosen[slot] * per_gpu + held[chosen[slot]]] = replicas[slot]
            held[chosen[slot]] += 1
    return top, steps
