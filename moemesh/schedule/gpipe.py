"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
2019, arXiv:1811.06965.
"""

from __future__ import annotations

from typing import Literal

from moemesh.schedule.action import Op, Schedule, linear, single
from moemesh.schedule.conditions import ALWAYS, require


def gpipe(
    num_ranks: int,
    num_microbatches: int,
    *,
    backward_order: Literal["last_first", "first_first"] = "last_first",
) -> Schedule:
    """Stage r on rank r. The last forward is the first backward, or in order of arrival.

    Bubble (p-1)(tF+tB); rank r holds all m microbatches. Raises ValueError unless m >= 1.

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(gpipe(4, 4)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B3--- B2--- B1--- B0---
    rank 1: .  F0 F1 F2 F3 .  .  .  .  .  .  B3--- B2--- B1--- B0---
    rank 2: .  .  F0 F1 F2 F3 .  .  .  B3--- B2--- B1--- B0---
    rank 3: .  .  .  F0 F1 F2 F3 B3--- B2--- B1--- B0---
    """
    require("gpipe", ALWAYS, ranks=num_ranks, microbatches=num_microbatches)
    forwards = range(num_microbatches)
    backwards = forwards[::-1] if backward_order == "last_first" else forwards
    orders = tuple(
        single(
            *(Op("F", rank, microbatch) for microbatch in forwards),
            *(Op("B", rank, microbatch) for microbatch in backwards),
        )
        for rank in range(num_ranks)
    )
    return Schedule(
        name="gpipe",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=(linear(num_ranks),),
        orders=orders,
        num_microbatches=(num_microbatches,),
        parameters={} if backward_order == "last_first" else {"backward_order": backward_order},
    )
