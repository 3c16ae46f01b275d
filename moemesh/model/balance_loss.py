"""Auxiliary losses of the router: load balance and z-loss, each a mean over a scope's tokens.

Legend: T tokens held here, E experts, Q scopes that this rank has tokens of.

A scope is a set of tokens: one sequence, one microbatch of one data-parallel rank, or one
microbatch of all ranks ("global"). With V valid tokens in it, counts c and probabilities p:

    L = alpha * E * sum_i f_i P_i  +  beta * (1/V) sum_t logsumexp(logits_t)^2
    f_i = c_i / (K V), without gradient        P_i = (1/V) sum_t p_ti

(Switch; Fedus et al., 2021. ST-MoE; Zoph et al., 2022.) Counts are summed over the ranks of the
scope before, so that the ranks' parts add up to L and their gradients need no correction. The
objective takes the mean over the scopes of the step; a scope without valid tokens is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.router import Routing
from moemesh.model.seams import Tokens


def auxiliary_loss(
    routing: Routing, config: ModelConfig, context: Context, tokens: Tokens
) -> Tensor:
    """This rank's part of both losses, a sum over its scopes (a scalar)."""
    if not (config.aux_loss_coefficient or config.z_loss_coefficient):
        return routing.logits_TE.new_zeros(())
    if config.aux_loss_scope == "sequence":
        scope_T, num_scopes = context.sequence_T, context.num_sequences
    else:
        scope_T, num_scopes = torch.zeros_like(context.sequence_T), 1
    counts_QE = count(routing.preferred_TK, scope_T, num_scopes, config.num_experts)
    if config.aux_loss_scope == "global":
        counts_QE = tokens.sum_over_ranks(counts_QE)
    else:
        counts_QE = tokens.sum_over_shards(counts_QE)
    valid_Q = (counts_QE.sum(1) // config.experts_per_token).clamp(min=1)
    loss = config.aux_loss_coefficient * balance_loss(
        routing.probabilities_TE, counts_QE, valid_Q, scope_T
    )
    if config.z_loss_coefficient:
        square_T = routing.logits_TE.logsumexp(1).square() / valid_Q[scope_T]
        if context.valid_T is not None:
            square_T = square_T.masked_fill(~context.valid_T, 0.0)
        loss = loss + config.z_loss_coefficient * square_T.sum()
    return loss


def count(experts_TK: Tensor, scope_T: Tensor, num_scopes: int, num_experts: int) -> Tensor:
    """Choices of each expert in each scope, int64 [Q, E]; -1 is no choice."""
    key_TK = scope_T[:, None] * num_experts + experts_TK
    counts = torch.bincount(key_TK[experts_TK >= 0], minlength=num_scopes * num_experts)
    return counts.view(num_scopes, num_experts)


def balance_loss(
    probabilities_TE: Tensor, counts_QE: Tensor, valid_Q: Tensor, scope_T: Tensor
) -> Tensor:
    """``sum_Q E * sum_i f_i P_i`` over the tokens held here.

    ``counts_QE`` and ``valid_Q`` (int64) are of the whole scopes, ``probabilities_TE`` (0 for
    padding) of this rank's tokens.
    """
    num_experts = counts_QE.shape[1]
    frequency_QE = counts_QE / counts_QE.sum(1, keepdim=True).clamp(min=1).to(probabilities_TE)
    mean_QE = torch.zeros_like(frequency_QE).index_add(
        0, scope_T, probabilities_TE / valid_Q[scope_T][:, None]
    )
    return num_experts * (frequency_QE * mean_QE).sum()
