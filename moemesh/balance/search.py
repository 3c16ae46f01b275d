"""Search from loads to slots: first packings, and deeper searches for layers with a wide gap."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

import numpy as np

from moemesh.balance.bounds import box_bound
from moemesh.balance.boxes import (
    MOST_EXACT_SLOTS,
    exact_box,
    pack_box,
    pack_pairs,
    pack_with_companions,
)
from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.groups import (
    bounds_of,
    divide_groups,
    experts_in,
    find_divisions,
    nodes_bound,
)
from moemesh.balance.inputs import Shape, scaled
from moemesh.balance.polish import heaviest_gpu, part_twins, polish
from moemesh.balance.published import published_layers

#: Relative difference of loads that is due to the order of summation.
SAME = 1e-12
#: Number of searches with other seeds before a placement with second copies on a GPU is accepted.
NUM_RESCUES = 4
#: Largest number of slots per GPU with which first packings usually leave a gap: search helps.
FEW_SLOTS = 4


class SearchEffort(NamedTuple):
    """Extent of a search. A packing is improved until its largest load is within `tolerance` of the
    bound; a layer within `enough` of its bound is not searched further (both relative).

    With three or more slots per GPU, slots are reserved to split light experts: `kept` different
    numbers of slots are tried, each from `places` different experts on. With two, a search over
    counts has `pair_steps` steps for each target load. The best `polished` packings are polished
    with at most `moves` moves each; `divisions` additional divisions of groups over nodes are
    tried. `patience` failures in a row end each kind of trial.
    """

    tolerance: float
    enough: float
    kept: int
    places: int
    polished: int
    moves: int
    pair_steps: int
    divisions: int
    patience: int


# Columns: tolerance, enough, kept, places, polished, moves, pair_steps, divisions, patience.
FAST = SearchEffort(1e-3, 1e-2, 2, 1, 0, 0, 300, 0, 1)
QUALITY = SearchEffort(5e-4, 2e-3, 8, 2, 8, 400, 2000, 6, 4)
THOROUGH = SearchEffort(1e-5, 1e-5, 16, 4, 24, 1000, 4000, 40, 100)

#: Largest number of slots of a layer for which every promising division of groups is tried.
FEW_SLOTS_IN_ALL = 12


def solve(weights: Floats, shape: Shape, effort: Literal["fast", "quality"] | float) -> Ints:
    """Slots [layers, slots] of logical experts for loads [layers, experts]. A number as effort is a
    time budget in seconds: the result of "fast", improved until the budget is used up or all layers
    are near their bounds. A search that was begun is finished."""
    started = time.perf_counter()
    chosen = QUALITY if effort == "quality" else FAST
    layers = _Layers(weights, shape, chosen)
    # With one slot per GPU, or every expert on every GPU, the first packing is optimal.
    if 1 < shape.per_gpu < shape.num_experts // shape.num_nodes:
        enough = chosen.tolerance if shape.per_gpu <= FEW_SLOTS else chosen.enough
        for layer in np.flatnonzero(layers.tops.max(axis=1) > layers.floors * (1.0 + enough)):
            layers.search(int(layer), chosen, enough, 0)
        if isinstance(effort, (int, float)):
            _spend(layers, started + effort)
    _match_published(layers)
    return layers.slots


def first_packing(weights: Floats, shape: Shape) -> Ints:
    """Slots [layers, slots] from which a search for loads [layers, experts] starts."""
    return _Layers(scaled(weights), shape, FAST).slots


class _Layers:
    """State of a search over some layers. `members` [layers, nodes, groups per node], `slots`
    [layers, slots], `floors` [layers] and `tops` [layers, nodes] are as in `pack_layers`."""

    def __init__(
        self, weights: Floats, shape: Shape, effort: SearchEffort, members: Ints | None = None
    ) -> None:
        """Compute the first packings. `members`: the division of the groups; None: find one."""
        count = len(weights)
        # A layer without any load gets equal loads, and so equal numbers of replicas.
        weights = np.where(weights.any(axis=1, keepdims=True), weights, 1.0)
        self.weights, self.shape = weights, shape
        self.slots: Ints = np.empty((count, shape.num_slots), np.int64)
        self.floors: Floats = np.empty(count)
        self.tops: Floats = np.empty((count, shape.num_nodes))
        precision = 1e-2 if effort is FAST else max(effort.tolerance, 1e-6)
        if members is None:
            members = np.empty((count, shape.num_nodes, shape.node_groups), np.int64)
        else:
            precision = 0.0
        pack_layers(
            weights,
            shape.num_gpus,
            effort.tolerance,
            precision,
            members,
            self.slots,
            self.floors,
            self.tops,
        )

    def search(self, layer: int, effort: SearchEffort, enough: float, seed: int) -> None:
        """Search the nodes of a layer, then other divisions of its groups."""
        shape, weight, floor = self.shape, self.weights[layer], float(self.floors[layer])
        self._search_nodes(layer, effort, enough, np.inf, seed)
        top = float(self.tops[layer].max())
        if shape.num_nodes == 1 or not effort.divisions or top <= floor * (1.0 + enough):
            return
        sizes = (shape.num_groups, shape.node_slots, shape.node_gpus, shape.num_nodes)
        others, bounds, _ = find_divisions(weight, *sizes, top * (1.0 - effort.tolerance))
        failures = 0
        num_tried, patience = effort.divisions, effort.patience
        if shape.num_slots <= FEW_SLOTS_IN_ALL:
            num_tried = patience = len(bounds)
        for index in np.argsort(bounds, kind="stable")[:num_tried]:
            if bounds[index] >= top * (1.0 - effort.tolerance) or failures == patience:
                break
            other = _Layers(weight[None], shape, effort, others[index][None])
            other._search_nodes(0, effort, enough, top, seed)
            reached = float(other.tops.max())
            failures = 0 if reached < top else failures + 1
            if reached < top:
                top = reached
                self.slots[layer], self.tops[layer] = other.slots[0], other.tops[0]

    def _search_nodes(
        self, layer: int, effort: SearchEffort, enough: float, ceiling: float, seed: int
    ) -> None:
        """Search the nodes, hottest first; ends at a node that cannot get below `ceiling`."""
        shape, tops = self.shape, self.tops[layer]
        worst = float(self.floors[layer])
        parts = self.slots[layer].reshape(shape.num_nodes, -1)
        for node in np.argsort(-tops, kind="stable"):
            if tops[node] > worst * (1.0 + enough):
                experts, local = numbered(parts[node])
                tops[node] = search_box(
                    self.weights[layer][experts],
                    shape.node_gpus,
                    worst,
                    ceiling,
                    effort,
                    seed,
                    local,
                )
                parts[node] = experts[local]
            worst = max(worst, float(tops[node]))
            if worst >= ceiling:
                return


def _searched(weight: Floats, shape: Shape, seed: int) -> _Layers:
    """One layer after a longer search, which depends on `seed`."""
    layers = _Layers(weight[None], shape, effort := THOROUGH if seed else QUALITY)
    layers.search(0, effort, THOROUGH.enough, seed)
    return layers


def numbered(slots: Ints) -> tuple[Ints, Ints]:
    """(experts in some slots, the slots with these experts numbered from 0)."""
    experts, local = np.unique(slots, return_inverse=True)
    return experts, local.astype(np.int64)


def search_box(
    weight: Floats,
    num_gpus: int,
    bound: float,
    ceiling: float,
    effort: SearchEffort,
    seed: int,
    slots: Ints,
) -> float:
    """Improve the packing of one box in `slots`; returns the load of the hottest GPU.

    `bound` is a lower bound, or a load below which an improvement has no effect. The search first
    raises the bound; it ends if that reaches `ceiling`, or with a packing within the tolerance.
    """
    num_slots = len(slots)
    top = heaviest_gpu(weight, slots, num_gpus)
    if num_slots <= MOST_EXACT_SLOTS and effort.polished:
        top, finished = exact_box(weight, num_gpus, top, False, slots)
        if finished:
            # A second copy on a GPU wastes a slot: it must be better than all placements without.
            top, finished = exact_box(weight, num_gpus, top, True, slots)
        if finished:
            return top
    if effort.polished:
        bound = box_bound(weight, num_slots, num_gpus, bound, top)
    goal = bound * (1.0 + effort.tolerance)
    if top <= goal or bound >= ceiling:
        return top
    # The given packing, then packings with other replica counts.
    starts = np.empty((2 + effort.kept * effort.places, num_slots), np.int64)
    tops = np.empty(len(starts))
    starts[0], tops[0] = slots, top
    box = (weight, num_gpus, bound, effort.tolerance)
    if num_slots == 2 * num_gpus:
        tops[1] = pack_pairs(*box, effort.pair_steps, seed, starts[1])
        rows = 2
    else:
        rows = pack_with_companions(*box, effort.kept, effort.places, seed, starts, tops)
    order = np.argsort(tops[:rows], kind="stable")
    # The most promising starts are polished, until one reaches the goal or none improves.
    failures = 0
    for row in order[: max(effort.polished, 1)]:
        reached = float(tops[row])
        if effort.polished and reached > goal:
            reached = polish(weight, num_gpus, bound, goal, effort.moves, 1.0, starts[row])
        failures = 0 if reached < top else failures + 1
        if reached < top:
            top = reached
            slots[:] = starts[row]
        if top <= goal or failures == effort.patience:
            break
    return top


def _spend(layers: _Layers, deadline: float) -> None:
    """Continue the search, the layer furthest from its bound first, until the deadline."""
    if time.perf_counter() >= deadline:
        return
    bounds = bounds_of(layers.weights, layers.shape)
    enough = bounds * (1.0 + THOROUGH.enough)
    for seed in range(1 << 16):
        for layer in np.argsort(bounds / np.maximum(layers.tops.max(axis=1), 1e-300)):
            if time.perf_counter() >= deadline:
                return
            if layers.tops[layer].max() <= enough[layer]:
                continue
            trial = _searched(layers.weights[layer], layers.shape, seed)
            if trial.tops.max() < layers.tops[layer].max():
                layers.tops[layer], layers.slots[layer] = trial.tops[0], trial.slots[0]
        if np.all(layers.tops.max(axis=1) <= enough):
            return


def published(weights: Floats, shape: Shape, enough: Floats | None = None) -> tuple[Ints, Floats]:
    """Slots [layers, slots] of the published algorithm and the load of its hottest GPU [layers].
    Slots of a layer whose hottest GPU carries `enough` [layers] or more are incomplete."""
    slots = np.empty((len(weights), shape.num_slots), np.int64)
    tops = np.empty(len(weights))
    if enough is None:
        enough = np.full(len(weights), np.inf)
    published_layers(
        weights, shape.num_groups, shape.num_nodes, shape.num_gpus, enough, slots, tops
    )
    return slots, tops


def _match_published(layers: _Layers) -> None:
    """Replace layers for which the published placement is better: by a closer packing, by the
    published placement without second copies on a GPU, or by a longer search.

    If all of them fail, the published placement is taken with its second copies, because the
    largest load is more important than a wasted slot. So no layer is worse than published.
    """
    tops, shape = layers.tops.max(axis=1), layers.shape
    open_layers = np.flatnonzero(tops > layers.floors * (1.0 + 1e-9))
    if not len(open_layers):
        return
    enough = tops[open_layers] * (1.0 - SAME)
    all_slots, limits = published(layers.weights[open_layers], shape, enough)
    for layer, published_slots, limit in zip(open_layers, all_slots, limits, strict=True):
        if limit >= tops[layer] * (1.0 - SAME):
            continue
        weight = layers.weights[layer]
        # Usually both are near the bound, and our swaps stopped slightly too early: continue them
        # to half the gap of the published placement.
        gap = max(float(limit / layers.floors[layer]) - 1.0, 0.0)
        repacked = _Layers(weight[None], shape, FAST._replace(tolerance=gap / 2.0))
        if repacked.tops.max() <= limit * (1.0 + SAME):
            layers.slots[layer] = repacked.slots[0]
            continue
        mended = _mend(weight, shape, published_slots, float(limit))
        for seed in range(NUM_RESCUES):
            if mended is not None:
                break
            trial = _searched(weight, shape, seed)
            if trial.tops.max() <= float(limit) * (1.0 + SAME):
                mended = trial.slots[0]
        layers.slots[layer] = published_slots if mended is None else mended


def _mend(weight: Floats, shape: Shape, given: Ints, limit: float) -> Ints | None:
    """The published slots without second copies on a GPU and with loads up to `limit`; None if the
    moves tried do not lead to such slots."""
    mended = given.copy()
    gpus = shape.node_gpus
    for part in mended.reshape(shape.num_nodes, -1):
        experts, local = numbered(part)
        loads = weight[experts]
        # Slots of second copies go to other experts, also after polishing has made room; second
        # copies that remain are swapped with replicas on other GPUs.
        for by_swaps in (False, False, True):
            left = part_twins(loads, gpus, limit, by_swaps, local)
            aim = limit if by_swaps else 0.999 * limit
            top = polish(loads, gpus, aim, aim, QUALITY.moves, 1.0, local)
            if not left:
                break
        if left or top > limit * (1.0 + SAME):
            return None
        part[:] = experts[local]
    return mended


@compiled
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

    `weights` [layers, experts]. Fills `members` [layers, nodes, groups per node], the groups of
    each node (input with a precision of 0), `slots` [layers, slots], `floors` [layers], the largest
    of the nodes' quick bounds, and `tops` [layers, nodes], the load of the hottest GPU of a node.
    """
    num_nodes = members.shape[1]
    num_groups = num_nodes * members.shape[2]
    node_slots = slots.shape[1] // num_nodes
    node_gpus = num_gpus // num_nodes
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
            experts = experts_in(groups[node], weights.shape[1] // num_groups)
            part = slots[layer, node * node_slots : (node + 1) * node_slots]
            # A node is packed only as well as the worst one before it: more has no effect.
            tops[layer, node] = pack_box(weight[experts], node_gpus, worst, tolerance, part)
            worst = max(worst, tops[layer, node])
            part[:] = experts[part]
