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
from moemesh.ops.expert_weights import (
    ExpertKind,
    ExpertWeights,
    add_products,
    narrow,
    narrow_gradient,
    part_of,
)
from moemesh.ops.swiglu import PLAIN
from moemesh.ops.weight_gradient import weight_gradient


class _ExactExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        weights_R: Tensor,
        counts_EP: Tensor,
        kind: ExpertKind,
        recomputes: bool,
        *tensors: Tensor,
    ) -> Tensor:
        experts = kind.weights(tensors)
        rows = PaddedRows(counts_EP)
        gate_QF, up_QF = _gate_and_up(x_RH, experts, counts_EP, rows)
        scale_Q1 = rows.pad(weights_R)[:, None].to(gate_QF.dtype)
        if experts.form == PLAIN:
            product_QF = F.silu(gate_QF) * up_QF * scale_Q1
        else:
            product_QF = experts.form.product(torch.cat([gate_QF, up_QF], dim=1)) * scale_Q1
        y_QH = rows.gemm(product_QF, experts.down.transpose(1, 2))
        add_products(experts.of_down, product_QF, y_QH, experts.scale, rows.gemm)
        y_RH = rows.unpad(y_QH)
        if experts.down_bias is not None:
            scale_R1 = weights_R[:, None].to(y_RH.dtype)
            y_RH[:, experts.part] += _of_rows(experts.down_bias, counts_EP) * scale_R1
        kept = () if recomputes else (gate_QF, up_QF)
        ctx.save_for_backward(x_RH, weights_R, counts_EP, *tensors, *kept)
        ctx.rows, ctx.leaves, ctx.kind = rows, tensors, kind
        return y_RH

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weights_R, counts_EP, *saved = ctx.saved_tensors
        tensors, kept = saved[: len(ctx.leaves)], saved[len(ctx.leaves) :]
        experts = ctx.kind.weights(tensors)
        rows: PaddedRows = ctx.rows
        gate_QF, up_QF = kept or _gate_and_up(x_RH, experts, counts_EP, rows)
        scale_Q1 = rows.pad(weights_R)[:, None].to(gate_QF.dtype)
        scale, grad_QH = experts.scale, rows.pad(grad_RH)
        grad_QF = rows.gemm(grad_QH, experts.down)
        of_down = [
            (one, narrow_gradient(one, grad_QH, scale, rows.gemm)) for one in experts.of_down
        ]
        for adapter, g_QR in of_down:
            grad_QF += rows.gemm(g_QR, adapter.a)
        # The product of gate and up once more, and the gradient of both from that of the product.
        grad_product_QF = grad_QF * scale_Q1
        if experts.form == PLAIN:
            silu_QF = F.silu(gate_QF)
            product_QF = silu_QF * up_QF
            grad_gate_QF = torch.ops.aten.silu_backward(grad_product_QF * up_QF, gate_QF)
            grad_h_QG = torch.cat([grad_gate_QF, grad_product_QF * silu_QF], dim=1)
            del silu_QF, grad_gate_QF
        else:
            both_QG = torch.cat([gate_QF, up_QF], dim=1)
            product_QF, grad_h_QG = experts.form.backward(grad_product_QF, both_QG)
            del both_QG
        del grad_product_QF
        grad_weights_Q = torch.linalg.vecdot(grad_QF, product_QF)
        product_RF, grad_h_RG = rows.unpad(product_QF * scale_Q1), rows.unpad(grad_h_QG)
        factors = [(grad_h_RG, x_RH), (grad_RH, product_RF)]
        if experts.down_bias is not None:
            scale_R1 = weights_R[:, None].to(x_RH.dtype)
            grad_RC = grad_RH[:, experts.part].contiguous()
            factors += [(grad_h_RG, torch.ones_like(scale_R1)), (grad_RC, scale_R1)]
            bias_RC = _of_rows(experts.down_bias, counts_EP)
            grad_weights_Q = grad_weights_Q + torch.linalg.vecdot(
                rows.pad(grad_RC), rows.pad(bias_RC)
            )

        grad_x_QH = rows.gemm(grad_h_QG, experts.gate_up.flatten(1, 2))
        for adapter in experts.of_gate_up:
            g_QR = narrow_gradient(adapter, grad_h_QG, scale, rows.gemm)
            u_QR = narrow(adapter, rows.pad(x_RH), scale, rows.gemm)
            grad_x_QH += rows.gemm(g_QR, adapter.a)
            factors.append((rows.unpad(g_QR), x_RH))
            factors.append((part_of(adapter, grad_h_RG), rows.unpad(u_QR)))
        for adapter, g_QR in of_down:
            u_QR = narrow(adapter, product_QF * scale_Q1, scale, rows.gemm)
            factors += [(rows.unpad(g_QR), product_RF), (grad_RH, rows.unpad(u_QR))]

        def gradient(needed: bool, leaf: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor | None:
            if not needed:  # a weight that does not train: nobody would take it from a queue
                return None
            grad_RO, x_RI = pair
            return weight_gradient(
                leaf,
                lambda: exact_weight_gradient(grad_RO, x_RI, counts_EP).view_as(leaf),
                (grad_RO, x_RI),
            )

        needed = ctx.needs_input_grad[-len(tensors) :]
        found = [gradient(*one) for one in zip(needed, ctx.leaves, factors, strict=True)]
        grad_x_RH = rows.unpad(grad_x_QH)
        grad_weights_R = rows.unpad(grad_weights_Q).to(weights_R.dtype)
        return grad_x_RH, grad_weights_R, None, None, None, *found


def _gate_and_up(
    x_RH: Tensor, experts: ExpertWeights, counts_EP: Tensor, rows: PaddedRows
) -> tuple[Tensor, Tensor]:
    x_QH = rows.pad(x_RH)
    h_QG = rows.gemm(x_QH, experts.gate_up.flatten(1, 2).transpose(1, 2))
    add_products(experts.of_gate_up, x_QH, h_QG, experts.scale, rows.gemm)
    if experts.gate_up_bias is not None:
        h_QG += rows.pad(_of_rows(experts.gate_up_bias.flatten(1), counts_EP))
    gate_QF, up_QF = (half.contiguous() for half in h_QG.chunk(2, dim=1))
    return gate_QF, up_QF


def _of_rows(bias_EO: Tensor, counts_EP: Tensor) -> Tensor:
    """The bias of each row, [R, O]."""
    return bias_EO.repeat_interleave(counts_EP.sum(1), dim=0)


def exact_experts(
    x_RH: Tensor,
    weights_R: Tensor,
    counts_EP: Tensor,
    experts: ExpertWeights,
    recomputes: bool = False,
) -> Tensor:
    """Weighted expert outputs [R, H]; ``counts_EP`` (int64): rows of each expert and owner.
    `recomputes`: the backward computes gate and up once more instead of keeping them."""
    return _ExactExperts.apply(
        x_RH, weights_R, counts_EP, experts.kind, recomputes, *experts.tensors
    )
