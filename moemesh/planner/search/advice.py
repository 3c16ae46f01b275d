"""Explain a plan: binding constraint, value of more memory, near misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.search import SearchSpace
from moemesh.trace.memory_profile import format_bytes

GIB = 2**30
#: More memory a device that sensitivity is asked for, in GiB.
MORE_MEMORY = (4, 8, 16, 32)
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
    seconds = found.seconds(fastest)
    sensitivity: list[tuple[int, float]] = []
    for more in MORE_MEMORY:
        first = found.fitting(found.capacity + more * GIB, 1)[0]
        sensitivity.append((more * GIB, min(found.seconds(first), seconds)))
    return Advice(
        binding=_binding(found, fastest, sensitivity),
        sensitivity=tuple(sensitivity),
        why_not=tuple(_why_not(found, best, seconds)),
    )


def _binding(found: SearchSpace, best: int, sensitivity: Sequence[tuple[int, float]]) -> str:
    seconds, memory = found.seconds(best), found.memory(best)
    for more, then in sensitivity:
        if then < seconds * 0.999:
            gain = 1 - then / seconds
            return (
                f"memory of pipeline rank {memory.rank}: +{more // GIB} GiB a device would make a "
                f"step {gain:.1%} faster"
            )
    parts = found.breakdown(best)
    waits = {name: parts[name] for name in parts if name not in ("total", "compute", "attention")}
    name = max(waits, key=lambda part: waits[part])
    return f"not memory: {name} takes {waits[name] / seconds:.1%} of a step besides computing"


def _why_not(found: SearchSpace, best: int, fastest: float) -> Iterator[str]:
    """Layouts that are faster than all that fit, the ones that miss their memory by least."""
    seconds = found.seconds(best)
    seen: set[str] = set()
    for index in found.faster_that_do_not_fit(fastest, 12):
        layout, memory = found.layout(index), found.memory(index)
        change = difference(found.layout(best), layout)
        if change in seen:
            continue
        seen.add(change)
        short = memory.needed - found.capacity
        yield (
            f"{change}: {1 - found.seconds(index) / seconds:.1%} faster, pipeline rank "
            f"{memory.rank} short by {format_bytes(round(short))}"
        )
        if len(seen) == 5:
            return


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
