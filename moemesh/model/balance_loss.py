"""Auxiliary losses of the router: load balance and z-loss, each a mean over a scope's tokens.

Legend: T tokens of this rank, K slots per token, E experts, Q scopes of these tokens, X = 2 E + 1
sums of a scope.

A scope is a set of tokens: one sequence, one microbatch of one data-parallel rank, or one
microbatch of all ranks ("global"). With V valid tokens in it, counts c and probabilities p:

    L = alpha * E * sum_i f_i P_i  +  beta * (1/V) sum_t logsumexp(logits_t)^2
    f_i = c_i / (K V), without gradient        P_i = (1/V) sum_t p_ti

(Switch; Fedus et al., 2021. ST-MoE; Zoph et al., 2022.) Counts are summed over the ranks of the
scope first, so that the ranks' parts add up to L and their gradients need no correction. The
objective takes the mean over the scopes of the step that have a valid token.

Every layer has losses of its own (``model.aux_loss_layers = "each"``), or c, p and V are those of
all layers together ("together"), as in transformers' ``load_balancing_loss_func``, which leaves out
the K of f. Then the sums pass through the layers, and through the stages of a pipeline, to the
head, where the loss is computed; its gradient returns the same way.

If sequences come in slices (:class:`~moemesh.model.seams.SliceState`), each adds its counts,
probabilities and squares to those of the previous slices. The loss is computed in the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.router import Routing
from moemesh.model.seams import ScopeSums, Tokens
from moemesh.ops.fusion import fused
from moemesh.ops.permute import count_ids


def auxiliary_loss(
    routing: Routing, config: ModelConfig, context: Context, tokens: Tokens, layer: int = 0
) -> Tensor:
    """This rank's part of both losses of a layer, summed over scopes; 0 before the last slice."""
    sums = layer_sums(routing, config, context, layer)
    if sums is None:
        return routing.logits_TE.new_zeros(())
    return loss_of(sums, config, context, tokens)


def auxiliary_sums(
    routing: Routing, config: ModelConfig, context: Context, layer: int = 0
) -> Tensor:
    """Sums of one layer for the losses of all layers together (:func:`joint_loss`), float64
    [Q, 2E + 1]: counts, probabilities and squares in one tensor. Counts are exact in float64."""
    sums = layer_sums(routing, config, context, layer)
    if sums is None:
        return no_sums(config, context)
    counts_QE, probabilities_QE, squares_Q = sums
    parts = counts_QE.double(), probabilities_QE.double(), squares_Q.double()[:, None]
    return torch.cat(parts, dim=1)


def no_sums(config: ModelConfig, context: Context) -> Tensor:
    """Zeros in the shape of :func:`auxiliary_sums`."""
    shape = shape_of_sums(config, context.num_sequences)
    return torch.zeros(shape, dtype=torch.float64, device=context.position_T.device)


def shape_of_sums(config: ModelConfig, num_sequences: int) -> tuple[int, int]:
    """Shape of :func:`auxiliary_sums`: scopes; counts, probabilities and squares."""
    num_scopes = num_sequences if config.aux_loss_scope == "sequence" else 1
    return num_scopes, 2 * config.num_experts + 1


def joint_loss(sums_QX: Tensor, config: ModelConfig, context: Context, tokens: Tokens) -> Tensor:
    """This rank's part of both losses of all layers together, from the sums of
    :func:`auxiliary_sums` over layers; 0 before the last slice."""
    if not context.slices.is_last:
        return sums_QX.new_zeros(())
    counts_QE, probabilities_QE, squares_Q1 = sums_QX.split(
        [config.num_experts, config.num_experts, 1], dim=1
    )
    counts_QE = counts_QE.detach().round().long()
    return loss_of(
        ScopeSums(counts_QE, probabilities_QE, squares_Q1.squeeze(1)), config, context, tokens
    )


def layer_sums(
    routing: Routing, config: ModelConfig, context: Context, layer: int
) -> ScopeSums | None:
    """The sums of one layer over the tokens of whole sequences (squares are 0 without a z-loss);
    None without a loss, or before the last slice."""
    if not config.has_aux_loss:
        return None
    scope_T, probabilities_TE = context.sequence_T, routing.probabilities_TE
    if config.aux_loss_scope != "sequence":
        scope_T = torch.zeros_like(scope_T)
    num_scopes, _ = shape_of_sums(config, context.num_sequences)
    squares_Q = probabilities_TE.new_zeros(num_scopes)
    if config.z_loss_coefficient:
        square_T = routing.logits_TE.logsumexp(1).square()
        if context.valid_T is not None:
            square_T = square_T.masked_fill(~context.valid_T, 0.0)
        squares_Q = _sum_by_scope(square_T[:, None], scope_T, num_scopes).squeeze(1)
    key_TK = _keys(routing.preferred_TK, scope_T, config.num_experts)
    counts_QE = count_ids(key_TK.flatten(), num_scopes * config.num_experts)
    counts_QE = counts_QE.view(num_scopes, config.num_experts)
    probabilities_QE = _sum_by_scope(probabilities_TE, scope_T, num_scopes)
    return context.slices.total(layer, ScopeSums(counts_QE, probabilities_QE, squares_Q))


def loss_of(sums: ScopeSums, config: ModelConfig, context: Context, tokens: Tokens) -> Tensor:
    """This rank's part of both losses, a sum over its scopes, from its `sums`."""
    is_global = config.aux_loss_scope == "global"
    counts_QE = context.flow.once(
        tokens.sum_over_ranks if is_global else tokens.sum_over_shards, sums.counts_QE
    )
    valid_Q = (counts_QE.sum(1) // config.experts_per_token).clamp(min=1)
    loss = _BalanceLoss.apply(sums.probabilities_QE, counts_QE, valid_Q)
    loss = config.aux_loss_coefficient * loss
    if config.z_loss_coefficient:
        loss = loss + config.z_loss_coefficient * (sums.squares_Q / valid_Q).sum()
    return loss


@fused
def _keys(experts_TK: Tensor, scope_T: Tensor, num_experts: int) -> Tensor:
    """Index of each choice in the flattened counts [Q, E], or -1."""
    return torch.where(experts_TK < 0, -1, scope_T[:, None] * num_experts + experts_TK)


def _sum_by_scope(probabilities_TE: Tensor, scope_T: Tensor, num_scopes: int) -> Tensor:
    """Probabilities [T, E], or squares [T, 1] (0 for padding), added up in each scope [Q, ...]."""
    if probabilities_TE.device.type != "cpu":
        # On a GPU the atomic additions of index_add have another order in every call.
        is_in_QT = scope_T == torch.arange(num_scopes, device=scope_T.device)[:, None]
        return is_in_QT.to(probabilities_TE.dtype) @ probabilities_TE
    zeros_QE = probabilities_TE.new_zeros(num_scopes, probabilities_TE.shape[1])
    return zeros_QE.index_add(0, scope_T, probabilities_TE)


class _BalanceLoss(torch.autograd.Function):
    """``sum_Q E * sum_i f_i P_i``. ``counts_QE`` and ``valid_Q`` (int64) are of the whole scopes,
    ``probabilities_QE`` the sums over this rank's tokens. The loss is linear in these: the forward
    computes its gradient as well."""

    @staticmethod
    def forward(ctx: Any, probabilities_QE: Tensor, counts_QE: Tensor, valid_Q: Tensor) -> Tensor:
        loss, slope_QE = _loss_and_slope(probabilities_QE, counts_QE, valid_Q)
        ctx.save_for_backward(slope_QE)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.saved_tensors[0], None, None


@fused
def _loss_and_slope(
    probabilities_QE: Tensor, counts_QE: Tensor, valid_Q: Tensor
) -> tuple[Tensor, Tensor]:
    choices_Q1 = counts_QE.sum(1, keepdim=True).clamp(min=1).to(probabilities_QE)
    slope_QE = counts_QE.shape[1] * (counts_QE / choices_Q1) / valid_Q[:, None]
    return (slope_QE * probabilities_QE).sum(), slope_QE
