"""The layouts that answer a search: different ones, each with the roles that it has.

Step times within :data:`TIE` are one to the model, whose error is more. Of those the one is
*recommended* whose whole interval of memory fits the device; then the one with the fewest
mechanisms; then the fastest, or where none is safe the one that needs least memory. Beside it stand
the *fastest*, the *safest* (the fastest whose whole interval fits) and the *simplest* (the fewest
mechanisms within :data:`NEAR` of the fastest). :meth:`Family.mechanisms` says what is counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moemesh.config.plan import DEGREES
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.search import SearchSpace

#: Shares of a step: what is a tie, what a near-copy, and what a simpler layout may cost.
TIE, COPY, NEAR = 0.02, 0.01, 0.05
#: Of so many times the layouts that are shown, near-copies are counted.
_MOST_LOOKED_AT = 8
_WEIGHTS = ("pp", "tp", "ep", "etp", "stages_per_rank")


class Chosen(NamedTuple):
    """A layout by its number in the search, its roles, and how many near-copies it stands for."""

    number: int
    roles: tuple[str, ...]
    alike: int


def choose(found: SearchSpace, top: int, safe_bytes: float) -> list[Chosen]:
    """Up to `top` different layouts that fit, at least the recommended and the fastest: the former,
    then by seconds; empty where none fits. A layout of at most `safe_bytes` is safe."""
    top = max(top, 2)
    if not (first := found.fitting(found.capacity, 1)):
        return []
    fastest = first[0]
    seconds = found.seconds(fastest)
    fits = found.needed <= found.capacity

    def order(index: int) -> tuple[bool, int, float, float]:
        risk = max(float(found.needed[index]) - safe_bytes, 0.0)
        return risk > 0, int(found.mechanisms[index]), risk, found.seconds(index)

    may_tie = np.flatnonzero(fits & (found.bounds <= seconds * (1 + TIE))).tolist()
    best = min((one for one in may_tie if found.seconds(one) <= seconds * (1 + TIE)), key=order)
    roles = {best: ["recommended"]}
    roles.setdefault(fastest, []).append("fastest")
    if safe := found.fitting(min(found.capacity, safe_bytes), 1):
        is_safe = found.needed[best] <= safe_bytes
        roles.setdefault(best if is_safe else safe[0], []).append("safest")
    # The fastest of the layouts with the fewest mechanisms that are nearly as fast as any.
    limit = seconds * (1 + NEAR)
    may = np.flatnonzero((found.needed <= found.capacity) & (found.bounds <= limit))
    levels = found.mechanisms[may]
    firsts = (found.fastest(may[levels == level], 1)[0] for level in np.unique(levels))
    simplest = next(index for index in firsts if found.seconds(index) <= limit)
    is_simple = found.mechanisms[best] == found.mechanisms[simplest]
    roles.setdefault(best if is_simple else simplest, []).append("simplest")
    rows = list(roles)[:top]
    count = top
    while True:
        pool, copies = found.fitting(found.capacity, count), dict.fromkeys(rows, 0)
        for index in pool:
            if index not in roles:
                like = next((one for one in copies if _alike(found, one, index)), None)
                if like is not None:
                    copies[like] += 1
                elif len(copies) < top:
                    copies[index] = 0
        if len(copies) == top or len(pool) < count or count >= top * _MOST_LOOKED_AT:
            break
        count *= 2
    others = sorted((one for one in copies if one != best), key=found.seconds)
    return [Chosen(one, tuple(roles.get(one, ())), copies[one]) for one in (best, *others)]


def _alike(found: SearchSpace, one: int, other: int) -> bool:
    """Whether two layouts have the same mechanisms and are as fast, or cut the weights alike and
    only the batch otherwise (dp, cp and what follows from them)."""
    first, second = found.layout(one), found.layout(other)
    if _words(first) != _words(second):
        return False
    if all(getattr(first, axis) == getattr(second, axis) for axis in _WEIGHTS):
        return True
    is_as_fast = abs(found.seconds(other) / found.seconds(one) - 1) <= COPY
    axes, others = ([getattr(one, axis) > 1 for axis in DEGREES] for one in (first, second))
    return is_as_fast and axes == others


def _words(layout: PlannedLayout) -> tuple[object, ...]:
    """The mechanisms of a layout besides its axes."""
    of_pipeline = layout.schedule, layout.stages_per_rank > 1
    return of_pipeline, layout.recompute, layout.zero > 1, layout.dispatcher
