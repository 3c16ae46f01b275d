"""The balancer as a policy of vLLM's expert load balancer, in its older and its newer signature."""

import torch

from moemesh.balance import rebalance_experts, rebalance_incremental


def place(loads: torch.Tensor, old: torch.Tensor | None, slots: int, **groups: int) -> torch.Tensor:
    """Experts [layers, slots]: few moves from `old`, or a new placement where there is none."""
    if old is None or old.shape[1] != slots or bool((old < 0).any()):
        return rebalance_experts(loads, num_replicas=slots, **groups)[0]
    return rebalance_incremental(loads, old, **groups).physical_to_logical


class MoemeshPolicy:
    """Six arguments, one map: `rebalance_experts` of vLLM until the context was introduced."""

    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old=None):
        groups = {"num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_ranks}
        return place(weight, old, num_replicas, **groups)


def plan_of(context) -> torch.Tensor:
    """The map for `EplbPlan(...)` from an `EplbRebalanceContext`, whose loads are a window."""
    box = context.topology
    groups = {"num_groups": box.num_groups, "num_nodes": box.num_nodes}
    old, loads = context.physical_to_logical_map_cpu, context.load_window_cpu.sum(0)
    return place(loads, old, context.num_replicas, num_gpus=box.num_ranks, **groups)
