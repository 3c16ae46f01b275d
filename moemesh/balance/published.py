"""The published algorithm of DeepSeek's expert balancer: the baseline.

Replicas go to the largest load per replica. Groups are packed on nodes, then replicas on GPUs:
heaviest first into the least loaded place with room. Source: seed document 004 and
https://github.com/deepseek-ai/EPLB. Arithmetic is rounded to float32 after every step, and
the sum of a group once, so that ties are broken as in the original.
"""

from __future__ import annotations

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.groups import experts_in, group_sums
from moemesh.balance.packing import sift_down, total
from moemesh.balance.polish import heaviest_gpu


@compiled
def pack_greedily(values: Floats, num_packs: int, pack_of: Ints, rank_of: Ints) -> None:
    """Pack values, heaviest first, into the lightest pack with room; all packs get equal numbers.
    Fills `pack_of` with the pack of each value and `rank_of` with its place in the pack."""
    per_pack = len(values) // num_packs
    load = np.zeros(num_packs)
    held = np.zeros(num_packs, np.int64)
    for item in np.argsort(-values, kind="mergesort"):
        best = -1
        for pack in range(num_packs):
            if held[pack] < per_pack and (best < 0 or load[pack] < load[best]):
                best = pack
        if per_pack == 1:  # the original, too, keeps the order then
            best = item
        pack_of[item] = best
        rank_of[item] = held[best]
        load[best] = np.float32(load[best] + values[item])
        held[best] += 1


@compiled
def published_box(loads: Floats, num_gpus: int, slots: Ints) -> None:
    """Fill the slots of one node (of all GPUs in the global policy) with its experts, numbered from
    0."""
    num_experts = len(loads)
    num_slots = len(slots)
    per_gpu = num_slots // num_gpus
    counts = np.ones(num_experts, np.int64)
    heap = np.arange(num_experts)
    key = loads.copy()
    replicas = np.empty(num_slots, np.int64)
    replicas[:num_experts] = heap
    for place in range(num_experts // 2 - 1, -1, -1):
        sift_down(heap, key, place)
    for slot in range(num_experts, num_slots):
        expert = heap[0]
        replicas[slot] = expert
        counts[expert] += 1
        key[expert] = np.float32(loads[expert] / counts[expert])
        sift_down(heap, key, 0)
    pack_of = np.empty(num_slots, np.int64)
    rank_of = np.empty(num_slots, np.int64)
    pack_greedily(key[replicas], num_gpus, pack_of, rank_of)
    slots[pack_of * per_gpu + rank_of] = replicas


@compiled
def published_layers(
    weights: Floats,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    enough: Floats,
    slots: Ints,
    tops: Floats,
) -> None:
    """Fill the `slots` of every layer with logical experts, and `tops` [layers] with the loads of
    the hottest GPUs.

    The global policy is one group and one node. A layer is left incomplete once one of its nodes
    has a load of `enough` [layers] or more.
    """
    node_of = np.empty(num_groups, np.int64)
    rank_of = np.empty(num_groups, np.int64)
    members = np.empty((num_nodes, num_groups // num_nodes), np.int64)
    size, per_node = weights.shape[1] // num_groups, slots.shape[1] // num_nodes
    heat = np.zeros(num_nodes)
    for layer in range(len(weights)):
        loads = weights[layer].astype(np.float32).astype(np.float64)
        sums = group_sums(loads, num_groups).astype(np.float32).astype(np.float64)
        pack_greedily(sums, num_nodes, node_of, rank_of)
        for group in range(num_groups):
            members[node_of[group], rank_of[group]] = group
        for node in range(num_nodes):
            heat[node] = -total(loads[experts_in(members[node], size)])
        tops[layer] = 0.0
        # The node with the largest load first: it is the likeliest to reach `enough`.
        for node in np.argsort(heat, kind="mergesort"):
            experts = experts_in(members[node], size)
            part = slots[layer, node * per_node : (node + 1) * per_node]
            published_box(loads[experts], num_gpus // num_nodes, part)
            exact = weights[layer][experts]
            tops[layer] = max(tops[layer], heaviest_gpu(exact, part, num_gpus // num_nodes))
            if tops[layer] >= enough[layer]:
                break
            part[:] = experts[part]
