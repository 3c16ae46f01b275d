"""The choice of experts: stable top-k, groups, expert choice, Sinkhorn.

Legend: T tokens, B sequences, S positions, E experts, K experts per token, G groups of experts.
Everything here is without gradient: a choice has none, the weights of the chosen do.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from moemesh.config.model import ModelConfig

#: Rounds of Sinkhorn's algorithm; always all of them, so that no rank stops before another.
SINKHORN_ROUNDS = 8


def stable_top_k(scores_TE: Tensor, num_chosen: int) -> Tensor:
    """Ids of the best scores, best first; equal scores by ascending id."""
    if scores_TE.device.type != "cpu":
        # One kernel, where the keys below take eight; the others are not kept.
        return stable_top_k_sort(scores_TE, num_chosen).contiguous()
    if scores_TE.dtype != torch.float32:
        return stable_top_k_sort(scores_TE, num_chosen)
    # One int64 key per expert, no two alike: the float's bits, made to ascend with its value, above
    # the id, made to descend. Then any top-k is stable, at a third of the price of the sort.
    bits_TE = (scores_TE + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal scores
    ascending_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    num_experts = scores_TE.shape[1]
    rank_E = torch.arange(num_experts - 1, -1, -1, device=scores_TE.device)
    key_TE = (ascending_TE.to(torch.int64) << 32) + rank_E
    return key_TE.topk(num_chosen, dim=1).indices


def stable_top_k_sort(scores_TE: Tensor, num_chosen: int) -> Tensor:
    """The obvious form of :func:`stable_top_k`. Any dtype."""
    return torch.sort(scores_TE, dim=1, descending=True, stable=True).indices[:, :num_chosen]


def keep_best_groups(scores_TE: Tensor, config: ModelConfig) -> Tensor:
    """Group-limited routing (DeepSeek-V3): all but the best groups of experts become -inf.

    Never 0: scores plus a bias may be negative.
    """
    num_tokens, num_experts = scores_TE.shape
    grouped = scores_TE.view(num_tokens, config.router_groups, num_experts // config.router_groups)
    if config.router_group_score == "max":
        group_scores_TG = grouped.amax(2)
    else:
        group_scores_TG = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    kept_TG.scatter_(1, stable_top_k(group_scores_TG, config.router_groups_kept), True)
    return grouped.masked_fill(~kept_TG[:, :, None], -torch.inf).view(num_tokens, num_experts)


def capacity_per_sequence(valid_BS: Tensor, config: ModelConfig, factor: float) -> Tensor:
    """ceil(V * K * factor / E), at most V, for V valid tokens in a sequence: int64 [B].

    In integers: 10 * 1.1 is 11, and not the next larger float, whose ceiling is 12.
    """
    num_B = valid_BS.sum(1)
    exact = Fraction(factor).limit_denominator(10_000)
    wanted = num_B * (config.experts_per_token * exact.numerator)
    parts = config.num_experts * exact.denominator
    return torch.minimum((wanted + parts - 1) // parts, num_B)


def comparable(scores: Tensor) -> Tensor:
    """Scores as they are compared between tokens: rounded, fp32 to bf16 and fp64 to fp32.

    Two equal tokens at the start of a sequence have equal scores but for rounding, which differs
    with the layout. Rounded they tie, and the earlier one wins in every layout.
    """
    if scores.dtype == torch.float64:
        return scores.to(torch.float32).to(scores.dtype)
    return scores.to(torch.bfloat16).to(scores.dtype)


def expert_choice(scores_BSE: Tensor, valid_BS: Tensor, capacity_B: Tensor) -> Tensor:
    """Each expert takes the `capacity_B` tokens of a sequence that score best: bool [B, S, E].

    Zhou et al., "Mixture-of-Experts with Expert Choice Routing", 2022 (arXiv:2202.09368). Equal
    scores by ascending position. A token may be taken by any number of experts, or by none.
    """
    scores_BSE = scores_BSE.masked_fill(~valid_BS[:, :, None], -torch.inf)
    order = torch.sort(scores_BSE, dim=1, descending=True, stable=True).indices
    rank_BSE = torch.argsort(order, dim=1)
    return (rank_BSE < capacity_B[:, None, None]) & valid_BS[:, :, None]


def slots(chosen_TE: Tensor, num_slots: int) -> Tensor:
    """bool [T, E] -> ids of the chosen experts, ascending, then -1: int64 [T, num_slots].

    No row of `chosen_TE` may hold more than `num_slots`.
    """
    num_experts = chosen_TE.shape[1]
    ids_E = torch.arange(num_experts, device=chosen_TE.device)
    ids_TE = torch.where(chosen_TE, ids_E, num_experts).sort(dim=1).values[:, :num_slots]
    return ids_TE.masked_fill(ids_TE == num_experts, -1)


def sinkhorn(logits_BSE: Tensor, valid_BS: Tensor) -> Tensor:
    """Logits balanced so that, in a sequence, every expert is as attractive as another: [B, S, E].

    exp(logits) with rows and columns scaled in turn to equal sums (Sinkhorn & Knopp, 1967; Clark et
    al., "Unified Scaling Laws for Routed Language Models", 2022, arXiv:2202.01169), in logarithms.
    Only the order within a row has a meaning. Rows of padding take no part.
    """
    log_BSE = logits_BSE
    is_padding = ~valid_BS[:, :, None]
    for _ in range(SINKHORN_ROUNDS):
        log_BSE = log_BSE - log_BSE.logsumexp(2, keepdim=True)
        columns = log_BSE.masked_fill(is_padding, -torch.inf).logsumexp(1, keepdim=True)
        # A sequence of nothing but padding has no sum.
        log_BSE = log_BSE - columns.masked_fill(columns == -torch.inf, 0.0)
    return log_BSE
