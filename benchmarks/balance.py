"""`benchmarks.balance`: expert balancers side by side on loads of every shape.

Static placement against the published algorithm in torch (written here as published: Python loops
over small tensors), exact-load quotas against FasterMoE's shadowing, permuted homes and nothing,
and incremental replanning under drift. All contenders take turns on the same loads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.settings import BalancersSettings
from moemesh.balance import (
    assign_tokens,
    gpu_loads,
    homes_of,
    lower_bound,
    permute_experts,
    plan_quotas,
    rebalance_experts,
    rebalance_incremental,
    replan_from_scratch,
    shadow_experts,
)

Loads = NDArray[np.float64]


def load_shapes(num_layers: int, num_experts: int, seed: int = 0) -> dict[str, Loads]:
    """Loads [layers, experts] of twelve shapes, whole numbers; same for the same seed."""
    random = np.random.default_rng(seed)
    size = (num_layers, num_experts)
    shapes = {"flat": np.full(size, 1000.0), "uniform": random.integers(0, 1000, size) * 1.0}
    for exponent in (0.5, 0.8, 1.0, 1.2):
        law = 1e6 / np.arange(1, num_experts + 1) ** exponent
        shapes[f"zipf {exponent}"] = random.permuted(np.tile(law, (num_layers, 1)), axis=1)
    for sigma in (0.5, 1.0, 1.5):
        shapes[f"lognormal {sigma}"] = 1000 * np.exp(random.normal(0, sigma, size))
    shapes["poisson"] = random.poisson(300, size) * 1.0
    burst = random.poisson(500, size) * 1.0
    hot = random.random(size).argsort(axis=1)[:, : max(num_experts // 32, 1)]
    factors = random.integers(5, 40, hot.shape)
    np.put_along_axis(burst, hot, np.take_along_axis(burst, hot, 1) * factors, 1)
    shapes["bursty"] = burst
    one = np.full(size, 500.0)
    one[:, 7 % num_experts] = 50_000.0
    shapes["one hot"] = one
    return {name: np.round(loads) for name, loads in shapes.items()}


# The published algorithm as one writes it in torch: rows in Python, numbers in tensors.


def torch_pack(weight: Tensor, num_packs: int) -> tuple[Tensor, Tensor]:
    """Pack and place in it of each item, [rows, items] both; heaviest first, equal numbers."""
    rows, items = weight.shape
    room = items // num_packs
    if room == 1:
        packs = torch.arange(items).expand(rows, items)
        return packs, torch.zeros_like(packs)
    packs = torch.full((rows, items), -1, dtype=torch.int64)
    places = torch.full_like(packs, -1)
    for row, order in enumerate(weight.float().sort(-1, descending=True).indices):
        load: list[Any] = [0] * num_packs
        held = [0] * num_packs
        for item in order:
            open_packs = (pack for pack in range(num_packs) if held[pack] < room)
            pack = min(open_packs, key=load.__getitem__)
            packs[row, item] = pack
            places[row, item] = held[pack]
            load[pack] += weight[row, item]
            held[pack] += 1
    return packs, places


def torch_replicate(weight: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """(expert of each replica [rows, slots], replicas of each expert [rows, experts])."""
    rows, experts = weight.shape
    replicas = torch.arange(num_slots).repeat(rows, 1)
    counts = torch.ones(rows, experts, dtype=torch.int64)
    every_row = torch.arange(rows)
    for slot in range(experts, num_slots):
        hottest = (weight / counts).max(dim=-1).indices
        replicas[:, slot] = hottest
        counts[every_row, hottest] += 1
    return replicas, counts


def torch_published(
    weight: Tensor, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> Tensor:
    """physical_to_logical [layers, slots] of the published algorithm (hierarchical policy)."""
    layers, experts = weight.shape
    size, per_node = experts // num_groups, num_groups // num_nodes
    node_of, rank_of = torch_pack(weight.unflatten(-1, (num_groups, size)).sum(-1), num_nodes)
    start = (node_of * per_node + rank_of) * size
    to_middle = (start.unsqueeze(-1) + torch.arange(size)).flatten(-2)
    from_middle = torch.empty_like(to_middle)
    from_middle.scatter_(1, to_middle, torch.arange(experts).expand(layers, -1))
    loads = weight.gather(-1, from_middle).view(-1, experts // num_nodes)
    replicas, counts = torch_replicate(loads, num_slots // num_nodes)
    packs, places = torch_pack((loads / counts).gather(-1, replicas), num_gpus // num_nodes)
    slot_of = packs * (num_slots // num_gpus) + places
    at_slot = torch.empty_like(slot_of)
    at_slot.scatter_(1, slot_of, torch.arange(slot_of.shape[1]).expand(len(slot_of), -1))
    local = replicas.gather(-1, at_slot).view(layers, num_nodes, -1)
    local = local + torch.arange(0, experts, experts // num_nodes).view(1, -1, 1)
    return from_middle.gather(-1, local.flatten(-2))


def _median_seconds(call: Callable[[], object], rounds: int) -> float:
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def static_placement(settings: BalancersSettings) -> list[dict[str, Any]]:
    """Per load shape and policy: gaps to the bound, and microseconds a layer of each contender."""
    rows: list[dict[str, Any]] = []
    for policy, groups, nodes in (
        ("hierarchical", settings.groups, settings.nodes),
        ("global", 1, 1),
    ):
        sizes = (settings.replicas, groups, nodes, settings.gpus)
        for name, loads in load_shapes(settings.layers, settings.experts, settings.seed).items():
            tensor = torch.from_numpy(loads).float()
            bound = lower_bound(loads, *sizes)
            row: dict[str, Any] = {"policy": policy, "shape": name, "worse": 0}
            published = torch_published(tensor, *sizes)
            theirs = gpu_loads(loads, published.numpy(), settings.gpus).max(axis=1)
            row["published_gap"] = float((theirs / bound).mean() - 1)
            start = time.perf_counter()
            torch_published(tensor, *sizes)
            row["published_us"] = (time.perf_counter() - start) / settings.layers * 1e6
            for effort in ("fast", "quality"):
                call = partial(rebalance_experts, loads, *sizes, effort=effort)
                ours = gpu_loads(loads, call()[0], settings.gpus).max(axis=1)
                row[f"{effort}_gap"] = float((ours / bound).mean() - 1)
                row["worse"] += int((ours > theirs * (1 + 1e-9)).sum())
                seconds = _median_seconds(call, settings.rounds)
                row[f"{effort}_us"] = seconds / settings.layers * 1e6
            rows.append(row)
    return rows


def exact_loads(settings: BalancersSettings) -> list[dict[str, Any]]:
    """Per load shape: imbalance and replicas of nothing, permuted homes, shadowing and quotas.

    Homes are permuted by the loads that the tokens are then drawn from: the best case. A shadow
    costs as much as 1 % of a rank's mean rows.
    """
    rows: list[dict[str, Any]] = []
    ranks, experts = settings.ranks, settings.experts
    random = np.random.default_rng(settings.seed)
    home = np.arange(experts) // (experts // ranks)
    for name, loads in load_shapes(1, experts, settings.seed + 1).items():
        share = loads[0] / loads[0].sum()
        counts = random.multinomial(4096 * 8, share, size=ranks)
        permuted = homes_of(permute_experts(loads, ranks), ranks)[0]
        shadow_rows = 0.01 * counts.sum() / ranks
        quotas = plan_quotas(counts, home, settings.spare_slots)
        totals = counts.sum(axis=0)
        shadows = shadow_experts(counts, home, shadow_rows=shadow_rows)
        plan = partial(plan_quotas, counts, home, settings.spare_slots)
        assign = partial(assign_tokens, quotas, counts)
        tokens = assign_tokens(quotas, counts)
        own = quotas.place_rank[None, :] == np.arange(ranks)[:, None]
        rows.append(
            {
                "shape": name,
                "nothing": plan_quotas(totals, home, 0).balance - 1,
                "permuted": plan_quotas(totals, permuted, 0).balance - 1,
                "shadowed": shadows.balance - 1,
                "shadow_copies": shadows.num_replicas,
                "quotas": quotas.balance - 1,
                "replicas": quotas.num_replicas,
                "stays_on_rank": float(tokens[own].sum() / tokens.sum()),
                "plan_us": _median_seconds(plan, 50 * settings.rounds) * 1e6,
                "assign_us": _median_seconds(assign, 5 * settings.rounds) * 1e6,
            }
        )
    return rows


def drift(settings: BalancersSettings) -> list[dict[str, Any]]:
    """Per load shape: replicas moved over steps of 10 % drift, and the worst gap to the bound."""
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(settings.seed)
    where = {"num_gpus": settings.gpus, "num_groups": settings.groups, "num_nodes": settings.nodes}
    for name, given in load_shapes(settings.drift_layers, settings.experts, settings.seed).items():
        loads = given
        sizes = (settings.replicas, settings.groups, settings.nodes, settings.gpus)
        ours = scratch = rebalance_experts(loads, *sizes)[0]
        moved = {"incremental": 0, "scratch": 0}
        worst = 0.0
        for _ in range(settings.drift_steps):
            loads = loads * np.exp(random.normal(0, 0.1, loads.shape))
            step = rebalance_incremental(loads, ours, 0.05, **where)
            again = replan_from_scratch(loads, scratch, **where)
            ours, scratch = step.physical_to_logical, again.physical_to_logical
            moved["incremental"] += sum(step.moved)
            moved["scratch"] += sum(again.moved)
            worst = max(worst, *(a / b - 1 for a, b in zip(step.after, step.bound, strict=True)))
        rows.append({"shape": name, **moved, "worst_gap": worst})
    return rows


def next_step(settings: BalancersSettings) -> dict[str, float]:
    """Gap to the bound on the loads a plan was made for, and on the next, drifted ones.

    Medians over the load shapes, of means over layers.
    """
    random = np.random.default_rng(settings.seed)
    sizes = (settings.replicas, settings.groups, settings.nodes, settings.gpus)
    found: dict[str, list[float]] = {}
    for loads in load_shapes(settings.next_layers, settings.experts, settings.seed).values():
        later = loads * np.exp(random.normal(0, 0.1, loads.shape))
        ours = rebalance_experts(loads, *sizes)[0]
        theirs = torch_published(torch.from_numpy(loads).float(), *sizes).numpy()
        for when, now in (("planned", loads), ("drifted", later)):
            bound = lower_bound(now, *sizes)
            for name, slots in (("ours", ours), ("published", theirs)):
                top = gpu_loads(now, slots, settings.gpus).max(axis=1)
                found.setdefault(f"{name}_{when}", []).append(float((top / bound).mean() - 1))
    return {name: statistics.median(values) for name, values in found.items()}


def run(settings: BalancersSettings) -> dict[str, Any]:
    """Measure everything, in this process."""
    torch.set_num_threads(1)
    rebalance_experts(np.ones((1, settings.experts)), settings.replicas, 1, 1, settings.gpus)
    return {
        "settings": settings.to_json(),
        "static": static_placement(settings),
        "exact": exact_loads(settings),
        "drift": drift(settings),
        "next_step": next_step(settings),
    }


if __name__ == "__main__":
    from benchmarks.application import main

    main("balance")
