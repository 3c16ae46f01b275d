"""Which new GPU takes over which old one, so that as many replicas as possible stay."""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Ints, entry, inner_loop


@inner_loop
def assign(cost: Ints, columns: Ints) -> int:
    """Fill `columns` [n] with the cheapest one-to-one choice of a column for each row of `cost`.

    The Hungarian method with potentials and shortest augmenting paths, O(n^3). Returns its cost.
    """
    size = len(cost)
    far = np.int64(1) << 60
    row_price = np.zeros(size + 1, np.int64)
    column_price = np.zeros(size + 1, np.int64)
    taken_by = np.zeros(size + 1, np.int64)  # row of each column, counted from 1; 0 is none
    came_from = np.zeros(size + 1, np.int64)
    for row in range(1, size + 1):
        taken_by[0] = row
        column = 0
        slack = np.full(size + 1, far)
        used = np.zeros(size + 1, np.bool_)
        while taken_by[column] != 0:
            used[column] = True
            here = taken_by[column]
            least = far
            following = 0
            for other in range(1, size + 1):
                if used[other]:
                    continue
                reduced = cost[here - 1, other - 1] - row_price[here] - column_price[other]
                if reduced < slack[other]:
                    slack[other] = reduced
                    came_from[other] = column
                if slack[other] < least:
                    least = slack[other]
                    following = other
            for other in range(size + 1):
                if used[other]:
                    row_price[taken_by[other]] += least
                    column_price[other] -= least
                else:
                    slack[other] -= least
            column = following
        while column != 0:
            taken_by[column] = taken_by[came_from[column]]
            column = came_from[column]
    result = 0
    for column in range(1, size + 1):
        columns[taken_by[column] - 1] = column - 1
        result += cost[taken_by[column] - 1, column - 1]
    return result


@inner_loop
def num_missing(slots: Ints, previous: Ints) -> int:
    """Replicas of one GPU that another GPU's slots do not hold yet."""
    missing = 0
    for index in range(len(slots)):
        wanted = 0
        for other in range(index + 1):
            wanted += slots[other] == slots[index]
        for held in previous:
            wanted -= held == slots[index]
        missing += wanted > 0
    return missing


@entry
def relabel(slots: Ints, previous: Ints, num_nodes: int, num_gpus: int) -> int:
    """Permute the GPUs (inside nodes, and whole nodes) of one layer's `slots`: fewest moved copies.

    Also puts what stays on a GPU into its old slot. Returns the number of moved copies.
    """
    per_gpu = len(slots) // num_gpus
    node_gpus = num_gpus // num_nodes
    between = np.empty((num_nodes, num_nodes), np.int64)
    inside = np.empty((num_nodes, num_nodes, node_gpus), np.int64)
    cost = np.empty((node_gpus, node_gpus), np.int64)
    for old in range(num_nodes):
        for new in range(num_nodes):
            for first in range(node_gpus):
                start = (old * node_gpus + first) * per_gpu
                held = previous[start : start + per_gpu]
                for second in range(node_gpus):
                    begin = (new * node_gpus + second) * per_gpu
                    cost[first, second] = num_missing(slots[begin : begin + per_gpu], held)
            between[old, new] = assign(cost, inside[old, new])
    nodes = np.empty(num_nodes, np.int64)
    moved = assign(between, nodes)
    given = slots.copy()
    for old in range(num_nodes):
        for first in range(node_gpus):
            second = nodes[old] * node_gpus + inside[old, nodes[old], first]
            start = (old * node_gpus + first) * per_gpu
            slots[start : start + per_gpu] = given[second * per_gpu : (second + 1) * per_gpu]
    keep_slots(slots, previous, num_gpus)
    return moved


@entry
def keep_slots(slots: Ints, previous: Ints, num_gpus: int) -> None:
    """Inside each GPU, put what it held before back into its old slot."""
    per_gpu = len(slots) // num_gpus
    for gpu in range(num_gpus):
        start = gpu * per_gpu
        for slot in range(start, start + per_gpu):
            if slots[slot] == previous[slot]:
                continue
            for other in range(start, start + per_gpu):
                if slots[other] == previous[slot] and slots[other] != previous[other]:
                    slots[other] = slots[slot]
                    slots[slot] = previous[slot]
                    break
