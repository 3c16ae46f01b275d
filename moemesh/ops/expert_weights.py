"""The weights of many experts, with biases, adapters and experts that do not train.

Legend: E local experts, F expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from moemesh.config.lora import NF4_NUMBERS_AT_ONCE
from moemesh.ops.expert_blocks import Block, block_rows, expert_blocks
from moemesh.ops.linear import Adapter
from moemesh.ops.nf4 import dense
from moemesh.ops.swiglu import PLAIN, SwigluForm

# Low-rank adapters of stacked experts (Hu et al., 2021): their part of products and of gradients.
#
# Legend: B rows grouped by expert (T: of one expert), E experts, I inputs, O outputs of a product,
# P those of the part that an adapter belongs to, R its rank. ``a`` is [E, R, I], ``b`` [E, ..., R]
# with P in between.
#
# An expert's delta is never formed: a row costs R (I + P) products forward instead of I P, and
# twice that backward. The caller passes its own grouped product, rows [B, I] times
# [E, I, O].


#: (rows [B, I], weights [E, I, O]) -> [B, O].
Gemm = Callable[[Tensor, Tensor], Tensor]


def part_of(adapter: Adapter, y_BO: Tensor) -> Tensor:
    """The columns of `y_BO` that the adapter belongs to, a view."""
    if adapter.dim is None:
        return y_BO
    width = adapter.b.shape[-2]
    return y_BO[:, adapter.start * width : (adapter.start + adapter.count) * width]


def rows_of(adapter: Adapter) -> Tensor:
    """``b`` as a matrix of each expert, [E, P, R]."""
    return adapter.b.flatten(1, -2)


def narrow(adapter: Adapter, x_BI: Tensor, scale: float, gemm: Gemm) -> Tensor:
    """``scale * x a^T`` [B, R]."""
    return gemm(x_BI, adapter.a.transpose(1, 2)) * scale


def narrow_gradient(adapter: Adapter, grad_BO: Tensor, scale: float, gemm: Gemm) -> Tensor:
    """``scale * grad b`` [B, R]: the gradient of ``x a^T``."""
    return gemm(part_of(adapter, grad_BO), rows_of(adapter)) * scale


def add_products(
    adapters: Sequence[Adapter], x_BI: Tensor, y_BO: Tensor, scale: float, gemm: Gemm
) -> None:
    """Add the outputs of the adapters of one weight for x to `y_BO`, its product, in place."""
    for adapter in adapters:
        u_BR = narrow(adapter, x_BI, scale, gemm)
        part_of(adapter, y_BO).add_(gemm(u_BR, rows_of(adapter).transpose(1, 2)))


def of_experts(adapters: Sequence[Adapter], experts: slice) -> list[Adapter]:
    """`adapters` of the given experts."""
    return [adapter._replace(a=adapter.a[experts], b=adapter.b[experts]) for adapter in adapters]


def add_products_loop(
    adapters: Sequence[Adapter], x_TI: Tensor, y_TO: Tensor, scale: float, expert: int
) -> Tensor:
    """Reference for :func:`add_products` on the rows of one expert, by plain autograd."""
    width = y_TO.shape[1]
    delta_OI = y_TO.new_zeros(width, x_TI.shape[1])
    for adapter in adapters:
        product_PI = rows_of(adapter)[expert] @ adapter.a[expert]
        start = 0 if adapter.dim is None else adapter.start * len(product_PI)
        stop = start + len(product_PI)
        delta_OI = delta_OI + torch.nn.functional.pad(product_PI, (0, 0, start, width - stop))
    return y_TO + scale * (x_TI @ delta_OI.t())


# All weights of the experts.


class ExpertWeights(NamedTuple):
    """``gate_up`` [E, 2, F, H], ``down`` [E, H, F], and biases ``gate_up_bias`` [E, 2, F] and
    ``down_bias`` [E, part of H], the part from channel `column` on. `adapters` of both weights,
    whose outputs are multiplied by `scale`. ``rest``: the same weights of frozen experts, after
    these in the order of rows."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    form: SwigluForm = PLAIN
    column: int = 0
    adapters: tuple[Adapter, ...] = ()
    scale: float = 1.0
    rest: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All weights in order: stacks, biases, both factors of every adapter, the rest."""
        stacks = self[:2] if self.gate_up_bias is None else self[:4]
        factors = chain.from_iterable(map(itemgetter(0, 1), self.adapters))
        return (*stacks, *factors, *self.rest)

    def blocks(
        self, counts_E: Tensor, num_rows: int, max_rows: int | None, dtype: torch.dtype
    ) -> list[Block]:
        """The blocks of :func:`~moemesh.ops.expert_blocks.expert_blocks`: those of packed experts
        (:mod:`moemesh.ops.nf4`) have few experts, because each is dequantized as a whole."""
        num_experts, _, width, _ = self.gate_up.shape
        is_packed = self.gate_up.dtype == torch.uint8
        is_bounded = max_rows is not None and num_rows > max_rows
        if counts_E.device.type != "cpu" and not (is_packed or is_bounded or self.rest):
            ends_E = counts_E.cumsum(0, dtype=torch.int32)
            return [Block(slice(0, num_experts), slice(0, num_rows), ends_E)]
        numbers_of_expert = 3 * width * self.down.shape[1]
        return expert_blocks(
            counts_E,
            num_rows,
            max_rows,
            border=num_experts if self.rest else None,
            fewest_rows=block_rows(dtype, width),
            most_experts=max(NF4_NUMBERS_AT_ONCE // numbers_of_expert, 1) if is_packed else None,
        )

    def of_block(self, block: Block, dtype: torch.dtype) -> ExpertWeights:
        """Weights of one block's experts, trained or frozen ones; packed weights in `dtype`."""
        start, stop = block.experts.start, block.experts.stop
        border, is_packed = self.gate_up.shape[0], self.gate_up.dtype == torch.uint8
        if stop - start == border and not self.rest and not is_packed:
            return self
        stacks = [tensor for tensor in self[:4] if isinstance(tensor, Tensor)]
        if not block.trains:
            start, stop, stacks = start - border, stop - border, list(self.rest)
        return ExpertWeights(
            *(dense(stack[start:stop], dtype) for stack in stacks),
            form=self.form,
            column=self.column,
            adapters=tuple(of_experts(self.adapters, block.experts)),
            scale=self.scale,
        )

    def of(self, tensors: Sequence[Tensor]) -> ExpertWeights:
        """Other experts of the same kind, from their :attr:`tensors`."""
        end = len(tensors) - len(self.rest)
        first = end - 2 * len(self.adapters)
        factors = tensors[first:end]
        return ExpertWeights(
            *tensors[:first],
            form=self.form,
            column=self.column,
            adapters=tuple(map(Adapter.of, self.adapters, factors[::2], factors[1::2])),
            scale=self.scale,
            rest=tuple(tensors[end:]),
        )

    @property
    def of_gate_up(self) -> list[Adapter]:
        """Adapters of ``gate_up``: each belongs to a part of it, so it has a `dim`."""
        return [x for x in self.adapters if x.dim is not None] if self.adapters else []

    @property
    def of_down(self) -> list[Adapter]:
        """Adapters of ``down``, which belong to all of it."""
        return [x for x in self.adapters if x.dim is None] if self.adapters else []

    @property
    def part(self) -> slice:
        """The channels of the output that ``down_bias`` is added to."""
        assert self.down_bias is not None
        return slice(self.column, self.column + self.down_bias.shape[1])
