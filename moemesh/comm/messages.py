"""All-gather and all-to-all from single messages, so that both directions of a link are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from moemesh.comm.mesh import Axis

# Tags of the messages inside all_gather and all_to_all, so that they never meet a pipeline's on the
# same group. Messages of one tag between two ranks arrive in the order in which they were started.
_GATHER_TAG = 7401
_EXCHANGE_TAG = 7402
#: From here on tags are free for exchanges that number themselves.
FIRST_FREE_TAG = 1 << 21


class Messages:
    """Several messages as one piece of work; holds the rows that are being sent."""

    def __init__(self, works: list[dist.Work | None], sent: Tensor) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()
        self._works.clear()


def gather_by_messages(x: Tensor, gathered: Tensor, axis: Axis, blocks: Sequence[int]) -> Messages:
    """Every rank sends its rows to each other one; both sides skip blocks without rows."""
    into = gathered.split(list(blocks))
    works: list[dist.Work | None] = []
    for distance in range(1, axis.size):
        source = (axis.index - distance) % axis.size
        if blocks[source]:
            works.append(
                dist.irecv(into[source], axis.ranks[source], group=axis.group, tag=_GATHER_TAG)
            )
    for distance in range(1, axis.size):
        destination = (axis.index + distance) % axis.size
        if blocks[axis.index]:
            works.append(dist.isend(x, axis.ranks[destination], group=axis.group, tag=_GATHER_TAG))
    into[axis.index].copy_(x)
    return Messages(works, x)


def exchange_by_messages(
    x: Tensor,
    received: Tensor,
    axis: Axis,
    inputs: Sequence[int],
    outputs: Sequence[int],
    tag: int = _EXCHANGE_TAG,
) -> Messages:
    """Start every receive, then every send; both sides skip blocks without rows. The own block is
    copied, unless `outputs` has no room for it."""
    blocks, into = x.split(list(inputs)), received.split(list(outputs))
    works: list[dist.Work | None] = []
    for distance in range(1, axis.size):
        source = (axis.index - distance) % axis.size
        if outputs[source] and into[source].numel():
            place, rank = into[source], axis.ranks[source]
            works.append(dist.irecv(place, rank, group=axis.group, tag=tag))
    for distance in range(1, axis.size):
        destination = (axis.index + distance) % axis.size
        if inputs[destination] and blocks[destination].numel():
            block, rank = blocks[destination], axis.ranks[destination]
            works.append(dist.isend(block, rank, group=axis.group, tag=tag))
    if outputs[axis.index]:
        into[axis.index].copy_(blocks[axis.index])
    return Messages(works, x)
