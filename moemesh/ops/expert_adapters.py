"""Low-rank adapters of stacked experts (Hu et al., 2021): their part of products and of gradients.

Legend: B rows grouped by expert, E experts, I inputs, O outputs of a product, P those of the part
that an adapter belongs to, R its rank. ``a`` is [E, R, I], ``b`` [E, ..., R] with P in between.

An expert's delta is never made: a row costs R (I + P) products forward instead of I P, and twice
as many again backward. Whoever uses these brings its own grouped product, rows [B, I] times
[E, I, O].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moemesh.ops.linear import Adapter

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
    """Add what the adapters of one weight give for x to the product of the weight, in place."""
    for adapter in adapters:
        u_BR = narrow(adapter, x_BI, scale, gemm)
        part_of(adapter, y_BO).add_(gemm(u_BR, rows_of(adapter).transpose(1, 2)))


def of_experts(adapters: Sequence[Adapter], experts: slice) -> list[Adapter]:
    """The adapters of some of the experts."""
    return [adapter._replace(a=adapter.a[experts], b=adapter.b[experts]) for adapter in adapters]


def add_products_loop(
    adapters: Sequence[Adapter], x_TI: Tensor, y_TO: Tensor, scale: float, expert: int
) -> Tensor:
    """The obvious form for the rows of one expert, by plain autograd; returns the sum."""
    width = y_TO.shape[1]
    delta_OI = y_TO.new_zeros(width, x_TI.shape[1])
    for adapter in adapters:
        product_PI = rows_of(adapter)[expert] @ adapter.a[expert]
        before = 0 if adapter.dim is None else adapter.start * len(product_PI)
        behind = width - before - len(product_PI)
        delta_OI = delta_OI + torch.nn.functional.pad(product_PI, (0, 0, before, behind))
    return y_TO + scale * (x_TI @ delta_OI.t())
