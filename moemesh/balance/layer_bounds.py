"""The bound of whole layers: over all divisions of the expert groups onto nodes."""

from __future__ import annotations

import numpy as np

from moemesh.balance.bounds import box_bound, quick_bound
from moemesh.balance.compiled import Floats, Ints, fast
from moemesh.balance.groups import first_division, other_divisions
from moemesh.balance.shape import Shape

#: Divisions of groups onto nodes that are compared by their bounds.
MAX_DIVISIONS = 128


def bounds_of(weights: Floats, shape: Shape) -> Floats:
    """Loads [layers] that no placement of `weights` [layers, experts] undercuts on all GPUs."""
    bounds = np.empty(len(weights))
    for layer, weight in enumerate(weights):
        low = fast(quick_bound)(weight, shape.num_slots, shape.num_gpus)
        if shape.num_nodes > 1:
            low = max(low, _over_divisions(weight, shape))
        bounds[layer] = fast(box_bound)(weight, shape.num_slots, shape.num_gpus, low, np.inf)
    return bounds


def _over_divisions(weight: Floats, shape: Shape) -> float:
    """The smallest bound of any division of the groups onto nodes.

    Where there are too many to look at each, what could be proven of their quick bounds.
    """
    members = np.empty((shape.num_nodes, shape.node_groups), np.int64)
    sizes = (shape.node_slots, shape.node_gpus)
    quick, proven = fast(first_division)(weight, shape.num_groups, *sizes, members)
    best = _of_division(weight, shape, members, np.inf)
    if best <= quick:
        return max(proven, min(best, quick)) if proven >= quick * (1.0 - 1e-5) else proven
    others, bounds, complete = find_divisions(weight, shape, best)
    if not complete:
        return proven
    for index in np.argsort(bounds, kind="stable"):
        if bounds[index] >= best:
            break
        best = min(best, _of_division(weight, shape, others[index], best))
    return best


def find_divisions(weight: Floats, shape: Shape, limit: float) -> tuple[Ints, Floats, bool]:
    """Divisions [n, nodes, groups per node] with quick bounds [n] under `limit`; whether all."""
    others = np.empty((MAX_DIVISIONS, shape.num_nodes, shape.node_groups), np.int64)
    bounds = np.empty(MAX_DIVISIONS)
    found, complete = fast(other_divisions)(
        weight, shape.num_groups, shape.node_slots, shape.node_gpus, limit, others, bounds
    )
    return others[:found], bounds[:found], complete


def experts_of(groups: Ints, shape: Shape) -> Ints:
    """The experts of some groups, in order of the groups."""
    size = shape.num_experts // shape.num_groups
    return (groups[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)


def _of_division(weight: Floats, shape: Shape, members: Ints, enough: float) -> float:
    """The largest bound of the nodes of one division; no further than `enough`."""
    bound = 0.0
    for groups in members:
        loads = weight[experts_of(groups, shape)]
        low = max(bound, fast(quick_bound)(loads, shape.node_slots, shape.node_gpus))
        if low >= enough:
            return low
        bound = fast(box_bound)(loads, shape.node_slots, shape.node_gpus, low, np.inf)
    return bound
