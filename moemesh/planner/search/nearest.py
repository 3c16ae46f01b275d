"""The smallest change of a layout that makes it fit: one key, else two; of those the fastest.

The devices stay as many as they are: dp takes what the other degrees leave over. Every change is
priced with the exact memory model, none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from moemesh.config.cluster import Cluster
from moemesh.config.divisors import divisors
from moemesh.config.errors import ConfigError
from moemesh.planner.peak_memory import peak_memory
from moemesh.planner.planned_layout import RECOMPUTED, TRAINED, PlannedLayout
from moemesh.planner.search.advice import difference, what_would_fit
from moemesh.planner.search.search import SearchSpace
from moemesh.planner.search.space import EXITS, SCHEDULES, Space
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.price import pricing
from moemesh.schedule.build import is_defined

#: Keys that an edit changes at once, at most.
MOST_CHANGES = 2


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """A layout that fits near one that does not. `change`: what differs ("recompute none ->
    full"); `needed` bytes of the worst rank; `seconds` of a step."""

    change: str
    layout: PlannedLayout
    needed: float
    seconds: float


def nearest_that_fits(shape: ModelShape, cluster: Cluster, layout: PlannedLayout) -> Nearest | None:
    """The fastest of the smallest changes that fit; None when no change of two keys does."""
    known = pricing(cluster)
    capacity = cluster.memory_bytes * known.usable_share
    for count in range(1, MOST_CHANGES + 1):
        best: Nearest | None = None
        for other in edits(shape, layout, count, node_size=cluster.gpus_per_node):
            memory = peak_memory(shape, other, known.allocation_of(other))
            if memory.needed > capacity:
                continue
            seconds = known.price(shape, other)[1]["total"]
            if best is None or seconds < best.seconds:
                change = difference(layout, other)
                best = Nearest(change=change, layout=other, needed=memory.needed, seconds=seconds)
        if best is not None:
            return best
    return None


def instead(shape: ModelShape, cluster: Cluster, layout: PlannedLayout) -> Nearest | str:
    """The layout to run in place of one that does not fit: the nearest; where none is near, the
    fastest that fits at all; else a sentence about what there is."""
    if (near := nearest_that_fits(shape, cluster, layout)) is not None:
        return near
    space = Space(
        num_devices=layout.world_size,
        node_size=cluster.gpus_per_node,
        seq_len=layout.seq_len,
        global_batch=layout.global_batch,
        precision=layout.precision,
        trained={name: getattr(layout, name) for name in TRAINED},
    )
    try:
        found = SearchSpace(shape, cluster, space)
    except ConfigError:
        return "no change of two keys makes it fit"
    if best := found.fitting(found.capacity, 1):
        other = found.candidate(best[0])
        return Nearest(
            change=difference(layout, other.layout),
            layout=other.layout,
            needed=other.memory.needed,
            seconds=other.seconds,
        )
    return f"no layout of {layout.world_size} such devices fits: {what_would_fit(found)}"


def edits(
    shape: ModelShape, layout: PlannedLayout, count: int, *, node_size: int
) -> Iterator[PlannedLayout]:
    """Every legal layout of as many devices that differs in exactly `count` keys.

    Tensor groups leave a node of `node_size` devices only where they did before.
    """
    world = layout.world_size
    inside = [degree for degree in divisors(world) if degree <= node_size]
    share = max(layout.global_batch // layout.dp, 1)
    experts = divisors(shape.num_experts) if shape.is_moe else []
    widths = divisors(shape.expert_intermediate_size) if shape.is_moe else []
    every: dict[str, list[Any]] = {
        "pp": [degree for degree in divisors(world) if degree <= shape.num_layers],
        "schedule": list(SCHEDULES) if layout.pp > 1 else [],
        "stages_per_rank": [1, 2, 3, 4],
        "cp": divisors(world),
        "tp": inside,
        "ep": [degree for degree in experts if world % degree == 0],
        "etp": [degree for degree in widths if degree in inside],
        "zero": [0, 1, 2, 3],
        "recompute": list(RECOMPUTED.values()),
        "microbatch": [size for size in divisors(share) if size < layout.microbatch],
        "attention_exit": list(EXITS) if layout.tp > 1 else [],
    }
    found = {
        name: [value for value in values if value != getattr(layout, name)]
        for name, values in every.items()
    }
    choices = {name: values for name, values in found.items() if values}
    for names in combinations(choices, count):
        for values in product(*(choices[name] for name in names)):
            if (other := _edited(shape, layout, dict(zip(names, values, strict=True)))) is not None:
                yield other


def _edited(
    shape: ModelShape, layout: PlannedLayout, values: dict[str, Any]
) -> PlannedLayout | None:
    """The layout with these values and the dp that they leave; None where that is illegal."""

    def degree(name: str) -> int:
        return int(values.get(name, getattr(layout, name)))

    rest = degree("pp") * degree("cp") * degree("tp")
    if layout.world_size % rest:
        return None
    dp = layout.world_size // rest
    if layout.global_batch % (dp * degree("microbatch")):
        return None
    cut = {"layers_per_stage": None} if {"pp", "schedule", "stages_per_rank"} & set(values) else {}
    try:
        other = layout.changed(**values, **cut, dp=dp)
    except ConfigError:
        return None
    # Rules beyond those that a layout checks by itself.
    if other.seq_len % other.cp or other.check(shape.sizes):
        return None
    if other.zero and other.dp * other.cp == 1:
        return None
    # Gradients (and weights) would travel for every microbatch, as the search assumes.
    if other.zero >= 2 and other.pp > 1 and not (layout.zero >= 2 and layout.pp > 1):
        return None
    if (other.schedule == "interleaved_1f1b") != (other.stages_per_rank > 1):
        return None  # one chunk is 1F1B, and only this schedule has more
    has_schedule = is_defined(other.schedule, other.pp, other.microbatches, other.stages_per_rank)
    return other if has_schedule else None
