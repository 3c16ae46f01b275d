"""Layers of each pipeline stage: the layout's own cut, else that of `moemesh train`."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from moemesh.config.layout import shard_sizes
from moemesh.planner.parameters import layer_matmul, layer_weights
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape
from moemesh.schedule.step import PipelineStep
from moemesh.sharding.stages import balanced_sizes


@lru_cache(maxsize=4096)
def default_cut(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage as `moemesh train` cuts them. Raises ValueError for more stages than
    layers."""
    by_kind = {kind: layer_matmul(shape, kind.moe) for kind in shape.kind_counts}
    costs = [by_kind[kind] for kind in shape.kinds]
    head = shape.vocab_size * shape.hidden_size
    ahead = costs[-1] + 2 * shape.hidden_size**2 + head
    return balanced_sizes(costs, head + shape.num_mtp_layers * ahead, num_stages)


def even_cut(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers, the longer stages first: what most frameworks do."""
    return tuple(shard_sizes(shape.num_layers, num_stages))


def cut_by_weight(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Stages whose heaviest is as light as it can be, embedding and head counted by their weights:
    equal inner stages, the outer two alike. For frameworks that count the tables as layers."""
    if num_stages < 3:
        return even_cut(shape, num_stages)
    share = shape.vocab_size * shape.hidden_size / layer_weights(shape, shape.is_moe).total
    layers = shape.num_layers

    def heaviest(outer: int) -> tuple[float, int]:
        inner = -(-(layers - 2 * outer) // (num_stages - 2))
        return max(outer + share, inner), -outer

    outer = min(range(layers // 2 + 1), key=heaviest)
    return outer, *shard_sizes(layers - 2 * outer, num_stages - 2), outer


def with_values(layout: PlannedLayout, **values: Any) -> PlannedLayout:
    """A copy that is not checked: its numbers may be numpy columns, one entry a layout."""
    found = copy(layout)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def pipeline_step(layout: PlannedLayout, microbatches: int | None = None) -> PipelineStep:
    """The numbers of the layout's schedule; one rank runs one stage after the other."""
    count = layout.microbatches if microbatches is None else microbatches
    if layout.pp == 1:
        schedule = "gpipe" if layout.schedule in ("gpipe", "terapipe") else "1f1b"
        return PipelineStep(schedule, 1, count)
    slices = (layout.slices or layout.pp) if layout.schedule == "terapipe" else 1
    return PipelineStep(layout.schedule, layout.pp, count, layout.stages_per_rank, slices)


class RankContent(NamedTuple):
    """The parts of one pipeline rank: layers by kind, of each stage and of all, and the ends of the
    model."""

    chunks: tuple[dict[LayerKind, int], ...]
    kinds: Counter[LayerKind]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Stages:
    """The stages of one model under one schedule: layers by kind, in order."""

    shape: ModelShape
    step: PipelineStep
    sizes: tuple[int, ...]

    @staticmethod
    def of(shape: ModelShape, layout: PlannedLayout, microbatches: int | None = None) -> Stages:
        step = pipeline_step(layout, microbatches)
        if layout.pp == 1:
            return _stages(shape, step, (shape.num_layers,))
        return _stages(shape, step, layout.layers_per_stage or default_cut(shape, step.num_stages))

    @property
    def last(self) -> int:
        return len(self.sizes) - 1

    @cached_property
    def kinds(self) -> tuple[dict[LayerKind, int], ...]:
        """Layers of every stage by kind; extra prediction layers are not among them."""
        ends = (0, *accumulate(self.sizes))
        return tuple(dict(Counter(self.shape.kinds[first:end])) for first, end in pairwise(ends))

    @cached_property
    def contents(self) -> tuple[RankContent, ...]:
        """The parts of every pipeline rank."""
        found: list[RankContent] = []
        for own in map(self.step.stages_of, range(self.step.ranks)):
            chunks = tuple(self.kinds[stage] for stage in own)
            kinds = sum(map(Counter, chunks), Counter[LayerKind]())
            found.append(RankContent(chunks, kinds, 0 in own, self.last in own))
        return tuple(found)

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(dense layers, layers with experts) that every stage runs, extra prediction layers with
        the last."""
        found = [[0, 0] for _ in self.kinds]
        for stage, kinds in enumerate(self.kinds):
            for kind, number in kinds.items():
                found[stage][kind.moe] += number
        found[-1][self.shape.mtp_kind.moe] += self.shape.num_mtp_layers
        return tuple((dense, routed) for dense, routed in found)


#: Layouts are many, stages that differ few.
_stages = lru_cache(maxsize=4096)(Stages)
