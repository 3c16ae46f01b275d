"""From loads to slots: first packings, and deeper searches where the gap is wide."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moemesh.balance.boxes import BoxEffort, mend_box, search_box
from moemesh.balance.compiled import Floats, Ints, fast
from moemesh.balance.groups import other_divisions
from moemesh.balance.layers import (
    MAX_DIVISIONS,
    layer_bounds,
    pack_division,
    pack_layers,
)
from moemesh.balance.published import heaviest_gpu, published_layers

#: Loads that differ by less, relatively, are equal: only the order of summation differs.
SAME = 1e-12
#: Searches with other seeds before a placement with second copies on a GPU is accepted.
NUM_RESCUES = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Slots, groups of experts, nodes and GPUs. The global policy is one group and one node."""

    num_experts: int
    num_slots: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def per_gpu(self) -> int:
        return self.num_slots // self.num_gpus

    @property
    def node_gpus(self) -> int:
        return self.num_gpus // self.num_nodes

    @property
    def is_easy(self) -> bool:
        """Whether the first packing is optimal: one slot per GPU, or every expert on every GPU."""
        return self.per_gpu == 1 or self.per_gpu >= self.num_experts // self.num_nodes


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to search: `enough` ends it, `tolerance` is aimed for (both relative to the bound).

    `divisions` is the number of other divisions of groups onto nodes that are tried.
    """

    tolerance: float
    enough: float
    box: BoxEffort
    divisions: int


FAST = Effort(tolerance=1e-3, enough=1e-2, box=(2, 1, 0, 0, 300), divisions=0)
#: With few slots per GPU every packing leaves a gap: there the search always pays.
QUALITY = Effort(tolerance=5e-4, enough=2e-3, box=(8, 2, 8, 400, 2000), divisions=6)
THOROUGH = Effort(tolerance=1e-5, enough=1e-5, box=(16, 4, 24, 1000, 4000), divisions=40)
FEW_SLOTS = 4


def solve(weights: Floats, shape: Shape, effort: Literal["fast", "quality"] | float) -> Ints:
    """Slots [layers, slots] of logical experts for loads [layers, experts].

    A number as effort is a time budget in seconds: as good as `fast` at once, then ever better.
    """
    started = time.perf_counter()
    chosen = QUALITY if effort == "quality" else FAST
    num_layers = len(weights)
    per_node = shape.num_groups // shape.num_nodes
    members = np.empty((num_layers, shape.num_nodes, per_node), np.int64)
    slots = np.empty((num_layers, shape.num_slots), np.int64)
    floors = np.empty(num_layers)
    node_tops = np.empty((num_layers, shape.num_nodes))
    few = shape.per_gpu <= FEW_SLOTS
    precision = 1e-2 if chosen is FAST else chosen.tolerance
    fast(pack_layers)(
        weights, shape.num_gpus, chosen.tolerance, precision, members, slots, floors, node_tops
    )
    tops = node_tops.max(axis=1)
    if not shape.is_easy:
        enough = chosen.tolerance if few else chosen.enough
        for layer in np.flatnonzero(tops > floors * (1.0 + enough)):
            box = _Layer(weights[layer], shape, members[layer], float(floors[layer]))
            box.slots, box.tops = slots[layer], node_tops[layer]
            tops[layer] = box.search(chosen, enough, 0)
            slots[layer] = box.slots
        if isinstance(effort, (int, float)):
            _spend(weights, shape, slots, tops, started + effort)
    _keep_up(weights, shape, slots, tops, floors)
    return slots


class _Layer:
    """One layer while it is searched: the division of its groups, slots, hottest GPU per node."""

    def __init__(self, weight: Floats, shape: Shape, members: Ints, floor: float) -> None:
        self.weight, self.shape, self.floor = weight, shape, floor
        self.members: Ints = members
        self.slots: Ints = np.empty(shape.num_slots, np.int64)
        self.tops: Floats = np.empty(shape.num_nodes)

    def search(self, effort: Effort, enough: float, seed: int) -> float:
        """Search the nodes, then other divisions of the groups; the load of the hottest GPU."""
        self._search_nodes(effort, enough, np.inf, seed)
        top = float(self.tops.max())
        shape = self.shape
        if shape.num_nodes == 1 or not effort.divisions or top <= self.floor * (1.0 + enough):
            return top
        per_node = shape.num_groups // shape.num_nodes
        others = np.empty((MAX_DIVISIONS, shape.num_nodes, per_node), np.int64)
        bounds = np.empty(MAX_DIVISIONS)
        node_slots = shape.num_slots // shape.num_nodes
        limit = top * (1.0 - effort.tolerance)
        found, _ = fast(other_divisions)(
            self.weight, shape.num_groups, node_slots, shape.node_gpus, limit, others, bounds
        )
        for index in np.argsort(bounds[:found], kind="stable")[: effort.divisions]:
            if bounds[index] >= top * (1.0 - effort.tolerance):
                break
            other = _Layer(self.weight, shape, others[index], float(bounds[index]))
            reached = other.first(effort).search_below(effort, enough, top, seed)
            if reached < top:
                top = reached
                self.slots, self.tops, self.members = other.slots, other.tops, other.members
        return top

    def first(self, effort: Effort) -> _Layer:
        """Fill the slots with first packings."""
        fast(pack_division)(
            self.weight,
            self.shape.num_groups,
            self.shape.node_gpus,
            self.floor,
            effort.tolerance,
            self.members,
            self.slots,
            self.tops,
        )
        return self

    def search_below(self, effort: Effort, enough: float, ceiling: float, seed: int) -> float:
        """Search the nodes, unless some node cannot get below `ceiling`."""
        self._search_nodes(effort, enough, ceiling, seed)
        return float(self.tops.max())

    def _search_nodes(self, effort: Effort, enough: float, ceiling: float, seed: int) -> None:
        shape = self.shape
        worst = self.floor
        for node in np.argsort(-self.tops, kind="stable"):
            if self.tops[node] > worst * (1.0 + enough):
                part = self.slots.reshape(shape.num_nodes, -1)[node]
                experts, local = np.unique(part, return_inverse=True)
                local = local.astype(np.int64)
                self.tops[node] = fast(search_box)(
                    self.weight[experts],
                    shape.node_gpus,
                    worst,
                    ceiling,
                    effort.tolerance,
                    effort.box,
                    seed,
                    local,
                )
                part[:] = experts[local]
            worst = max(worst, float(self.tops[node]))
            if worst >= ceiling:
                return


def _spend(weights: Floats, shape: Shape, slots: Ints, tops: Floats, deadline: float) -> None:
    """Search on, the layer furthest from its bound first, until the time is used up."""
    if time.perf_counter() >= deadline:
        return
    bounds = bounds_of(weights, shape)
    members = np.empty((1, shape.num_nodes, shape.num_groups // shape.num_nodes), np.int64)
    floor, node_tops = np.empty(1), np.empty((1, shape.num_nodes))
    for seed in range(1 << 16):
        for layer in np.argsort(bounds / np.maximum(tops, 1e-300), kind="stable"):
            if time.perf_counter() >= deadline:
                return
            if tops[layer] <= bounds[layer] * (1.0 + THOROUGH.enough):
                continue
            trial = np.empty((1, shape.num_slots), np.int64)
            fast(pack_layers)(
                weights[layer : layer + 1],
                shape.num_gpus,
                THOROUGH.tolerance,
                THOROUGH.tolerance,
                members,
                trial,
                floor,
                node_tops,
            )
            box = _Layer(weights[layer], shape, members[0], float(floor[0]))
            box.slots, box.tops = trial[0], node_tops[0]
            reached = box.search(THOROUGH if seed else QUALITY, THOROUGH.enough, seed)
            if reached < tops[layer]:
                tops[layer] = reached
                slots[layer] = box.slots
        if np.all(tops <= bounds * (1.0 + THOROUGH.enough)):
            return


def bounds_of(weights: Floats, shape: Shape) -> Floats:
    """Loads [layers] that the hottest GPU of no placement falls below."""
    bounds = np.empty(len(weights))
    fast(layer_bounds)(
        weights, shape.num_slots, shape.num_groups, shape.num_nodes, shape.num_gpus, bounds
    )
    return bounds


def published(weights: Floats, shape: Shape, enough: Floats | None = None) -> tuple[Ints, Floats]:
    """Slots [layers, slots] of the published algorithm and the load of its hottest GPU [layers].

    Slots of a layer whose hottest GPU carries `enough` [layers] or more are not filled.
    """
    slots = np.empty((len(weights), shape.num_slots), np.int64)
    tops = np.empty(len(weights))
    if enough is None:
        enough = np.full(len(weights), np.inf)
    fast(published_layers)(
        weights, shape.num_groups, shape.num_nodes, shape.num_gpus, enough, slots, tops
    )
    return slots, tops


def _keep_up(weights: Floats, shape: Shape, slots: Ints, tops: Floats, floors: Floats) -> None:
    """Where the published placement is better, take that, mended, or search until ours is as good.

    Only if all that fails, a second copy of an expert stays on a GPU: a smaller largest load counts
    more than a wasted slot.
    """
    open_layers = np.flatnonzero(tops > floors * (1.0 + 1e-9))
    if not len(open_layers):
        return
    enough = tops[open_layers] * (1.0 - SAME)
    given, limits = published(weights[open_layers], shape, enough)
    for layer, theirs, limit in zip(open_layers, given, limits, strict=True):
        if limit >= tops[layer] * (1.0 - SAME):
            continue
        weight = weights[layer]
        mended, twins = _mend(weight, shape, theirs, float(limit))
        if twins:
            rescued = _rescue(weight, shape, slots[layer], float(limit))
            mended = mended if rescued is None else rescued
        slots[layer] = mended
        tops[layer] = fast(heaviest_gpu)(weight, mended, shape.num_gpus)


def _mend(weight: Floats, shape: Shape, given: Ints, limit: float) -> tuple[Ints, int]:
    """The published slots without second copies on a GPU, as far as that does not cost load."""
    mended = given.copy()
    left = 0
    for part in mended.reshape(shape.num_nodes, -1):
        experts, local = np.unique(part, return_inverse=True)
        local = local.astype(np.int64)
        top, twins = fast(mend_box)(weight[experts], shape.node_gpus, limit, QUALITY.box[3], local)
        assert top <= limit * (1.0 + 1e-9)
        left += twins
        part[:] = experts[local]
    return mended, left


def _rescue(weight: Floats, shape: Shape, slots: Ints, limit: float) -> Ints | None:
    """Slots without second copies and within `limit`, searched for from ours; None if not found."""
    best = slots.copy()
    for seed in range(NUM_RESCUES):
        for part in best.reshape(shape.num_nodes, -1):
            experts, local = np.unique(part, return_inverse=True)
            local = local.astype(np.int64)
            loads = weight[experts]
            if fast(heaviest_gpu)(loads, local, shape.node_gpus) > limit:
                fast(search_box)(
                    loads, shape.node_gpus, 0.999 * limit, np.inf, 1e-3, THOROUGH.box, seed, local
                )
                part[:] = experts[local]
        if fast(heaviest_gpu)(weight, best, shape.num_gpus) <= limit * (1.0 + SAME):
            return best
    return None
