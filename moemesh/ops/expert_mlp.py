"""The SwiGLU MLPs of many experts over rows grouped by expert, in one autograd Function.

Legend: N source rows, R rows in expert order, E local experts, F expert width, G = 2 F, H hidden;
B rows and D experts of one block; C channels of H whose bias this rank adds; I in, O out.

    h = x W_gate_up^T          two products fused into one
    y = (silu(h_gate) * h_up * weight) W_down^T

The router's weight multiplies before the down projection: the same function as weighting the
output, on F instead of H numbers a row. A bias (``h + b``, ``y + weight * b'``) is a weight of one
input channel, which is 1, or the router's weight: its gradient is a product like that of others.
The Function copies the rows out of their source itself, in forward and backward, and saves only the
source and h of activation size: neither the copied rows nor the product of gate and up.

It works in blocks of whole experts. On a CPU a block is small enough to stay in the cache from one
operation to the next; only h, the output and the gradients of the output and of the copied rows
exist for all rows.

With `recomputes`, h is not saved: the backward recomputes it, block by block, with the same bits.
With more rows than `max_rows` it is not saved either, and blocks have at most `max_rows` rows. Both
are inside of the Function, so that autograd's graph is equal on every rank: the exchanges of a
backward, and their order, must not depend on the number of a rank's rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.expert_blocks import (
    Block,
    WeightGradient,
    in_blocks,
    of_rows,
)
from moemesh.ops.expert_weights import (
    ExpertWeights,
    add_products,
    add_products_loop,
    narrow,
    narrow_gradient,
    part_of,
)
from moemesh.ops.grouped_gemm import grouped_gemm
from moemesh.ops.nf4 import PackedMatrices, matrices
from moemesh.ops.permute import NoSecondDerivative, OwnSlots, RowMap, sum_rows
from moemesh.ops.swiglu import swiglu, swiglu_backward
from moemesh.ops.weight_gradient import deferral


def expert_mlp_loop(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    experts: ExpertWeights,
) -> Tensor:
    """Reference for :func:`expert_mlp`, by plain autograd."""
    x_RH = source_NH[rows.source_R]
    outputs, start = [x_RH[:0]], 0
    limit, alpha, offset = experts.form
    if experts.rest:
        stacks = [torch.cat(pair) for pair in zip(experts.tensors, experts.rest, strict=False)]
        experts = experts._replace(rest=()).of(stacks)
    for expert, count in enumerate(counts_E.tolist()):
        x = x_RH[start : start + count]
        h = x @ experts.gate_up[expert].flatten(0, 1).t()
        gate, up = add_products_loop(experts.of_gate_up, x, h, experts.scale, expert).chunk(2, 1)
        if experts.gate_up_bias is not None:
            gate, up = gate + experts.gate_up_bias[expert, 0], up + experts.gate_up_bias[expert, 1]
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        product = gate * torch.sigmoid(alpha * gate) * (up + offset)
        y = product @ experts.down[expert].t()
        y = add_products_loop(experts.of_down, product, y, experts.scale, expert)
        if experts.down_bias is not None:
            bias = experts.down_bias[expert]
            y = y + F.pad(bias, (experts.column, y.shape[1] - experts.column - len(bias)))
        outputs.append(y * weights_R[start : start + count, None].to(x.dtype))
        start += count
    return torch.cat(outputs)


class DeferredProducts(NamedTuple):
    """Weight gradients of several calls of :func:`expert_mlp`, computed in the backward of
    `anchor`. Autograd reaches it after all nodes that were created later."""

    anchor: Tensor
    calls: list[list[WeightGradient]]


class ExpertOptions(TypedDict, total=False):
    """Options of :func:`expert_mlp`."""

    deferred: DeferredProducts | None
    max_rows: int | None
    recomputes: bool


def defer(experts: ExpertWeights) -> DeferredProducts:
    """An option of :func:`expert_mlp` that defers the weight gradients of all calls with it.

    If it is created between the start and the end of a dispatch, the gradients are computed while
    those of the dispatch's tokens are in flight. Calls with the same option share products: chunks
    of few rows cost no more than all rows at once.
    """
    calls: list[list[WeightGradient]] = []
    return DeferredProducts(_Anchor.apply(calls, *experts.tensors), calls)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: list[list[WeightGradient]], *weights: Tensor) -> Tensor:
        ctx.calls, ctx.num_weights = calls, len(weights)
        return weights[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        if not ctx.calls:  # a queue has them, the calls computed them, or there were no calls
            return (None,) * (1 + ctx.num_weights)
        by_weight = [list(calls) for calls in zip(*ctx.calls, strict=True)]
        ctx.calls.clear()
        sums = list(map(WeightGradient.compute_sum, by_weight))
        return None, *sums, *(None for _ in range(ctx.num_weights - len(sums)))


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source_NH: Tensor,
        weights: Tensor,
        call: _Call,
        *leaves: Tensor,
    ) -> Tensor:
        """`leaves`: the weights of the experts, then the anchor of deferred products, if any."""
        experts, rows, slots = call.experts, call.rows, call.slots
        weights_R = weights if slots is None else slots.pick(weights)
        num_rows = weights_R.shape[0]
        blocks = experts.blocks(call.counts_E, num_rows, call.max_rows, source_NH.dtype)
        is_bounded = call.max_rows is not None and num_rows > call.max_rows
        is_kept = not call.recomputes and not is_bounded
        # Memory for the results of blocks; a single block allocates its own.
        h_RG = y_RH = None
        if len(blocks) > 1:
            y_RH = source_NH.new_empty(num_rows, experts.down.shape[1])
            h_RG = y_RH.new_empty(num_rows, 2 * experts.gate_up.shape[2]) if is_kept else None
        parts = in_blocks(blocks, rows.source_R, weights_R, h_RG, y_RH)
        for block, source_B, weights_B, h_BG, y_BH in parts:
            block_experts = experts.of_block(block, source_NH.dtype)
            h_BG = _gate_and_up(source_NH, source_B, block_experts, block, h_BG)
            product_BF = swiglu(h_BG, weights_B, experts.form)
            y_BH = grouped_gemm(product_BF, block_experts.down.transpose(1, 2), block.ends_D, y_BH)
            if block_experts.adapters:
                gemm = partial(grouped_gemm, ends_E=block.ends_D)
                add_products(block_experts.of_down, product_BF, y_BH, experts.scale, gemm)
            if block_experts.down_bias is not None:
                bias = of_rows(block_experts.down_bias, block) * weights_B[:, None].to(y_BH.dtype)
                y_BH[:, block_experts.part] += bias
        kept = [h_BG if h_RG is None else h_RG] if is_kept else []
        ctx.save_for_backward(source_NH, weights_R, *leaves, *kept)
        # Hooks may replace saved tensors by other objects; gradients belong to the leaves.
        ctx.call, ctx.blocks, ctx.leaves, ctx.is_bounded = call, blocks, leaves, is_bounded
        ctx.shape = weights.shape
        y_RH = y_BH if y_RH is None else y_RH
        return y_RH if slots is None else sum_rows(y_RH, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        call, blocks, is_bounded = ctx.call, ctx.blocks, ctx.is_bounded
        # The weights are saved for autograd's check that nothing has changed them.
        source_NH, weights_R, *saved = ctx.saved_tensors
        kept = saved[len(ctx.leaves) :]
        experts, rows, slots = call.experts, call.rows, call.slots
        num_weights = 2 if experts.gate_up_bias is None else 4
        needs_source, needs_leaves = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        num_trained = len(ctx.leaves) - len(experts.rest) - (call.calls is not None)
        grad_RH = grad.contiguous() if slots is None else grad.index_select(0, rows.source_R)
        grad_x_RH = torch.empty_like(grad_RH) if needs_source and len(blocks) > 1 else None
        # An active queue takes the gradients, not `deferred`. With more rows than `max_rows`
        # nothing is deferred: it would hold the activations that bounded memory must not.
        is_queued = deferral.queue is not None
        calls = None if is_bounded or is_queued else call.calls
        # Gradients of weights that are not leaves are needed now, for the weights' own backward.
        is_deferred = calls is not None or (is_queued and ctx.leaves[0].is_leaf)
        is_deferred = is_deferred and not is_bounded
        trained = [block for block in blocks if block.trains] if experts.rest else blocks
        # One for each trained leaf, in the order of ExpertWeights.tensors; the blocks fill them.
        gradients = [
            WeightGradient(
                leaf,
                trained,
                needed,
                is_deferred=is_deferred,
                are_shared=is_bounded,
                is_bias=2 <= i < num_weights,
            )
            for i, (leaf, needed) in enumerate(zip(ctx.leaves, needs_leaves, strict=True))
            if i < num_trained
        ]
        grad_weights: list[Tensor] = []
        h_RG = kept[0] if kept else None
        parts = in_blocks(blocks, rows.source_R, weights_R, grad_RH, h_RG, grad_x_RH)
        for block, source_B, weights_B, grad_BH, h_BG, grad_x_BH in parts:
            ends_D, gemm = block.ends_D, partial(grouped_gemm, ends_E=block.ends_D)
            block_experts = experts.of_block(block, source_NH.dtype)
            of_gate_up = block_experts.of_gate_up if block_experts.adapters else ()
            of_down = block_experts.of_down if block_experts.adapters else ()
            if h_BG is None:
                h_BG = _gate_and_up(source_NH, source_B, block_experts, block)
            # Down projection and SwiGLU, from the output back to h.
            grad_product_BF = grouped_gemm(grad_BH, block_experts.down, ends_D)
            narrow_down: list[Tensor] = []
            for adapter in of_down:
                g_BR = narrow_gradient(adapter, grad_BH, experts.scale, gemm)
                grad_product_BF += gemm(g_BR, adapter.a)
                narrow_down.append(g_BR)
            product_BF, grad_h_BG, grad_weights_B = swiglu_backward(
                grad_product_BF, h_BG, weights_B, experts.form
            )
            if block.trains:
                gradients[0].add(block, grad_h_BG, source_NH, source_B)
                gradients[1].add(block, grad_BH, product_BF)
            if block_experts.down_bias is not None:
                scale_B1 = weights_B[:, None].to(grad_h_BG.dtype)
                grad_BC = grad_BH[:, block_experts.part].contiguous()
                if block.trains:
                    gradients[2].add(block, grad_h_BG, torch.ones_like(scale_B1))
                    gradients[3].add(block, grad_BC, scale_B1)
                bias_BC = of_rows(block_experts.down_bias, block)
                grad_weights_B += torch.linalg.vecdot(grad_BC, bias_BC).to(grad_weights_B.dtype)
            grad_weights.append(grad_weights_B)
            # Gate and up projection, from h back to the rows; then the factors of adapters.
            if needs_source:
                gate_up_DGH = block_experts.gate_up.flatten(1, 2)
                grad_x_BH = grouped_gemm(grad_h_BG, gate_up_DGH, ends_D, grad_x_BH)
            factors = iter(gradients[num_weights:])
            if of_gate_up:
                x_BH = source_NH.index_select(0, source_B)
            for adapter in of_gate_up:
                g_BR = narrow_gradient(adapter, grad_h_BG, experts.scale, gemm)
                u_BR = narrow(adapter, x_BH, experts.scale, gemm)
                next(factors).add(block, g_BR, source_NH, source_B)
                next(factors).add(block, part_of(adapter, grad_h_BG), u_BR)
                if needs_source:
                    grad_x_BH += gemm(g_BR, adapter.a)
            for adapter, g_BR in zip(of_down, narrow_down, strict=True):
                u_BR = narrow(adapter, product_BF, experts.scale, gemm)
                next(factors).add(block, g_BR, product_BF)
                next(factors).add(block, grad_BH, u_BR)
        # Results, one for each input of the forward.
        leaf_gradients: list[Tensor | None] = [None] * len(ctx.leaves)
        if calls is None:
            result = WeightGradient.result if is_queued else WeightGradient.compute
            leaf_gradients[: len(gradients)] = map(result, gradients)
        else:
            calls.append(gradients)
        if call.calls is not None:
            leaf_gradients[-1] = grad_RH.new_zeros(())
        grad_weights_R = grad_weights[0] if len(grad_weights) == 1 else torch.cat(grad_weights)
        grad_x_RH = grad_x_BH if grad_x_RH is None else grad_x_RH
        return (
            sum_rows(grad_x_RH, rows) if needs_source else None,
            grad_weights_R if slots is None else slots.unpick(grad_weights_R, ctx.shape),
            None,
            *leaf_gradients,
        )


class _Call(NamedTuple):
    """Arguments of :func:`expert_mlp` but the source and the router's weights, of activation size:
    autograd saves those, and frees them."""

    experts: ExpertWeights
    rows: RowMap
    counts_E: Tensor
    calls: list[list[WeightGradient]] | None
    max_rows: int | None
    recomputes: bool
    slots: OwnSlots | None


def _gate_and_up(
    source_NH: Tensor,
    source_B: Tensor,
    block_experts: ExpertWeights,
    block: Block,
    out: Tensor | None = None,
) -> Tensor:
    """The h of one block, whose rows are copies of the source rows `source_B`."""
    x_BH = source_NH.index_select(0, source_B)
    gate_up_DGH = block_experts.gate_up.flatten(1, 2)
    h_BG = grouped_gemm(x_BH, gate_up_DGH.transpose(1, 2), block.ends_D, out)
    if block_experts.adapters:
        gemm = partial(grouped_gemm, ends_E=block.ends_D)
        add_products(block_experts.of_gate_up, x_BH, h_BG, block_experts.scale, gemm)
    if block_experts.gate_up_bias is not None:
        h_BG += of_rows(block_experts.gate_up_bias.flatten(1), block)
    return h_BG


def expert_mlp_of_few(
    x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: ExpertWeights
) -> Tensor:
    """Sums [T, H] of the weighted outputs of each token's experts, without gradient, for few rows:
    one product for each (token, slot) pair, without sorting."""
    ids_R, weights_R = experts_TK.flatten(), weights_TK.flatten()
    numbers = ids_R.tolist()

    def gemm(x_RI: Tensor, weight_EIO: Tensor | PackedMatrices) -> Tensor:
        rows = zip(x_RI.split(1), numbers, strict=True)
        return torch.cat([x_1I @ weight_EIO[expert] for x_1I, expert in rows])

    x_RH = x_TH.repeat_interleave(experts_TK.shape[1], dim=0)
    h_RG = gemm(x_RH, matrices(experts.gate_up, x_RH.dtype, is_transposed=True))
    add_products(experts.of_gate_up, x_RH, h_RG, experts.scale, gemm)
    if experts.gate_up_bias is not None:
        h_RG += experts.gate_up_bias.flatten(1)[ids_R]
    product_RF = swiglu(h_RG, weights_R, experts.form)
    y_RH = gemm(product_RF, matrices(experts.down, x_RH.dtype, is_transposed=True))
    add_products(experts.of_down, product_RF, y_RH, experts.scale, gemm)
    if experts.down_bias is not None:
        y_RH[:, experts.part] += experts.down_bias[ids_R] * weights_R[:, None].to(y_RH.dtype)
    return y_RH.view(*experts_TK.shape, -1).sum(1)


def expert_mlp(
    source_NH: Tensor,
    rows: RowMap,
    weights: Tensor,
    counts_E: Tensor,
    experts: ExpertWeights,
    deferred: DeferredProducts | None = None,
    max_rows: int | None = None,
    recomputes: bool = False,
    slots: OwnSlots | None = None,
) -> Tensor:
    """Weighted expert outputs [R, H] of the rows that `rows` copies from `source_NH`.

    `weights` (fp32 or fp64) are the router's weights of the rows [R], ``counts_E`` (int64) the rows
    of each expert; the sum of counts is R without padding rows. With `slots`, weights are those of
    tokens and slots [T, K], and the result is the sum of the rows of each token [T, H]. Weight
    gradients of leaves can be deferred by a queue (:mod:`moemesh.ops.weight_gradient`); `deferred`
    computes those of several calls at once (:func:`defer`). More rows than `max_rows` are computed
    in blocks of at most `max_rows`. These are recomputed in the backward, as are all blocks with
    `recomputes`.
    """
    calls = None if deferred is None else deferred.calls
    call = _Call(experts, rows, counts_E, calls, max_rows, recomputes, slots)
    leaves = experts.tensors if deferred is None else (*experts.tensors, deferred.anchor)
    return _ExpertMLP.apply(source_NH, weights, call, *leaves)
