"""PipeDream-2BW: 1F1B that never drains, with two versions of the weights.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, arXiv:2006.09503.
"""

from __future__ import annotations

from moemesh.schedule.action import Schedule, UpdateRule, linear
from moemesh.schedule.conditions import ALWAYS, at_least, divisible, require
from moemesh.schedule.one_f_one_b import orders

CONDITIONS = (
    *ALWAYS,
    at_least("microbatches", 1, "ranks"),
    at_least("window", 1, "ranks"),
    divisible("microbatches", "window"),
)


def pipedream_2bw(num_ranks: int, num_microbatches: int, *, window: int | None = None) -> Schedule:
    """The order of 1F1B over the whole run; every `window` backwards update once.

    Microbatch k uses version max(k // window - 1, 0) on every stage and in both directions, so
    that two copies of the weights are enough. `window` is by default the smallest divisor of the
    microbatches that is not below p. No bubble in the steady state; rank r holds p-r microbatches.
    Raises ValueError unless window >= p and it divides the microbatches (gradients of a part of a
    window would be lost).

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(pipedream_2bw(2, 6)).timeline))
    rank 0: F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5---
    rank 1: .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---
    """
    if window is None:
        first = CONDITIONS[: len(ALWAYS) + 1]
        require("pipedream_2bw", first, ranks=num_ranks, microbatches=num_microbatches)
        enough = range(num_ranks, num_microbatches + 1)
        window = next((n for n in enough if num_microbatches % n == 0), num_microbatches)
    require(
        "pipedream_2bw", CONDITIONS, ranks=num_ranks, microbatches=num_microbatches, window=window
    )
    return Schedule(
        name="pipedream_2bw",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=(linear(num_ranks),),
        orders=orders(num_ranks, num_microbatches),
        num_microbatches=(num_microbatches,),
        update=UpdateRule(kind="two_versions", window=window),
    )
