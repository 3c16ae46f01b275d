"""Division of expert groups over nodes in equal numbers, and bounds of layers over all divisions.

A node can hold a set of groups at load T per GPU only if the sum of their loads is at most T x GPUs
of the node, and if ceil(load / T) replicas of each of their experts fit the slots of the node. The
functions count a set that meets both conditions as fitting, even if no packing reaches T.

In all functions `weight` [experts] are loads, `sums` [groups] loads of groups, and `members`
[nodes, groups per node] holds the groups of each node.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.bounds import box_bound, quick_bound
from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.inputs import Shape
from moemesh.balance.packing import fold, swap_hottest, swap_opposite, total

POSSIBLE, IMPOSSIBLE, UNKNOWN = 1, 0, -1
#: Maximum number of steps of one search.
MAX_STEPS = 20_000
#: Maximum number of divisions of groups over nodes that are compared by their bounds.
MAX_DIVISIONS = 128


@compiled
def divide_groups(
    weight: Floats, num_groups: int, num_slots: int, num_gpus: int, precision: float, members: Ints
) -> float:
    """Fill `members`; returns the largest of the nodes' quick bounds. `num_slots` and `num_gpus`
    are those of one node. The search ends when it finds no division, in :data:`MAX_STEPS` steps,
    that is better by more than `precision` (relative)."""
    num_nodes, per_node = members.shape
    sums = group_sums(weight, num_groups)
    groups = np.arange(num_groups)
    load = np.empty(num_nodes)
    if per_node == 1 or num_nodes == 1:
        members[:] = groups.reshape(num_nodes, per_node)
        return nodes_bound(weight, num_slots, num_gpus, num_groups, members)
    # Groups are packed on nodes as replicas are on GPUs, with one replica of each.
    fold(np.ones(num_groups, np.int64), sums, num_nodes, groups, load)
    if per_node > 2:
        swap_opposite(groups, sums, load, 0.0)
        swap_hottest(groups, sums, load, 0.0)
    members[:] = groups.reshape(num_nodes, per_node)
    bound = nodes_bound(weight, num_slots, num_gpus, num_groups, members)
    if per_node == 2 and bound * num_gpus <= load.max():
        return bound  # no pairing has a smaller largest sum
    low = total(weight) / (num_nodes * num_gpus)
    trial = members.copy()
    target = bound / (1.0 + precision)
    while low < target:
        if fit_groups(weight, sums, num_slots, num_gpus, target, trial) == POSSIBLE:
            members[:] = trial
            bound = nodes_bound(weight, num_slots, num_gpus, num_groups, members)
        elif target * (1.0 + 2.0 * precision) >= bound:
            break
        else:
            low = target
        target = min(0.5 * (low + bound), bound / (1.0 + precision))
    return bound


@compiled
def group_sums(weight: Floats, num_groups: int) -> Floats:
    """Load of each group [groups]."""
    size = len(weight) // num_groups
    sums = np.empty(num_groups)
    for group in range(num_groups):
        sums[group] = total(weight[group * size : (group + 1) * size])
    return sums


@compiled
def experts_in(groups: Ints, size: int) -> Ints:
    """The experts of the given groups, of `size` experts each."""
    return (groups.reshape(-1, 1) * size + np.arange(size)).reshape(-1)


@compiled
def nodes_bound(
    weight: Floats, num_slots: int, num_gpus: int, num_groups: int, members: Ints
) -> float:
    """The largest of the nodes' quick bounds."""
    bound = 0.0
    for node in range(len(members)):
        loads = weight[experts_in(members[node], len(weight) // num_groups)]
        bound = max(bound, quick_bound(loads, num_slots, num_gpus))
    return bound


@compiled
def fit_groups(
    weight: Floats, sums: Floats, num_slots: int, num_gpus: int, limit: float, members: Ints
) -> int:
    """POSSIBLE if the groups fit the nodes at `limit` per GPU: fills `members`. Else IMPOSSIBLE, or
    UNKNOWN after :data:`MAX_STEPS`."""
    need = slots_needed(weight, len(sums), limit)
    state = np.full(len(sums) + 1, -1)
    state[-1] = 0
    room = limit * num_gpus * (1.0 + 1e-12)
    return next_division(sums, need, room, num_slots, state, members)


@compiled
def slots_needed(weight: Floats, num_groups: int, limit: float) -> Ints:
    """Number of slots that each group needs so that no replica is heavier than `limit` [groups]."""
    need = np.maximum(np.ceil(weight / limit - 1e-12), 1.0)
    return need.reshape(num_groups, -1).sum(axis=1).astype(np.int64)


@compiled
def next_division(
    sums: Floats, need: Ints, room: float, num_slots: int, state: Ints, members: Ints
) -> int:
    """Depth-first search for the next division in which no node exceeds the load `room` or
    `num_slots` slots; fills `members`, and returns as :func:`fit_groups`.

    At depth d the search places the d-th heaviest group. `state` [groups + 1] keeps the position of
    the search between calls: the node at each depth (-1: none), and last the depth. `need` [groups]
    are slots.
    """
    num_nodes, per_node = members.shape
    num_groups = len(sums)
    order = np.argsort(-sums, kind="mergesort")
    load = np.zeros(num_nodes)
    slots = np.zeros(num_nodes, np.int64)
    held = np.zeros(num_nodes, np.int64)
    depth = state[num_groups]
    for earlier in range(depth):
        node = state[earlier]
        members[node, held[node]] = order[earlier]
        held[node] += 1
        load[node] += sums[order[earlier]]
        slots[node] += need[order[earlier]]
    if depth == num_groups:
        depth -= 1
    for _ in range(MAX_STEPS):
        group = order[depth]
        last = state[depth]
        chosen = -1
        first = last + 1
        if last >= 0:  # remove the group from its node, then try the next node
            held[last] -= 1
            load[last] -= sums[group]
            slots[last] -= need[group]
            if held[last] == 0:
                first = num_nodes  # empty nodes are interchangeable: one is enough to try
        for node in range(first, num_nodes):
            fits = held[node] < per_node and load[node] + sums[group] <= room
            if fits and slots[node] + need[group] <= num_slots:
                chosen = node
                break
            if held[node] == 0:
                break
        state[depth] = chosen
        if chosen < 0:
            depth -= 1
            if depth < 0:
                return IMPOSSIBLE
            continue
        members[chosen, held[chosen]] = group
        held[chosen] += 1
        load[chosen] += sums[group]
        slots[chosen] += need[group]
        depth += 1
        if depth == num_groups:
            state[num_groups] = depth
            return POSSIBLE
    return UNKNOWN


@compiled
def find_divisions(
    weight: Floats, num_groups: int, num_slots: int, num_gpus: int, num_nodes: int, limit: float
) -> tuple[Ints, Floats, bool]:
    """Divisions [n, nodes, groups per node] that fit `limit`, their quick bounds [n], and whether
    these are all such divisions."""
    divisions = np.empty((MAX_DIVISIONS, num_nodes, num_groups // num_nodes), np.int64)
    bounds = np.empty(MAX_DIVISIONS)
    sums = group_sums(weight, num_groups)
    need = slots_needed(weight, num_groups, limit)
    state = np.full(num_groups + 1, -1)
    state[num_groups] = 0
    members = divisions[0].copy()
    count = 0
    while True:
        answer = next_division(sums, need, limit * num_gpus, num_slots, state, members)
        if answer != POSSIBLE or count == MAX_DIVISIONS:
            return divisions[:count], bounds[:count], answer == IMPOSSIBLE
        divisions[count] = members
        bounds[count] = nodes_bound(weight, num_slots, num_gpus, num_groups, members)
        count += 1


@compiled
def first_division(
    weight: Floats, num_groups: int, num_slots: int, num_gpus: int, members: Ints
) -> tuple[float, float]:
    """Fill `members` with a good division; returns its quick bound, and a bound for all divisions.
    The latter is the smallest quick bound of all divisions, or a proven lower bound of it."""
    num_nodes = len(members)
    reached = divide_groups(weight, num_groups, num_slots, num_gpus, 1e-4, members)
    sums = group_sums(weight, num_groups)
    trial = members.copy()
    high = reached
    low = total(weight) / (num_nodes * num_gpus) * (1.0 - 1e-9)
    proven = low
    while low > 0.0 and high > low * (1.0 + 1e-6):
        middle = 0.5 * (low + high)
        answer = fit_groups(weight, sums, num_slots, num_gpus, middle, trial)
        if answer == POSSIBLE:
            high = middle
            continue
        low = middle
        if answer == IMPOSSIBLE:  # lower limits are impossible, too
            proven = low
    return reached, proven


def bounds_of(weights: Floats, shape: Shape) -> Floats:
    """Lower bounds [layers] of the largest load of a GPU, for `weights` [layers, experts]."""
    bounds = np.empty(len(weights))
    for layer, weight in enumerate(weights):
        low = quick_bound(weight, shape.num_slots, shape.num_gpus)
        if shape.num_nodes > 1:
            low = max(low, _over_divisions(weight, shape))
        bounds[layer] = box_bound(weight, shape.num_slots, shape.num_gpus, low, np.inf)
    return bounds


def _over_divisions(weight: Floats, shape: Shape) -> float:
    """The smallest bound of all divisions of the groups over nodes, or a proven lower bound of
    their quick bounds if there are too many divisions.
    """
    members = np.empty((shape.num_nodes, shape.node_groups), np.int64)
    sizes = (shape.num_groups, shape.node_slots, shape.node_gpus)
    quick, proven = first_division(weight, *sizes, members)
    best = _of_division(weight, shape, members, np.inf)
    if best <= quick:  # linear programs do not raise the bound of this division
        return max(proven, min(best, quick)) if proven >= quick * (1.0 - 1e-5) else proven
    others, bounds, are_all = find_divisions(weight, *sizes, shape.num_nodes, best)
    if not are_all:
        return proven
    for index in np.argsort(bounds, kind="stable"):
        if bounds[index] >= best:
            break
        best = min(best, _of_division(weight, shape, others[index], best))
    return best


def _of_division(weight: Floats, shape: Shape, members: Ints, enough: float) -> float:
    """The largest bound of the nodes of one division, or any of its lower bounds of at least
    `enough`, at which the computation stops."""
    bound, by_group = 0.0, weight.reshape(shape.num_groups, -1)
    for groups in members:
        loads = by_group[groups].reshape(-1)
        low = max(bound, quick_bound(loads, shape.node_slots, shape.node_gpus))
        if low >= enough:
            return low
        bound = box_bound(loads, shape.node_slots, shape.node_gpus, low, np.inf)
    return bound
