"""1F1B: after a short warm-up each forward is followed by a backward.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019,
doi:10.1145/3341301.3359646 (the order); Fan et al., "DAPPLE: A Pipelined Data Parallel Approach
for Training Large Models", 2021, arXiv:2007.01045 (with a flush at the end of each step).
"""

from __future__ import annotations

from moemesh.schedule.action import Entry, Op, Schedule, linear, single
from moemesh.schedule.conditions import ALWAYS, require


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage r on rank r; rank r is p-1-r forwards ahead.

    The bubble of GPipe, (p-1)(tF+tB), with less memory: rank r holds min(m, p-r) microbatches.
    Raises ValueError unless m >= 1.

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(one_f_one_b(4, 4)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---
    rank 1: .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
    rank 2: .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
    rank 3: .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---
    """
    require("1f1b", ALWAYS, ranks=num_ranks, microbatches=num_microbatches)
    return Schedule(
        name="1f1b",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=(linear(num_ranks),),
        orders=orders(num_ranks, num_microbatches),
        num_microbatches=(num_microbatches,),
    )


def orders(num_ranks: int, num_microbatches: int) -> tuple[tuple[Entry, ...], ...]:
    """The order of every rank."""
    return tuple(single(*_order(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Op]:
    warm_up = min(num_microbatches, num_ranks - 1 - rank)
    found = [Op("F", rank, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches):
        if microbatch + warm_up < num_microbatches:
            found.append(Op("F", rank, microbatch + warm_up))
        found.append(Op("B", rank, microbatch))
    return found
