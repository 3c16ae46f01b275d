"""Auxiliary losses of the router: load balance and z-loss, each a mean over a scope's tokens.

Legend: T tokens held here, E experts, Q scopes that this rank has tokens of.

A scope is a set of tokens: one sequence, one microbatch of one data-parallel rank, or one
microbatch of all ranks ("global"). With V valid tokens in it, counts c and probabilities p:

    L = alpha * E * sum_i f_i P_i  +  beta * (1/V) sum_t logsumexp(logits_t)^2
    f_i = c_i / (K V), without gradient        P_i = (1/V) sum_t p_ti

(Switch; Fedus et al., 2021. ST-MoE; Zoph et al., 2022.) Counts are summed over the ranks of the
scope before, so that the ranks' parts add up to L and their gradients need no correction. The
objective takes the mean over the scopes of the step; a scope without valid tokens is none.

Where sequences come in slices (:class:`~moemesh.model.seams.SliceState`), each adds its counts,
probabilities and squares to those of the slices before it, and the last one has the loss of the
whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.router import Routing
from moemesh.model.seams import ScopeSums, Tokens


def auxiliary_loss(
    routing: Routing, config: ModelConfig, context: Context, tokens: Tokens, layer: int = 0
) -> Tensor:
    """This rank's part of both losses, a sum over its scopes; 0 before the last slice."""
    if not (config.aux_loss_coefficient or config.z_loss_coefficient):
        return routing.logits_TE.new_zeros(())
    if config.aux_loss_scope == "sequence":
        scope_T, num_scopes = context.sequence_T, context.num_sequences
    else:
        scope_T, num_scopes = torch.zeros_like(context.sequence_T), 1
    sums = context.slices.total(layer, scope_sums(routing, config, context, scope_T, num_scopes))
    if sums is None:
        return routing.logits_TE.new_zeros(())
    is_global = config.aux_loss_scope == "global"
    counts_QE = context.flow.once(
        tokens.sum_over_ranks if is_global else tokens.sum_over_shards, sums.counts_QE
    )
    valid_Q = (counts_QE.sum(1) // config.experts_per_token).clamp(min=1)
    loss = config.aux_loss_coefficient * balance_loss(sums.probabilities_QE, counts_QE, valid_Q)
    if config.z_loss_coefficient:
        loss = loss + config.z_loss_coefficient * (sums.squares_Q / valid_Q).sum()
    return loss


def scope_sums(
    routing: Routing, config: ModelConfig, context: Context, scope_T: Tensor, num_scopes: int
) -> ScopeSums:
    """Of the tokens of this forward that are held here; no squares without a z-loss."""
    probabilities_TE = routing.probabilities_TE
    squares_Q = probabilities_TE.new_zeros(num_scopes)
    if config.z_loss_coefficient:
        square_T = routing.logits_TE.logsumexp(1).square()
        if context.valid_T is not None:
            square_T = square_T.masked_fill(~context.valid_T, 0.0)
        squares_Q = squares_Q.index_add(0, scope_T, square_T)
    return ScopeSums(
        count(routing.preferred_TK, scope_T, num_scopes, config.num_experts),
        sum_by_scope(probabilities_TE, scope_T, num_scopes),
        squares_Q,
    )


def count(experts_TK: Tensor, scope_T: Tensor, num_scopes: int, num_experts: int) -> Tensor:
    """Choices of each expert in each scope, int64 [Q, E]; -1 is no choice."""
    key_TK = scope_T[:, None] * num_experts + experts_TK
    counts = torch.bincount(key_TK[experts_TK >= 0], minlength=num_scopes * num_experts)
    return counts.view(num_scopes, num_experts)


def sum_by_scope(probabilities_TE: Tensor, scope_T: Tensor, num_scopes: int) -> Tensor:
    """Probabilities [T, E] (0 for padding) added up in each scope, [Q, E]."""
    zeros_QE = probabilities_TE.new_zeros(num_scopes, probabilities_TE.shape[1])
    return zeros_QE.index_add(0, scope_T, probabilities_TE)


def balance_loss(probabilities_QE: Tensor, counts_QE: Tensor, valid_Q: Tensor) -> Tensor:
    """``sum_Q E * sum_i f_i P_i`` over the tokens held here.

    ``counts_QE`` and ``valid_Q`` (int64) are of the whole scopes, ``probabilities_QE`` the sums
    over this rank's tokens.
    """
    frequency_QE = counts_QE / counts_QE.sum(1, keepdim=True).clamp(min=1).to(probabilities_QE)
    mean_QE = probabilities_QE / valid_Q[:, None]
    return counts_QE.shape[1] * (frequency_QE * mean_QE).sum()
