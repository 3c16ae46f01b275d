"""Messages between two ranks of an axis, one by one, or in queues for traffic known beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moemesh.comm import staged
from moemesh.comm.mesh import Axis, Mesh, new_group
from moemesh.comm.staged import PendingWork
from moemesh.comm.transfers import pair_of, record
from moemesh.monitor.progress import Ticket
from moemesh.trace.wire import WireBytes

# Messages between two ranks of an axis, blocking and not. The ledger has them as "send_receive".
#
# Both sides know shape and dtype. The sender records the bytes as sent, the receiver as received.
# Messages between the same two ranks with the same `tag` arrive in the order they were started.
# NCCL has no tags: a send and a receive that overlap in time must be in one :func:`exchange`, and
# exchanges start in one order on all ranks.


def send(x: Tensor, axis: Axis, destination_index: int, *, phase: str, caller: str) -> None:
    """Send `x` to rank `destination_index` of `axis`; returns when `x` may be modified."""
    start_send(x.contiguous(), axis, destination_index, phase=phase, caller=caller).wait()


def receive(into: Tensor, axis: Axis, source_index: int, *, phase: str, caller: str) -> Tensor:
    """Fill `into` (contiguous) with what rank `source_index` of `axis` sends, and return it."""
    start_receive(into, axis, source_index, phase=phase, caller=caller).wait()
    return into


def _start(
    is_sent: bool,
    x: Tensor,
    axis: Axis,
    index: int,
    *,
    phase: str,
    caller: str,
    tag: int = 0,
    group: ProcessGroup | None = None,
) -> PendingWork:
    ticket = _enter(is_sent, x, axis, index, phase, caller)
    operation = staged.send if is_sent else staged.receive
    return PendingWork([operation(x, axis, index, group=group, tag=tag)], ticket=ticket)


#: Asynchronous :func:`send`: keep `x` (contiguous) unchanged until ``wait()``. `group`: the process
#: group that carries it, None for that of the axis.
start_send = partial(_start, True)
#: Asynchronous :func:`receive`: `into` is filled after ``wait()``.
start_receive = partial(_start, False)


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    axis: Axis,
    *,
    phase: str,
    caller: str,
    tag: int = 0,
) -> list[PendingWork]:
    """Start all `sends` (tensor, destination index) and `receives` (tensor, source index) at once;
    the caller waits for every returned work. On NCCL this is the only safe way when two ranks send
    to each other in one process group."""
    if any(staged.is_staged(x, axis) for x, _ in (*sends, *receives)):
        keys: dict[str, Any] = {"phase": phase, "caller": caller, "tag": tag}
        works = [start_send(x, axis, index, **keys) for x, index in sends]
        return works + [start_receive(x, axis, index, **keys) for x, index in receives]
    operations: list[dist.P2POp] = []
    tickets: list[Ticket | None] = []
    for is_sent, messages in ((True, sends), (False, receives)):
        operation = dist.isend if is_sent else dist.irecv
        for x, index in messages:
            tickets.append(_enter(is_sent, x, axis, index, phase, caller))
            operations.append(dist.P2POp(operation, x, axis.ranks[index], axis.group, tag))
    works = dist.batch_isend_irecv(operations) if operations else []
    # NCCL returns one work for all operations: while this rank waits for it, the progress record
    # shows the first message only.
    return [
        PendingWork([work], ticket=ticket) for work, ticket in zip(works, tickets, strict=False)
    ]


def _enter(
    is_sent: bool, x: Tensor, axis: Axis, index: int, phase: str, caller: str
) -> Ticket | None:
    """Enter a message between this rank and rank `index` of the axis."""
    assert index != axis.index, f"rank {index} of {axis.name} sends to itself"
    assert x.is_contiguous(), "messages are contiguous tensors"
    rank, peer = axis.ranks[axis.index], axis.ranks[index]
    num_bytes = x.numel() * x.element_size()
    if is_sent:
        pair, moved = pair_of(rank, peer), WireBytes(num_bytes, num_bytes, 0)
    else:
        pair, moved = pair_of(peer, rank), WireBytes(num_bytes, 0, num_bytes)
    return record(axis, "send_receive", phase, caller, moved, pair=pair)


# Queues of messages between pairs of ranks of an axis, for traffic known beforehand.
#
# Every ordered pair of ranks has its own queue: the receiver takes messages in the order in which
# the sender sends them, and both ranks count them. On gloo the count is the message's tag, so a
# mis-ordered message hangs until the timeout instead of filling a wrong tensor of equal shape. NCCL
# has no tags and gives one channel to an *unordered* pair, in which two ranks that send to each
# other would wait for each other: on NCCL every ordered pair has a process group of its own.


#: Number of tags before they wrap around: gloo's have 31 bits.
_NUM_TAGS = 1 << 30


class Channels:
    """Message queues of this rank with other ranks of `axis`, one for each of `pairs`: (source,
    destination) indices in the axis. All ranks of the mesh create them at the same point.

    The queues have process groups separate from that of the axis, so that no other message of the
    axis is taken for one of theirs. `on_host`: messages are CPU tensors and travel by gloo,
    whatever the mesh uses.
    """

    def __init__(
        self, mesh: Mesh, axis: str, pairs: Iterable[tuple[int, int]], *, on_host: bool = False
    ) -> None:
        pairs = sorted(set(pairs))
        self.axis = mesh[axis]
        if on_host:
            self.axis = replace(self.axis, device=torch.device("cpu"))
        #: Process group of each (source, destination).
        self._groups: dict[tuple[int, int], ProcessGroup] = {}
        #: True for gloo, which matches messages and receives by tags, and whose pending receives
        #: leave the device free. A pending receive of NCCL blocks all kernels ordered after it.
        self.tagged = True
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        if self.axis.size == 1 or not pairs:
            return
        backend, timeout = "gloo" if on_host else self.axis.backend, mesh.timeout
        self.tagged = backend == "gloo"
        # All ranks of the mesh call `new_group` in one order, members or not.
        for ranks in mesh.layout.groups(axis):
            if self.tagged:
                group = new_group(ranks, name="channels", timeout=timeout, backend=backend)
                if ranks == self.axis.ranks:
                    self._groups = dict.fromkeys(pairs, group)
                continue
            for source, destination in pairs:
                members = [ranks[source], ranks[destination]]
                group = new_group(members, name=f"channel {members}", timeout=timeout)
                if ranks == self.axis.ranks and self.axis.index in (source, destination):
                    self._groups[source, destination] = group

    def send(self, x: Tensor, destination: int, *, phase: str, caller: str) -> PendingWork:
        """Start to send to index `destination`; keep `x` (contiguous) as it is until ``wait()``."""
        tag = self._next(self._num_sent, destination)
        group = self._groups[self.axis.index, destination]
        labels = {"phase": phase, "caller": caller}
        return start_send(x, self.axis, destination, **labels, tag=tag, group=group)

    def receive(self, into: Tensor, source: int, *, phase: str, caller: str) -> PendingWork:
        """Start to receive the next message of index `source`; it is in `into` after ``wait()``."""
        tag = self._next(self._num_received, source)
        group = self._groups[source, self.axis.index]
        labels = {"phase": phase, "caller": caller}
        return start_receive(into, self.axis, source, **labels, tag=tag, group=group)

    def _next(self, counts: Counter[int], peer: int) -> int:
        """Count the next message to or from index `peer` in `counts`; returns its tag."""
        counts[peer] += 1
        return counts[peer] % _NUM_TAGS if self.tagged else 0
