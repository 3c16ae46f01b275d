"""Chimera: two pipes from both ends, each filling the other's bubbles.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", 2021, arXiv:2107.06925.
"""

from __future__ import annotations

from moemesh.schedule.action import Op, Schedule, mirrored, single
from moemesh.schedule.conditions import ALWAYS, divisible, require

CONDITIONS = (*ALWAYS, divisible("ranks", 2), divisible("microbatches", "ranks"))


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage s of pipe 0 on rank s, of pipe 1 on rank p-1-s: every stage lives twice.

    Half of the microbatches go through each pipe, in blocks of p/2. Bubble (p-2)tF where tF = tB;
    rank r holds p/2 + 1 + min(r, p-1-r) microbatches and two copies of weights, whose gradients are
    summed. With tB = 2tF the idle time is 2(p-2)tF for m = p and larger for more blocks. Raises
    ValueError unless p is even and m % p == 0. Pipe 1 is drawn in small letters:

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(chimera(4, 4)).timeline))
    rank 0: F0 F1 .  f0 b0--- f1 b1--- .  B0--- .  .  B1---
    rank 1: .  F0 f0 F1 f1 .  b0--- B0--- b1--- B1---
    rank 2: .  f0 F0 f1 F1 .  B0--- b0--- B1--- b1---
    rank 3: f0 f1 .  F0 B0--- F1 B1--- .  b0--- .  .  b1---
    """
    require("chimera", CONDITIONS, ranks=num_ranks, microbatches=num_microbatches)
    half = num_ranks // 2
    slots: list[dict[int, Op]] = [{} for _ in range(num_ranks)]
    for pipe, ranks in enumerate(mirrored(num_ranks)):
        for microbatch in range(num_microbatches // 2):
            block, place = divmod(microbatch, half)
            first = 2 * num_ranks * block + 2 * place
            for stage, rank in enumerate(ranks):
                forward = first + stage
                backward = first + 2 * num_ranks - 1 - stage
                assert slots[rank].keys().isdisjoint((forward, backward)), "a slot taken twice"
                slots[rank][forward] = Op("F", stage, microbatch, pipe)
                slots[rank][backward] = Op("B", stage, microbatch, pipe)
    return Schedule(
        name="chimera",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=mirrored(num_ranks),
        orders=tuple(single(*(taken[slot] for slot in sorted(taken))) for taken in slots),
        num_microbatches=(num_microbatches // 2,) * 2,
    )
