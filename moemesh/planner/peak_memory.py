"""Peak of the allocator on the worst rank: exact tensors, and what a framework adds to them.

`memory` counts the tensors that a step must hold. A framework holds more: the working set of the
layer that runs, unfused or gathered copies, the gradient of a large matrix before it is added up,
libraries. An :class:`Allocation` names those habits with a handful of numbers per software stack;
they are calibrated, the tensors are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moemesh.planner.activations import ActivationBytes
from moemesh.planner.arithmetic import Number, maximum, where
from moemesh.planner.memory import ChunkBytes, StageContent, held, rank_memory
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import Stages, default_cut, pipeline_step, with_values
from moemesh.schedule.step import PipelineStep, alive, weight_copies

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Memory that a software stack keeps beside the tensors that every stack must keep.

    Defaults are those of Megatron with fused kernels, as measured with
    ``torch.cuda.max_memory_allocated``.
    """

    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    fused_activation: bool = True
    #: Times the kept activations.
    activation_scale: float = 1.0
    #: Microbatches that a pipeline holds beyond its schedule's (received, not yet released).
    extra_in_flight: float = 0.0
    #: Whole layers that exist while one runs forward or backward.
    working_layers: float = 0.0
    #: Share of the norm outputs that stays gathered in spite of sequence parallelism.
    gathered_norms: float = 0.0
    #: Bytes per channel of norms in fp32, beyond the two copies that are always counted.
    unfused_norm_bytes: float = 0.0
    #: Bytes per attention score kept, and of the scores being worked on, by kind of kernel.
    fused_score_bytes: float = 5.0
    eager_score_bytes: float = 5.0
    fused_score_work: float = 0.0
    eager_score_work: float = 0.0
    #: Bytes per logit on a rank, and per logit of the whole vocabulary where it is gathered.
    logit_bytes: float = 4.0
    gathered_logit_bytes: float = 0.0
    #: Bytes per weight of the largest matrix of the last layer, and of the head.
    layer_gradient_bytes: float = 4.0
    head_gradient_bytes: float = 2.0
    #: Libraries, communicators, fragmentation: in no allocator statistic, but in the device.
    workspace_bytes: float = 2.0 * GIB
    #: The part of the device's memory that a job gets.
    usable_share: float = 0.985


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes that the allocator of the worst rank reports, and that the device must have."""

    rank: int
    allocated: float
    needed: float
    states: float
    activations: float
    logits: float
    working: float

    def fits(self, memory_bytes: float, usable_share: float = 1.0) -> bool:
        """Whether a device of so much memory can run it."""
        return bool(self.needed <= memory_bytes * usable_share)


def peak_memory(shape: ModelShape, layout: PlannedLayout, allocation: Allocation) -> PeakMemory:
    """The worst pipeline rank."""
    changed = _as_allocated(layout, allocation)
    both = ChunkBytes(shape, changed), _habits(shape, changed, allocation)
    ranks = worst_ranks(shape, layout)
    found = [_rank_peak(shape, changed, allocation, rank, *both) for rank in ranks]
    return max(found, key=lambda peak: peak.needed)


def needed_bytes(shape: ModelShape, layout: PlannedLayout, allocation: Allocation) -> Number:
    """Bytes that a device must have; numbers of the layout may be columns."""
    changed = _as_allocated(layout, allocation)
    both = ChunkBytes(shape, changed), _habits(shape, changed, allocation)
    worst: Number = 0.0
    for rank in worst_ranks(shape, layout):
        worst = maximum(worst, _rank_peak(shape, changed, allocation, rank, *both).needed)
    return worst


def _as_allocated(layout: PlannedLayout, allocation: Allocation) -> PlannedLayout:
    return with_values(
        layout,
        gradient_bytes=allocation.gradient_bytes,
        optimizer_bytes=allocation.optimizer_bytes,
        fused_activation=allocation.fused_activation,
    )


def worst_ranks(shape: ModelShape, layout: PlannedLayout) -> tuple[int, ...]:
    """Pipeline ranks one of which needs the most memory, whatever the other degrees are: those
    whose layers, ends, microbatches in flight and versions of weights no other rank exceeds."""
    return _worst_ranks(shape, pipeline_step(layout, 1), layout.layers_per_stage or ())


@lru_cache(maxsize=4096)
def _worst_ranks(
    shape: ModelShape, step: PipelineStep, layers_per_stage: tuple[int, ...]
) -> tuple[int, ...]:
    if step.ranks == 1:
        return (0,)
    stages = Stages(shape, step, layers_per_stage or default_cut(shape, step.num_stages))
    contents = [StageContent(stages, rank) for rank in range(step.ranks)]
    many = step.of(step.settled(8 * step.ranks))
    kept: list[int] = []
    for rank in range(step.ranks):
        rivals = (*kept, *range(rank + 1, step.ranks))
        if not any(_exceeded(many, contents, rank, rival) for rival in rivals):
            kept.append(rank)
    return tuple(kept)


def _exceeded(step: PipelineStep, contents: Sequence[StageContent], rank: int, rival: int) -> bool:
    moments = alive(step)
    return (
        contents[rank].holds_less(contents[rival])
        and weight_copies(step, rank) <= weight_copies(step, rival)
        and all(
            any(all(a <= b for a, b in zip(mine, one, strict=True)) for one in moments[rival])
            for mine in moments[rank]
        )
    )


def _rank_peak(
    shape: ModelShape,
    layout: PlannedLayout,
    allocation: Allocation,
    rank: int,
    tensors: ChunkBytes,
    chunks: ChunkBytes,
) -> PeakMemory:
    content = StageContent.of(shape, layout, rank)
    exact = rank_memory(shape, layout, rank, tensors)
    kept = [chunks.chunk(chunk) for chunk in content.chunks]
    working: Number = 0.0
    scores = 0.0
    if layout.attention_kernel != "flash":
        eager = layout.attention_kernel == "eager"
        each = allocation.eager_score_work if eager else allocation.fused_score_work
        scores = each * layout.tokens * layout.seq_len * shape.num_heads / layout.tp
    for kind in content.kinds:
        _, whole = chunks.layer(kind)
        work = whole if "full" in layout.recompute else 0.0
        working = maximum(working, work + allocation.working_layers * whole + scores)
    last_kind = list(content.kinds)[-1] if content.kinds else None
    if last_kind is not None and not layout.adapters:
        # The gradient of the largest matrix of a layer exists once more.
        matrix = (2 if shape.gated else 1) * shape.hidden_size
        if last_kind.moe:
            matrix = matrix * shape.expert_intermediate_size / layout.etp
        else:
            matrix = matrix * shape.intermediate_size / layout.tp
        working = working + allocation.layer_gradient_bytes * matrix
    logits: Number = 0.0
    if content.has_head:
        numbers = layout.tokens * shape.vocab_size
        logits = allocation.logit_bytes * numbers / layout.tp
        logits = logits + where(layout.tp > 1, allocation.gathered_logit_bytes * numbers, 0.0)
        head = 0 if layout.adapters else shape.vocab_size * shape.hidden_size / layout.tp
        logits = logits + allocation.head_gradient_bytes * head
    if layout.zero >= 3 and "full" in layout.recompute:
        # The loss is over before the first layer runs backward.
        logits, working = maximum(logits, working), 0.0
    activations = held(layout, rank, kept)
    if layout.pp > 1:
        activations = activations + allocation.extra_in_flight * sum(kept)
    allocated = (
        exact.states + activations + logits + working + (exact.buffers if layout.zero >= 3 else 0.0)
    )
    # What a step must hold is a floor, whatever the habits of a stack say.
    needed = maximum(allocated + allocation.workspace_bytes, exact.total)
    return PeakMemory(
        rank=rank,
        allocated=allocated,
        needed=needed,
        states=exact.states,
        activations=activations,
        logits=logits,
        working=working,
    )


def _habits(shape: ModelShape, layout: PlannedLayout, allocation: Allocation) -> ChunkBytes:
    """What a stack keeps of layers, beyond their tensors."""
    hidden, tokens = shape.hidden_size, layout.tokens
    extra = 0.0 if layout.fused_norm else allocation.unfused_norm_bytes * hidden
    shards = layout.tp if layout.sequence_parallel else 1
    normed = 2 * layout.element_bytes * hidden * allocation.gathered_norms
    gathered = tokens * (normed * (1 - 1 / shards))
    scores: Number = 0.0
    if layout.attention_kernel != "flash":
        bytes_each = (
            allocation.eager_score_bytes
            if layout.attention_kernel == "eager"
            else allocation.fused_score_bytes
        )
        counted = tokens * layout.seq_len * shape.num_heads / layout.tp
        scores = (bytes_each - layout.element_bytes) * counted

    def kept(tensors: ActivationBytes) -> Number:
        found = tensors.plus(ActivationBytes(tokens=extra)).on_rank(layout) + gathered
        return allocation.activation_scale * (found + scores)

    return ChunkBytes(shape, layout, kept)
