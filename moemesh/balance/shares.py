"""A fixed placement and a known load: what share of each expert's load each replica takes.

The linear program "least load of the hottest GPU" (and then of the next hottest, and so on) is
solved exactly by flows. At a trial load T the experts pour their load into their GPUs, each up to
T. What does not fit shows a set of experts X that share too few GPUs N(X): then T must be at least
load(X) / |N(X)|, which is the next trial (discrete Newton). When all fits, the GPUs of X are full,
and the same is done with what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moemesh.balance.compiled import Flags, Floats, Ints, entry, fast, inner_loop
from moemesh.balance.inputs import check_loads, check_placement, like, scaled
from moemesh.balance.rebalance import balance_of

#: Loads below this share of the trial load are rounding.
ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Split:
    """How known loads are split over the replicas of a placement.

    `shares` [layers, slots] of its expert's load that each slot takes (an expert's sum to 1),
    `gpu_loads` [layers, GPUs], and `balance` [layers], the hottest GPU's load over the mean.
    """

    shares: Any
    gpu_loads: Any
    balance: tuple[float, ...]


def split_loads(loads: Any, placement: Any, *, num_gpus: int) -> Split:
    """Split known loads over the replicas of a fixed placement, best possible for every GPU.

    `loads` [layers, experts], `placement` [layers, slots] of logical experts. No other split has a
    less loaded hottest GPU, and among those none a less loaded second, and so on. Results are of
    the kind of `loads`. Raises ValueError.
    """
    given = check_loads(loads, "loads")
    slots = check_placement(placement, given.shape[1], num_gpus, len(given), "placement")
    flow = np.zeros(slots.shape)
    weights = scaled(given)
    for layer in range(len(given)):
        fast(fill_shares)(weights[layer], slots[layer], num_gpus, flow[layer])
    whole = np.take_along_axis(weights, slots, axis=1)
    copies = np.stack([np.bincount(row, minlength=given.shape[1])[row] for row in slots])
    shares = np.divide(flow, whole, out=1.0 / copies, where=whole > 0)
    value = shares * np.take_along_axis(given, slots, axis=1)
    per_gpu = value.reshape(len(slots), num_gpus, -1).sum(axis=2)
    kinds = like(loads, shares, per_gpu)
    return Split(shares=kinds[0], gpu_loads=kinds[1], balance=tuple(balance_of(per_gpu).tolist()))


@entry
def fill_shares(weight: Floats, slots: Ints, num_gpus: int, flow: Floats) -> None:
    """Fill `flow` [slots] with the load of each slot of one layer."""
    num_experts = len(weight)
    per_gpu = len(slots) // num_gpus
    start = np.zeros(num_experts + 1, np.int64)  # where the slots of each expert begin in `own`
    for slot in range(len(slots)):
        start[slots[slot] + 1] += 1
    for expert in range(num_experts):
        start[expert + 1] += start[expert]
    fill = start.copy()
    own = np.empty(len(slots), np.int64)
    for slot in range(len(slots)):
        own[fill[slots[slot]]] = slot
        fill[slots[slot]] += 1
    open_expert = weight > 0.0
    open_gpu = np.ones(num_gpus, np.bool_)
    flow[:] = 0.0
    while True:
        load = 0.0
        for expert in range(num_experts):
            if open_expert[expert]:
                load += weight[expert]
        if load == 0.0:
            return
        trial = load / open_gpu.sum()
        tight_expert = open_expert.copy()
        tight_gpu = open_gpu.copy()
        while True:
            for slot in range(len(slots)):
                if open_expert[slots[slot]]:
                    flow[slot] = 0.0
            seen_expert, seen_gpu, poured = pour(
                weight, slots, per_gpu, start, own, open_expert, open_gpu, trial, flow
            )
            if poured:
                break
            tight_expert = seen_expert
            tight_gpu = seen_gpu
            load = 0.0
            for expert in range(num_experts):
                if seen_expert[expert]:
                    load += weight[expert]
            following = load / seen_gpu.sum()
            if following <= trial * (1.0 + ROUNDING):
                trial *= 1.0 + 4.0 * ROUNDING  # only rounding is missing
            else:
                trial = following
        for expert in range(num_experts):
            open_expert[expert] = open_expert[expert] and not tight_expert[expert]
        for gpu in range(num_gpus):
            open_gpu[gpu] = open_gpu[gpu] and not tight_gpu[gpu]


@inner_loop
def pour(
    weight: Floats,
    slots: Ints,
    per_gpu: int,
    start: Ints,
    own: Ints,
    open_expert: Flags,
    open_gpu: Flags,
    trial: float,
    flow: Floats,
) -> tuple[Flags, Flags, bool]:
    """Pour open experts into open GPUs up to `trial` each, along shortest augmenting paths.

    Returns (experts, GPUs, False) that share too little room, or (..., True) when all fits.
    """
    num_gpus = len(open_gpu)
    room = np.full(num_gpus, trial)
    came_by = np.empty(num_gpus, np.int64)  # slot through which a GPU was reached
    back_by = np.empty(len(weight), np.int64)  # slot whose flow an expert would take back
    queue = np.empty(len(weight), np.int64)
    seen_expert = np.zeros(len(weight), np.bool_)
    seen_gpu = np.zeros(num_gpus, np.bool_)
    for source in range(len(weight)):
        left = weight[source] if open_expert[source] else 0.0
        while left > ROUNDING * trial:
            seen_expert[:] = False
            seen_gpu[:] = False
            seen_expert[source] = True
            queue[0] = source
            head, tail, end = 0, 1, -1
            while head < tail and end < 0:
                expert = queue[head]
                head += 1
                for index in range(start[expert], start[expert + 1]):
                    gpu = own[index] // per_gpu
                    if seen_gpu[gpu] or not open_gpu[gpu]:
                        continue
                    seen_gpu[gpu] = True
                    came_by[gpu] = own[index]
                    if room[gpu] > ROUNDING * trial:
                        end = gpu
                        break
                    for slot in range(gpu * per_gpu, (gpu + 1) * per_gpu):
                        other = slots[slot]
                        if flow[slot] > 0.0 and open_expert[other] and not seen_expert[other]:
                            seen_expert[other] = True
                            back_by[other] = slot
                            queue[tail] = other
                            tail += 1
            if end < 0:
                return seen_expert, seen_gpu, False
            amount = min(left, room[end])
            expert = slots[came_by[end]]
            while expert != source:
                amount = min(amount, flow[back_by[expert]])
                expert = slots[came_by[back_by[expert] // per_gpu]]
            room[end] -= amount
            left -= amount
            flow[came_by[end]] += amount
            expert = slots[came_by[end]]
            while expert != source:
                flow[back_by[expert]] -= amount
                through = came_by[back_by[expert] // per_gpu]
                flow[through] += amount
                expert = slots[through]
    return seen_expert, seen_gpu, True
