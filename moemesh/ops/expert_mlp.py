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

With `recomputes` not even h is kept: the backward computes it once more, block by block, with the
same bits. With more rows than `max_rows` neither, and blocks have at most `max_rows` rows. Both
happen inside of the Function, so that autograd sees the same graph on every rank: what a backward
sends, and when, must not depend on how many rows a rank has.
"""

from __future__ import annotations

from itertools import pairwise
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


def expert_blocks(counts_E: Tensor, num_rows: int, max_rows: int | None = None) -> list[Block]:
    """Cut the rows into blocks, at least one, of whole experts; an accelerator gets one, without a
    wait for counts. More rows than `max_rows` are cut there first, wherever that is in an expert.
    """
    if max_rows is None or num_rows <= max_rows:
        return _blocks_of_whole_experts(counts_E, 0, num_rows)
    ends_E, blocks = counts_E.cumsum(0), list[Block]()
    for start in range(0, num_rows, max_rows):
        stop = min(start + max_rows, num_rows)
        within_E = torch.diff(ends_E.clamp(start, stop), prepend=ends_E.new_tensor([start]))
        blocks += _blocks_of_whole_experts(within_E, start, stop)
    return [block for block in blocks if block.rows.start < block.rows.stop]


def _blocks_of_whole_experts(counts_E: Tensor, start: int, stop: int) -> list[Block]:
    """The blocks of the rows `start` to `stop`, `counts_E` for each expert."""
    if counts_E.device.type != "cpu":
        return [Block(slice(0, len(counts_E)), slice(start, stop), row_ends(counts_E))]
    blocks: list[Block] = []
    expert, row, end = 0, start, start
    for index, count in enumerate(counts_E.tolist(), start=1):
        end += count
        if end - row >= BLOCK_ROWS or index == len(counts_E):
            ends_D = row_ends(counts_E[expert:index])
            blocks.append(Block(slice(expert, index), slice(row, end), ends_D))
            expert, row = index, end
    return blocks


class _Whole:
    """A tensor written block by block; the result of a lone block is taken without a copy."""

    def __init__(self, blocks: list[Block], like: Tensor, *shape: int) -> None:
        self._tensor = like.new_empty(shape) if len(blocks) > 1 else None

    def __getitem__(self, part: slice) -> Tensor | None:
        """Where a block shall write; None: in memory of its own."""
        return None if self._tensor is None else self._tensor[part]

    def of(self, last: Tensor) -> Tensor:
        """The whole, given the result of the last block."""
        return last if self._tensor is None else self._tensor


class _WeightGradient:
    """The gradient of stacked weights, block by block: at once, or when somebody asks for it.

    `are_shared`: the rows of an expert may lie in several blocks; then each block is computed and
    added at once, in fp32 at least.
    """

    def __init__(
        self,
        weight: Tensor,
        blocks: list[Block],
        needed: bool,
        *,
        is_deferred: bool,
        are_shared: bool = False,
    ) -> None:
        self._weight, self._blocks, self._needed = weight, blocks, needed
        self._is_deferred = is_deferred
        self._whole: _Whole | None = None
        self._last = weight
        self._pending: list[tuple[Block, Tensor, Tensor, Tensor | None]] = []
        self._total: Tensor | None = None
        if are_shared and needed:
            wide = torch.promote_types(weight.dtype, torch.float32)
            self._total = torch.zeros_like(weight.flatten(1, -2), dtype=wide)

    def add(
        self, block: Block, grad_BO: Tensor, x_BI: Tensor, source_B: Tensor | None = None
    ) -> None:
        """The block's part is ``grad.T @ x`` of each expert; x may be given as rows of a source."""
        if self._needed:
            self._pending.append((block, grad_BO, x_BI, source_B))
            if not self._is_deferred:
                self.compute()

    def result(self) -> Tensor | None:
        """The gradient; None when it is not needed, or when the queue will compute it."""
        if not self._needed:
            return None
        if not self._weight.is_leaf:
            return self.compute()
        kept = [tensor for _, grad_BO, x_BI, _ in self._pending for tensor in (grad_BO, x_BI)]
        return weight_gradient(self._weight, self.compute, kept)

    def compute(self) -> Tensor | None:
        """The gradient of all blocks that were added; None when it is not needed."""
        if not self._needed:
            return None
        if self._whole is None and self._total is None:
            self._whole = _Whole(self._blocks, self._weight, *self._weight.flatten(1, -2).shape)
        for block, grad_BO, x_BI, source_B in self._pending:
            x_BI = x_BI if source_B is None else x_BI.index_select(0, source_B)
            out = None if self._whole is None else self._whole[block.experts]
            self._last = grouped_weight_gradient(grad_BO, x_BI, block.ends_D, out)
            if self._total is not None:
                self._total[block.experts] += self._last
        self._pending.clear()
        if self._total is not None:
            return self._total.to(self._weight.dtype).view_as(self._weight)
        assert self._whole is not None
        return self._whole.of(self._last).view_as(self._weight)

    @staticmethod
    def compute_sum(calls: list[_WeightGradient]) -> Tensor | None:
        """The sum over several calls; on a CPU one product an expert, over the rows of all."""
        weight, needed = calls[0]._weight, calls[0]._needed
        if not needed or len(calls) == 1:
            return calls[0].compute()
        if weight.device.type != "cpu":
            found = [call.compute() for call in calls]
            return torch.stack([one for one in found if one is not None]).sum(0)
        total = torch.zeros_like(weight.flatten(1, -2))
        rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in total]
        for call in calls:
            for block, grad_BO, x_BI, source_B in call._pending:
                ends = [0, *block.ends_D.tolist()]
                for expert, (start, end) in enumerate(pairwise(ends), start=block.experts.start):
                    part = slice(start, end)
                    x = x_BI[part] if source_B is None else x_BI.index_select(0, source_B[part])
                    if end > start:
                        rows[expert].append((grad_BO[part], x))
            call._pending.clear()
        for out, parts in zip(total, rows, strict=True):
            if parts:
                grad_RO, x_RI = map(torch.cat, zip(*parts, strict=True))
                torch.mm(grad_RO.t(), x_RI, out=out)
        return total.view_as(weight)


class Deferred(NamedTuple):
    """Weight gradients that several calls of :func:`expert_mlp` leave to the backward of `anchor`,
    which autograd reaches behind all nodes that were made after it."""

    anchor: Tensor
    calls: list[tuple[_WeightGradient, _WeightGradient]]


def defer(gate_up_E2FH: Tensor, down_EHF: Tensor) -> Deferred:
    """Defer the weight gradients of all calls that are given the result.

    Made behind the start of a dispatch and before its end, they are computed while the gradients
    of its tokens are under way. Calls that share one also share the products: chunks of few rows
    cost no more than all rows at once.
    """
    calls: list[tuple[_WeightGradient, _WeightGradient]] = []
    return Deferred(_Anchor.apply(gate_up_E2FH, down_EHF, calls), calls)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        down: Tensor,
        calls: list[tuple[_WeightGradient, _WeightGradient]],
    ) -> Tensor:
        ctx.calls = calls
        return gate_up.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.calls:  # a queue has them
            return None, None, None
        gate_up, down = zip(*ctx.calls, strict=True)
        ctx.calls.clear()
        compute = _WeightGradient.compute_sum
        return compute(list(gate_up)), compute(list(down)), None


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
        calls: list[tuple[_WeightGradient, _WeightGradient]] | None,
        anchor: Tensor | None,
        max_rows: int | None,
        recomputes: bool,
    ) -> Tensor:
        blocks = expert_blocks(counts_E, rows.num_rows, max_rows)
        is_bounded = max_rows is not None and rows.num_rows > max_rows
        is_kept = not recomputes and not is_bounded
        gate_up_EGH = gate_up.flatten(1, 2)
        h = _Whole(blocks, source_NH, rows.num_rows if is_kept else 0, gate_up_EGH.shape[1])
        y = _Whole(blocks, source_NH, rows.num_rows, gate_up_EGH.shape[2])
        for block in blocks:
            experts, part, ends_D = block
            out = h[part] if is_kept else None
            h_BG = _gate_and_up(source_NH, rows, gate_up_EGH, block, out)
            product_BF = swiglu(h_BG, weights_R[part])
            y_BH = grouped_gemm(product_BF, down[experts].transpose(1, 2), ends_D, y[part])
        kept = [h.of(h_BG)] if is_kept else []
        ctx.save_for_backward(source_NH, weights_R, gate_up, down, *kept)
        # Hooks on saved tensors give back other objects: only the leaves themselves have gradients.
        ctx.rows, ctx.blocks, ctx.leaves, ctx.calls = rows, blocks, (gate_up, down), calls
        ctx.is_bounded = is_bounded
        return y.of(y_BH)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        source_NH, weights_R, gate_up, down, *kept = ctx.saved_tensors
        rows, blocks, is_bounded = ctx.rows, ctx.blocks, ctx.is_bounded
        needs_source, _, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        gate_up_EGH, grad_RH = gate_up.flatten(1, 2), grad_RH.contiguous()
        grad_x, grad_x_BH = _Whole(blocks, grad_RH, *grad_RH.shape), grad_RH
        # A queue computes on its own, whenever it runs. Beyond `max_rows` nothing waits: it would
        # hold as many numbers as were not kept.
        calls = None if is_bounded or deferring() else ctx.calls
        # A weight that came from elsewhere has a gradient that must go on from here.
        is_deferred = calls is not None or (deferring() and ctx.leaves[0].is_leaf)
        is_deferred = is_deferred and not is_bounded
        grad_gate_up, grad_down = (
            _WeightGradient(leaf, blocks, needed, is_deferred=is_deferred, are_shared=is_bounded)
            for leaf, needed in zip(ctx.leaves, (needs_gate_up, needs_down), strict=True)
        )
        grad_weights: list[Tensor] = []
        for block in blocks:
            experts, part, ends_D = block
            if kept:
                h_BG = kept[0][part]
            else:
                h_BG = _gate_and_up(source_NH, rows, gate_up_EGH, block)
            grad_product_BF = grouped_gemm(grad_RH[part], down[experts], ends_D)
            product_BF, grad_h_BG, grad_weights_B = swiglu_backward(
                grad_product_BF, h_BG, weights_R[part]
            )
            grad_weights.append(grad_weights_B)
            grad_down.add(block, grad_RH[part], product_BF)
            grad_gate_up.add(block, grad_h_BG, source_NH, rows.source_R[part])
            if needs_source:
                grad_x_BH = grouped_gemm(grad_h_BG, gate_up_EGH[experts], ends_D, grad_x[part])
        gradients: tuple[Tensor | None, Tensor | None] = None, None
        if calls is None:
            gradients = grad_gate_up.result(), grad_down.result()
        else:
            calls.append((grad_gate_up, grad_down))
        return (
            sum_rows(grad_x.of(grad_x_BH), rows) if needs_source else None,
            torch.cat(grad_weights),
            *gradients,
            None,
            None,
            None,
            None if ctx.calls is None else grad_RH.new_zeros(()),
            None,
            None,
        )


def _gate_and_up(
    source_NH: Tensor,
    rows: RowMap,
    gate_up_EGH: Tensor,
    block: Block,
    out: Tensor | None = None,
) -> Tensor:
    """The h of one block."""
    x_BH = source_NH.index_select(0, rows.source_R[block.rows])
    return grouped_gemm(x_BH, gate_up_EGH[block.experts].transpose(1, 2), block.ends_D, out)


def expert_mlp(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    deferred: Deferred | None = None,
    max_rows: int | None = None,
    recomputes: bool = False,
) -> Tensor:
    """Weighted expert outputs [R, H] of the rows that `rows` copies from `source_NH`.

    ``weights_R`` (fp32 or fp64) are the router's weights of the rows, ``counts_E`` (int64) the
    rows of each expert; the sum of counts is R. Weight gradients of leaves can be deferred
    (:mod:`moemesh.ops.weight_gradient`), those of other weights are computed at once. `deferred`
    leaves them to the end of several calls (:func:`defer`). More rows than `max_rows` are computed
    in blocks of at most so many, whose h is computed again in the backward instead of kept; so is
    any h with `recomputes`.
    """
    anchor, calls = deferred or (None, None)
    return _ExpertMLP.apply(
        source_NH,
        weights_R,
        gate_up_E2FH,
        down_EHF,
        rows,
        counts_E,
        calls,
        anchor,
        max_rows,
        recomputes,
    )
