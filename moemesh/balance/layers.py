"""Many layers at once: groups to nodes and a first packing, maps, bounds."""

from __future__ import annotations

import numpy as np

from moemesh.balance.bounds import box_bound, quick_bound
from moemesh.balance.boxes import pack_box
from moemesh.balance.compiled import Floats, Ints, entry, inner_loop
from moemesh.balance.groups import (
    divide_groups,
    division_bound,
    gather_node,
    other_divisions,
)

#: Divisions of groups onto nodes that are compared by their bounds.
MAX_DIVISIONS = 128


@entry
def pack_layers(
    weights: Floats,
    num_gpus: int,
    tolerance: float,
    precision: float,
    members: Ints,
    slots: Ints,
    floors: Floats,
    tops: Floats,
) -> None:
    """The first packing of every layer. The global policy is one group and one node.

    `weights` [layers, experts]. Fills `members` [layers, nodes, groups per node], `slots` [layers,
    slots], `floors` [layers] (the largest of the nodes' quick bounds) and `tops` [layers, nodes]
    (the load of the hottest GPU of each node).
    """
    num_nodes = members.shape[1]
    for layer in range(len(weights)):
        node_slots = slots.shape[1] // num_nodes
        node_gpus = num_gpus // num_nodes
        num_groups = num_nodes * members.shape[2]
        floors[layer] = divide_groups(
            weights[layer], num_groups, node_slots, node_gpus, precision, members[layer]
        )
        pack_division(
            weights[layer],
            num_groups,
            node_gpus,
            floors[layer],
            tolerance,
            members[layer],
            slots[layer],
            tops[layer],
        )


@entry
def pack_division(
    weight: Floats,
    num_groups: int,
    num_gpus: int,
    floor: float,
    tolerance: float,
    members: Ints,
    slots: Ints,
    tops: Floats,
) -> None:
    """The first packing of a layer whose groups are divided; `num_gpus` are those of one node.

    No node is balanced better than the worst one before it: nothing would be gained.
    """
    num_nodes = len(members)
    node_slots = len(slots) // num_nodes
    experts = np.empty(len(weight) // num_nodes, np.int64)
    worst = floor
    for node in range(num_nodes):
        loads = gather_node(weight, num_groups, members[node], experts)
        part = slots[node * node_slots : (node + 1) * node_slots]
        tops[node] = pack_box(loads, num_gpus, worst, tolerance, part)
        worst = max(worst, tops[node])
        for slot in range(node_slots):
            part[slot] = experts[part[slot]]


@entry
def count_replicas(slots: Ints, counts: Ints) -> None:
    """Fill `counts` [layers, experts] from `slots` [layers, slots]."""
    counts[:] = 0
    for layer in range(len(slots)):
        for slot in range(slots.shape[1]):
            counts[layer, slots[layer, slot]] += 1


@entry
def invert(slots: Ints, replicas: Ints) -> None:
    """Fill `replicas` [layers, experts, most replicas] with slots, ascending, then -1."""
    replicas[:] = -1
    found = np.empty(replicas.shape[1], np.int64)
    for layer in range(len(slots)):
        found[:] = 0
        for slot in range(slots.shape[1]):
            expert = slots[layer, slot]
            replicas[layer, expert, found[expert]] = slot
            found[expert] += 1


@entry
def layer_bounds(
    weights: Floats, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int, bounds: Floats
) -> None:
    """Fill `bounds` [layers] with loads of a GPU that no placement of the layer falls below."""
    node_slots = num_slots // num_nodes
    node_gpus = num_gpus // num_nodes
    for layer in range(len(weights)):
        weight = weights[layer]
        low = quick_bound(weight, num_slots, num_gpus)
        if num_nodes > 1:
            low = max(low, divisions_bound(weight, num_groups, num_nodes, node_slots, node_gpus))
        bounds[layer] = box_bound(weight, num_slots, num_gpus, low, np.inf)


@inner_loop
def divisions_bound(
    weight: Floats, num_groups: int, num_nodes: int, num_slots: int, num_gpus: int
) -> float:
    """The smallest bound of any division of the groups onto nodes; slots and GPUs of one node.

    Where there are too many divisions to look at each, what could be proven of their quick bounds.
    """
    members = np.empty((num_nodes, num_groups // num_nodes), np.int64)
    high = divide_groups(weight, num_groups, num_slots, num_gpus, 1e-4, members)
    best = division_box_bound(weight, num_groups, members, num_slots, num_gpus, np.inf)
    if best > high:
        others = np.empty((MAX_DIVISIONS, num_nodes, num_groups // num_nodes), np.int64)
        bounds = np.empty(MAX_DIVISIONS)
        found, complete = other_divisions(
            weight, num_groups, num_slots, num_gpus, best, others, bounds
        )
        if complete:
            for index in np.argsort(bounds[:found], kind="mergesort"):
                if bounds[index] >= best:
                    break
                bound = division_box_bound(
                    weight, num_groups, others[index], num_slots, num_gpus, best
                )
                best = min(best, bound)
            return best
    return division_bound(weight, num_groups, num_nodes, num_slots, num_gpus, high)


@inner_loop
def division_box_bound(
    weight: Floats, num_groups: int, members: Ints, num_slots: int, num_gpus: int, enough: float
) -> float:
    """The largest bound of the nodes of one division; no further than `enough`."""
    experts = np.empty(len(weight) // len(members), np.int64)
    bound = 0.0
    for node in range(len(members)):
        loads = gather_node(weight, num_groups, members[node], experts)
        low = max(bound, quick_bound(loads, num_slots, num_gpus))
        if low >= enough:
            return low
        bound = box_bound(loads, num_slots, num_gpus, low, np.inf)
    return bound
