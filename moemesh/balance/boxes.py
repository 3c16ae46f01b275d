"""One box of GPUs (a node, or all): counts and packing together, near the bound.

`pack_box` is quick and almost always good enough from five slots per GPU on. What it leaves open,
`search_box` tries: the search over pairs (two slots per GPU); slots kept from the quotient method
to split light experts into small companions of heavy ones; and the descent of `polish`, from the
most promising packings first.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.bounds import box_bound
from moemesh.balance.compiled import Floats, Ints, entry, inner_loop
from moemesh.balance.counts import (
    counts_by_quotient,
    counts_with_companions,
    largest,
    slots_at,
    total,
)
from moemesh.balance.packing import add_up, pack, separate
from moemesh.balance.pairs import search_pairs
from moemesh.balance.polish import part_twins, polish, recount

#: What a search may cost: slots kept for light experts (how many numbers, from how many places of
#: the light experts), packings that are polished, moves of each, steps of the search over pairs.
BoxEffort = tuple[int, int, int, int, int]


@entry
def pack_box(weight: Floats, num_gpus: int, floor: float, tolerance: float, slots: Ints) -> float:
    """Fill `slots` with the experts 0 .. len(weight) - 1; returns the largest load of a GPU.

    Quotient counts, folded and swapped until the load is within `tolerance` of the bound, or of
    `floor`: below it nothing is gained (another box is that heavy anyway).
    """
    num_experts = len(weight)
    num_slots = len(slots)
    per_gpu = num_slots // num_gpus
    if per_gpu >= num_experts:
        # Every GPU alike, so all loads are the mean; copies on one GPU are unavoidable.
        for slot in range(num_slots):
            slots[slot] = slot % per_gpu % num_experts
        return total(weight) / num_gpus
    counts = np.empty(num_experts, np.int64)
    unit = np.empty(num_experts)
    load = np.empty(num_gpus)
    counts_by_quotient(weight, num_slots, num_gpus, counts)
    bound = max(floor, total(weight) / num_gpus)
    for expert in range(num_experts):
        bound = max(bound, weight[expert] / counts[expert])
    return pack(weight, counts, num_gpus, bound * (1.0 + tolerance), slots, unit, load)


@entry
def search_box(
    weight: Floats,
    num_gpus: int,
    bound: float,
    ceiling: float,
    tolerance: float,
    effort: BoxEffort,
    seed: int,
    slots: Ints,
) -> float:
    """Improve what `pack_box` put into `slots`; returns the largest load of a GPU.

    `bound` is a lower bound, or a load below which nothing is gained; the search raises it and ends
    within `tolerance` of it. Where it shows that `ceiling` cannot be undercut, the search ends at
    once.
    """
    num_slots = len(slots)
    num_kept, num_places, num_polished, max_moves, pair_steps = effort
    starts = np.empty((2 + num_kept * num_places, num_slots), np.int64)
    starts[0] = slots
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    recount(slots, weight, counts, unit)
    add_up(slots, unit, load)
    best = largest(load)
    if num_polished > 0:
        bound = box_bound(weight, num_slots, num_gpus, bound, best)
    if best <= bound * (1.0 + tolerance) or bound >= ceiling:
        return best
    if num_slots == 2 * num_gpus:
        counts_by_quotient(weight, num_slots, num_gpus, counts)
        search_pairs(weight, num_gpus, bound, tolerance, pair_steps, seed, counts)
        pack(weight, counts, num_gpus, bound * (1.0 + tolerance), starts[1], unit, load)
        rows = 2
    else:
        rows = pack_with_companions(
            weight, num_gpus, bound, tolerance, num_kept, num_places, seed, starts
        )
    return best_start(
        weight, num_gpus, bound, tolerance, num_polished, max_moves, starts[:rows], slots
    )


@inner_loop
def pack_with_companions(
    weight: Floats,
    num_gpus: int,
    bound: float,
    tolerance: float,
    num_kept: int,
    num_places: int,
    seed: int,
    starts: Ints,
) -> int:
    """Fill `starts` from row 1 on with packings of other counts; returns the rows in use.

    Ever more slots are kept from the quotient method, as far as no replica gets heavier than the
    bound; for each number, light experts are split from `num_places` places on. Stops at a packing
    that is good enough.
    """
    num_experts = len(weight)
    num_slots = starts.shape[1]
    goal = bound * (1.0 + tolerance)
    counts = np.empty(num_experts, np.int64)
    unit = np.empty(num_experts)
    load = np.empty(num_gpus)
    ascending = np.argsort(weight, kind="mergesort")
    most = num_slots - slots_at(weight, bound * (1.0 + 1e-9))
    jitter = (seed * 0.6180339887498949) % 1.0
    rows = 1
    before = 0
    for step in range(num_kept):
        kept = int(np.ceil(most * (step + 1 - jitter) / num_kept))
        if kept <= before or kept > num_slots - num_experts:
            continue
        before = kept
        for position in range(num_places):
            place = int((position + jitter) * num_experts / num_places)
            counts_with_companions(weight, num_slots, kept, num_gpus, ascending, place, counts)
            rows += 1
            if pack(weight, counts, num_gpus, goal, starts[rows - 1], unit, load) <= goal:
                return rows
    return rows


@inner_loop
def best_start(
    weight: Floats,
    num_gpus: int,
    bound: float,
    tolerance: float,
    num_polished: int,
    max_moves: int,
    starts: Ints,
    slots: Ints,
) -> float:
    """Polish the most promising starts, until one is good enough; fills `slots` with the best."""
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    tops = np.empty(len(starts))
    for row in range(len(starts)):
        recount(starts[row], weight, counts, unit)
        add_up(starts[row], unit, load)
        tops[row] = largest(load)
    best = np.inf
    goal = bound * (1.0 + tolerance)
    order = np.argsort(tops, kind="mergesort")
    for place in range(len(starts)):
        row = order[place]
        top = float(tops[row])
        if place < num_polished and top > goal:
            recount(starts[row], weight, counts, unit)
            add_up(starts[row], unit, load)
            top = polish(weight, counts, bound, goal, max_moves, 1.0, starts[row], unit, load)
        if top < best:
            best = top
            slots[:] = starts[row]
        if best <= goal or place > num_polished:
            break
    return best


@entry
def mend_box(
    weight: Floats, num_gpus: int, limit: float, max_moves: int, slots: Ints
) -> tuple[float, int]:
    """Rid a foreign placement of second copies on a GPU, and polish it, at most at load `limit`.

    Returns the largest load and the number of second copies that are left.
    """
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    before = slots.copy()
    left = 0
    for _ in range(3):
        recount(slots, weight, counts, unit)
        add_up(slots, unit, load)
        left = part_twins(weight, counts, limit, slots, unit, load)
        polish(weight, counts, 0.999 * limit, 0.0, max_moves, 1.0, slots, unit, load)
        if left == 0:
            break
    if left > 0:
        # What swapping can do if the limit may be missed on the way.
        separate(slots, unit, load)
        polish(weight, counts, limit, limit, max_moves, 1.0, slots, unit, load)
        if largest(load) > limit:
            slots[:] = before
    recount(slots, weight, counts, unit)
    add_up(slots, unit, load)
    return largest(load), count_twins(slots, num_gpus)


@inner_loop
def count_twins(slots: Ints, num_gpus: int) -> int:
    """Second and further copies of an expert on one GPU."""
    per_gpu = len(slots) // num_gpus
    twins = 0
    for slot in range(len(slots)):
        for earlier in range(slot - slot % per_gpu, slot):
            if slots[earlier] == slots[slot]:
                twins += 1
                break
    return twins
