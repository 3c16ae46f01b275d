"""Messages between two ranks of an axis, one by one, or in queues for traffic known beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moemesh.comm.groups import new_group, watched
from moemesh.comm.mesh import Axis, Mesh
from moemesh.comm.transfers import pair_of, record
from moemesh.trace import wire
from moemesh.watch.progress_words import Ticket

# Messages between two ranks of an axis, blocking and not, entered as "send_receive".
#
# Both sides know shape and dtype. The sender enters the bytes as sent, the receiver as received.
# Messages between the same two ranks with the same `tag` arrive in the order they were started;
# NCCL knows no tags and needs sends and receives of one moment in one :func:`exchange`.


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


# Queues of messages between pairs of ranks of an axis, for traffic known beforehand.
#
# Every ordered pair of ranks has its own queue: the receiver takes messages in the order in which
# the sender sends them, and both count. On gloo the number is the message's tag, so a mis-ordered
# message hangs until the timeout instead of meeting a tensor of equal shape. NCCL knows no tags and
# gives one channel to an *unordered* pair, in which two ranks that send to each other would wait
# for each other: there every ordered pair has a process group of its own.


#: gloo's tags are 31 bits; numbers start again when they are used up.
_NUM_TAGS = 1 << 30


class Channels:
    """The queues of one rank with the other members of its axis."""

    def __init__(
        self, axis: Axis, groups: dict[tuple[int, int], ProcessGroup], *, tagged: bool
    ) -> None:
        """Use :meth:`create`; `groups` by (source, destination)."""
        self.axis = axis
        self._groups = groups
        #: Whether messages find their receives by tags. NCCL has none: a receive there is work of
        #: the device, which holds up what else must wait for it until the message comes.
        self.tagged = tagged
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    @classmethod
    def create(
        cls, mesh: Mesh, axis: str, pairs: Iterable[tuple[int, int]], *, on_host: bool = False
    ) -> Channels:
        """Queues for the ordered `pairs` of indices on `axis`; all ranks of the mesh call this.

        A group of their own keeps these messages apart from everything else on the axis. `on_host`:
        for tensors on the CPU, by gloo, whatever carries those of the mesh.
        """
        own, pairs = mesh[axis], sorted(set(pairs))
        if on_host:
            own = replace(own, device=torch.device("cpu"))
        if own.size == 1 or not pairs:
            return cls(own, {}, tagged=True)
        backend = "gloo" if on_host else own.backend
        tagged, timeout = backend == "gloo", mesh.timeout
        found: dict[tuple[int, int], ProcessGroup] = {}
        # Groups are made by all ranks in one order, whether or not they are members.
        for ranks in mesh.layout.groups(axis):
            if tagged:
                group = new_group(ranks, name="channels", timeout=timeout, backend=backend)
                if ranks == own.ranks:
                    found = dict.fromkeys(pairs, group)
                continue
            for source, destination in pairs:
                members = [ranks[source], ranks[destination]]
                group = new_group(members, name=f"channel {members}", timeout=timeout)
                if ranks == own.ranks and own.index in (source, destination):
                    found[source, destination] = group
        return cls(own, found, tagged=tagged)

    def send(self, x: Tensor, destination: int, *, phase: str, caller: str) -> dist.Work:
        """Start the next message to index `destination`; keep `x` (contiguous) as it is until the
        returned work has been waited for."""
        self._num_sent[destination] += 1
        return start_send(
            x,
            self.axis,
            destination,
            phase=phase,
            caller=caller,
            tag=self._tag(self._num_sent[destination]),
            group=self._groups[self.axis.index, destination],
        )

    def receive(self, into: Tensor, source: int, *, phase: str, caller: str) -> dist.Work:
        """Start to receive the next message of index `source`; filled after ``wait()``."""
        self._num_received[source] += 1
        return start_receive(
            into,
            self.axis,
            source,
            phase=phase,
            caller=caller,
            tag=self._tag(self._num_received[source]),
            group=self._groups[source, self.axis.index],
        )

    def _tag(self, number: int) -> int:
        return number % _NUM_TAGS if self.tagged else 0
