"""Replica counts of a box with two slots per GPU: every heavy replica needs a light companion.

Given the replicas, the best pairing is a fold, the heaviest with the lightest. At a target T, a
replica heavier than T / 2 needs a companion of at most T minus its load. By Hall's theorem all find
one if, for every x, at most as many replicas are heavier than T - x as are at most x. Both are
counted on a grid of `CELLS` values of x, rounded to the safe side, and a search by threshold
accepting drives the number of missing companions to zero.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled

CELLS = 128
#: Missing companions that a step may add at the beginning of the search.
FIRST_THRESHOLD = 3
#: Random numbers of the search: a linear congruential generator on 31 bits.
RANDOM_FACTOR, RANDOM_SHIFT, RANDOM_MASK = 1103515245, 12345, 0x7FFFFFFF


@compiled
def place_on_grid(load: float, target: float) -> int:
    """First cell from which a replica counts, plus 1, negative for one that needs a companion."""
    width = 0.5 * target / CELLS
    if 2.0 * load > target:
        cell = int(np.floor((target - load) / width))
        return -1 - max(0, min(cell, CELLS))
    cell = int(np.ceil(load / width))
    return 1 + max(0, min(cell, CELLS))


@compiled
def add_replicas(balance: Ints, load: float, copies: int, target: float) -> None:
    """Enter `copies` replicas (or take away, if negative) into the balance of companions."""
    cell = place_on_grid(load, target)
    sign = 1 if cell > 0 else -1
    balance[sign * cell - 1 :] += sign * copies


@compiled
def missing(balance: Ints) -> int:
    """Companions that are missing, summed over the grid."""
    return -int(np.minimum(balance, 0).sum())


@compiled
def companions(
    weight: Floats, limit: int, target: float, num_steps: int, seed: int, counts: Ints
) -> None:
    """Move slots between random experts until every heavy replica has a companion at `target`.

    Threshold accepting: a step may make things a little worse, ever less so. Leaves the best.
    """
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
    fewest = now = missing(balance)
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
            continue
        trial[:] = balance
        for expert, change in ((loser, -1), (winner, 1)):
            copies = counts[expert]
            add_replicas(trial, weight[expert] / copies, -copies, target)
            copies += change
            add_replicas(trial, weight[expert] / copies, copies, target)
        result = missing(trial)
        if (result - now) * num_steps > FIRST_THRESHOLD * (num_steps - step):
            continue
        now = result
        balance[:] = trial
        counts[loser] -= 1
        counts[winner] += 1
        if counts[loser] == 1:
            num_split -= 1
            split[place] = split[num_split]
        if counts[winner] == 2:
            split[num_split] = winner
            num_split += 1
        if now < fewest:
            fewest = now
            best[:] = counts
    counts[:] = best
