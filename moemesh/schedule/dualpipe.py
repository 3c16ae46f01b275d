"""DualPipe and its V form: forward and backward of two microbatches run as one block.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437 (DualPipe, two pipes from both
ends); Sea AI Lab, "DualPipe could be better without the Dual", 2025,
https://huggingface.co/blog/ufotalent/cut-in-half (DualPipeV: folded to one pipe, without the second
copy of the weights). In a block one microbatch's exchange of tokens runs under the other's compute.
"""

from __future__ import annotations

from collections import deque

from moemesh.schedule.action import Entry, Kind, Op, Schedule, mirrored, one_pipe, v_shape
from moemesh.schedule.conditions import ALWAYS, at_least, divisible, require

DUALPIPE = (
    *ALWAYS,
    divisible("ranks", 2),
    divisible("microbatches", 2),
    at_least("microbatches", 2, "ranks"),
)
DUALPIPE_V = (*ALWAYS, at_least("microbatches", 2, "ranks"))


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage s of pipe 0 on rank s, of pipe 1 on rank p-1-s; half of the microbatches through each.

    Rank idle (p/2-1)(tFB+tB-3tW) where tF = tI, tW <= tI, tB <= tFB <= tF+tB; every rank holds p+1
    microbatches and two copies of weights, whose gradients are summed. Raises ValueError unless p
    and m are even and m >= 2p. Pipe 1 is drawn in small letters:

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(dualpipe(2, 4)).timeline))
    rank 0: F0 f0 F1 b0--- f1+B0--- b1--- I1 W1
    rank 1: f0 F0 f1 B0--- F1+b0--- B1--- i1 w1
    """
    require("dualpipe", DUALPIPE, ranks=num_ranks, microbatches=num_microbatches)
    half, orders = num_ranks // 2, list[tuple[Entry, ...]]()
    for rank in range(num_ranks):
        # (pipe, stage) of the pipe that enters at this rank's end comes first.
        ends = [(0, rank), (1, num_ranks - 1 - rank)]
        near, far = ends if rank < half else reversed(ends)
        depth = min(rank, num_ranks - 1 - rank)
        orders.append(_RankEntries(near, far).phases(half, depth, num_microbatches // 2))
    return Schedule(
        name="dualpipe",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=mirrored(num_ranks),
        orders=tuple(orders),
        num_microbatches=(num_microbatches // 2,) * 2,
    )


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chunk 0 of rank r is stage r, chunk 1 is stage 2p-1-r: first and last layers meet on rank 0.

    Rank idle (p-1)/2 (tFB+tB-3tW) where tF = tI, tW <= tI, tB <= tFB <= tF+tB; every rank holds
    p + 1/2 microbatches. Raises ValueError unless m >= 2p. Chunk 1 is drawn in small letters:

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(dualpipe_v(2, 4)).timeline))
    rank 0: F0 F1 F2 f0 i0 w0 f1 F3+b1--- .  f2+B0--- b2--- .  f3+B1--- b3--- I2 W2 I3 W3
    rank 1: .  F0 f0 F1 f1 F2 b0--- f2+B0--- F3+b1--- f3+B1--- b2--- B2--- .  i3 I3 w3 W3
    """
    require("dualpipe_v", DUALPIPE_V, ranks=num_ranks, microbatches=num_microbatches)
    orders: list[tuple[Entry, ...]] = []
    for rank in range(num_ranks):
        entries = _RankEntries((0, rank), (0, 2 * num_ranks - 1 - rank))
        orders.append(entries.phases(num_ranks, rank, num_microbatches))
    return one_pipe("dualpipe_v", v_shape(num_ranks), tuple(orders), num_microbatches)


class _RankEntries:
    """One rank's entries. A direction is the (pipe, stage) its microbatches pass on this rank."""

    def __init__(self, near: tuple[int, int], far: tuple[int, int]) -> None:
        self.near, self.far = near, far
        self.forwards = {near: 0, far: 0}
        self.backwards = {near: 0, far: 0}
        self.pending: deque[Op] = deque()
        self.entries: list[Entry] = []

    def forward(self, direction: tuple[int, int]) -> Op:
        """The next forward of a direction."""
        pipe, stage = direction
        self.forwards[direction] += 1
        return Op("F", stage, self.forwards[direction] - 1, pipe)

    def backward(self, direction: tuple[int, int], kind: Kind = "B") -> Op:
        """The next backward of a direction, whole or its input-gradient half."""
        pipe, stage = direction
        op = Op(kind, stage, self.backwards[direction], pipe)
        self.backwards[direction] += 1
        if kind == "I":
            self.pending.append(op)
        return op

    def put(self, *ops: Op) -> None:
        """One entry: a block when there are several operations."""
        self.entries.append(ops)

    def weight_gradient(self) -> None:
        """The oldest deferred weight gradient."""
        self.put(self.pending.popleft()._replace(kind="W"))

    def phases(self, num_half: int, depth: int, num_each: int) -> tuple[Entry, ...]:
        """The eight phases; `depth` counts from the end where the near direction enters, which
        meets the far one after `num_half` ranks; `num_each` microbatches pass each way."""
        near, far = self.near, self.far
        to_middle = num_half - depth - 1
        for _ in range(2 * to_middle):
            self.put(self.forward(near))
        for _ in range(depth + 1):
            self.put(self.forward(near))
            self.put(self.forward(far))
        for _ in range(to_middle):
            self.put(self.backward(far, "I"))
            self.weight_gradient()
            self.put(self.forward(far))
        for index in range(num_each - 2 * num_half + depth + 1):
            if index == 0 and to_middle == 0:
                # Here the first block would wait for the middle rank's own forward.
                self.put(self.forward(near))
                self.put(self.backward(far))
            else:
                self.put(self.forward(near), self.backward(far))
            self.put(self.forward(far), self.backward(near))
        for _ in range(to_middle):
            self.put(self.backward(far))
            self.put(self.forward(far), self.backward(near))
        for index in range(2 * (depth + 1)):
            direction = near if index % 2 else far
            self.put(self.backward(direction, "B" if index <= depth else "I"))
        for _ in range(to_middle):
            self.weight_gradient()
            self.put(self.backward(near, "I"))
        for _ in range(depth + 1):
            self.weight_gradient()
        assert not self.pending, "a weight gradient was left over"
        return tuple(self.entries)
