"""The SwiGLU experts with layout-independent bits, for `combine = exact`: one plain Function.

The same function as :mod:`moemesh.ops.expert_mlp`. Three effects make an expert's result depend on
the layout. BLAS computes the last few rows of a product by other code (measured: row counts not
divisible by 4 in float64, fewer than 4 rows in float32), and a vectorised pointwise operation the
last few numbers: :class:`PaddedRows` pads rows. And a weight gradient is a sum over rows that may
be on several ranks: it is computed as one product per owner of the rows, added in a balanced binary
tree over owners. Expert-parallel groups are contiguous ranks: for powers of two the sum of a group
is a subtree, and the sum over replicas completes the same tree.

Legend: R rows ordered by expert, then by owner; Q padded rows; E local experts, P owners, F expert
width, G = 2 F, H hidden, C channels of it whose bias this rank adds; I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.expert_weights import (
    ExpertWeights,
    add_products,
    narrow,
    narrow_gradient,
    part_of,
)
from moemesh.ops.grouped_gemm import product_into
from moemesh.ops.nf4 import PackedMatrices, matrices
from moemesh.ops.swiglu import PLAIN
from moemesh.ops.weight_gradient import weight_gradient
from moemesh.sharding.dispatchers import EXACT_ROWS


class PaddedRows:
    """Rows [R] padded to [Q]: each expert's to a multiple of EXACT_ROWS, all to 4 times that."""

    def __init__(self, counts_EP: Tensor) -> None:
        counts_E = counts_EP.sum(1)
        padded_E = (counts_E + EXACT_ROWS - 1) // EXACT_ROWS * EXACT_ROWS
        shift_E = padded_E.cumsum(0) - padded_E - (counts_E.cumsum(0) - counts_E)
        rows = torch.arange(int(counts_E.sum()), device=counts_EP.device)
        #: Padded row of each row; padded rows of each expert.
        self.place_R = rows + torch.repeat_interleave(shift_E, counts_E)
        self.per_expert: list[int] = padded_E.tolist()
        self.num_padded = -(-sum(self.per_expert) // (4 * EXACT_ROWS)) * 4 * EXACT_ROWS

    def pad(self, x_R: Tensor) -> Tensor:
        """[R, ...] -> [Q, ...], zeros in padding."""
        padded = x_R.new_zeros(self.num_padded, *x_R.shape[1:])
        padded[self.place_R] = x_R
        return padded

    def unpad(self, x_Q: Tensor) -> Tensor:
        """[Q, ...] -> [R, ...]."""
        return x_Q[self.place_R]

    def gemm(self, x_QI: Tensor, weight_EIO: Tensor | PackedMatrices) -> Tensor:
        """Rows of expert e times ``weight[e]``, [Q, O]."""
        y_QO = x_QI.new_zeros(self.num_padded, weight_EIO[0].shape[1])
        start = 0
        for expert, count in enumerate(self.per_expert):
            if count:
                rows = slice(start, start + count)
                product_into(y_QO[rows], x_QI[rows], weight_EIO[expert])
            start += count
        return y_QO


def exact_weight_gradient(grad_RO: Tensor, x_RI: Tensor, counts_EP: Tensor) -> Tensor:
    """``grad.T @ x`` of each expert, [E, O, I], added over owners in a binary tree; at least fp32.
    Rounding a rank's sum to bfloat16 would make it depend on which owners it sums."""
    wide = torch.promote_types(x_RI.dtype, torch.float32)
    splits = counts_EP.flatten().tolist()
    grads, xs = grad_RO.to(wide).split(splits), x_RI.to(wide).split(splits)
    num_experts, num_owners = counts_EP.shape
    total = x_RI.new_empty(num_experts, grad_RO.shape[1], x_RI.shape[1], dtype=wide)
    for expert in range(num_experts):
        pieces = slice(expert * num_owners, (expert + 1) * num_owners)
        total[expert] = tree_sum(
            grad.t() @ x for grad, x in zip(grads[pieces], xs[pieces], strict=True)
        )
    return total


def tree_sum(parts: Iterable[Tensor]) -> Tensor:
    """Sum of `parts` in a balanced binary tree; holds at most 1 + log2(len(parts)) partial sums."""
    #: Level in the tree and sum of each complete subtree, the largest first.
    stack: list[tuple[int, Tensor]] = []
    for part in parts:
        level, value = 0, part
        while stack and stack[-1][0] == level:
            value = stack.pop()[1] + value
            level += 1
        stack.append((level, value))
    _, total = stack.pop()
    while stack:
        total = stack.pop()[1] + total
    return total


class _ExactExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        weights_R: Tensor,
        counts_EP: Tensor,
        experts: ExpertWeights,
        recomputes: bool,
        *tensors: Tensor,
    ) -> Tensor:
        rows = PaddedRows(counts_EP)
        gate_QF, up_QF = _gate_and_up(x_RH, experts, counts_EP, rows)
        scale_Q1 = rows.pad(weights_R)[:, None].to(gate_QF.dtype)
        if experts.form == PLAIN:
            product_QF = F.silu(gate_QF) * up_QF * scale_Q1
        else:
            product_QF = experts.form.product(torch.cat([gate_QF, up_QF], dim=1)) * scale_Q1
        down_EFH = matrices(experts.down, x_RH.dtype, is_transposed=True)
        y_QH = rows.gemm(product_QF, down_EFH)
        add_products(experts.of_down, product_QF, y_QH, experts.scale, rows.gemm)
        y_RH = rows.unpad(y_QH)
        if experts.down_bias is not None:
            scale_R1 = weights_R[:, None].to(y_RH.dtype)
            y_RH[:, experts.part] += _of_rows(experts.down_bias, counts_EP) * scale_R1
        kept = () if recomputes else (gate_QF, up_QF)
        ctx.save_for_backward(x_RH, weights_R, counts_EP, *tensors, *kept)
        ctx.rows, ctx.leaves, ctx.experts = rows, tensors, experts
        return y_RH

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weights_R, counts_EP, *saved = ctx.saved_tensors
        tensors, kept = saved[: len(ctx.leaves)], saved[len(ctx.leaves) :]
        experts = ctx.experts.of(tensors)
        rows: PaddedRows = ctx.rows
        gate_QF, up_QF = kept or _gate_and_up(x_RH, experts, counts_EP, rows)
        scale_Q1 = rows.pad(weights_R)[:, None].to(gate_QF.dtype)
        scale, grad_QH = experts.scale, rows.pad(grad_RH)
        grad_QF = rows.gemm(grad_QH, matrices(experts.down, x_RH.dtype, is_transposed=False))
        of_down = [
            (adapter, narrow_gradient(adapter, grad_QH, scale, rows.gemm))
            for adapter in experts.of_down
        ]
        for adapter, g_QR in of_down:
            grad_QF += rows.gemm(g_QR, adapter.a)
        # Recompute the product of gate and up, and derive the gradients of both from its gradient.
        grad_product_QF = grad_QF * scale_Q1
        if experts.form == PLAIN:
            silu_QF = F.silu(gate_QF)
            product_QF = silu_QF * up_QF
            grad_gate_QF = torch.ops.aten.silu_backward(grad_product_QF * up_QF, gate_QF)
            grad_h_QG = torch.cat([grad_gate_QF, grad_product_QF * silu_QF], dim=1)
            del silu_QF, grad_gate_QF
        else:
            h_QG = torch.cat([gate_QF, up_QF], dim=1)
            product_QF, grad_h_QG = experts.form.backward(grad_product_QF, h_QG)
            del h_QG
        del grad_product_QF
        grad_weights_Q = torch.linalg.vecdot(grad_QF, product_QF)
        product_RF, grad_h_RG = rows.unpad(product_QF * scale_Q1), rows.unpad(grad_h_QG)
        # (gradient, input) of the product of each leaf, in the order of ExpertWeights.tensors.
        pairs = [(grad_h_RG, x_RH), (grad_RH, product_RF)]
        if experts.down_bias is not None:
            scale_R1 = weights_R[:, None].to(x_RH.dtype)
            grad_RC = grad_RH[:, experts.part].contiguous()
            pairs += [(grad_h_RG, torch.ones_like(scale_R1)), (grad_RC, scale_R1)]
            bias_RC = _of_rows(experts.down_bias, counts_EP)
            grad_weights_Q = grad_weights_Q + torch.linalg.vecdot(
                rows.pad(grad_RC), rows.pad(bias_RC)
            )

        gate_up_EGH = matrices(experts.gate_up, x_RH.dtype, is_transposed=False)
        grad_x_QH = rows.gemm(grad_h_QG, gate_up_EGH)
        for adapter in experts.of_gate_up:
            g_QR = narrow_gradient(adapter, grad_h_QG, scale, rows.gemm)
            u_QR = narrow(adapter, rows.pad(x_RH), scale, rows.gemm)
            grad_x_QH += rows.gemm(g_QR, adapter.a)
            pairs.append((rows.unpad(g_QR), x_RH))
            pairs.append((part_of(adapter, grad_h_RG), rows.unpad(u_QR)))
        for adapter, g_QR in of_down:
            u_QR = narrow(adapter, product_QF * scale_Q1, scale, rows.gemm)
            pairs += [(rows.unpad(g_QR), product_RF), (grad_RH, rows.unpad(u_QR))]

        def gradient(needed: bool, leaf: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor | None:
            if not needed:  # a frozen weight
                return None
            grad_RO, x_RI = pair
            return weight_gradient(
                leaf,
                lambda: exact_weight_gradient(grad_RO, x_RI, counts_EP).view_as(leaf),
                (grad_RO, x_RI),
            )

        needed = ctx.needs_input_grad[-len(tensors) :]
        weight_gradients = [gradient(*x) for x in zip(needed, ctx.leaves, pairs, strict=True)]
        grad_x_RH = rows.unpad(grad_x_QH)
        grad_weights_R = rows.unpad(grad_weights_Q).to(weights_R.dtype)
        return grad_x_RH, grad_weights_R, None, None, None, *weight_gradients


def _gate_and_up(
    x_RH: Tensor, experts: ExpertWeights, counts_EP: Tensor, rows: PaddedRows
) -> tuple[Tensor, Tensor]:
    x_QH = rows.pad(x_RH)
    h_QG = rows.gemm(x_QH, matrices(experts.gate_up, x_RH.dtype, is_transposed=True))
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
    `recomputes`: the backward recomputes gate and up instead of keeping them."""
    return _ExactExperts.apply(x_RH, weights_R, counts_EP, experts, recomputes, *experts.tensors)
