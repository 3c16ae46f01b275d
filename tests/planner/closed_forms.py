"""Closed forms that the planner's counts are compared with."""

from __future__ import annotations


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
