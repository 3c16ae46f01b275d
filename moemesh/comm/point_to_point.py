"""Messages between two ranks of an axis, blocking and not, entered as "send_receive".

Both sides know shape and dtype. The sender enters the bytes as sent, the receiver as received.
Messages between the same two ranks with the same `tag` arrive in the order they were started; NCCL
knows no tags and needs sends and receives of one moment in one :func:`exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moemesh.comm.groups import watched
from moemesh.comm.mesh import Axis
from moemesh.comm.transfers import pair_of, record
from moemesh.trace import wire
from moemesh.watch.progress_words import Ticket


def send(
    x: Tensor, axis: Axis, destination_index: int, *, phase: str, caller: str, tag: int = 0
) -> None:
    """Send `x` to rank `destination_index` of `axis`; back when `x` may be changed again."""
    start_send(x.contiguous(), axis, destination_index, phase=phase, caller=caller, tag=tag).wait()


def receive(
    into: Tensor, axis: Axis, source_index: int, *, phase: str, caller: str, tag: int = 0
) -> Tensor:
    """Fill `into` (contiguous) with what rank `source_index` of `axis` sends, and return it."""
    start_receive(into, axis, source_index, phase=phase, caller=caller, tag=tag).wait()
    return into


def start_send(
    x: Tensor,
    axis: Axis,
    destination_index: int,
    *,
    phase: str,
    caller: str,
    tag: int = 0,
    group: ProcessGroup | None = None,
) -> dist.Work:
    """As :func:`send`, but returns at once: keep `x` (contiguous) unchanged until ``wait()``.
    `group`: the one that carries it, None that of the axis."""
    _check(x, axis, destination_index)
    pair = pair_of(axis.ranks[axis.index], axis.ranks[destination_index])
    ticket = record(axis, "send_receive", phase, caller, wire.send(_num_bytes(x)), pair=pair)
    work = dist.isend(x, axis.ranks[destination_index], group=group or axis.group, tag=tag)
    assert work is not None
    return watched(work, ticket)


def start_receive(
    into: Tensor,
    axis: Axis,
    source_index: int,
    *,
    phase: str,
    caller: str,
    tag: int = 0,
    group: ProcessGroup | None = None,
) -> dist.Work:
    """As :func:`receive`, but returns at once: `into` is filled after ``wait()``."""
    _check(into, axis, source_index)
    pair = pair_of(axis.ranks[source_index], axis.ranks[axis.index])
    ticket = record(axis, "send_receive", phase, caller, wire.receive(_num_bytes(into)), pair=pair)
    work = dist.irecv(into, axis.ranks[source_index], group=group or axis.group, tag=tag)
    assert work is not None
    return watched(work, ticket)


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    axis: Axis,
    *,
    phase: str,
    caller: str,
    tag: int = 0,
) -> list[dist.Work]:
    """Start all `sends` (tensor, destination index) and `receives` (tensor, source index) at once.

    Wait for every work returned. The only safe way on NCCL when two ranks send to each other.
    """
    operations: list[dist.P2POp] = []
    tickets: list[Ticket | None] = []
    own = axis.ranks[axis.index]
    for tensor, index in sends:
        _check(tensor, axis, index)
        pair, moved = pair_of(own, axis.ranks[index]), wire.send(_num_bytes(tensor))
        tickets.append(record(axis, "send_receive", phase, caller, moved, pair=pair))
        operations.append(dist.P2POp(dist.isend, tensor, axis.ranks[index], axis.group, tag))
    for tensor, index in receives:
        _check(tensor, axis, index)
        pair, moved = pair_of(axis.ranks[index], own), wire.receive(_num_bytes(tensor))
        tickets.append(record(axis, "send_receive", phase, caller, moved, pair=pair))
        operations.append(dist.P2POp(dist.irecv, tensor, axis.ranks[index], axis.group, tag))
    works = dist.batch_isend_irecv(operations) if operations else []
    # NCCL answers with one work for all of them.
    return [watched(work, ticket) for work, ticket in zip(works, tickets, strict=False)]


def _check(x: Tensor, axis: Axis, index: int) -> None:
    assert index != axis.index, f"rank {index} of {axis.name} sends to itself"
    assert x.is_contiguous(), "messages are contiguous tensors"


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
