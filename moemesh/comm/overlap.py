"""An all-to-all in two halves, so that work of this rank runs while it is under way.

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.comm import transfers
from moemesh.comm.mesh import Axis
from moemesh.ops.pending import Pending


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
    work: list[dist.Work | None] = field(default_factory=list)
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
        ctx.exchange = exchange
        return exchange.finish_rows(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # What this returns only holds the place: autograd wants the shape of `received` here.
        ctx.exchange.home = ctx.exchange.start(gradient, "backward")
        return gradient, None


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
    received = _Start.apply(x, exchange)
    return Pending(lambda: _Finish.apply(received, exchange))
