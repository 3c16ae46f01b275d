"""The router written out token by token in plain Python: slow, and obviously correct."""

from __future__ import annotations

import math

from moemesh.config.model import ModelConfig


def score(logits: list[float], kind: str) -> list[float]:
    if kind == "softmax":
        largest = max(logits)
        powers = [math.exp(z - largest) for z in logits]
        return [p / sum(powers) for p in powers]
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in logits]
    return [math.sqrt(math.log1p(math.exp(z))) for z in logits]


def route_reference(
    logits: list[float], config: ModelConfig, selection_bias: list[float] | None = None
) -> tuple[list[float], list[int]]:
    """Weights and experts of one token, best choice first."""
    before = config.router_when == "before"
    scores = score(logits, config.router_score) if before else logits
    choice = [s + b for s, b in zip(scores, selection_bias or [0.0] * len(scores), strict=True)]
    size = len(choice) // config.router_groups
    groups = []
    for group in range(config.router_groups):
        best = sorted(choice[group * size : (group + 1) * size], reverse=True)
        value = best[0] if config.router_group_score == "max" else sum(best[:2])
        groups.append((-value, group))
    kept = {group for _, group in sorted(groups)[: config.router_groups_kept]}
    if config.router_groups == 1:
        kept = {0}
    candidates = [(-choice[i], i) for i in range(len(choice)) if i // size in kept]
    experts = [i for _, i in sorted(candidates)[: config.experts_per_token]]
    weights = [scores[i] for i in experts]
    if not before:
        weights = score(weights, config.router_score)
    if config.router_normalize:
        total = sum(weights)
        if config.router_normalize_min:
            total = max(total, config.router_normalize_min)
        weights = [w / (total + config.router_normalize_eps) for w in weights]
    if config.router_scale_on == "weights":
        weights = [w * config.router_scale for w in weights]
    return weights, experts


def keep_reference(
    experts: list[list[int]], priority: list[list[float]] | None, capacity: int
) -> list[list[bool]]:
    """Which choices of one sequence [S][K] stay: each expert serves its queue from the front."""
    kept = [[False] * len(row) for row in experts]
    for expert in {e for row in experts for e in row if e >= 0}:
        queue = [
            (-priority[s][k] if priority else 0.0, s, k)
            for s, row in enumerate(experts)
            for k, e in enumerate(row)
            if e == expert
        ]
        for _, s, k in sorted(queue)[:capacity]:
            kept[s][k] = True
    return kept
