"""Descent from a packing: swaps and replica shifts under the potential sum max(0, load - T)^2.

A shift takes a slot away from one expert (its other replicas grow) and gives it to another (all
its replicas shrink).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.packing import add_up, holds, is_second, separate, swap, total

NO_MOVE, SWAP, SHIFT = 0, 1, 2
#: Difference below which potentials count as equal, relative to T squared.
EQUAL = 1e-12
#: Number of exchanges of two replicas for two (GPUs x slots^4) above which none is tried.
MAX_DOUBLE_SWAPS = 200_000


class PlacedReplicas(NamedTuple):
    """A placement with derived tables. `weight` [experts] are loads, `counts` [experts] numbers of
    replicas; `where` [experts, at least GPUs] lists the GPUs of each expert's replicas; `slots`,
    `unit` and `load` are as in `packing`."""

    weight: Floats
    counts: Ints
    where: Ints
    slots: Ints
    unit: Floats
    load: Floats


@compiled
def placed(weight: Floats, num_gpus: int, slots: Ints) -> PlacedReplicas:
    """The placement in `slots`, which are not copied: moves change them."""
    counts, unit, load = measured(weight, num_gpus, slots)
    # A placement of the user may have more copies of an expert than GPUs.
    where = np.empty((len(weight), num_gpus + counts.max()), np.int64)
    listed = np.zeros(len(weight), np.int64)
    for slot in range(len(slots)):
        expert = slots[slot]
        where[expert, listed[expert]] = slot // (len(slots) // num_gpus)
        listed[expert] += 1
    return PlacedReplicas(weight, counts, where, slots, unit, load)


@compiled
def over(load: float, limit: float) -> float:
    """Potential of one GPU: the square of its load beyond `limit`."""
    return (load - limit) * (load - limit) if load > limit else 0.0


@compiled
def potential(load: Floats, limit: float) -> float:
    """Potential of all GPUs."""
    excess = np.maximum(load - limit, 0.0)
    return total(excess * excess)


@compiled
def polish(
    weight: Floats,
    num_gpus: int,
    limit: float,
    goal: float,
    max_moves: int,
    swap_price: float,
    slots: Ints,
) -> float:
    """Best moves of the hottest GPU, until no GPU is over `limit`, the largest load is at most
    `goal`, no move helps, or `max_moves` were made.

    If no move of the hottest GPU lowers the potential, the next hottest one is tried. A swap costs
    `swap_price` shifts. At the end `slots` has the placement with the least largest load, which is
    returned.
    """
    replicas = placed(weight, num_gpus, slots)
    load = replicas.load
    stuck = np.zeros(num_gpus, np.bool_)
    best_slots = slots.copy()
    best = load.max()
    for _ in range(max_moves):
        hot = int(np.argmax(np.where(stuck, -1.0, load)))
        if stuck[hot] or load[hot] <= limit or best <= goal:
            break
        kind, first, second = best_move(replicas, hot, limit, swap_price)
        third, fourth = -1, -1
        if kind == NO_MOVE:
            first, second, third, fourth = best_double_swap(replicas, hot, limit)
            if first < 0:
                stuck[hot] = True
                continue
            kind = SWAP
        stuck[:] = False
        if kind == SWAP:
            exchange(replicas, first, second)
            if third >= 0:
                exchange(replicas, third, fourth)
        else:
            before = potential(load, limit)
            loser = slots[first]
            shift(replicas, first, second)
            # The estimate ignores that a GPU may hold both experts, so it can be wrong.
            if potential(load, limit) >= before - EQUAL * limit * limit:
                shift(replicas, first, loser)
                stuck[hot] = True
        top = load.max()
        if top < best:
            best = top
            best_slots[:] = slots
    slots[:] = best_slots
    return heaviest_gpu(weight, slots, num_gpus)


@compiled
def exchange(replicas: PlacedReplicas, first: int, second: int) -> None:
    """Swap two slots of different GPUs."""
    slots, load = replicas.slots, replicas.load
    per_gpu = len(slots) // len(load)
    relocate(replicas, slots[first], first // per_gpu, second // per_gpu)
    relocate(replicas, slots[second], second // per_gpu, first // per_gpu)
    swap(slots, replicas.unit, load, first, second)


@compiled
def relocate(replicas: PlacedReplicas, expert: int, source: int, target: int) -> None:
    """Update the table for a replica that moves from one GPU to another."""
    for copy in range(replicas.counts[expert]):
        if replicas.where[expert, copy] == source:
            replicas.where[expert, copy] = target
            return


@compiled
def measured(weight: Floats, num_gpus: int, slots: Ints) -> tuple[Ints, Floats, Floats]:
    """`counts`, `unit` and `load` of the experts in the slots."""
    counts = np.bincount(slots, minlength=len(weight))
    unit, load = weight / counts, np.empty(num_gpus)
    add_up(slots, unit, load)
    return counts, unit, load


@compiled
def heaviest_gpu(weight: Floats, slots: Ints, num_gpus: int) -> float:
    """Largest load of a GPU, with every expert's load split evenly over its replicas."""
    return measured(weight, num_gpus, slots)[2].max()


@compiled
def price_splits(replicas: PlacedReplicas, limit: float) -> tuple[Floats, Floats]:
    """Changes [experts] of the potential of the GPUs with an expert, if it gets one replica more
    (<= 0), and if it loses one (>= 0). An expert that cannot get (or lose) one has an infinite
    price."""
    weight, counts, where, _, unit, load = replicas
    gain = np.empty(len(weight))
    cost = np.empty(len(weight))
    for expert in range(len(weight)):
        copies = counts[expert]
        gain[expert] = 0.0 if copies < len(load) else np.inf
        cost[expert] = 0.0 if copies > 1 else np.inf
        if copies < len(load):
            change = weight[expert] / (copies + 1) - unit[expert]
            for copy in range(copies):
                gpu_load = float(load[where[expert, copy]])
                if gpu_load > limit:
                    gain[expert] += over(gpu_load + change, limit) - over(gpu_load, limit)
        if copies > 1:
            change = weight[expert] / (copies - 1) - unit[expert]
            for copy in range(copies):
                gpu_load = float(load[where[expert, copy]])
                if gpu_load + change > limit:
                    cost[expert] += over(gpu_load + change, limit) - over(gpu_load, limit)
    return gain, cost


@compiled
def best_move(
    replicas: PlacedReplicas, hot: int, limit: float, swap_price: float
) -> tuple[int, int, int]:
    """The best move: (SWAP, slot, slot), (SHIFT, slot, its new expert) or (NO_MOVE, -1, -1)."""
    weight, counts, _, slots, unit, load = replicas
    gain, cost = price_splits(replicas, limit)
    per_gpu = len(slots) // len(load)
    hot_load = load[hot]
    hot_potential = over(hot_load, limit)
    best = -EQUAL * limit * limit
    kind, first, second = NO_MOVE, -1, -1
    for slot in range(hot * per_gpu, (hot + 1) * per_gpu):
        expert = slots[slot]
        load_of_replica = unit[expert]
        split_load = weight[expert] / (counts[expert] + 1)
        for other in range(len(slots)):
            peer = other // per_gpu
            partner = slots[other]
            if peer == hot or partner == expert:
                continue
            peer_load = load[peer]
            difference = load_of_replica - unit[partner]
            # Swap the two replicas.
            if difference > 0.0 and peer_load < hot_load:
                change = over(hot_load - difference, limit) - hot_potential
                change += over(peer_load + difference, limit) - over(peer_load, limit)
                change /= swap_price
                if (
                    change < best
                    and not holds(slots, peer, per_gpu, expert)
                    and not holds(slots, hot, per_gpu, partner)
                ):
                    best, kind, first, second = change, SWAP, slot, other
            # Give the partner's slot to this expert, whose replica on the hot GPU shrinks.
            if counts[partner] > 1 and gain[expert] < 0.0:
                growth = weight[partner] / (counts[partner] - 1) - unit[partner]
                change = gain[expert] + cost[partner] - over(peer_load + growth, limit)
                change += over(peer_load - unit[partner] + split_load, limit)
                if change < best and not holds(slots, peer, per_gpu, expert):
                    best, kind, first, second = change, SHIFT, other, expert
        # Give the slot on the hot GPU to another expert.
        if counts[expert] > 1:
            growth = weight[expert] / (counts[expert] - 1) - load_of_replica
            cost_elsewhere = cost[expert] - over(hot_load + growth, limit)
            for partner in range(len(weight)):
                if partner == expert:
                    continue
                change = cost_elsewhere + gain[partner]
                change += over(
                    hot_load - load_of_replica + weight[partner] / (counts[partner] + 1), limit
                )
                if change < best and not holds(slots, hot, per_gpu, partner):
                    best, kind, first, second = change, SHIFT, slot, partner
    return kind, first, second


@compiled
def best_double_swap(replicas: PlacedReplicas, hot: int, limit: float) -> tuple[int, int, int, int]:
    """Slots of the best exchange of two replicas for two of another GPU, as two swaps: on the hot
    GPU, on the other, on the hot GPU, on the other. All are -1 if no exchange lowers the potential,
    or if there are too many to try."""
    slots, unit, load = replicas.slots, replicas.unit, replicas.load
    per_gpu = len(slots) // len(load)
    best_slots = (-1, -1, -1, -1)
    # With three slots per GPU an exchange of two for two equals one of one for one.
    if per_gpu < 4 or len(load) * per_gpu**4 > MAX_DOUBLE_SWAPS:
        return best_slots
    start = hot * per_gpu
    hot_potential = over(load[hot], limit)
    best = -EQUAL * limit * limit
    for peer in range(len(load)):
        if load[peer] >= load[hot]:
            continue
        base = peer * per_gpu
        rest = hot_potential + over(load[peer], limit)
        for first in range(start, start + per_gpu):
            if holds(slots, peer, per_gpu, slots[first]):
                continue
            for second in range(first + 1, start + per_gpu):
                given = unit[slots[first]] + unit[slots[second]]
                if given <= 0.0 or holds(slots, peer, per_gpu, slots[second]):
                    continue
                for third in range(base, base + per_gpu):
                    for fourth in range(third + 1, base + per_gpu):
                        difference = given - unit[slots[third]] - unit[slots[fourth]]
                        if difference <= 0.0:
                            continue
                        change = over(load[hot] - difference, limit) - rest
                        change += over(load[peer] + difference, limit)
                        if (
                            change < best
                            and not holds(slots, hot, per_gpu, slots[third])
                            and not holds(slots, hot, per_gpu, slots[fourth])
                        ):
                            best = change
                            best_slots = (first, third, second, fourth)
    return best_slots


@compiled
def shift(replicas: PlacedReplicas, slot: int, winner: int) -> None:
    """Assign a slot to the expert `winner`, and update all tables."""
    weight, counts, where, slots, unit, load = replicas
    gpu = slot // (len(slots) // len(load))
    loser = slots[slot]
    counts[loser] -= 1
    load[gpu] -= unit[loser]
    copy_index = 0
    while where[loser, copy_index] != gpu:
        copy_index += 1
    where[loser, copy_index] = where[loser, counts[loser]]
    for expert in (loser, winner):
        copies = counts[expert] + (1 if expert == winner else 0)
        for copy in range(counts[expert]):
            load[where[expert, copy]] += weight[expert] / copies - unit[expert]
        unit[expert] = weight[expert] / copies
    where[winner, counts[winner]] = gpu
    counts[winner] += 1
    load[gpu] += unit[winner]
    slots[slot] = winner


@compiled
def part_twins(weight: Floats, num_gpus: int, limit: float, by_swaps: bool, slots: Ints) -> int:
    """Remove second replicas of an expert from a GPU; returns the number that remain. Their slots
    go to other experts, with no GPU over `limit`; or, with `by_swaps`, they are swapped with
    replicas of other GPUs, at any load."""
    per_gpu = len(slots) // num_gpus
    replicas = placed(weight, num_gpus, slots)
    if by_swaps:
        separate(slots, replicas.unit, replicas.load)
    for slot in range(0 if by_swaps else len(slots)):
        gpu = slot // per_gpu
        twin = slots[slot]
        if not is_second(slots, per_gpu, slot):
            continue
        best = limit * (1.0 + EQUAL)
        winner = -1
        for expert in range(len(weight)):
            if replicas.counts[expert] >= num_gpus or holds(slots, gpu, per_gpu, expert):
                continue
            shift(replicas, slot, expert)
            top = replicas.load.max()
            shift(replicas, slot, twin)
            if top < best:
                best = top
                winner = expert
        if winner >= 0:
            shift(replicas, slot, winner)
    left = 0
    for slot in range(len(slots)):
        left += is_second(slots, per_gpu, slot)
    return left
