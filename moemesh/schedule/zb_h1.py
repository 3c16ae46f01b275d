"""ZB-H1: weight gradients are deferred into the bubbles, within the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241.
"""

from __future__ import annotations

from moemesh.schedule.action import Entry, Op, Schedule, linear, single
from moemesh.schedule.conditions import ALWAYS, require


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stage r on rank r; rank r runs its k-th ``W`` after its (k+r)-th ``I``.

    Span bubble (p-1)(tF+tI-tW), exact for m >= p and tW <= tF; rank r holds p-r microbatches and
    what r weight gradients need. Raises ValueError unless m >= 1.

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(zb_h1(4, 4)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1: .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 2: .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """
    require("zb_h1", ALWAYS, ranks=num_ranks, microbatches=num_microbatches)
    return Schedule(
        name="zb_h1",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=(linear(num_ranks),),
        orders=tuple(
            put_off(rank, num_microbatches, warm_up=num_ranks - rank, delay=rank)
            for rank in range(num_ranks)
        ),
        num_microbatches=(num_microbatches,),
    )


def put_off(stage: int, num_microbatches: int, *, warm_up: int, delay: int) -> tuple[Entry, ...]:
    """One rank's order: `warm_up` forwards, then ``I``, a ``W`` that is `delay` late, ``F``."""
    warm_up = min(num_microbatches, warm_up)
    found = [Op("F", stage, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches):
        found.append(Op("I", stage, microbatch))
        if microbatch >= delay:
            found.append(Op("W", stage, microbatch - delay))
        if microbatch + warm_up < num_microbatches:
            found.append(Op("F", stage, microbatch + warm_up))
    left = range(max(num_microbatches - delay, 0), num_microbatches)
    return single(*found, *(Op("W", stage, microbatch) for microbatch in left))
