"""Layers of each pipeline stage: the cut of the layout, or by default that of `moemesh train`."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from moemesh.config.layout import shard_sizes
from moemesh.planner.parameters import layer_matmul, layer_weights
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape
from moemesh.schedule.step import PipelineStep
from moemesh.sharding.stages import balanced_sizes, layer_runs


@lru_cache(maxsize=4096)
def default_cut(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage in the cut of `moemesh train`. Raises ValueError for more stages than
    layers."""
    # Costs are parameters that multiply a token.
    by_kind = {kind: layer_matmul(shape, kind.moe) for kind in shape.kind_counts}
    costs = [by_kind[kind] for kind in shape.kinds]
    head = shape.vocab_size * shape.hidden_size
    mtp_layer = costs[-1] + 2 * shape.hidden_size**2 + head
    return balanced_sizes(costs, head + shape.num_mtp_layers * mtp_layer, num_stages)


def even_cut(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers, longer stages first, as in most frameworks."""
    return tuple(shard_sizes(shape.num_layers, num_stages))


def cut_by_weight(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """For frameworks that count the tables as layers: among cuts with equal outer stages and nearly
    equal inner stages, the one whose heaviest stage is lightest. Embedding and head each count as a
    fraction of a layer, the ratio of their weights. Fewer than three stages: :func:`even_cut`."""
    if num_stages < 3:
        return even_cut(shape, num_stages)
    share = shape.vocab_size * shape.hidden_size / layer_weights(shape, shape.is_moe).total
    layers = shape.num_layers

    def heaviest(outer: int) -> tuple[float, int]:
        """Layers of the heaviest stage if both outer stages have `outer`; the second number orders
        equal cuts, more outer layers first."""
        inner = -(-(layers - 2 * outer) // (num_stages - 2))
        return max(outer + share, inner), -outer

    outer = min(range(layers // 2 + 1), key=heaviest)
    return outer, *shard_sizes(layers - 2 * outer, num_stages - 2), outer


def with_values(layout: PlannedLayout, **values: Any) -> PlannedLayout:
    """An unchecked copy, whose numbers may be numpy columns with one entry per layout."""
    changed = copy(layout)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed


def pipeline_step(layout: PlannedLayout, microbatches: int | None = None) -> PipelineStep:
    """The sizes of the layout's schedule. A pipeline of one rank runs GPipe's or 1F1B's order."""
    count = layout.microbatches if microbatches is None else microbatches
    if layout.pp == 1:
        schedule = "gpipe" if layout.schedule in ("gpipe", "terapipe") else "1f1b"
        return PipelineStep(schedule, 1, count)
    slices = (layout.slices or layout.pp) if layout.schedule == "terapipe" else 1
    return PipelineStep(layout.schedule, layout.pp, count, layout.stages_per_rank, slices)


class RankContent(NamedTuple):
    """The parts of one pipeline rank: layers by kind, for each stage and in total, and whether it
    has the embedding and the head."""

    chunks: tuple[dict[LayerKind, int], ...]
    kinds: Counter[LayerKind]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Stages:
    """The stages of one model under one schedule, in order; `sizes` are their numbers of layers."""

    shape: ModelShape
    step: PipelineStep
    sizes: tuple[int, ...]

    @staticmethod
    def of(shape: ModelShape, layout: PlannedLayout, microbatches: int | None = None) -> Stages:
        """The stages of `layout`. `microbatches` replaces its number; no cut depends on it."""
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
        kinds = self.shape.kinds
        return tuple(dict(Counter(kinds[run.start : run.stop])) for run in layer_runs(self.sizes))

    @cached_property
    def contents(self) -> tuple[RankContent, ...]:
        """The parts of every pipeline rank."""
        contents: list[RankContent] = []
        for stages in map(self.step.stages_of, range(self.step.ranks)):
            chunks = tuple(self.kinds[stage] for stage in stages)
            kinds = sum(map(Counter, chunks), Counter[LayerKind]())
            contents.append(RankContent(chunks, kinds, 0 in stages, self.last in stages))
        return tuple(contents)

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(dense layers, layers with experts) of every stage; the last one includes the extra
        prediction layers."""
        counts = [[0, 0] for _ in self.kinds]
        for stage, kinds in enumerate(self.kinds):
            for kind, number in kinds.items():
                counts[stage][kind.moe] += number
        counts[-1][self.shape.mtp_kind.moe] += self.shape.num_mtp_layers
        return tuple((dense, routed) for dense, routed in counts)


#: Cached constructor: many layouts share few different stages.
_stages = lru_cache(maxsize=4096)(Stages)
