"""An all-to-all or an all-gather in two halves: work of this rank runs while it is under way.

    pending = all_to_all_start(x, axis, input_splits, output_splits, caller="moe.dispatch")
    ...                                     # compute something else
    rows = pending.wait()

The backward mirrors it: where the forward waited, the transposed exchange of the gradient starts;
where the forward started, it is waited for. Autograd runs nodes in the reverse order of their
creation, so what overlapped in the forward overlaps in the backward, in the same order on all
ranks.

A :class:`Codec` makes rows smaller for the forward; gradients travel as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.comm import transfers
from moemesh.comm.mesh import Axis
from moemesh.ops.pending import Pending, under_way


class Codec(Protocol):
    """Rows to bytes and back, without gradient."""

    def encode(self, x_RH: Tensor) -> Tensor: ...

    def decode(self, packed: Tensor, hidden: int, dtype: torch.dtype) -> Tensor: ...


@dataclass
class _Exchange:
    """One exchange and its way back; `work` is the operation under way, either direction.

    `packed` are the forward's coded rows and `home` the backward's gradients while under way.
    """

    axis: Axis
    input_splits: Sequence[int] | None
    output_splits: Sequence[int] | None
    caller: str
    codec: Codec | None = None
    work: list[transfers.Work | None] = field(default_factory=list)
    packed: Tensor | None = None
    home: Tensor | None = None

    def start(self, x: Tensor, phase: str) -> Tensor:
        splits = (self.input_splits, self.output_splits)
        if phase == "backward":
            splits = splits[::-1]
        received, work = transfers.all_to_all_start(
            x, self.axis, *splits, phase=phase, caller=self.caller
        )
        self.work.append(work)
        return received

    def finish(self) -> None:
        if (work := self.work.pop()) is not None:
            work.wait()

    def start_rows(self, x_RH: Tensor) -> Tensor:
        """The forward's start; with a codec the result only holds the place of the rows."""
        if self.codec is None:
            return self.start(x_RH, "forward")
        self.packed = self.start(self.codec.encode(x_RH), "forward")
        return x_RH.new_empty(self.packed.shape[0], x_RH.shape[1])

    def finish_rows(self, received_RH: Tensor) -> Tensor:
        """The forward's end: the rows."""
        self.finish()
        if self.codec is None or self.packed is None:
            return received_RH.view_as(received_RH)
        packed, self.packed = self.packed, None
        return self.codec.decode(packed, received_RH.shape[1], received_RH.dtype)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start_rows(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.finish()
        home, ctx.exchange.home = ctx.exchange.home, None
        return home, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, exchange: _Exchange) -> Tensor:
        # A leaf where the graph was cut (moemesh.ops.pending): no one reads its gradient.
        ctx.exchange, ctx.is_cut = exchange, received.is_leaf
        return exchange.finish_rows(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        # What this returns only holds the place: autograd wants the shape of `received` here.
        ctx.exchange.home = ctx.exchange.start(gradient, "backward")
        return None if ctx.is_cut else gradient, None


def all_to_all_start(
    x: Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    caller: str,
    codec: Codec | None = None,
) -> Pending[Tensor]:
    """Start an all_to_all along axis; its value waits. Backward: all_to_all, transposed, likewise.

    Splits as in :func:`moemesh.comm.collectives.all_to_all`. The value must be waited for exactly
    once, and all ranks must start and wait in the same order.
    """
    if axis.size == 1:
        return Pending.ready(x)
    exchange = _Exchange(axis, input_splits, output_splits, caller, codec)
    started = under_way(_Start.apply(x, exchange))
    return Pending(lambda: _Finish.apply(started.take(), exchange))


@dataclass
class _Gather:
    """An all_gather and its way back, a reduce_scatter; likewise."""

    axis: Axis
    sizes: Sequence[int] | None
    caller: str
    codec: Codec | None = None
    work: transfers.Work | None = None
    packed: Tensor | None = None
    home: Callable[[], Tensor] | None = None

    def start_rows(self, x_TH: Tensor) -> Tensor:
        """The forward's start; with a codec the result only holds the place of the rows."""
        sent = x_TH if self.codec is None else self.codec.encode(x_TH)
        gathered, self.work = transfers.all_gather_start(
            sent, self.axis, self.sizes, phase="forward", caller=self.caller
        )
        if self.codec is None:
            return gathered
        self.packed = gathered
        return x_TH.new_empty(gathered.shape[0], x_TH.shape[1])

    def finish_rows(self, gathered_AH: Tensor) -> Tensor:
        """The forward's end: the rows."""
        if self.work is not None:
            self.work.wait()
        if self.codec is None or self.packed is None:
            return gathered_AH.view_as(gathered_AH)
        packed, self.work, self.packed = self.packed, None, None
        return self.codec.decode(packed, gathered_AH.shape[1], gathered_AH.dtype)


class _StartGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, gather: _Gather) -> Tensor:
        ctx.gather = gather
        return gather.start_rows(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        finish, ctx.gather.home = ctx.gather.home, None
        return finish(), None


class _FinishGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered_AH: Tensor, gather: _Gather) -> Tensor:
        ctx.gather, ctx.is_cut = gather, gathered_AH.is_leaf
        return gather.finish_rows(gathered_AH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        gather = ctx.gather
        gather.home = transfers.reduce_scatter_start(
            gradient, gather.axis, gather.sizes, phase="backward", caller=gather.caller
        )
        return None if ctx.is_cut else gradient, None


def all_gather_start(
    x_TH: Tensor,
    axis: Axis,
    sizes: Sequence[int] | None = None,
    *,
    caller: str,
    codec: Codec | None = None,
) -> Pending[Tensor]:
    """Start an all_gather along axis; its value waits. Backward: reduce_scatter, likewise.

    As :func:`all_to_all_start`: waited for exactly once, in the same order on all ranks.
    """
    if axis.size == 1:
        return Pending.ready(x_TH)
    gather = _Gather(axis, sizes, caller, codec)
    started = under_way(_StartGather.apply(x_TH, gather))
    return Pending(lambda: _FinishGather.apply(started.take(), gather))


class Way(Protocol):
    """One direction of a linear exchange, carried out once: it starts, and ends with the rows."""

    def start(self, x: Tensor, phase: str) -> None: ...

    def finish(self) -> Tensor: ...


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        there.start(x, "forward")
        return x.new_empty(0)  # the rows are with `there`

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.finish(), None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, departed: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back, ctx.is_cut = back, departed.is_leaf
        return there.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.back.start(gradient, "backward")
        return None if ctx.is_cut else gradient.new_zeros(0), None, None


def start_way(x: Tensor, there: Way, back: Way) -> Pending[Tensor]:
    """Start `there`; its value waits. Backward: `back`, its transpose, likewise.

    As :func:`all_to_all_start`: waited for exactly once, in the same order on all ranks.
    """
    departed = under_way(_Depart.apply(x, there, back))
    return Pending(lambda: _Arrive.apply(departed.take(), there, back))
