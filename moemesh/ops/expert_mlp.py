"""The SwiGLU MLPs of many experts over rows grouped by expert, in one autograd Function.

Legend: N source rows, R rows in expert order, E local experts, F expert width, H hidden.

    h = x W_gate_up^T          two products fused into one
    y = (silu(h_gate) * h_up * weight) W_down^T

The router's weight multiplies before the down projection: there is no bias behind it, so this is
the same function as weighting the output, on F instead of H numbers a row. The Function copies the
rows out of their source itself, forward and backward, so that neither the copied rows nor the
product of gate and up are kept: it saves the source, h and nothing else of activation size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.grouped_gemm import grouped_gemm, grouped_weight_gradient, row_ends
from moemesh.ops.permute import RowMap, gather_rows, sum_rows
from moemesh.ops.weight_gradient import weight_gradient


def expert_mlp_loop(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
) -> Tensor:
    """The obvious form of :func:`expert_mlp`, by plain autograd."""
    x_RH = source_NH[rows.source_R]
    outputs, start = [x_RH[:0]], 0
    for expert, count in enumerate(counts_E.tolist()):
        x = x_RH[start : start + count]
        gate, up = (x @ matrix.t() for matrix in gate_up_E2FH[expert])
        product = F.silu(gate) * up * weights_R[start : start + count, None].to(x.dtype)
        outputs.append(product @ down_EHF[expert].t())
        start += count
    return torch.cat(outputs)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source_NH: Tensor,
        weights_R: Tensor,
        gate_up: Tensor,
        down: Tensor,
        rows: RowMap,
        counts_E: Tensor,
    ) -> Tensor:
        ends_E = row_ends(counts_E)
        x_RH = gather_rows(source_NH, rows)
        h_RG = grouped_gemm(x_RH, gate_up.flatten(1, 2).transpose(1, 2), ends_E)
        del x_RH
        gate_RF, up_RF = h_RG.chunk(2, dim=1)
        product_RF = F.silu(gate_RF)
        product_RF.mul_(up_RF).mul_(weights_R[:, None].to(product_RF.dtype))
        ctx.save_for_backward(source_NH, weights_R, gate_up, down, h_RG)
        ctx.rows, ctx.ends_E = rows, ends_E
        return grouped_gemm(product_RF, down.transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        source_NH, weights_R, gate_up, down, h_RG = ctx.saved_tensors
        rows, ends_E = ctx.rows, ctx.ends_E
        needs_source, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        grad_RH = grad_RH.contiguous()
        grad_product_RF = grouped_gemm(grad_RH, down, ends_E)
        gate_RF, up_RF = h_RG.chunk(2, dim=1)
        silu_RF = F.silu(gate_RF)
        product_RF = silu_RF * up_RF
        grad_weights_R = None
        if needs_weights:
            grad_weights_R = torch.linalg.vecdot(grad_product_RF, product_RF).to(weights_R.dtype)
        scale_R1 = weights_R[:, None].to(h_RG.dtype)
        grad_product_RF.mul_(scale_R1)
        product_RF.mul_(scale_R1)
        grad_h_RG = torch.empty_like(h_RG)
        grad_gate_RF, grad_up_RF = grad_h_RG.chunk(2, dim=1)
        torch.mul(grad_product_RF, silu_RF, out=grad_up_RF)
        grad_product_RF.mul_(up_RF)
        grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_product_RF, gate_RF))
        del silu_RF, grad_product_RF

        grad_down = grad_gate_up = None
        if needs_down:
            grad_down = weight_gradient(
                down, lambda: grouped_weight_gradient(grad_RH, product_RF, ends_E)
            )
        if needs_gate_up:
            grad_gate_up = weight_gradient(
                gate_up,
                lambda: grouped_weight_gradient(
                    grad_h_RG, gather_rows(source_NH, rows), ends_E
                ).view_as(gate_up),
            )
        grad_source_NH = None
        if needs_source:
            grad_source_NH = sum_rows(grouped_gemm(grad_h_RG, gate_up.flatten(1, 2), ends_E), rows)
        return grad_source_NH, grad_weights_R, grad_gate_up, grad_down, None, None


def expert_mlp(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
) -> Tensor:
    """Weighted expert outputs [R, H] of the rows that `rows` copies from `source_NH`.

    ``weights_R`` (fp32 or fp64) are the router's weights of the rows, ``counts_E`` (int64) the
    rows of each expert; the sum of counts is R. Both weight parameters must be leaves.
    """
    return _ExpertMLP.apply(source_NH, weights_R, gate_up_E2FH, down_EHF, rows, counts_E)
