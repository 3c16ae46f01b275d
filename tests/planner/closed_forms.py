"""Closed forms that the planner's counts are compared with."""

from __future__ import annotations

from math import comb


def gpt_iteration(
    batch: int, seq: int, layers: int, hidden: int, vocab: int, *, recompute: bool
) -> float:
    """FLOPs of one GPT training step, full attention (arXiv:2104.04473, equation 3):
    72 B s L h^2 (1 + s/(6h) + V/(12 L h)); with full recompute 96 and V/(16 L h)."""
    factor, head = (96, 16) if recompute else (72, 12)
    inner = 1 + seq / (6 * hidden) + vocab / (head * layers * hidden)
    return factor * batch * seq * layers * hidden**2 * inner


def gpt_parameters(layers: int, hidden: int, vocab: int, positions: int) -> int:
    """The closed form 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)): exact for a GPT without its
    final norm (2h)."""
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + positions) * hidden


def expected_nodes(experts: int, per_token: int, nodes: int, kept: int | None = None) -> float:
    """Mean number of nodes that a token has an expert on, under uniform routing.

    `kept`: the router chooses among the best `kept` nodes only. Raises ValueError when the experts
    do not divide over the nodes.
    """
    if experts % nodes:
        raise ValueError(f"{experts} experts do not divide over {nodes} nodes")
    used = nodes if kept is None else min(kept, nodes)
    pool, part = experts * used // nodes, experts // nodes
    return used * (1 - comb(pool - part, per_token) / comb(pool, per_token))
