"""The pictures of docs/balancing.md, drawn from results of the solvers.

`python -m tests.documents` regenerates them. Loads are whole numbers from Python's own
generator, so that the pictures are the same everywhere.
"""

from __future__ import annotations

from random import Random

import numpy as np

from moemesh.balance import (
    gpu_loads,
    homes_of,
    lower_bound,
    permute_experts,
    plan_quotas,
    rebalance_experts,
    rebalance_incremental,
    rebalance_published,
    replan_from_scratch,
    shadow_experts,
)
from moemesh.report.curves import Series, line_chart
from moemesh.report.heat_maps import balance_heat_maps
from tests.balance.cases import Floats, Ints


def zipf(num_layers: int, num_experts: int, tenths: int, seed: int) -> Floats:
    """Loads [layers, experts] that fall with rank to the power of `tenths` / 10."""
    random = Random(seed)
    table = []
    for _ in range(num_layers):
        row = [round(1e5 / rank ** (tenths / 10)) for rank in range(1, num_experts + 1)]
        random.shuffle(row)
        table.append(row)
    return np.array(table, float)


def placement() -> str:
    """Twelve layers of 128 experts on 16 GPUs, before and after."""
    loads = zipf(12, 128, 7, seed=1)
    slots = rebalance_experts(loads, 160, 1, 1, 16)[0]
    before = loads.reshape(12, 16, 8).sum(axis=2)
    return balance_heat_maps(before.tolist(), gpu_loads(loads, slots, 16).tolist())


def gap() -> str:
    """Picture of the distance of placements to the lower bound, by the number of slots per GPU."""
    points: dict[str, list[tuple[float, float]]] = {"published algorithm": [], "moemesh": []}
    for per_gpu in range(2, 11):
        above: dict[str, list[float]] = {name: [] for name in points}
        for tenths in (4, 7, 10, 12):
            loads = zipf(4, 13 * per_gpu, tenths, seed=per_gpu)
            sizes = (16 * per_gpu, 1, 1, 16)
            bound = lower_bound(loads, *sizes)
            for name, balance in zip(points, (rebalance_published, rebalance_experts), strict=True):
                top = gpu_loads(loads, balance(loads, *sizes)[0], 16).max(axis=1)
                above[name].append(float((top / bound).mean() - 1) * 100)
        for name, values in above.items():
            points[name].append((per_gpu, sum(values) / len(values)))
    return line_chart(
        "gap",
        "Hottest GPU over the lower bound, by slots per GPU",
        [Series(name=n, points=p, colour=c, dots=True) for c, (n, p) in enumerate(points.items())],
        x_label="slots per GPU (16 GPUs, 13 experts in 16 slots)",
        y_label="% over the bound",
        description="Zipf loads of four exponents. With few slots per GPU every placement leaves a "
        "gap; from five on ours is next to none.",
        from_zero=True,
    )


def drift() -> str:
    """Replicas moved, added up over steps of drift."""
    random = Random(3)
    loads = zipf(2, 128, 8, seed=3)
    slots = scratch = rebalance_experts(loads, 160, 1, 1, 16)[0]
    moved = {"from scratch, GPUs renumbered": [0], "incremental, tolerance 5 %": [0]}
    for _ in range(12):
        factors = [random.randint(80, 125) for _ in range(loads.size)]
        loads = np.round(loads * np.reshape(factors, loads.shape) / 100)
        again = replan_from_scratch(loads, scratch, num_gpus=16)
        step = rebalance_incremental(loads, slots, 0.05, num_gpus=16)
        scratch, slots = again.physical_to_logical, step.physical_to_logical
        for name, result in zip(moved, (again, step), strict=True):
            moved[name].append(moved[name][-1] + sum(result.moved))
    series = [
        Series(name=name, points=list(enumerate(counts)), colour=colour, dots=True)
        for colour, (name, counts) in enumerate(moved.items())
    ]
    return line_chart(
        "drift",
        "Replicas moved, under drifting loads",
        series,
        x_label="replanning",
        y_label="replicas moved so far",
        description="Two layers of 128 experts in 160 slots; every load changes by up to a quarter "
        f"between plans. {series[0].points[-1][1]} against {series[1].points[-1][1]} moves.",
        from_zero=True,
    )


def exact_loads() -> str:
    """Imbalance of one microbatch over the skew of its loads, by policy."""
    ranks, experts = 16, 64
    home = np.arange(experts) // (experts // ranks)
    points: dict[str, list[tuple[float, float]]] = {}
    for tenths in range(0, 13, 2):
        counts: Ints = zipf(ranks, experts, tenths, seed=4).astype(np.int64)
        # All ranks route by the same law, with some scatter.
        order = np.argsort(-counts[0])
        scatter = Random(tenths)
        rows = [sorted(row, reverse=True) for row in counts.tolist()]
        for row, values in zip(counts, rows, strict=True):
            row[order] = [value * scatter.randint(90, 110) // 1000 for value in values]
        totals = counts.sum(axis=0)
        permuted = homes_of(permute_experts(totals[None], ranks), ranks)[0]
        shadow_rows = float(counts.sum()) / ranks / 50
        plans = {
            "nothing": plan_quotas(totals, home, 0, num_ranks=ranks),
            "homes permuted": plan_quotas(totals, permuted, 0, num_ranks=ranks),
            "shadows on every rank": shadow_experts(counts, home, shadow_rows=shadow_rows),
            "quotas, 1 spare slot": plan_quotas(counts, home, 1),
            "quotas, 2 spare slots": plan_quotas(counts, home, 2),
        }
        for name, plan in plans.items():
            points.setdefault(name, []).append((tenths / 10, plan.balance))
    return line_chart(
        "exact-loads",
        "Busiest rank over the mean, by the skew of the loads",
        [Series(name=n, points=p, colour=c, dots=True) for c, (n, p) in enumerate(points.items())],
        x_label="exponent of the loads' law (0 = all equal)",
        y_label="busiest / mean (log)",
        description="64 experts on 16 ranks. Permuting homes helps until one expert is more than a "
        "rank can carry. Quotas with two spare slots stay near 1 whatever the skew.",
        log=True,
    )


#: File -> what draws it.
PICTURES = {
    "docs/balancing-placement.svg": placement,
    "docs/balancing-gap.svg": gap,
    "docs/balancing-drift.svg": drift,
    "docs/balancing-quotas.svg": exact_loads,
}
