"""The router: scores, stable top-k selection and weights, in fp32 whatever the model's dtype.

Legend: T tokens, E experts, K experts per token, H hidden, G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.ops.linear import linear


class Routing(NamedTuple):
    """Where each token goes: made once per layer and microbatch, then only read.

    ``weights_TK`` fp32 with gradient, 0 where there is no expert; ``experts_TK`` int64 logical ids,
    -1 = none; ``probabilities_TE`` fp32, rows summing to 1 (0 for padding), for balance losses;
    ``logits_TE`` fp32.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    probabilities_TE: Tensor
    logits_TE: Tensor


class Router(nn.Module):
    """One linear layer and :func:`route`; ``selection_bias`` steers the choice, not the weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # fp32 in every run: in bfloat16 an update of 1e-3 would vanish near 1 (spacing 2^-8).
        bias_E = torch.zeros(config.num_experts) if config.router_selection_bias else None
        self.register_buffer("selection_bias", bias_E)

    def forward(self, x_TH: Tensor, valid_T: Tensor | None) -> Routing:
        # The product itself in fp32: a bf16 router changes the experts of 0.5 to 2 % of tokens.
        logits_TE = linear(x_TH.to(self.weight.dtype), self.weight)
        return route(logits_TE, self.config, self.selection_bias, valid_T)

    @torch.no_grad()
    def update_selection_bias(self, counts_E: Tensor) -> None:
        """Aux-loss-free balancing (Wang et al., 2024), once per optimizer step.

        `counts_E` (int64): tokens per expert of the whole step, all ranks and microbatches.
        """
        counts = counts_E.double()
        self.selection_bias += self.config.router_bias_rate * torch.sign(counts.mean() - counts).to(
            self.selection_bias
        )
        self.selection_bias -= self.selection_bias.mean()  # or it drifts as a whole


def route(
    logits_TE: Tensor, config: ModelConfig, selection_bias: Tensor | None, valid_T: Tensor | None
) -> Routing:
    """Choose K experts per token and weigh them.

    Equal scores go to the lowest id, on every backend: `torch.topk` promises no order of ties.
    """
    scores_TE = _score(logits_TE, config) if config.router_when == "before" else logits_TE
    choice_TE = scores_TE.detach()
    if selection_bias is not None:
        choice_TE = choice_TE + selection_bias
    if config.router_groups > 1:
        choice_TE = keep_best_groups(choice_TE, config)
    experts_TK = stable_top_k(choice_TE, config.experts_per_token)
    weights_TK = scores_TE.gather(1, experts_TK)
    if config.router_when == "after":
        weights_TK = _score(weights_TK, config)
    if config.router_normalize:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + config.router_normalize_eps)
    weights_TK = weights_TK * config.router_scale
    probabilities_TE = _score(logits_TE, config)
    if config.router_score == "sigmoid":
        probabilities_TE = probabilities_TE / probabilities_TE.sum(1, keepdim=True)
    if valid_T is not None:
        experts_TK = experts_TK.masked_fill(~valid_T[:, None], -1)
        weights_TK = weights_TK.masked_fill(~valid_T[:, None], 0.0)
        probabilities_TE = probabilities_TE.masked_fill(~valid_T[:, None], 0.0)
    return Routing(weights_TK, experts_TK, probabilities_TE, logits_TE)


def _score(logits: Tensor, config: ModelConfig) -> Tensor:
    return logits.softmax(1) if config.router_score == "softmax" else logits.sigmoid()


def stable_top_k(scores_TE: Tensor, num_chosen: int) -> Tensor:
    """Ids of the best scores, best first; equal scores by ascending id."""
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
    grouped = scores_TE.view(num_tokens, config.router_groups, -1)
    if config.router_group_score == "max":
        group_scores_TG = grouped.amax(2)
    else:
        group_scores_TG = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    kept_TG.scatter_(1, stable_top_k(group_scores_TG, config.router_groups_kept), True)
    return grouped.masked_fill(~kept_TG[:, :, None], -torch.inf).view(num_tokens, num_experts)
