"""Bytes of one pipeline rank: weights, gradients, optimizer, activations, logits, buffers.

Model states, bytes per parameter that a rank holds after tp, pp, ep and etp have cut the model:

| ZeRO | weights | gradients | optimizer |
|---|---|---|---|
| 0 | w | g | o |
| 1 | w | g | o / N |
| 2 | w | g / N | o / N |
| 3 | w / N | g / N | o / N |

w = 2, g = 4, o = 12 is Megatron's mixed precision (18 bytes), g = 2 the ZeRO paper's (16). N is
dp cp for dense weights and D_e = dp cp tp / (ep etp) for experts: two sums, never one.

Activations of a rank are its layers' (see `activations`) times the microbatches in flight:

| schedule | in flight on rank i of p |
|---|---|
| GPipe | m |
| 1F1B, ZB-H1 | min(m, p - i) |
| interleaved, v chunks | (v p + p - 1 - 2 i) / v, at most m |
| ZB-H2 | min(m, 2 (p - i) - 1) |
| ZB-V; DualPipeV | p; p + 1/2, on every rank, in chunks of half a stage |
| DualPipe | p + 1 of one stage each, and two copies of the weights |
| Chimera | as 1F1B in each direction, at most p / 2 of each; two copies |

`moemesh.schedule.memory` counts the same from the schedules themselves; tests hold both together.

Sources: arXiv:1910.02054 (ZeRO), arXiv:2205.05198 (activations), arXiv:2104.04473 (interleaving),
arXiv:2401.10241 (zero bubble), arXiv:2412.19437 (DualPipe).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from moemesh.config.layout import shard_sizes
from moemesh.planner.activations import layer_kept, layer_kept_whole
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.parameters import (
    Weights,
    embedding_weights,
    head_weights,
    kind_weights,
    mtp_weights,
)
from moemesh.planner.shapes.shape import LayerKind, ModelShape


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank of pipeline rank `rank`, each part at its own largest."""

    rank: int
    dense_weights: float
    expert_weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    workspace: float = 0.0

    @property
    def weights(self) -> float:
        return self.dense_weights + self.expert_weights

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.buffers + self.workspace

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


class StageContent:
    """What one pipeline rank holds: layers by kind, and the ends of the model."""

    def __init__(self, shape: ModelShape, layout: PlannedLayout, rank: int) -> None:
        stages = layout.stages_of(rank)
        num_stages = layout.num_stages
        cut = _cut_kinds(shape, num_stages, layout.layers_per_stage or ())
        self.chunks: tuple[dict[LayerKind, int], ...] = tuple(cut[stage] for stage in stages)
        self.has_embedding = 0 in stages
        self.has_head = num_stages - 1 in stages

    @property
    def kinds(self) -> dict[LayerKind, int]:
        if len(self.chunks) == 1:
            return self.chunks[0]
        total: Counter[LayerKind] = Counter()
        for chunk in self.chunks:
            total.update(chunk)
        return dict(total)


@lru_cache(maxsize=1024)
def _cut_kinds(
    shape: ModelShape, num_stages: int, layers_per_stage: tuple[int, ...]
) -> tuple[dict[LayerKind, int], ...]:
    """The layers of every stage by kind."""
    sizes = layers_per_stage or shard_sizes(shape.num_layers, num_stages)
    found: list[dict[LayerKind, int]] = []
    start = 0
    for size in sizes:
        found.append(dict(Counter(shape.kinds[start : start + size])))
        start += size
    return tuple(found)


def rank_weights(shape: ModelShape, layout: PlannedLayout, rank: int) -> Weights:
    """Parameters of the layers, embedding and head of a pipeline rank, before tp, ep and etp."""
    content = StageContent(shape, layout, rank)
    return _content_weights(shape, layout, content)


def _content_weights(shape: ModelShape, layout: PlannedLayout, content: StageContent) -> Weights:
    whole = layout.attention_exit == "all_to_all" and layout.tp > 1
    found = kind_weights(shape, content.kinds, whole_output=whole)
    if content.has_embedding:
        found = found.plus(embedding_weights(shape))
    if content.has_head:
        found = found.plus(head_weights(shape))
        if shape.num_mtp_layers:
            found = found.plus(mtp_weights(shape).times(shape.num_mtp_layers))
        if not content.has_embedding and (shape.tied_embeddings or shape.num_mtp_layers):
            # A copy of the table: tied with the first stage, or read by the extra layers.
            found = found.plus(Weights(sharded=shape.vocab_size * shape.hidden_size))
    return found


def in_flight(layout: PlannedLayout, rank: int) -> float:
    """Microbatches whose activations pipeline rank `rank` holds at its peak, in whole passes
    through all of its chunks."""
    p, m, v = layout.pp, layout.microbatches, layout.stages_per_rank
    match layout.schedule:
        case "gpipe" | "terapipe":
            return float(m)
        case "interleaved_1f1b" if v > 1:
            return min(v * p + p - 1 - 2 * rank, m * v) / v
        case "zb_h2":
            return float(min(m, 2 * (p - rank) - 1))
        case "zb_v":
            return min(2 * p, 2 * m) / 2
        case "dualpipe_v":
            return min(2 * p + 1, 2 * m) / 2
        case "dualpipe":
            return min(p + 1, m) / 2 if p > 1 else 1.0
        case "chimera":
            # Of each direction as under 1F1B, at most half of the p microbatches of a unit.
            half = min(p, m) / 2
            return (min(p - rank, half) + min(rank + 1, half)) / 2 if p > 1 else 1.0
        case "ampnet":
            return float(min(m, p)) if rank < p - 1 else 1.0
        case _:
            return float(min(m, p - rank))


def rank_memory(shape: ModelShape, layout: PlannedLayout, rank: int) -> RankMemory:
    """Every part of one pipeline rank's memory, on its most loaded member."""
    content = StageContent(shape, layout, rank)
    weights = _content_weights(shape, layout, content)
    dense = weights.sharded / layout.tp + weights.replicated
    expert = weights.expert / (layout.ep * layout.etp) + weights.expert_rows / layout.ep
    if layout.spare_slots and shape.is_moe:
        expert *= 1 + layout.spare_slots * layout.ep / shape.num_experts
    n_dense, n_expert = layout.dense_shards, layout.expert_shards
    w = layout.element_bytes
    cut_w = (n_dense, n_expert) if layout.zero >= 3 else (1, 1)
    cut_g = (n_dense, n_expert) if layout.zero >= 2 else (1, 1)
    cut_o = (n_dense, n_expert) if layout.zero >= 1 else (1, 1)
    return RankMemory(
        rank=rank,
        dense_weights=w * dense / cut_w[0],
        expert_weights=w * expert / cut_w[1],
        gradients=layout.gradient_bytes * (dense / cut_g[0] + expert / cut_g[1]),
        optimizer=layout.optimizer_bytes * (dense / cut_o[0] + expert / cut_o[1]),
        activations=_activations(shape, layout, content, rank),
        logits=_logits(shape, layout, content),
        buffers=_buffers(shape, layout, content),
    )


def _layer_bytes(shape: ModelShape, kind: LayerKind, layout: PlannedLayout) -> tuple[float, float]:
    """(kept from forward to backward, held while its backward runs) of one layer, in bytes."""
    kept = layer_kept(shape, kind, layout).on_rank(layout)
    if not layout.recompute:
        return kept, kept
    return kept, layer_kept_whole(shape, kind, layout).on_rank(layout)


def _activations(
    shape: ModelShape, layout: PlannedLayout, content: StageContent, rank: int
) -> float:
    kept = whole = 0.0
    for kind, number in content.kinds.items():
        once, all_of_it = _layer_bytes(shape, kind, layout)
        recomputed = number
        if layout.recompute_layers is not None:
            recomputed = min(number, layout.recompute_layers)
        kept += recomputed * once + (number - recomputed) * all_of_it
        whole = max(whole, all_of_it - once)
    return kept * in_flight(layout, rank) + ("full" in layout.recompute) * whole


#: Bytes per logit at the loss: the logits, their fp32 softmax and its gradient.
FUSED_LOSS_BYTES = 6.0
LOSS_BYTES = 14.0


def _logits(shape: ModelShape, layout: PlannedLayout, content: StageContent) -> float:
    if not content.has_head:
        return 0.0
    per_logit = FUSED_LOSS_BYTES if layout.fused_loss else LOSS_BYTES
    logits = layout.tokens * shape.vocab_size / layout.tp * per_logit
    return logits + 2 * layout.element_bytes * layout.token_shard * shape.hidden_size


def _buffers(shape: ModelShape, layout: PlannedLayout, content: StageContent) -> float:
    """What communication holds beside: gathered inputs, unsharded units of ZeRO-3."""
    found = 0.0
    if layout.tp > 1 and layout.sequence_parallel:
        found += 2 * layout.element_bytes * layout.tokens * shape.hidden_size
    if layout.zero >= 3:
        units = [_unit(shape, layout, kind) for kind in content.kinds]
        if content.has_embedding or content.has_head:
            units.append(shape.vocab_size * shape.hidden_size / layout.tp)
        largest = max(units, default=0.0)
        # Two units gathered (one in use, one prefetched) and one unsharded gradient.
        found += 3 * layout.element_bytes * largest
    return found


def _unit(shape: ModelShape, layout: PlannedLayout, kind: LayerKind) -> float:
    weights = kind_weights(shape, {kind: 1})
    return (
        weights.sharded / layout.tp
        + weights.replicated
        + weights.expert / (layout.ep * layout.etp)
        + weights.expert_rows / layout.ep
    )


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """First, last and worst pipeline rank, and all of them."""

    ranks: tuple[RankMemory, ...]

    @property
    def first(self) -> RankMemory:
        return self.ranks[0]

    @property
    def last(self) -> RankMemory:
        return self.ranks[-1]

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)


def estimate_memory(
    shape: ModelShape, layout: PlannedLayout, *, workspace_bytes: float = 0.0
) -> MemoryEstimate:
    """The memory of every pipeline rank, `workspace_bytes` of libraries added to each."""
    ranks = (rank_memory(shape, layout, rank) for rank in range(layout.pp))
    return MemoryEstimate(ranks=tuple(replace(found, workspace=workspace_bytes) for found in ranks))
