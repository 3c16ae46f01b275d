"""Descent from a packing: swaps and replica shifts under the potential sum max(0, load - T)^2.

A shift takes a slot away from one expert (its other replicas grow) and gives it to another (all
its replicas shrink). `where` [experts x GPUs] lists the GPUs of each expert's replicas. The rest is
as in `packing`.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Flags, Floats, Ints, compiled
from moemesh.balance.packing import add_up, holds, is_second, largest, swap

NO_MOVE, SWAP, SHIFT = 0, 1, 2
#: Potentials closer than this, relative to T squared, are equal.
EQUAL = 1e-12
#: Exchanges of two replicas for two are looked at where these are not more (GPUs x slots^4).
MAX_DOUBLE_SWAPS = 200_000


@compiled
def over(load: float, limit: float) -> float:
    """The potential of one GPU."""
    return (load - limit) * (load - limit) if load > limit else 0.0


@compiled
def potential(load: Floats, limit: float) -> float:
    """The potential of all GPUs."""
    result = 0.0
    for gpu in range(len(load)):
        result += over(load[gpu], limit)
    return result


@compiled
def polish(
    weight: Floats,
    counts: Ints,
    limit: float,
    goal: float,
    max_moves: int,
    swap_price: float,
    slots: Ints,
    unit: Floats,
    load: Floats,
) -> float:
    """Best moves of the hottest GPU until nothing is over `limit` or the largest load is `goal`.

    When no move of the hottest GPU lowers the potential, the next one's turn comes. A swap counts
    for `swap_price` shifts. Leaves the placement with the smallest largest load in `slots`,
    `counts`, `unit`, `load`, and returns that load.
    """
    num_experts = len(weight)
    num_gpus = len(load)
    per_gpu = len(slots) // num_gpus
    # A foreign placement may have more copies than GPUs.
    where = np.empty((num_experts, max(num_gpus, counts.max())), np.int64)
    locate(slots, num_experts, per_gpu, where)
    stuck = np.zeros(num_gpus, np.bool_)
    gain = np.empty(num_experts)
    cost = np.empty(num_experts)
    best_slots = slots.copy()
    best = largest(load)
    for _ in range(max_moves):
        hot = hottest(load, stuck, limit)
        if hot < 0 or best <= goal:
            break
        price_splits(weight, counts, unit, load, where, limit, gain, cost)
        kind, first, second = best_move(
            hot, weight, counts, unit, load, gain, cost, limit, swap_price, slots
        )
        third, fourth = -1, -1
        if kind == NO_MOVE:
            first, second, third, fourth = best_double_swap(hot, unit, load, limit, slots)
            if first < 0:
                stuck[hot] = True
                continue
            kind = SWAP
        stuck[:] = False
        if kind == SWAP:
            exchange(slots, unit, load, where, counts, first, second)
            if third >= 0:
                exchange(slots, unit, load, where, counts, third, fourth)
        else:
            before = potential(load, limit)
            loser = slots[first]
            shift(first, second, weight, counts, unit, load, where, slots)
            # The estimate leaves out GPUs that hold both experts; there it can be wrong.
            if potential(load, limit) >= before - EQUAL * limit * limit:
                shift(first, loser, weight, counts, unit, load, where, slots)
                stuck[hot] = True
        top = largest(load)
        if top < best:
            best = top
            best_slots[:] = slots
    slots[:] = best_slots
    recount(slots, weight, counts, unit)
    add_up(slots, unit, load)
    return largest(load)


@compiled
def hottest(load: Floats, stuck: Flags, limit: float) -> int:
    """The hottest GPU over `limit` that is not stuck, or -1."""
    hot = -1
    for gpu in range(len(load)):
        if not stuck[gpu] and load[gpu] > limit and (hot < 0 or load[gpu] > load[hot]):
            hot = gpu
    return hot


@compiled
def locate(slots: Ints, num_experts: int, per_gpu: int, where: Ints) -> None:
    """Fill `where`."""
    found = np.zeros(num_experts, np.int64)
    for slot in range(len(slots)):
        expert = slots[slot]
        where[expert, found[expert]] = slot // per_gpu
        found[expert] += 1


@compiled
def exchange(
    slots: Ints, unit: Floats, load: Floats, where: Ints, counts: Ints, first: int, second: int
) -> None:
    """Swap two slots of different GPUs, and keep `where` right."""
    per_gpu = len(slots) // len(load)
    relocate(where, counts, slots[first], first // per_gpu, second // per_gpu)
    relocate(where, counts, slots[second], second // per_gpu, first // per_gpu)
    swap(slots, unit, load, first, second)


@compiled
def relocate(where: Ints, counts: Ints, expert: int, source: int, target: int) -> None:
    """Note that a replica went from one GPU to another."""
    for copy in range(counts[expert]):
        if where[expert, copy] == source:
            where[expert, copy] = target
            return


@compiled
def recount(slots: Ints, weight: Floats, counts: Ints, unit: Floats) -> None:
    """Fill `counts` and `unit` from what lies in the slots."""
    counts[:] = 0
    for slot in range(len(slots)):
        counts[slots[slot]] += 1
    for expert in range(len(weight)):
        unit[expert] = weight[expert] / counts[expert]


@compiled
def measured(weight: Floats, num_gpus: int, slots: Ints) -> tuple[Ints, Floats, Floats]:
    """`counts`, `unit` and `load` of what lies in the slots."""
    counts = np.empty(len(weight), np.int64)
    unit = np.empty(len(weight))
    load = np.empty(num_gpus)
    recount(slots, weight, counts, unit)
    add_up(slots, unit, load)
    return counts, unit, load


@compiled
def price_splits(
    weight: Floats,
    counts: Ints,
    unit: Floats,
    load: Floats,
    where: Ints,
    limit: float,
    gain: Floats,
    cost: Floats,
) -> None:
    """Effects elsewhere of one replica more (`gain`, <= 0) or less (`cost`, >= 0) of an expert.

    An expert that cannot get (or lose) a replica has an infinite price.
    """
    for expert in range(len(weight)):
        copies = counts[expert]
        gain[expert] = 0.0 if copies < len(load) else np.inf
        cost[expert] = 0.0 if copies > 1 else np.inf
        if copies < len(load):
            less = weight[expert] / (copies + 1) - unit[expert]
            for copy in range(copies):
                at = float(load[where[expert, copy]])
                if at > limit:
                    gain[expert] += over(at + less, limit) - over(at, limit)
        if copies > 1:
            more = weight[expert] / (copies - 1) - unit[expert]
            for copy in range(copies):
                at = float(load[where[expert, copy]])
                if at + more > limit:
                    cost[expert] += over(at + more, limit) - over(at, limit)


@compiled
def best_move(
    hot: int,
    weight: Floats,
    counts: Ints,
    unit: Floats,
    load: Floats,
    gain: Floats,
    cost: Floats,
    limit: float,
    swap_price: float,
    slots: Ints,
) -> tuple[int, int, int]:
    """(SWAP, slot, slot), (SHIFT, slot, expert that gets it) or (NO_MOVE, -1, -1)."""
    per_gpu = len(slots) // len(load)
    heat = load[hot]
    here = over(heat, limit)
    best = -EQUAL * limit * limit
    kind, first, second = NO_MOVE, -1, -1
    for slot in range(hot * per_gpu, (hot + 1) * per_gpu):
        expert = slots[slot]
        own = unit[expert]
        smaller = weight[expert] / (counts[expert] + 1)
        for other in range(len(slots)):
            there = other // per_gpu
            partner = slots[other]
            if there == hot or partner == expert:
                continue
            at = load[there]
            difference = own - unit[partner]
            if difference > 0.0 and at < heat:
                change = over(heat - difference, limit) - here
                change += over(at + difference, limit) - over(at, limit)
                change /= swap_price
                if (
                    change < best
                    and not holds(slots, there, per_gpu, expert)
                    and not holds(slots, hot, per_gpu, partner)
                ):
                    best, kind, first, second = change, SWAP, slot, other
            if counts[partner] > 1 and gain[expert] < 0.0:
                more = weight[partner] / (counts[partner] - 1) - unit[partner]
                change = gain[expert] + cost[partner] - over(at + more, limit)
                change += over(at - unit[partner] + smaller, limit)
                if change < best and not holds(slots, there, per_gpu, expert):
                    best, kind, first, second = change, SHIFT, other, expert
        if counts[expert] > 1:
            more = weight[expert] / (counts[expert] - 1) - own
            rest = cost[expert] - over(heat + more, limit)
            for partner in range(len(weight)):
                if partner == expert:
                    continue
                change = rest + gain[partner]
                change += over(heat - own + weight[partner] / (counts[partner] + 1), limit)
                if change < best and not holds(slots, hot, per_gpu, partner):
                    best, kind, first, second = change, SHIFT, slot, partner
    return kind, first, second


@compiled
def best_double_swap(
    hot: int, unit: Floats, load: Floats, limit: float, slots: Ints
) -> tuple[int, int, int, int]:
    """Slots of the best exchange of two replicas for two of another GPU: hot, other, hot, other.

    All -1 when none lowers the potential, or there are too many to look at.
    """
    per_gpu = len(slots) // len(load)
    found = (-1, -1, -1, -1)
    # With three slots two for two is one for one, seen from the other side.
    if per_gpu < 4 or len(load) * per_gpu**4 > MAX_DOUBLE_SWAPS:
        return found
    start = hot * per_gpu
    here = over(load[hot], limit)
    best = -EQUAL * limit * limit
    for there in range(len(load)):
        if load[there] >= load[hot]:
            continue
        base = there * per_gpu
        rest = here + over(load[there], limit)
        for one in range(start, start + per_gpu):
            if holds(slots, there, per_gpu, slots[one]):
                continue
            for two in range(one + 1, start + per_gpu):
                given = unit[slots[one]] + unit[slots[two]]
                if given <= 0.0 or holds(slots, there, per_gpu, slots[two]):
                    continue
                for three in range(base, base + per_gpu):
                    for four in range(three + 1, base + per_gpu):
                        difference = given - unit[slots[three]] - unit[slots[four]]
                        if difference <= 0.0:
                            continue
                        change = over(load[hot] - difference, limit) - rest
                        change += over(load[there] + difference, limit)
                        if (
                            change < best
                            and not holds(slots, hot, per_gpu, slots[three])
                            and not holds(slots, hot, per_gpu, slots[four])
                        ):
                            best = change
                            found = (one, three, two, four)
    return found


@compiled
def shift(
    slot: int,
    winner: int,
    weight: Floats,
    counts: Ints,
    unit: Floats,
    load: Floats,
    where: Ints,
    slots: Ints,
) -> None:
    """Give a slot to `winner`, and bring everything else up to date."""
    gpu = slot // (len(slots) // len(load))
    loser = slots[slot]
    counts[loser] -= 1
    load[gpu] -= unit[loser]
    found = 0
    while where[loser, found] != gpu:
        found += 1
    where[loser, found] = where[loser, counts[loser]]
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
def part_twins(
    weight: Floats, counts: Ints, limit: float, slots: Ints, unit: Floats, load: Floats
) -> int:
    """Give slots that hold a second copy on their GPU to other experts, at loads up to `limit`.

    Returns the number of second copies for which no expert could be found.
    """
    num_gpus = len(load)
    per_gpu = len(slots) // num_gpus
    where = np.empty((len(weight), len(slots)), np.int64)
    locate(slots, len(weight), per_gpu, where)
    left = 0
    for slot in range(len(slots)):
        gpu = slot // per_gpu
        twin = slots[slot]
        if not is_second(slots, per_gpu, slot):
            continue
        best = limit * (1.0 + EQUAL)
        winner = -1
        for expert in range(len(weight)):
            if counts[expert] >= num_gpus or holds(slots, gpu, per_gpu, expert):
                continue
            shift(slot, expert, weight, counts, unit, load, where, slots)
            top = largest(load)
            shift(slot, twin, weight, counts, unit, load, where, slots)
            if top < best:
                best = top
                winner = expert
        if winner < 0:
            left += 1
        else:
            shift(slot, winner, weight, counts, unit, load, where, slots)
    add_up(slots, unit, load)
    return left
