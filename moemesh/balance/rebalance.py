"""Static placement with replicas: a drop-in for the published balancer that is never worse."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moemesh.balance.compiled import Floats, Ints
from moemesh.balance.groups import bounds_of
from moemesh.balance.inputs import (
    Effort,
    Policy,
    check_effort,
    check_loads,
    check_shape,
    like,
    scaled,
)
from moemesh.balance.search import published, solve
from moemesh.config.errors import public
from moemesh.config.shown import Shown


class _Maps(NamedTuple):
    """Shapes: see :func:`rebalance_experts`."""

    physical_to_logical: Any
    logical_to_physical: Any
    replica_count: Any


class ExpertPlacement(Shown, _Maps):
    """The three maps of :func:`rebalance_experts` as a tuple, with `loads` [layers, experts]."""

    loads: Floats
    num_gpus: int

    @property
    def gpu_loads(self) -> tuple[Floats, Floats]:
        """Load of each GPU [layers, GPUs] with the experts in order, and with these replicas."""
        slots = np.asarray(self.physical_to_logical)
        placed = gpu_loads(self.loads, slots, self.num_gpus)
        return loads_in_order(self.loads, self.num_gpus), placed

    def facts(self) -> dict[str, object]:
        (layers, slots), experts = np.shape(self.physical_to_logical), self.loads.shape[1]
        sizes = {"layers": layers, "experts": experts, "slots": slots, "gpus": self.num_gpus}
        before, after = (balance_of(loads).max() for loads in self.gpu_loads)
        return sizes | {"max_over_mean_before": before, "max_over_mean_after": after}


@public
def rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    effort: Effort = "quality",
    policy: Policy | None = None,
) -> ExpertPlacement:
    """Place replicas of experts on GPUs so that the largest load of a GPU is least in each layer.

    `weight` [layers, experts] holds loads; replicas of an expert carry equal shares of its load. A
    slot holds one replica: GPU g has slots ``g n`` to ``(g + 1) n - 1``, n = num_replicas /
    num_gpus. `policy` is "hierarchical" (groups of experts stay on one node) or "global"; None is
    hierarchical if `num_nodes` divides `num_groups`, else global. `effort` is "fast", "quality" or
    a time budget in seconds. Results of a time budget depend on the machine's speed, others do not.

    Returns physical_to_logical [layers, replicas], logical_to_physical [layers, experts, most
    replicas] (padded with -1) and replica counts [layers, experts], int64: as CPU tensors, arrays
    or lists, like `weight`. No layer is worse than with the published algorithm (seed document 004;
    https://github.com/deepseek-ai/EPLB). A GPU holds two replicas of an expert only if that lowers
    the largest load, or if it has more slots than there are experts.
    Raises ValueError for illegal sizes and loads.
    """
    loads = check_loads(weight)
    shape = check_shape(loads.shape[1], num_replicas, num_groups, num_nodes, num_gpus, policy)
    slots = solve(scaled(loads), shape, check_effort(effort))
    placed = ExpertPlacement(*like(weight, *maps_of(slots, shape.num_experts)))
    placed.loads, placed.num_gpus = loads, num_gpus
    return placed


def rebalance_published(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    policy: Policy | None = None,
) -> tuple[Any, Any, Any]:
    """The published algorithm, a baseline; arguments and results as in `rebalance_experts`."""
    loads = check_loads(weight)
    shape = check_shape(loads.shape[1], num_replicas, num_groups, num_nodes, num_gpus, policy)
    slots, _ = published(scaled(loads), shape)
    return like(weight, *maps_of(slots, shape.num_experts))


def lower_bound(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    policy: Policy | None = None,
) -> Any:
    """Lower bounds [layers] of the largest load of a GPU, for all placements.

    A bound is the maximum of three: the mean load of a GPU, the smallest possible load of the
    largest replica, and linear programs over replica counts (:mod:`moemesh.balance.bounds`). In the
    hierarchical policy it is the minimum over the divisions of groups among nodes, as far as they
    can be searched. Arguments, types and errors as in `rebalance_experts`.
    """
    loads = check_loads(weight)
    shape = check_shape(loads.shape[1], num_replicas, num_groups, num_nodes, num_gpus, policy)
    exponents = np.frexp(loads.max(axis=1))[1]  # of the power of two that `scaled` divides by
    return like(weight, np.ldexp(bounds_of(scaled(loads), shape), exponents))[0]


def maps_of(slots: Ints, num_experts: int) -> tuple[Ints, Ints, Ints]:
    """(physical_to_logical, logical_to_physical, counts) of slots [layers, slots]."""
    counts = np.stack([np.bincount(row, minlength=num_experts) for row in slots])
    replicas = np.full((*counts.shape, int(counts.max())), -1, np.int64)
    for layer, row in enumerate(slots):
        # Slots by expert, ascending; the n-th slot of an expert goes to its column n.
        order = np.argsort(row, kind="stable")
        first = np.cumsum(counts[layer]) - counts[layer]
        replicas[layer, row[order], np.arange(len(row)) - first[row[order]]] = order
    return slots, replicas, counts


def loads_in_order(loads: Floats, num_gpus: int) -> Floats:
    """Load of each GPU [layers, GPUs] with the experts in order, in nearly equal numbers."""
    sums = np.zeros((len(loads), num_gpus))
    for expert in range(loads.shape[1]):
        sums[:, expert * num_gpus // loads.shape[1]] += loads[:, expert]
    return sums


def gpu_loads(loads: Floats, slots: Ints, num_gpus: int) -> Floats:
    """Load of each GPU [layers, GPUs], with experts' loads split evenly over their replicas."""
    counts = np.stack([np.bincount(row, minlength=loads.shape[1]) for row in slots])
    unit = loads / np.maximum(counts, 1)
    value = np.take_along_axis(unit, slots, axis=1)
    return value.reshape(len(slots), num_gpus, -1).sum(axis=2)


def balance_of(loads: Floats) -> Floats:
    """Load of the most loaded GPU over the mean [layers]; 1 for a layer without any load."""
    mean = loads.mean(axis=1)
    return np.divide(loads.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0)


def permute_experts(
    loads: Any,
    num_gpus: int,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
    effort: Effort = "quality",
) -> Any:
    """Placement without replicas: the expert in each slot [layers, experts]; all GPUs have equally
    many slots. A permutation evens out skewed loads without memory for replicas: try it first.
    Types and errors as in `rebalance_experts`."""
    num_experts = check_loads(loads, "loads").shape[1]
    return rebalance_experts(loads, num_experts, num_groups, num_nodes, num_gpus, effort=effort)[0]


def homes_of(slots: Any, num_gpus: int) -> Any:
    """Rank of each expert [layers, experts], for a placement without replicas."""
    placed = np.asarray(slots)
    # The slot of each expert: the inverse of a permutation.
    return like(slots, np.argsort(placed, axis=1) // (placed.shape[1] // num_gpus))[0]
