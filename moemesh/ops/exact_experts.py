"""The SwiGLU experts with layout-independent bits: plain, unblocked, one Function.

Legend: R rows ordered by expert, then by owner; Q padded rows; E local experts, P owners, F expert
width, G = 2 F, H hidden.
The same function as :mod:`moemesh.ops.expert_mlp`, by the products of
:mod:`moemesh.ops.exact_gemm`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.exact_gemm import PaddedRows, exact_weight_gradient
from moemesh.ops.weight_gradient import weight_gradient


class _ExactExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        weights_R: Tensor,
        counts_EP: Tensor,
        gate_up: Tensor,
        down: Tensor,
        recomputes: bool,
    ) -> Tensor:
        rows = PaddedRows(counts_EP)
        gate_QF, up_QF = _gate_and_up(x_RH, gate_up, rows)
        scale_Q1 = rows.pad(weights_R)[:, None].to(gate_QF.dtype)
        y_QH = rows.gemm(F.silu(gate_QF) * up_QF * scale_Q1, down.transpose(1, 2))
        kept = () if recomputes else (gate_QF, up_QF)
        ctx.save_for_backward(x_RH, weights_R, counts_EP, gate_up, down, *kept)
        ctx.rows, ctx.leaves = rows, (gate_up, down)
        return rows.unpad(y_QH)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weights_R, counts_EP, gate_up, down, *kept = ctx.saved_tensors
        rows: PaddedRows = ctx.rows
        gate_QF, up_QF = kept or _gate_and_up(x_RH, gate_up, rows)
        scale_Q1 = rows.pad(weights_R)[:, None].to(gate_QF.dtype)
        silu_QF = F.silu(gate_QF)
        product_QF = silu_QF * up_QF
        grad_QF = rows.gemm(rows.pad(grad_RH), down)
        grad_weights_R = rows.unpad(torch.linalg.vecdot(grad_QF, product_QF)).to(weights_R.dtype)
        grad_QF = grad_QF * scale_Q1
        grad_gate_QF = torch.ops.aten.silu_backward(grad_QF * up_QF, gate_QF)
        grad_h_QG = torch.cat([grad_gate_QF, grad_QF * silu_QF], dim=1)
        product_RF, grad_h_RG = rows.unpad(product_QF * scale_Q1), rows.unpad(grad_h_QG)
        grad_down = weight_gradient(
            ctx.leaves[1],
            lambda: exact_weight_gradient(grad_RH, product_RF, counts_EP),
            (grad_RH, product_RF),
        )
        grad_gate_up = weight_gradient(
            ctx.leaves[0],
            lambda: exact_weight_gradient(grad_h_RG, x_RH, counts_EP).view_as(gate_up),
            (grad_h_RG, x_RH),
        )
        grad_x_RH = rows.unpad(rows.gemm(grad_h_QG, gate_up.flatten(1, 2)))
        return grad_x_RH, grad_weights_R, None, grad_gate_up, grad_down, None


def _gate_and_up(x_RH: Tensor, gate_up: Tensor, rows: PaddedRows) -> tuple[Tensor, Tensor]:
    h_QG = rows.gemm(rows.pad(x_RH), gate_up.flatten(1, 2).transpose(1, 2))
    gate_QF, up_QF = (half.contiguous() for half in h_QG.chunk(2, dim=1))
    return gate_QF, up_QF


def exact_experts(
    x_RH: Tensor,
    weights_R: Tensor,
    counts_EP: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    recomputes: bool = False,
) -> Tensor:
    """Weighted expert outputs [R, H]; ``counts_EP`` (int64): rows of each expert and owner.
    `recomputes`: the backward computes gate and up once more instead of keeping them."""
    return _ExactExperts.apply(x_RH, weights_R, counts_EP, gate_up_E2FH, down_EHF, recomputes)
