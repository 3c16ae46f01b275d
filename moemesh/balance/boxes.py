"""One box of GPUs (a node, or all): counts and packing together, near the bound.

`pack_box` is quick and almost always good enough from five slots per GPU on. For what it leaves
open there are starts with other counts (`pack_pairs`, `pack_with_companions`) and the descent of
`polish`; `search` calls them in turn.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, entry, inner_loop
from moemesh.balance.counts import (
    counts_by_quotient,
    counts_with_companions,
    slots_at,
    total,
)
from moemesh.balance.packing import add_up, pack, separate
from moemesh.balance.pairs import search_pairs
from moemesh.balance.polish import part_twins, polish, recount


@inner_loop
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
def pack_pairs(
    weight: Floats,
    num_gpus: int,
    bound: float,
    tolerance: float,
    num_steps: int,
    seed: int,
    slots: Ints,
) -> float:
    """Fill `slots`, two per GPU, after a search over counts; returns the hottest GPU's load."""
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    counts_by_quotient(weight, len(slots), num_gpus, counts)
    search_pairs(weight, num_gpus, bound, tolerance, num_steps, seed, counts)
    return pack(weight, counts, num_gpus, bound * (1.0 + tolerance), slots, unit, load)


@entry
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
    """Fill `starts` from row 1 on with packings of other counts; returns the rows in use.

    Ever more slots are kept from the quotient method, as far as no replica gets heavier than the
    bound; for each number, light experts are split from `num_places` places on. `tops` [rows] get
    the loads of the hottest GPUs. Stops at a packing that is good enough.
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
            tops[rows] = pack(weight, counts, num_gpus, goal, starts[rows], unit, load)
            rows += 1
            if tops[rows - 1] <= goal:
                return rows
    return rows


@entry
def polish_box(
    weight: Floats,
    num_gpus: int,
    limit: float,
    goal: float,
    max_moves: int,
    swap_price: float,
    slots: Ints,
) -> float:
    """`polish` what lies in `slots`; returns the load of the hottest GPU."""
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    recount(slots, weight, counts, unit)
    add_up(slots, unit, load)
    return polish(weight, counts, limit, goal, max_moves, swap_price, slots, unit, load)


@entry
def part_box(weight: Floats, num_gpus: int, limit: float, by_swaps: bool, slots: Ints) -> int:
    """Part experts that are twice on a GPU; returns how often that is still so.

    By giving slots to other experts, no GPU over `limit`; or by swaps, whatever the load.
    """
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    recount(slots, weight, counts, unit)
    add_up(slots, unit, load)
    if by_swaps:
        separate(slots, unit, load)
    else:
        part_twins(weight, counts, limit, slots, unit, load)
    return count_twins(slots, num_gpus)


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
