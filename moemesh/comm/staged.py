"""Operations of torch.distributed, through the host where gloo carries tensors of a device.

gloo neither sends nor exchanges tensors of a device. Ranks that share a GPU have no other backend:
NCCL refuses two ranks on one device. For all its operations this module copies such tensors to the
host and back; on every other axis a call is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moemesh.comm.mesh import Axis
from moemesh.monitor import progress
from moemesh.monitor.progress import Ticket


class PendingWork:
    """Pending operations of the backend as one. `kept`: tensors that must stay alive until their
    end; `then` is called after it; `ticket`: the operation that the progress record shows while
    this rank waits."""

    def __init__(
        self,
        works: Sequence[Any],
        *,
        kept: Sequence[Tensor] = (),
        then: Callable[[], object] | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        self._works, self._kept, self._then, self.ticket = list(works), kept, then, ticket

    def wait(self) -> None:
        """Wait for the end of the operations."""
        progress.waiting(self.ticket)
        self.wait_aside()
        if self.ticket is not None:
            progress.left()

    def wait_aside(self) -> None:
        """Same as :meth:`wait`, in a thread whose waits the progress record does not show."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._then is not None:
            self._then()
            self._then = None

    def fail(self) -> None:
        """Let all waits for operations of the group fail: on gloo a wait that times out does."""
        for work in list(self._works):
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))

    def is_completed(self) -> bool:
        """Whether the operations are known to be over; of a message on gloo, only after a wait."""
        return all(work.is_completed() for work in self._works)


def is_staged(x: Tensor, axis: Axis) -> bool:
    """Whether `x` travels over `axis` as a copy on the host."""
    return x.device.type != "cpu" and axis.backend == "gloo"


def all_reduce(tensor: Tensor, op: Any, axis: Axis) -> Any:
    """Pending ``dist.all_reduce``."""
    if not is_staged(tensor, axis):
        return dist.all_reduce(tensor, op, group=axis.group, async_op=True)
    copy = tensor.cpu()
    work = dist.all_reduce(copy, op, group=axis.group, async_op=True)
    return PendingWork([work], then=lambda: tensor.copy_(copy))


def all_to_all_single(
    into: Tensor, x: Tensor, outputs: Sequence[int], inputs: Sequence[int], axis: Axis
) -> Any:
    """Pending ``dist.all_to_all_single``."""
    splits = list(outputs), list(inputs)
    if not is_staged(x, axis):
        return dist.all_to_all_single(into, x, *splits, group=axis.group, async_op=True)
    sent, copy = x.cpu(), torch.empty(into.shape, dtype=into.dtype)
    work = dist.all_to_all_single(copy, sent, *splits, group=axis.group, async_op=True)
    return PendingWork([work], kept=[sent], then=lambda: into.copy_(copy))


def broadcast(tensor: Tensor, axis: Axis, source_index: int) -> None:
    """``dist.broadcast``, waited for."""
    copy = tensor.cpu() if is_staged(tensor, axis) else tensor
    dist.broadcast(copy, src=axis.ranks[source_index], group=axis.group)
    if copy is not tensor:
        tensor.copy_(copy)


def send(
    x: Tensor, axis: Axis, index: int, *, group: ProcessGroup | None = None, tag: int = 0
) -> Any:
    """Pending ``dist.isend`` to rank `index` of the axis."""
    copy = x.cpu() if is_staged(x, axis) else x
    work = dist.isend(copy, axis.ranks[index], group=group or axis.group, tag=tag)
    return work if copy is x else PendingWork([work], kept=[copy])


def receive(
    into: Tensor, axis: Axis, index: int, *, group: ProcessGroup | None = None, tag: int = 0
) -> Any:
    """Pending ``dist.irecv`` from rank `index` of the axis."""
    copy = torch.empty(into.shape, dtype=into.dtype) if is_staged(into, axis) else into
    work = dist.irecv(copy, axis.ranks[index], group=group or axis.group, tag=tag)
    return work if copy is into else PendingWork([work], then=lambda: into.copy_(copy))
