"""Operations of torch.distributed, through the host where gloo carries tensors of a device.

gloo sums and broadcasts tensors of a device, but neither sends them nor exchanges them. Ranks that
share a GPU have no other backend: NCCL refuses two ranks on one device. Here such tensors are
copied to the host and back; on every other axis a call is torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moemesh.comm.mesh import Axis


class StagedWork:
    """Pending work on host copies. :meth:`wait` copies `copy` to the device tensor `into`, None for
    a send."""

    def __init__(self, work: Any, sent: Tensor | None, into: Tensor | None, copy: Tensor) -> None:
        # `sent` is only kept alive: the backend reads it until the work ends.
        self._work, self._sent, self._into, self._copy = work, sent, into, copy

    def wait(self) -> None:
        """Wait for the end of the operation."""
        self._work.wait()
        if self._into is not None:
            self._into.copy_(self._copy)
        self._into = None

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self._work.is_completed()


def is_staged(x: Tensor, axis: Axis) -> bool:
    """Whether `x` travels over `axis` as a copy on the host."""
    return x.device.type != "cpu" and axis.backend == "gloo"


def all_reduce(tensor: Tensor, op: Any, axis: Axis) -> Any:
    """Pending ``dist.all_reduce``."""
    if not is_staged(tensor, axis):
        return dist.all_reduce(tensor, op, group=axis.group, async_op=True)
    copy = tensor.cpu()
    work = dist.all_reduce(copy, op, group=axis.group, async_op=True)
    return StagedWork(work, None, tensor, copy)


def all_to_all_single(
    into: Tensor, x: Tensor, outputs: Sequence[int], inputs: Sequence[int], axis: Axis
) -> Any:
    """Pending ``dist.all_to_all_single``."""
    splits = list(outputs), list(inputs)
    if not is_staged(x, axis):
        return dist.all_to_all_single(into, x, *splits, group=axis.group, async_op=True)
    sent, copy = x.cpu(), torch.empty(into.shape, dtype=into.dtype)
    work = dist.all_to_all_single(copy, sent, *splits, group=axis.group, async_op=True)
    return StagedWork(work, sent, into, copy)


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
    group = group or axis.group
    if not is_staged(x, axis):
        return dist.isend(x, axis.ranks[index], group=group, tag=tag)
    copy = x.cpu()
    return StagedWork(dist.isend(copy, axis.ranks[index], group=group, tag=tag), copy, None, copy)


def receive(
    into: Tensor, axis: Axis, index: int, *, group: ProcessGroup | None = None, tag: int = 0
) -> Any:
    """Pending ``dist.irecv`` from rank `index` of the axis."""
    group = group or axis.group
    if not is_staged(into, axis):
        return dist.irecv(into, axis.ranks[index], group=group, tag=tag)
    copy = torch.empty(into.shape, dtype=into.dtype)
    return StagedWork(dist.irecv(copy, axis.ranks[index], group=group, tag=tag), None, into, copy)
