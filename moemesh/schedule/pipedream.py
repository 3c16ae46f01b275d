"""PipeDream: 1F1B that never drains, every backward updates, weights are stashed.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019,
doi:10.1145/3341301.3359646 (arXiv:1806.03377 for the first version).
"""

from __future__ import annotations

from moemesh.schedule.action import Schedule, UpdateRule, linear
from moemesh.schedule.conditions import ALWAYS, require
from moemesh.schedule.one_f_one_b import orders


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of 1F1B over the microbatches of the whole run.

    Microbatch k uses version max(0, k-(p-1-s)) on stage s in both directions. No bubble in the
    steady state; rank r holds p-r microbatches and as many copies of its weights. Raises
    ValueError unless m >= 1.

    >>> from moemesh.report.timeline_text import draw
    >>> from moemesh.schedule.simulate import simulate
    >>> print(draw(simulate(pipedream(4, 6)).timeline))
    rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
    rank 1: .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5---
    rank 2: .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5---
    rank 3: .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---
    """
    require("pipedream", ALWAYS, ranks=num_ranks, microbatches=num_microbatches)
    return Schedule(
        name="pipedream",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        placement=(linear(num_ranks),),
        orders=orders(num_ranks, num_microbatches),
        num_microbatches=(num_microbatches,),
        update=UpdateRule(kind="stash"),
    )
