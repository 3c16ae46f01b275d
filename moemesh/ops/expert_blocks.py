"""Rows of many experts in blocks, and the gradient of their stacked weights, block by block.

Legend: R rows, E experts, B rows and D experts of one block, I input and O output channels. The
experts from the `border` on are frozen (None: no expert is).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.ops.grouped_gemm import grouped_weight_gradient, product_into
from moemesh.ops.weight_gradient import weight_gradient
from moemesh.trace.memory_profile import ONE_PASS_NUMBERS

#: Rows at which a block on a CPU is full: computing them takes much longer than the calls.
BLOCK_ROWS = 256
#: Rows of a block of wide experts in 16 bits: their products take a quarter of the time of 32 bits,
#: while the cost of a call is the same (docs/results/layer.md).
SHORT_BLOCK_ROWS = 2048


class Block(NamedTuple):
    """Consecutive experts, their rows, the end of each expert's rows in the block (int32), and
    whether the experts train: those before the border do."""

    experts: slice
    rows: slice
    ends_D: Tensor
    trains: bool = True


def block_rows(dtype: torch.dtype, width: int) -> int:
    """Number of rows of experts of this `width` that end a block on a CPU."""
    # Larger blocks of narrow experts would change bits of old runs: their SwiGLU would be compiled,
    # which rounds differently. That of wide experts is compiled in blocks of BLOCK_ROWS as well.
    is_wide = BLOCK_ROWS * width >= ONE_PASS_NUMBERS
    return SHORT_BLOCK_ROWS if dtype.itemsize == 2 and is_wide else BLOCK_ROWS


def expert_blocks(
    counts_E: Tensor,
    num_rows: int,
    max_rows: int | None = None,
    border: int | None = None,
    fewest_rows: int | None = None,
    most_experts: int | None = None,
) -> list[Block]:
    """Cut the rows into one or more blocks of whole experts.

    On a CPU a block ends at `fewest_rows` (:func:`block_rows`; None: BLOCK_ROWS) or more. On an
    accelerator there is one block, without a wait for counts. More than `max_rows` rows are first
    cut into parts of `max_rows`, also inside of an expert. With `border` no block has experts on
    both sides of it, with `most_experts` none has more experts: an accelerator then waits for
    counts.
    """
    limits = border, BLOCK_ROWS if fewest_rows is None else fewest_rows, most_experts
    if max_rows is None or num_rows <= max_rows:
        return _blocks_of_whole_experts(counts_E, 0, num_rows, *limits)
    ends_E, blocks = counts_E.cumsum(0), list[Block]()
    for start in range(0, num_rows, max_rows):
        stop = min(start + max_rows, num_rows)
        within_E = torch.diff(ends_E.clamp(start, stop), prepend=ends_E.new_tensor([start]))
        blocks += _blocks_of_whole_experts(within_E, start, stop, *limits)
    return [block for block in blocks if block.rows.start < block.rows.stop]


def _blocks_of_whole_experts(
    counts_E: Tensor,
    start: int,
    stop: int,
    border: int | None,
    fewest_rows: int,
    most_experts: int | None,
) -> list[Block]:
    """The blocks of the rows from `start` to `stop`, of which each expert has `counts_E`."""
    is_device = counts_E.device.type != "cpu"
    if is_device and most_experts is None:
        if not border:  # None or 0: all experts train, or all are frozen
            ends_E, trains = counts_E.cumsum(0, dtype=torch.int32), border is None
            return [Block(slice(0, counts_E.shape[0]), slice(start, stop), ends_E, trains)]
        middle, end = start + int(counts_E[:border].sum()), len(counts_E)
        halves = counts_E[:border], counts_E[border:]
        first_D, second_D = (half_D.cumsum(0, dtype=torch.int32) for half_D in halves)
        return [
            Block(slice(0, border), slice(start, middle), first_D),
            Block(slice(border, end), slice(middle, stop), second_D, False),
        ]
    blocks: list[Block] = []
    # First expert and first row of the block that is being filled, and the end of its rows so far.
    expert, row, end = 0, start, start
    for index, count in enumerate(counts_E.tolist(), start=1):
        # Rows after the last expert's have no expert (RowMap.has_rest).
        end = stop if is_device and index == len(counts_E) else end + count
        is_full = (end - row >= fewest_rows and not is_device) or index - expert == most_experts
        if is_full or index in (border, len(counts_E)):
            ends_D = counts_E[expert:index].cumsum(0, dtype=torch.int32)
            trains = border is None or index <= border
            blocks.append(Block(slice(expert, index), slice(row, end), ends_D, trains))
            expert, row = index, end
    return blocks


def in_blocks(blocks: list[Block], *wholes: Tensor | None) -> list[tuple[Any, ...]]:
    """Each block with its rows of every tensor; for a single block the tensors themselves."""
    if len(blocks) == 1:
        return [(blocks[0], *wholes)]
    return [(block, *(x if x is None else x[block.rows] for x in wholes)) for block in blocks]


class WeightGradient:
    """The gradient of stacked weights, block by block: computed by :meth:`add`, or deferred to
    :meth:`compute`. `are_shared`: the rows of an expert may be in several blocks, whose parts are
    summed in fp32 at least."""

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
        self._weight, self._blocks = weight, blocks
        self._needed = needed and weight.numel() > 0
        self._is_deferred, self._is_bias = is_deferred, is_bias
        self._pending: list[tuple[Block, Tensor, Tensor, Tensor | None]] = []
        #: Gradient of the last added block (a placeholder before the first).
        self._last = weight
        #: Memory for the gradients of several blocks, each expert in one block; None otherwise.
        self._whole: Tensor | None = None
        #: Sum of the gradients of blocks that share experts, at least fp32; None otherwise.
        self._total: Tensor | None = None
        if are_shared and self._needed:
            wide = torch.promote_types(weight.dtype, torch.float32)
            self._total = torch.zeros_like(self.stack, dtype=wide)

    @property
    def stack(self) -> Tensor:
        """The weight as matrices [E, O, I]; a bias has one input channel."""
        weight = self._weight
        return weight.flatten(1)[..., None] if self._is_bias else weight.flatten(1, -2)

    def add(
        self, block: Block, grad_BO: Tensor, x_BI: Tensor, source_B: Tensor | None = None
    ) -> None:
        """Add ``grad.T @ x`` of each expert of a block. With `source_B`, x are these rows of
        `x_BI`."""
        if not self._needed:
            return
        if self._is_deferred:
            self._pending.append((block, grad_BO, x_BI, source_B))
            return
        if self._whole is None and self._total is None and len(self._blocks) > 1:
            self._whole = self._weight.new_empty(self.stack.shape)
        x_BI = x_BI if source_B is None else x_BI.index_select(0, source_B)
        out = None if self._whole is None else self._whole[block.experts]
        self._last = grouped_weight_gradient(grad_BO, x_BI, block.ends_D, out)
        if self._total is not None:
            self._total[block.experts] += self._last

    def result(self) -> Tensor | None:
        """The gradient; None if it is not needed, or if the active queue computes it."""
        if not self._needed or not self._weight.is_leaf:
            return self.compute()
        held = [tensor for _, grad_BO, x_BI, _ in self._pending for tensor in (grad_BO, x_BI)]
        return weight_gradient(self._weight, self.compute, held)

    def compute(self) -> Tensor | None:
        """The gradient from all added blocks; None if it is not needed."""
        if not self._needed:
            return None
        self._is_deferred = False
        for part in self._pending:
            self.add(*part)
        self._pending.clear()
        if self._total is not None:
            return self._total.to(self._weight.dtype).view_as(self._weight)
        return (self._last if self._whole is None else self._whole).view_as(self._weight)

    @staticmethod
    def compute_sum(calls: list[WeightGradient]) -> Tensor | None:
        """The sum over several calls; on a CPU one product an expert, over the rows of all."""
        weight, needed = calls[0]._weight, calls[0]._needed
        if not needed or len(calls) == 1:
            return calls[0].compute()
        if weight.device.type != "cpu":
            whole = calls[0].compute()
            assert whole is not None
            for call in calls[1:]:  # one at a time: each sum is as large as the weights
                whole += call.compute()
            return whole
        total = torch.zeros_like(calls[0].stack)
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
                product_into(out, grad_RO.t(), x_RI)
        return total.view_as(weight)


def of_rows(bias_DO: Tensor, block: Block) -> Tensor:
    """The bias of each row of a block, [B, O], from the biases of its experts."""
    size = block.rows.stop - block.rows.start
    if bias_DO.device.type != "cpu":
        # Rows after the last end have no expert (RowMap.has_rest): any expert's bias is valid.
        places_B = torch.arange(size, dtype=torch.int32, device=bias_DO.device)
        expert_B = torch.searchsorted(block.ends_D, places_B, right=True)
        return bias_DO.index_select(0, expert_B.clamp(max=len(bias_DO) - 1))
    ends_D = block.ends_D.long()
    counts_D = torch.diff(ends_D, prepend=ends_D.new_zeros(1))
    return bias_DO.repeat_interleave(counts_D, dim=0, output_size=size)
