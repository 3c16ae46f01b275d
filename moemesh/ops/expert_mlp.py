"""The SwiGLU MLPs of many experts over rows grouped by expert, in one autograd Function.

Legend: N source rows, R rows in expert order, E local experts, F expert width, G = 2 F, H hidden;
B rows and D experts of one block.

    h = x W_gate_up^T          two products fused into one
    y = (silu(h_gate) * h_up * weight) W_down^T

The router's weight multiplies before the down projection: there is no bias behind it, so this is
the same function as weighting the output, on F instead of H numbers a row. The Function copies the
rows out of their source itself, forward and backward, so that neither the copied rows nor the
product of gate and up are kept: it saves the source, h and nothing else of activation size.

It works in blocks of whole experts. On a CPU a block is small enough to stay in the cache from one
operation to the next; only h, the output and the gradient of the copied rows are ever whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.grouped_gemm import grouped_gemm, grouped_weight_gradient, row_ends
from moemesh.ops.permute import RowMap, sum_rows
from moemesh.ops.swiglu import swiglu, swiglu_backward
from moemesh.ops.weight_gradient import deferring, weight_gradient

#: On a CPU a block takes experts until it has this many rows: enough to hide the price of calls.
BLOCK_ROWS = 256


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


class Block(NamedTuple):
    """Consecutive experts, their rows, and the running total of the experts' rows in the block."""

    experts: slice
    rows: slice
    ends_D: Tensor


def expert_blocks(counts_E: Tensor, num_rows: int) -> list[Block]:
    """Cut the experts into blocks, at least one; an accelerator gets one: no wait for counts."""
    if counts_E.device.type != "cpu":
        return [Block(slice(0, len(counts_E)), slice(0, num_rows), row_ends(counts_E))]
    blocks: list[Block] = []
    expert = row = end = 0
    for index, count in enumerate(counts_E.tolist(), start=1):
        end += count
        if end - row >= BLOCK_ROWS or index == len(counts_E):
            ends_D = row_ends(counts_E[expert:index])
            blocks.append(Block(slice(expert, index), slice(row, end), ends_D))
            expert, row = index, end
    return blocks


class _Whole:
    """A tensor written block by block; what a lone block returned is taken without a copy."""

    def __init__(self, blocks: list[Block], like: Tensor, *shape: int) -> None:
        self._tensor = like.new_empty(shape) if len(blocks) > 1 else None

    def __getitem__(self, part: slice) -> Tensor | None:
        """Where a block shall write; None: in memory of its own."""
        return None if self._tensor is None else self._tensor[part]

    def of(self, last: Tensor) -> Tensor:
        """The whole, given what the last block returned."""
        return last if self._tensor is None else self._tensor


class GradientSum:
    """Weight gradients of several calls of :func:`expert_mlp`, added where they are computed.

    Give one object to all calls whose outputs reach one loss (the chunks of a layer). autograd
    would make a gradient of full size for each and add them: with few rows a call, more work than
    the products. The last backward returns the sum, the others nothing.
    """

    def __init__(self) -> None:
        self._num_calls = self._num_waiting = 0
        self._sums: dict[int, Tensor] = {}

    def join(self) -> None:
        """One more call, whose backward will run."""
        self._num_calls += 1
        self._num_waiting += 1

    def place(self, weight: Tensor) -> tuple[Tensor, bool]:
        """The sum so far, and whether it holds anything."""
        held = self._sums.get(id(weight))
        if held is None:
            self._sums[id(weight)] = held = torch.empty_like(weight)
            return held, False
        return held, True

    def leave(self) -> dict[int, Tensor]:
        """The sums if this was the last backward, by id of the weight; else nothing."""
        self._num_waiting -= 1
        if self._num_waiting:
            return {}
        found, self._sums, self._num_waiting = self._sums, {}, self._num_calls
        return found


class _WeightGradient:
    """The gradient of stacked weights, block by block: at once, or when the queue asks for it."""

    def __init__(
        self, weight: Tensor, blocks: list[Block], needed: bool, total: GradientSum | None
    ) -> None:
        self._weight, self._blocks, self._needed = weight, blocks, needed
        self._into: Tensor | None = None
        self._adds = False
        # A weight that came from elsewhere has a gradient that must go on from here.
        self._is_deferred = deferring() and weight.is_leaf
        if needed and total is not None:
            into, self._adds = total.place(weight)
            self._into = into.flatten(1, -2)
        self._whole: _Whole | None = None
        self._last = weight
        self._pending: list[tuple[Block, Tensor, Tensor, Tensor | None]] = []

    def add(
        self, block: Block, grad_BO: Tensor, x_BI: Tensor, source_B: Tensor | None = None
    ) -> None:
        """The block's part is ``grad.T @ x`` of each expert; x may be given as rows of a source."""
        if self._needed:
            self._pending.append((block, grad_BO, x_BI, source_B))
            if not self._is_deferred:
                self._compute()

    def result(self) -> Tensor | None:
        """The gradient; None when it is not needed, or when the queue will compute it."""
        if not self._needed:
            return None
        if not self._weight.is_leaf:
            return self._compute()
        return weight_gradient(self._weight, self._compute)

    def _compute(self) -> Tensor:
        if self._into is not None:
            for block, grad_BO, x_BI, source_B in self._pending:
                x_BI = x_BI if source_B is None else x_BI.index_select(0, source_B)
                grouped_weight_gradient(
                    grad_BO,
                    x_BI,
                    block.ends_D,
                    self._into[block.experts],
                    accumulate=self._adds,
                )
            self._pending.clear()
            return self._into.view_as(self._weight)
        if self._whole is None:
            self._whole = _Whole(self._blocks, self._weight, *self._weight.flatten(1, -2).shape)
        for block, grad_BO, x_BI, source_B in self._pending:
            x_BI = x_BI if source_B is None else x_BI.index_select(0, source_B)
            out = self._whole[block.experts]
            self._last = grouped_weight_gradient(grad_BO, x_BI, block.ends_D, out)
        self._pending.clear()
        return self._whole.of(self._last).view_as(self._weight)


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
        total: GradientSum | None,
    ) -> Tensor:
        ctx.total = total
        if total is not None:
            total.join()
        blocks = expert_blocks(counts_E, rows.num_rows)
        gate_up_EGH = gate_up.flatten(1, 2)
        h = _Whole(blocks, source_NH, rows.num_rows, gate_up_EGH.shape[1])
        y = _Whole(blocks, source_NH, rows.num_rows, gate_up_EGH.shape[2])
        for experts, part, ends_D in blocks:
            x_BH = source_NH.index_select(0, rows.source_R[part])
            h_BG = grouped_gemm(x_BH, gate_up_EGH[experts].transpose(1, 2), ends_D, h[part])
            product_BF = swiglu(h_BG, weights_R[part])
            y_BH = grouped_gemm(product_BF, down[experts].transpose(1, 2), ends_D, y[part])
        ctx.save_for_backward(source_NH, weights_R, gate_up, down, h.of(h_BG))
        # Hooks on saved tensors give back other objects: only the leaves themselves have gradients.
        ctx.rows, ctx.blocks, ctx.leaves = rows, blocks, (gate_up, down)
        return y.of(y_BH)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        source_NH, weights_R, gate_up, down, h_RG = ctx.saved_tensors
        rows, blocks = ctx.rows, ctx.blocks
        needs_source, _, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        gate_up_EGH, grad_RH = gate_up.flatten(1, 2), grad_RH.contiguous()
        grad_x, grad_x_BH = _Whole(blocks, grad_RH, *grad_RH.shape), grad_RH
        # A queue adds on its own, whenever it runs.
        total: GradientSum | None = None if deferring() else ctx.total
        grad_gate_up = _WeightGradient(ctx.leaves[0], blocks, needs_gate_up, total)
        grad_down = _WeightGradient(ctx.leaves[1], blocks, needs_down, total)
        grad_weights: list[Tensor] = []
        for block in blocks:
            experts, part, ends_D = block
            grad_product_BF = grouped_gemm(grad_RH[part], down[experts], ends_D)
            product_BF, grad_h_BG, grad_weights_B = swiglu_backward(
                grad_product_BF, h_RG[part], weights_R[part]
            )
            grad_weights.append(grad_weights_B)
            grad_down.add(block, grad_RH[part], product_BF)
            grad_gate_up.add(block, grad_h_BG, source_NH, rows.source_R[part])
            if needs_source:
                grad_x_BH = grouped_gemm(grad_h_BG, gate_up_EGH[experts], ends_D, grad_x[part])
        gradients = grad_gate_up.result(), grad_down.result()
        if total is not None:
            sums = total.leave()
            gradients = tuple(sums.get(id(leaf)) for leaf in ctx.leaves)
        return (
            sum_rows(grad_x.of(grad_x_BH), rows) if needs_source else None,
            torch.cat(grad_weights),
            *gradients,
            None,
            None,
            None,
        )


def expert_mlp(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    total: GradientSum | None = None,
) -> Tensor:
    """Weighted expert outputs [R, H] of the rows that `rows` copies from `source_NH`.

    ``weights_R`` (fp32 or fp64) are the router's weights of the rows, ``counts_E`` (int64) the
    rows of each expert; the sum of counts is R. Weight gradients of leaves can be deferred
    (:mod:`moemesh.ops.weight_gradient`), those of other weights are computed at once. `total`
    joins the weight gradients of several calls.
    """
    return _ExpertMLP.apply(source_NH, weights_R, gate_up_E2FH, down_EHF, rows, counts_E, total)
