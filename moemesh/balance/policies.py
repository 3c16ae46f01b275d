"""Two other answers to uneven loads: shadow experts everywhere, or only permute homes."""

from __future__ import annotations

from typing import Any

import numpy as np

from moemesh.balance.inputs import BalanceError, Effort, check_loads, like
from moemesh.balance.quotas import QuotaPlan, plan_quotas
from moemesh.balance.rebalance import rebalance_experts


def shadow_experts(
    counts: Any, home: Any, *, shadow_rows: float, max_shadows: int | None = None
) -> QuotaPlan:
    """Replicate the hottest experts on every rank, as long as that pays (FasterMoE's rule).

    `counts` [ranks, experts] tokens that each rank sends to each expert, `home` [experts]. Every
    rank computes its own tokens of a shadowed expert. With S shadows a layer costs
    `max over ranks of rows + S x shadow_rows`, where `shadow_rows` is what sending one expert's
    weights and its gradients costs, in rows computed and sent meanwhile. The next hottest expert is
    added until it does not pay, or there are `max_shadows`. He et al., "FasterMoE" (PPoPP 2022).
    """
    if not shadow_rows >= 0:
        raise BalanceError(f"shadow_rows must not be negative, and is {shadow_rows}")
    table = np.asarray(counts)
    if table.ndim != 2:
        raise BalanceError(f"counts must be ranks x experts, and have {table.ndim} dims")
    plan = plan_quotas(table, home, 0)
    table = table.astype(np.int64)
    totals = table.sum(axis=0)
    rows = plan.rank_tokens
    shadows: list[int] = []
    best = float(rows.max())
    hottest = np.argsort(-totals, kind="stable")
    for expert in hottest[: len(totals) if max_shadows is None else max_shadows]:
        trial = rows + table[:, expert]
        trial[plan.home[expert]] -= totals[expert]
        cost = float(trial.max()) + (len(shadows) + 1) * shadow_rows
        if cost >= best:
            break
        best, rows = cost, trial
        shadows.append(int(expert))
    spare_expert = np.tile(np.array(shadows, np.int64), (len(table), 1))
    at_home = plan.home[spare_expert] == np.arange(len(table))[:, None]
    spare_expert[at_home] = -1
    spare_quota = np.where(at_home, 0, table[:, shadows])
    home_quota = totals.copy()
    home_quota[shadows] = table[plan.home[shadows], shadows]
    return QuotaPlan(
        home=plan.home,
        spare_expert=np.ascontiguousarray(spare_expert),
        spare_quota=np.ascontiguousarray(spare_quota),
        home_quota=home_quota,
    )


def permute_experts(
    loads: Any,
    num_gpus: int,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
    effort: Effort = "quality",
) -> Any:
    """Homes without any redundancy: slots [layers, experts] of logical experts, `num_gpus` alike.

    A permutation already pays when loads are skewed, and costs no memory: try it first. Kinds and
    errors as in `rebalance_experts`.
    """
    num_experts = check_loads(loads, "loads").shape[1]
    return rebalance_experts(loads, num_experts, num_groups, num_nodes, num_gpus, effort=effort)[0]


def homes_of(slots: Any, num_gpus: int) -> Any:
    """Rank of each expert [layers, experts], for a placement without replicas."""
    placed = np.asarray(slots)
    homes = np.empty(placed.shape, np.int64)
    per_gpu = placed.shape[1] // num_gpus
    for row, slots_of_layer in zip(homes, placed, strict=True):
        row[slots_of_layer] = np.repeat(np.arange(num_gpus, dtype=np.int64), per_gpu)
    return like(slots, homes)[0]
