"""Asynchronous exchanges with a backward: this rank computes while rows are in flight.

    pending = overlapped_all_to_all(x, axis, input_splits, output_splits, caller="moe.dispatch")
    ...                                     # compute something else
    rows = pending.wait()

The backward mirrors it: where the forward waited, the backward starts the transposed exchange of
the gradient; where the forward started, the backward waits. Autograd runs nodes in the reverse
order of their creation, so what overlapped in the forward overlaps in the backward, in the same
order on all ranks.

A :class:`Codec` makes rows smaller for the forward; gradients travel without it.

Legend: T own rows, H width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moemesh.comm import transfers
from moemesh.comm.mesh import Axis
from moemesh.ops.pending import Pending, Started
from moemesh.ops.permute import NoSecondDerivative


class Codec(NamedTuple):
    """Rows to bytes, and back from (bytes, width, dtype); without gradient."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int, torch.dtype], Tensor]


class RowExchange(Protocol):
    """One direction of a linear exchange: the call starts it and returns the wait for rows."""

    def __call__(self, x: Tensor, /, *, phase: str) -> Callable[[], Tensor]: ...


#: The function that waits for the exchange in flight (forward or backward); empty without one.
Ends = list[Callable[[], Tensor]]


class _Start(torch.autograd.Function):
    """Forward: starts the exchange. Backward: waits for the exchange that _Finish started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: RowExchange, ends: Ends) -> Tensor:
        ctx.ends = ends
        ends.append(there(x, phase="forward"))
        return x.new_empty(0)  # an empty tensor that links both nodes; _Finish returns the rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        return ctx.ends.pop()(), None, None


class _Finish(torch.autograd.Function):
    """Forward: waits for the exchange. Backward: starts the transposed exchange."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, back: RowExchange, ends: Ends) -> Tensor:
        # `link` is a leaf if the graph was cut (moemesh.ops.pending): nothing reads its gradient.
        ctx.back, ctx.ends, ctx.is_cut = back, ends, link.is_leaf
        return ends.pop()()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        ctx.ends.append(ctx.back(gradient, phase="backward"))
        return None if ctx.is_cut else gradient.new_zeros(0), None, None


def overlapped_exchange(
    x: Tensor, there: RowExchange, back: RowExchange, codec: Codec | None = None
) -> Pending[Tensor]:
    """Start `there`; `wait()` returns the rows. Backward: `back`, its transpose, also asynchronous.

    `wait()` or `abandon()` must be called exactly once, and all ranks must start and wait in the
    same order.
    """

    def coded(x: Tensor, /, *, phase: str) -> Callable[[], Tensor]:
        assert codec is not None
        width, dtype = x.shape[-1], x.dtype
        end = there(codec.encode(x), phase=phase)
        return lambda: codec.decode(end(), width, dtype)

    ends: Ends = []
    place = _Start.apply(x, there if codec is None else coded, ends)
    started = Started(place, lambda: ends.pop()())
    return Pending(lambda: _Finish.apply(started.take(), back, ends), (started,))


def overlapped_all_to_all(
    x: Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    caller: str,
    codec: Codec | None = None,
) -> Pending[Tensor]:
    """Asynchronous all_to_all along axis; `wait()` returns the rows. Backward: the transposed
    all_to_all, also asynchronous. The splits are those of
    :func:`moemesh.comm.collectives.all_to_all`, the rules those of :func:`overlapped_exchange`."""
    if axis.size == 1:
        return Pending.ready(x)
    begin = partial(transfers.all_to_all_start, axis=axis, caller=caller)
    there = partial(begin, input_splits=input_splits, output_splits=output_splits)
    back = partial(begin, input_splits=output_splits, output_splits=input_splits)
    return overlapped_exchange(x, there, back, codec)


def overlapped_all_gather(
    x_TH: Tensor,
    axis: Axis,
    sizes: Sequence[int] | None = None,
    *,
    caller: str,
    codec: Codec | None = None,
) -> Pending[Tensor]:
    """Asynchronous all_gather along axis; `wait()` returns the rows. Backward: reduce_scatter, also
    asynchronous. The rules are those of :func:`overlapped_exchange`."""
    if axis.size == 1:
        return Pending.ready(x_TH)
    there = partial(transfers.all_gather_start, axis=axis, sizes=sizes, caller=caller)
    back = partial(transfers.reduce_scatter_start, axis=axis, sizes=sizes, caller=caller)
    return overlapped_exchange(x_TH, there, back, codec)
