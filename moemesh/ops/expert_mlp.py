"""The SwiGLU MLPs of many experts over rows grouped by expert, in one autograd Function.

Legend: N source rows, R rows in expert order, E local experts, F expert width, G = 2 F, H hidden;
B rows and D experts of one block.

    h = x W_gate_up^T          two products fused into one
    y = (silu(h_gate) * h_up * weight) W_down^T

The router's weight multiplies before the down projection: the same function as weighting the
output, on F instead of H numbers a row. Biases (``h + b``, ``y + weight * b'``) are weights of an
input of one channel, which is 1, or the router's weight: their gradients are products like the
others. The Function copies the
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

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops.grouped_gemm import grouped_gemm, grouped_weight_gradient, row_ends
from moemesh.ops.permute import RowMap, sum_rows
from moemesh.ops.swiglu import PLAIN, SwigluForm, swiglu, swiglu_backward
from moemesh.ops.weight_gradient import deferring, weight_gradient

#: On a CPU a block takes experts until it has this many rows: enough to hide the price of calls.
BLOCK_ROWS = 256


class ExpertWeights(NamedTuple):
    """``gate_up`` [E, 2, F, H], ``down`` [E, H, F], biases ``gate_up_bias`` [E, 2, F] and
    ``down_bias`` [E, part of H], which is that from channel `column` on; and the form of SwiGLU."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    form: SwigluForm = PLAIN
    column: int = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are there, in order: without the biases, or with both."""
        return tuple(tensor for tensor in self[:4] if tensor is not None)

    def of(self, tensors: Sequence[Tensor]) -> ExpertWeights:
        """Other experts of the same kind, from their :attr:`tensors`."""
        return ExpertWeights(*tensors, form=self.form, column=self.column)

    @property
    def part(self) -> slice:
        """The channels of the output that ``down_bias`` is added to."""
        assert self.down_bias is not None
        return slice(self.column, self.column + self.down_bias.shape[1])


def expert_mlp_loop(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    experts: ExpertWeights,
) -> Tensor:
    """The obvious form of :func:`expert_mlp`, by plain autograd."""
    x_RH = source_NH[rows.source_R]
    outputs, start = [x_RH[:0]], 0
    limit, alpha, offset = experts.form
    for expert, count in enumerate(counts_E.tolist()):
        x = x_RH[start : start + count]
        gate, up = (x @ matrix.t() for matrix in experts.gate_up[expert])
        if experts.gate_up_bias is not None:
            gate, up = gate + experts.gate_up_bias[expert, 0], up + experts.gate_up_bias[expert, 1]
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = (gate * torch.sigmoid(alpha * gate) * (up + offset)) @ experts.down[expert].t()
        if experts.down_bias is not None:
            here = experts.down_bias[expert]
            y = y + F.pad(here, (experts.column, y.shape[1] - experts.column - len(here)))
        outputs.append(y * weights_R[start : start + count, None].to(x.dtype))
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
        is_bias: bool = False,
    ) -> None:
        self._weight, self._blocks, self._needed = weight, blocks, needed
        #: As a matrix of each expert: a bias has one input channel.
        self._stack = weight.flatten(1)[..., None] if is_bias else weight.flatten(1, -2)
        self._is_deferred = is_deferred
        self._whole: _Whole | None = None
        self._last = weight
        self._pending: list[tuple[Block, Tensor, Tensor, Tensor | None]] = []
        self._total: Tensor | None = None
        if are_shared and needed:
            wide = torch.promote_types(weight.dtype, torch.float32)
            self._total = torch.zeros_like(self._stack, dtype=wide)

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
            self._whole = _Whole(self._blocks, self._weight, *self._stack.shape)
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
        total = torch.zeros_like(calls[0]._stack)
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
    calls: list[list[_WeightGradient]]


def defer(experts: ExpertWeights) -> Deferred:
    """Defer the weight gradients of all calls that are given the result.

    Made behind the start of a dispatch and before its end, they are computed while the gradients
    of its tokens are under way. Calls that share one also share the products: chunks of few rows
    cost no more than all rows at once.
    """
    calls: list[list[_WeightGradient]] = []
    return Deferred(_Anchor.apply(calls, *experts.tensors), calls)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: list[list[_WeightGradient]], *weights: Tensor) -> Tensor:
        ctx.calls, ctx.num_weights = calls, len(weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.calls:  # a queue has them
            return (None,) * (1 + ctx.num_weights)
        by_weight = [list(calls) for calls in zip(*ctx.calls, strict=True)]
        ctx.calls.clear()
        return None, *map(_WeightGradient.compute_sum, by_weight)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source_NH: Tensor,
        weights_R: Tensor,
        anchor: Tensor | None,
        call: _Call,
        *tensors: Tensor,
    ) -> Tensor:
        experts, rows = call.weights(tensors), call.rows
        blocks = expert_blocks(call.counts_E, rows.num_rows, call.max_rows)
        is_bounded = call.max_rows is not None and rows.num_rows > call.max_rows
        is_kept = not call.recomputes and not is_bounded
        num_numbers = 2 * experts.gate_up.shape[2]
        h = _Whole(blocks, source_NH, rows.num_rows if is_kept else 0, num_numbers)
        y = _Whole(blocks, source_NH, rows.num_rows, experts.down.shape[1])
        for block in blocks:
            part = block.rows
            h_BG = _gate_and_up(source_NH, rows, experts, block, h[part] if is_kept else None)
            product_BF = swiglu(h_BG, weights_R[part], experts.form)
            down = experts.down[block.experts].transpose(1, 2)
            y_BH = grouped_gemm(product_BF, down, block.ends_D, y[part])
            if experts.down_bias is not None:
                bias = of_rows(experts.down_bias, block) * weights_R[part, None].to(y_BH.dtype)
                y_BH[:, experts.part] += bias
        kept = [h.of(h_BG)] if is_kept else []
        ctx.save_for_backward(source_NH, weights_R, *tensors, *kept)
        # Hooks on saved tensors give back other objects: only the leaves themselves have gradients.
        ctx.call, ctx.blocks, ctx.leaves, ctx.is_bounded = call, blocks, tensors, is_bounded
        return y.of(y_BH)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        call, blocks, is_bounded = ctx.call, ctx.blocks, ctx.is_bounded
        source_NH, weights_R, *saved = ctx.saved_tensors
        tensors, kept = saved[: len(ctx.leaves)], saved[len(ctx.leaves) :]
        experts, rows = call.weights(tensors), call.rows
        needs_source, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        gate_up_EGH, grad_RH = experts.gate_up.flatten(1, 2), grad_RH.contiguous()
        grad_x, grad_x_BH = _Whole(blocks, grad_RH, *grad_RH.shape), grad_RH
        # A queue computes on its own, whenever it runs. Beyond `max_rows` nothing waits: it would
        # hold as many numbers as were not kept.
        calls = None if is_bounded or deferring() else call.calls
        # A weight that came from elsewhere has a gradient that must go on from here.
        is_deferred = calls is not None or (deferring() and ctx.leaves[0].is_leaf)
        is_deferred = is_deferred and not is_bounded
        gradients = [
            _WeightGradient(
                leaf,
                blocks,
                needed,
                is_deferred=is_deferred,
                are_shared=is_bounded,
                is_bias=place > 1,
            )
            for place, (leaf, needed) in enumerate(zip(ctx.leaves, needs_weights, strict=True))
        ]
        grad_weights: list[Tensor] = []
        for block in blocks:
            part, ends_D = block.rows, block.ends_D
            h_BG = kept[0][part] if kept else _gate_and_up(source_NH, rows, experts, block)
            grad_product_BF = grouped_gemm(grad_RH[part], experts.down[block.experts], ends_D)
            product_BF, grad_h_BG, grad_weights_B = swiglu_backward(
                grad_product_BF, h_BG, weights_R[part], experts.form
            )
            gradients[0].add(block, grad_h_BG, source_NH, rows.source_R[part])
            gradients[1].add(block, grad_RH[part], product_BF)
            if experts.down_bias is not None:
                scale_B1 = weights_R[part, None].to(grad_h_BG.dtype)
                grad_BC = grad_RH[part, experts.part].contiguous()
                gradients[2].add(block, grad_h_BG, torch.ones_like(scale_B1))
                gradients[3].add(block, grad_BC, scale_B1)
                bias_BC = of_rows(experts.down_bias, block)
                grad_weights_B += torch.linalg.vecdot(grad_BC, bias_BC).to(grad_weights_B.dtype)
            grad_weights.append(grad_weights_B)
            if needs_source:
                gate_up = gate_up_EGH[block.experts]
                grad_x_BH = grouped_gemm(grad_h_BG, gate_up, ends_D, grad_x[part])
        found: list[Tensor | None] = [None] * len(gradients)
        if calls is None:
            found = [gradient.result() for gradient in gradients]
        else:
            calls.append(gradients)
        return (
            sum_rows(grad_x.of(grad_x_BH), rows) if needs_source else None,
            torch.cat(grad_weights),
            None if call.calls is None else grad_RH.new_zeros(()),
            None,
            *found,
        )


class _Call(NamedTuple):
    """One call of :func:`expert_mlp`, without its tensors that may have a gradient: autograd, not
    the call, decides how long they stay."""

    form: SwigluForm
    column: int
    rows: RowMap
    counts_E: Tensor
    calls: list[list[_WeightGradient]] | None
    max_rows: int | None
    recomputes: bool

    def weights(self, tensors: Sequence[Tensor]) -> ExpertWeights:
        """From :attr:`ExpertWeights.tensors`."""
        return ExpertWeights(*tensors, form=self.form, column=self.column)


def _gate_and_up(
    source_NH: Tensor,
    rows: RowMap,
    experts: ExpertWeights,
    block: Block,
    out: Tensor | None = None,
) -> Tensor:
    """The h of one block."""
    x_BH = source_NH.index_select(0, rows.source_R[block.rows])
    gate_up_DGH = experts.gate_up[block.experts].flatten(1, 2)
    h_BG = grouped_gemm(x_BH, gate_up_DGH.transpose(1, 2), block.ends_D, out)
    if experts.gate_up_bias is not None:
        h_BG += of_rows(experts.gate_up_bias.flatten(1), block)
    return h_BG


def of_rows(bias_EO: Tensor, block: Block) -> Tensor:
    """The bias of each row of a block, [B, O]."""
    ends_D = block.ends_D.long()
    counts_D = torch.diff(ends_D, prepend=ends_D.new_zeros(1))
    size = block.rows.stop - block.rows.start
    return bias_EO[block.experts].repeat_interleave(counts_D, dim=0, output_size=size)


def expert_mlp(
    source_NH: Tensor,
    rows: RowMap,
    weights_R: Tensor,
    counts_E: Tensor,
    experts: ExpertWeights,
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
    form, column = experts.form, experts.column
    call = _Call(form, column, rows, counts_E, calls, max_rows, recomputes)
    return _ExpertMLP.apply(source_NH, weights_R, anchor, call, *experts.tensors)
