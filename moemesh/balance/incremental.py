"""Replanning with few moved replicas: only layers out of tolerance, and only as far as needed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from moemesh.balance.compiled import Floats, Ints, compiled
from moemesh.balance.groups import bounds_of
from moemesh.balance.inputs import (
    BalanceError,
    Policy,
    Shape,
    check_loads,
    check_placement,
    check_shape,
    like,
    scaled,
)
from moemesh.balance.packing import holds
from moemesh.balance.polish import placed, polish, shift
from moemesh.balance.rebalance import balance_of, gpu_loads, maps_of
from moemesh.balance.search import numbered, solve
from moemesh.balance.transfers import Rounds, schedule_transfers
from moemesh.config.shown import Shown

#: Relative difference below which loads count as equal.
SAME = 1e-12
#: Settings of a repair: load above which a GPU is too hot, relative to the aim, and price of a swap
#: (which moves two replicas) in shifts. The best setting depends on the loads.
WAYS = ((1.0, 2.0), (1.0, 1.0), (0.98, 2.0), (0.98, 1.0), (0.95, 2.0), (0.95, 1.0))
#: Most moves of a repair.
MAX_MOVES = 1000


@dataclass(frozen=True, kw_only=True, repr=False)
class Replan(Shown):
    """A placement with the transfers that lead to it; maps as in `rebalance_experts`.

    `moved` [layers] counts replicas that a GPU did not hold before. `before`, `after` and `bound`
    [layers] are loads of the fullest GPU over the mean: with the previous placement, with the new
    one, and the lower bound. `transfers` [layers]: see :func:`schedule_transfers`.
    """

    physical_to_logical: Any
    logical_to_physical: Any
    replica_count: Any
    moved: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    bound: tuple[float, ...]
    transfers: tuple[Rounds, ...]


def rebalance_incremental(
    loads: Any,
    previous: Any,
    tolerance: float = 0.05,
    *,
    num_gpus: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    policy: Policy | None = None,
    margin: float = 0.2,
    min_gain: float = 0.0,
) -> Replan:
    """Move few replicas so that the most loaded GPU is within `tolerance` of the bound.

    `loads` [layers, experts]; `previous` [layers, slots] is the current placement (or the three
    maps of `rebalance_experts`). A layer is unchanged if its fullest GPU is within `tolerance` of
    the bound, or if at most the share `min_gain` of that GPU's load could be saved. Otherwise it is
    brought to `(1 - margin) x tolerance`, so that the next small drift moves no experts
    (hysteresis). A layer with a group on several nodes (hierarchical policy) is always planned from
    scratch. If no placement
    within `tolerance` is found, the layer gets within `tolerance` of a plan from scratch. Raises
    ValueError.
    """
    given = check_loads(loads, "loads")
    if isinstance(previous, tuple) and len(previous) == 3:  # pyright: ignore[reportUnknownArgumentType]
        previous = previous[0]  # pyright: ignore[reportUnknownVariableType]
    old = check_placement(previous, given.shape[1], num_gpus, len(given), "previous")
    for name, value in (("tolerance", tolerance), ("margin", margin), ("min_gain", min_gain)):
        if not 0.0 <= value < (np.inf if name == "tolerance" else 1.0):
            raise BalanceError(
                f"{name} must be at least 0{' and below 1' * (name != 'tolerance')}, and is {value}"
            )
    shape = check_shape(given.shape[1], old.shape[1], num_groups, num_nodes, num_gpus, policy)
    weights = scaled(given)
    bounds = bounds_of(weights, shape)
    tops = gpu_loads(weights, old, num_gpus).max(axis=1)
    slots = old.copy()
    due = (tops > bounds * (1.0 + tolerance)) & (tops - bounds > min_gain * tops)
    due |= [not _keeps_groups(row, shape) for row in old]
    for layer in np.flatnonzero(due):
        limit = bounds[layer] * (1.0 + tolerance)
        aim = bounds[layer] * (1.0 + tolerance * (1.0 - margin))
        slots[layer] = _replan(weights[layer], old[layer], shape, limit, aim, tolerance)
    return _describe(loads, given, old, slots, bounds, shape)


def replan_from_scratch(
    loads: Any,
    previous: Any,
    *,
    num_gpus: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    policy: Policy | None = None,
) -> Replan:
    """The placement of `rebalance_experts`, with GPUs renumbered so that the fewest replicas move.
    Arguments and errors as in `rebalance_incremental`."""
    given = check_loads(loads, "loads")
    old = check_placement(previous, given.shape[1], num_gpus, len(given), "previous")
    shape = check_shape(given.shape[1], old.shape[1], num_groups, num_nodes, num_gpus, policy)
    weights = scaled(given)
    slots = solve(weights, shape, "quality")
    for layer in range(len(slots)):
        relabel(slots[layer], old[layer], shape.num_nodes, num_gpus)
    return _describe(loads, given, old, slots, bounds_of(weights, shape), shape)


def _describe(
    kind: Any, loads: Floats, old: Ints, slots: Ints, bounds: Floats, shape: Shape
) -> Replan:
    """The replan from `old` to `slots`, with maps in the type of `kind`."""
    num_gpus = shape.num_gpus
    mean = np.maximum(scaled(loads).mean(axis=1), 1e-300)
    transfers = tuple(
        schedule_transfers(before.tolist(), after.tolist(), num_gpus, shape.num_nodes)
        for before, after in zip(old, slots, strict=True)
    )
    maps = like(kind, *maps_of(slots, shape.num_experts))
    # Over the mean load of a GPU; slack against rounding makes some bounds a little too low.
    bound = np.maximum(bounds / mean * num_gpus / shape.num_experts, 1.0)
    return Replan(
        physical_to_logical=maps[0],
        logical_to_physical=maps[1],
        replica_count=maps[2],
        moved=tuple(sum(map(len, rounds)) for rounds in transfers),
        before=tuple(balance_of(gpu_loads(loads, old, num_gpus)).tolist()),
        after=tuple(balance_of(gpu_loads(loads, slots, num_gpus)).tolist()),
        bound=tuple(bound.tolist()),
        transfers=transfers,
    )


def _replan(
    weight: Floats, old: Ints, shape: Shape, limit: float, aim: float, tolerance: float
) -> Ints:
    """New slots of one layer: repaired if that suffices, else from scratch."""
    slots = old.copy()
    legal = _keeps_groups(old, shape)
    if legal:
        top = _repair(weight, slots, old, shape, aim)
        if top <= limit:
            return slots
    else:
        top = np.inf
    scratch = solve(weight[None], shape, "quality")[0]
    best = float(gpu_loads(weight[None], scratch[None], shape.num_gpus).max())
    if legal and best > limit:
        # The bound is out of reach: stay within the tolerance of the best load instead.
        reachable = best * (1.0 + tolerance)
        if top <= reachable:
            return slots
        repaired = old.copy()
        if _repair(weight, repaired, old, shape, reachable) <= reachable:
            return repaired
    relabel(scratch, old, shape.num_nodes, shape.num_gpus)
    # Some moves of a plan from scratch may be unnecessary, too.
    undo_moves(weight, shape.num_nodes, shape.num_gpus, max(limit, best), scratch, old)
    return scratch


def _keeps_groups(slots: Ints, shape: Shape) -> bool:
    """Whether each group of experts is on one node."""
    if shape.num_nodes == 1:
        return True
    groups = slots.reshape(shape.num_nodes, -1) // (shape.num_experts // shape.num_groups)
    return sum(len(np.unique(node)) for node in groups) == shape.num_groups


def _repair(weight: Floats, slots: Ints, old: Ints, shape: Shape, aim: float) -> float:
    """Move few replicas inside the nodes until no GPU is over `aim`; returns the largest load. The
    best of several settings: least load, then fewest moves."""
    top, fewest = np.inf, len(slots) + 1
    for lower, swap_price in WAYS:
        trial = old.copy()
        reached = 0.0
        for part in trial.reshape(shape.num_nodes, -1):
            experts, local = numbered(part)
            loads = weight[experts]
            limit = aim * lower
            hottest = polish(loads, shape.node_gpus, limit, aim, MAX_MOVES, swap_price, local)
            reached = max(reached, hottest)
            part[:] = experts[local]
        if reached <= aim * (1.0 + SAME):
            reached = aim
            undo_moves(weight, shape.num_nodes, shape.num_gpus, aim, trial, old)
        keep_slots(trial, old, shape.num_gpus)
        moved = int((trial != old).sum())
        if (reached, moved) < (top, fewest):
            top, fewest = reached, moved
            slots[:] = trial
    return top


@compiled
def undo_moves(
    weight: Floats, num_nodes: int, num_gpus: int, limit: float, slots: Ints, previous: Ints
) -> None:
    """Restore the previous expert of each slot, if all GPUs stay within `limit`, the present expert
    keeps a replica, and the previous one is on this node and not on this GPU."""
    per_gpu = len(slots) // num_gpus
    node_gpus = num_gpus // num_nodes
    replicas = placed(weight, num_gpus, slots)
    counts, where = replicas.counts, replicas.where
    for slot in range(len(slots)):
        gpu = slot // per_gpu
        present = slots[slot]
        past = previous[slot]
        if past == present or counts[present] < 2 or holds(slots, gpu, per_gpu, past):
            continue
        is_same_node = where[past, 0] // node_gpus == gpu // node_gpus
        if not is_same_node or counts[past] >= len(slots):
            continue
        shift(replicas, slot, past)
        if replicas.load.max() > limit:
            shift(replicas, slot, present)


def relabel(slots: Ints, previous: Ints, num_nodes: int, num_gpus: int) -> int:
    """Permute the GPUs of one layer's `slots`, inside nodes and whole nodes, so that the fewest
    copies move; returns their number. Two levels of assignment: GPUs for each pair of nodes, then
    nodes. Replicas that stay on a GPU keep their slot."""
    # The import takes 0.2 s, and few runs need it.
    assign: Any = importlib.import_module("scipy.optimize").linear_sum_assignment

    node_gpus = num_gpus // num_nodes
    # Replicas of each expert on each GPU [GPUs, experts], and the number of replicas of a new GPU
    # that an old one does not hold [new GPUs, old GPUs].
    experts: Ints = np.arange(int(max(slots.max(), previous.max())) + 1, dtype=np.int64)
    new: Ints = np.sum(slots.reshape(num_gpus, -1, 1) == experts, axis=1)
    old: Ints = np.sum(previous.reshape(num_gpus, -1, 1) == experts, axis=1)
    missing = np.stack([np.maximum(counts - old, 0).sum(axis=1) for counts in new])
    blocks = missing.reshape(num_nodes, node_gpus, num_nodes, node_gpus).transpose(2, 0, 3, 1)
    # For each pair (old node, new node): the new GPU for each old one, and the number of moves.
    inside = np.empty((num_nodes, num_nodes, node_gpus), np.int64)
    between = np.empty((num_nodes, num_nodes), np.int64)
    for pair in np.ndindex(num_nodes, num_nodes):
        rows, inside[pair] = assign(blocks[pair])
        between[pair] = blocks[pair][rows, inside[pair]].sum()
    nodes, chosen = assign(between)
    gpus: Ints = chosen[:, None] * node_gpus + inside[nodes, chosen]
    slots[:] = slots.reshape(num_gpus, -1)[gpus.reshape(-1)].reshape(-1)
    keep_slots(slots, previous, num_gpus)
    return int(between[nodes, chosen].sum())


@compiled
def keep_slots(slots: Ints, previous: Ints, num_gpus: int) -> None:
    """Inside each GPU, put replicas that it held before into their old slots."""
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
