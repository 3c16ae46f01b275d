"""Many layers at once: groups to nodes and a first packing; maps."""

from __future__ import annotations

import numpy as np

from moemesh.balance.boxes import pack_box
from moemesh.balance.compiled import Floats, Ints, entry
from moemesh.balance.groups import divide_groups, gather_node, nodes_bound


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

    `weights` [layers, experts]. Fills `members` [layers, nodes, groups per node] (with a precision
    of 0 they are given), `slots` [layers, slots], `floors` [layers] (the largest of the nodes'
    quick bounds) and `tops` [layers, nodes] (the load of the hottest GPU of each node).
    """
    num_nodes = members.shape[1]
    num_groups = num_nodes * members.shape[2]
    node_slots = slots.shape[1] // num_nodes
    node_gpus = num_gpus // num_nodes
    experts = np.empty(weights.shape[1] // num_nodes, np.int64)
    for layer in range(len(weights)):
        weight = weights[layer]
        groups = members[layer]
        if precision > 0.0:
            floors[layer] = divide_groups(
                weight, num_groups, node_slots, node_gpus, precision, groups
            )
        else:
            floors[layer] = nodes_bound(weight, node_slots, node_gpus, num_groups, groups)
        worst = floors[layer]
        for node in range(num_nodes):
            loads = gather_node(weight, num_groups, groups[node], experts)
            part = slots[layer, node * node_slots : (node + 1) * node_slots]
            # No node is balanced better than the worst one before it: nothing would be gained.
            tops[layer, node] = pack_box(loads, node_gpus, worst, tolerance, part)
            worst = max(worst, tops[layer, node])
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
