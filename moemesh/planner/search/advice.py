"""The layouts that answer a search, and why: binding constraint, more memory, near misses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moemesh.config.plan import DEGREES
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.search import SearchSpace
from moemesh.trace.memory_profile import format_bytes

# The layouts that answer a search: different ones, each with the roles that it has.
#
# Step times within :data:`TIE` are one to the model, whose error is more. The *recommended* layout
# ties with the fastest whose whole interval of memory fits the device, if that one is within
# :data:`SAFER` of the fastest of all, else with the latter; of the ties it has the fewest
# mechanisms, then the least risk for memory, then the least time. Beside it stand the *fastest*,
# the *safest* (the fastest whose whole interval fits) and the *simplest* (the fewest mechanisms
# within :data:`NEAR` of the fastest). :meth:`Family.mechanisms` says what is counted.


#: Shares of a step: of a tie, of a near-copy, and what a simpler and a safer layout may cost. All
#: are less than the model's error; a run that ends without memory costs more than any of them.
TIE, COPY, NEAR, SAFER = 0.02, 0.01, 0.05, 0.10
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
    safe = found.fitting(min(found.capacity, safe_bytes), 1)
    leader, pool = fastest, fits
    if safe and found.seconds(safe[0]) <= seconds * (1 + SAFER):
        leader, pool = safe[0], fits & (found.needed <= safe_bytes)
    limit = min(found.seconds(leader) * (1 + TIE), seconds * (1 + SAFER))

    def order(index: int) -> tuple[int, float, float]:
        risk = max(float(found.needed[index]) - safe_bytes, 0.0)
        return int(found.mechanisms[index]), risk, found.seconds(index)

    may_tie = np.flatnonzero(pool & (found.bounds <= limit)).tolist()
    best = min((one for one in may_tie if found.seconds(one) <= limit), key=order)
    roles = {best: ["recommended"]}
    roles.setdefault(fastest, []).append("fastest")
    if safe:
        is_safe = found.needed[best] <= safe_bytes
        roles.setdefault(best if is_safe else safe[0], []).append("safest")
    # The fastest of the layouts with the fewest mechanisms that are nearly as fast as any.
    nearly = seconds * (1 + NEAR)
    may = np.flatnonzero(fits & (found.bounds <= nearly))
    levels = found.mechanisms[may]
    firsts = (found.fastest(may[levels == level], 1)[0] for level in np.unique(levels))
    simplest = next(index for index in firsts if found.seconds(index) <= nearly)
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
    # The mechanisms besides the axes.
    words = [
        (x.schedule, x.stages_per_rank > 1, x.recompute, x.zero > 1, x.dispatcher)
        for x in (first, second)
    ]
    if words[0] != words[1]:
        return False
    if all(getattr(first, axis) == getattr(second, axis) for axis in _WEIGHTS):
        return True
    is_as_fast = abs(found.seconds(other) / found.seconds(one) - 1) <= COPY
    axes, others = ([getattr(one, axis) > 1 for axis in DEGREES] for one in (first, second))
    return is_as_fast and axes == others


GIB = 2**30
#: More memory a device that sensitivity is asked for, in GiB.
MORE_MEMORY = (4, 8, 16, 32)
#: Parts of a step that are no waiting.
_WORK = ("total", "compute", "attention")
#: What two layouts are told apart by, in the order of a sentence.
_TOLD = (
    "pp", "schedule", "stages_per_rank", "dp", "cp", "tp", "ep", "etp", "zero", "recompute",
    "microbatch", "attention_exit", "dispatcher",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Sentences about the best layout. `binding`: the constraint that holds it back and its price;
    `sensitivity`: (more bytes a device, seconds then); `why_not`: one line per rival."""

    binding: str
    sensitivity: tuple[tuple[int, float], ...]
    why_not: tuple[str, ...]


def advise(found: SearchSpace, best: int, fastest: int) -> Advice:
    """Explain layout `best`, which is as good as the fastest that fits."""
    seconds, memory = found.seconds(fastest), found.memory(fastest)
    sensitivity: list[tuple[int, float]] = []
    for more in MORE_MEMORY:
        first = found.fitting(found.capacity + more * GIB, 1)[0]
        sensitivity.append((more * GIB, min(found.seconds(first), seconds)))
    whose = "" if best == fastest else f" of the fastest ({seconds:.3f} s)"
    if helps := [(more, then) for more, then in sensitivity if then < seconds * 0.999]:
        more, then = helps[0]
        binding = (
            f"memory of pipeline rank {memory.rank}{whose}: +{more // GIB} GiB a device would make "
            f"a step {1 - then / seconds:.1%} faster"
        )
    else:
        parts = found.breakdown(fastest)
        waits = {name: parts[name] for name in parts if name not in _WORK}
        name = max(waits, key=lambda part: waits[part])
        binding = (
            f"not memory: {name} takes {waits[name] / seconds:.1%} of a step besides computing"
        )
    # Layouts that are faster than all that fit, the ones that miss their memory by least.
    why_not: dict[str, str] = {}
    own = found.seconds(best)
    for index in found.faster_that_do_not_fit(seconds, 12):
        layout, memory = found.layout(index), found.memory(index)
        short = format_bytes(round(memory.needed - found.capacity))
        change = difference(found.layout(best), layout)
        why_not.setdefault(
            change,
            f"{change}: {1 - found.seconds(index) / own:.1%} faster, pipeline rank "
            f"{memory.rank} short by {short}",
        )
        if len(why_not) == 5:
            break
    return Advice(binding=binding, sensitivity=tuple(sensitivity), why_not=tuple(why_not.values()))


def difference(old: PlannedLayout, new: PlannedLayout) -> str:
    """The changes from one layout to the other: "tp 4 -> 2, recompute full -> none"."""
    changes = [
        f"{name} {_word(getattr(old, name))} -> {_word(getattr(new, name))}"
        for name in _TOLD
        if getattr(old, name) != getattr(new, name)
    ]
    return ", ".join(changes) or "nothing"


def _word(value: Any) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(map(str, value))) or "none"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)


def what_would_fit(found: SearchSpace) -> str:
    """The layout that needs least memory when nothing fits, and what it lacks."""
    index = found.smallest()
    layout, smallest = found.layout(index), float(found.needed[index])
    lacking = smallest - found.capacity
    needed = smallest / found.pricing.usable_share
    shown = replace(layout, ranks_per_node=0).key
    return (
        f"the smallest, {shown}, needs {format_bytes(round(needed))} a device, "
        f"{format_bytes(round(lacking))} more than there is"
    )
