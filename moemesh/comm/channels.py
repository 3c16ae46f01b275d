"""Queues of messages between pairs of ranks of an axis, for traffic known beforehand.

Every ordered pair of ranks has its own queue: the receiver takes messages in the order in which the
sender sends them, and both count. On gloo the number is the message's tag, so a mis-ordered message
hangs until the timeout instead of meeting a tensor of equal shape. NCCL knows no tags and gives one
channel to an *unordered* pair, in which two ranks that send to each other would wait for each
other: there every ordered pair has a process group of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moemesh.comm.groups import new_group
from moemesh.comm.mesh import Axis, Mesh
from moemesh.comm.point_to_point import start_receive, start_send

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
