"""ZB-V: two chunks a rank, up and back, no bubble at the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, arXiv:2405.15362.
"""

from __future__ import annotations

from moemesh.schedule.action import Entry, Kind, Op, Schedule, single, v_shape
from moemesh.schedule.conditions import ALWAYS, require


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chunk 0 of rank r is stage r, chunk 1 is stage 2p-1-r: first and last layers meet on rank 0.

    No span bubble for m >= 2p-1 and tF = tI = tW; every rank holds p microbatches. Raises
    ValueError unless m >= 1. Chunk 1 is drawn in small letters:

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(zb_v(2, 4)).timeline))
    rank 0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
    rank 1: .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    """
    require("zb_v", ALWAYS, ranks=num_ranks, microbatches=num_microbatches)
    return Schedule(
        name="zb_v",
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        placement=(v_shape(num_ranks),),
        orders=tuple(_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)),
        num_microbatches=(num_microbatches,),
    )


class _Order:
    """Operations of one rank, each kind and chunk in order of its microbatches."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.total = num_microbatches
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self.issued = {(kind, chunk): 0 for kind in kinds for chunk in (0, 1)}
        self.ops: list[Op] = []

    def put(self, kind: Kind, chunk: int) -> None:
        """The next operation of that kind and chunk; nothing when it is not yet possible."""
        microbatch = self.issued[kind, chunk]
        before: dict[Kind, Kind] = {"I": "F", "W": "I"}
        limit = self.issued[before[kind], chunk] if kind in before else self.total
        if microbatch < limit:
            self.ops.append(Op(kind, self.stages[chunk], microbatch))
            self.issued[kind, chunk] += 1

    def put_all(self, chunk: int) -> None:
        """One forward, one input gradient and one weight gradient."""
        self.put("F", chunk)
        self.put("I", chunk)
        self.put("W", chunk)

    def left(self, kind: Kind) -> bool:
        """Whether an operation of that kind is still to be issued."""
        return any(self.issued[kind, chunk] < self.total for chunk in (0, 1))


def _order(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Entry, ...]:
    order = _Order(rank, num_ranks, num_microbatches)
    # Warm-up: chunk 0 fills, then chunk 1 as its microbatches come back.
    for _ in range(2 * (num_ranks - rank) - 1):
        order.put("F", 0)
    for _ in range(rank):
        order.put("F", 1)
        order.put("F", 0)
    for _ in range(num_ranks - rank):
        order.put_all(1)
    # Stable phase.
    while order.left("F"):
        order.put_all(0)
        order.put_all(1)
    # Drain: input gradients first, others wait for them.
    for _ in range(rank):
        order.put("I", 0)
        order.put("I", 1)
    while order.left("I"):
        order.put("I", 1)
        order.put("I", 0)
        order.put("W", 0)
    for chunk in (1, 0):
        for _ in range(num_microbatches):
            order.put("W", chunk)
    return single(*order.ops)
