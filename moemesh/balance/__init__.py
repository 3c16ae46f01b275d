"""Placement of experts: static placement with replicas, bounds, increments, shares and quotas."""

from moemesh.balance.incremental import Replan, rebalance_incremental, replan_from_scratch
from moemesh.balance.inputs import BalanceError
from moemesh.balance.quotas import QuotaPlan, assign_tokens, plan_quotas, shadow_experts
from moemesh.balance.rebalance import (
    balance_of,
    gpu_loads,
    homes_of,
    loads_in_order,
    lower_bound,
    permute_experts,
    rebalance_experts,
    rebalance_published,
)
from moemesh.balance.shares import LoadSplit, split_loads
from moemesh.balance.transfers import ReplicaTransfer, schedule_transfers

__all__ = [
    "BalanceError",
    "LoadSplit",
    "QuotaPlan",
    "Replan",
    "ReplicaTransfer",
    "assign_tokens",
    "balance_of",
    "gpu_loads",
    "homes_of",
    "loads_in_order",
    "lower_bound",
    "permute_experts",
    "plan_quotas",
    "rebalance_experts",
    "rebalance_incremental",
    "rebalance_published",
    "replan_from_scratch",
    "schedule_transfers",
    "shadow_experts",
    "split_loads",
]
