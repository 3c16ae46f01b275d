"""ZB-H2: more forwards in flight and later weight gradients, until no bubble is left.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241. One rule with ZB-H1.
"""

from __future__ import annotations

from moemesh.schedule.action import Schedule, linear
from moemesh.schedule.conditions import ALWAYS, require
from moemesh.schedule.zb_h1 import put_off


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage r on rank r; up to twice the microbatches of 1F1B in flight.

    Span bubble (p-1)(tF+tI-2tW), exact for m >= 2p-1 and tW <= min(tF, tI): none for equal times.
    Rank r holds 2p-2r-1 microbatches and what 2r weight gradients need. Ranks end one after the
    other, so that the optimizer must not wait for all of them (post-validation). Raises ValueError
    unless m >= 1.

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(zb_h2(3, 5)).timeline))
    rank 0: F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
    rank 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
    rank 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    require("zb_h2", ALWAYS, ranks=num_ranks, microbatches=num_microbatches)
    return Schedule(
        name="zb_h2",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=(linear(num_ranks),),
        orders=tuple(
            put_off(rank, num_microbatches, warm_up=2 * (num_ranks - rank) - 1, delay=2 * rank)
            for rank in range(num_ranks)
        ),
        num_microbatches=(num_microbatches,),
    )
