"""Bytes of one pipeline rank: required tensors of a step, and the allocator's peak.

Model states, bytes per parameter that a rank holds after tp, pp, ep and etp have cut the model:

| ZeRO | weights | gradients | optimizer |
|---|---|---|---|
| 0 | w | g | o |
| 1 | w | g | o / N |
| 2 | w | g / N | o / N |
| 3 | w / N | g / N | o / N |
| parameter server | w | g | o / S on a server, 0 on others |

w = 2, g = 4, o = 12 is Megatron's mixed precision (18 bytes), g = 2 the ZeRO paper's (16). N is
dp cp for dense weights and D_e = dp cp tp / (ep etp) for experts, which are summed separately. S of
the N ranks are servers; the most loaded rank is a server.

The activations of a rank are those of its stages (:mod:`moemesh.planner.kept_tensors`), each times
the microbatches that it has in flight. Weights are multiplied by the number of their versions. Both
factors come from the schedule (:mod:`moemesh.schedule.step`). Every number of a layout may be a
numpy column, one entry per layout: a search evaluates a family of layouts in one call.

Sources: arXiv:1910.02054 (ZeRO), arXiv:2205.05198 (activations), arXiv:2104.04473 (interleaving),
arXiv:2401.10241 (zero bubble), arXiv:2412.19437 (DualPipe).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial, reduce

import numpy as np

from moemesh.config.lora import NF4_BLOCK, NF4_BLOCK_BYTES, NF4_NUMBERS_AT_ONCE
from moemesh.config.plan import SHARDED_STATES
from moemesh.planner.arithmetic import Number, maximum, minimum, where
from moemesh.planner.kept_tensors import KEEP_SCORES, ActivationBytes, ChunkBytes
from moemesh.planner.parameters import WeightCounts, end_weights, layer_parts, layer_weights
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape
from moemesh.planner.stage_cut import RankContent, Stages, pipeline_step, with_values
from moemesh.schedule.step import alive, weight_copies
from moemesh.trace.memory_profile import LOGITS, MemoryProfile, logits_per_token

#: Bytes per logit of a loss with all logits in 16 bits, and their softmax and gradient in fp32: in
#: one tensor if they are fused, else in two beside an fp32 copy of the logits.
WHOLE_LOGIT_BYTES = {"fused": 6.0, "plain": 14.0}


def chunk_bytes(shape: ModelShape, layout: PlannedLayout) -> Number:
    """Peak bytes of logits in the chunked loss of `moemesh train`."""
    per_token = logits_per_token(shape.vocab_size / layout.tp, minimum)
    return layout.element_bytes * layout.tokens * per_token


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at pipeline rank `rank`; each part is at its own maximum over the step."""

    rank: int
    dense_weights: float
    expert_weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    workspace: float = 0.0
    #: Bytes of host memory for an offloaded optimizer, in no other part.
    host: float = 0.0

    @cached_property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer."""
        return self.dense_weights + self.expert_weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.buffers + self.workspace

    @classmethod
    def of(cls, profile: MemoryProfile, rank: int) -> RankMemory:
        """Memory of a rank of our own runs, from its profile: older weight versions are weights,
        gathered weights and snapshots are buffers."""
        logits = profile.activation_kinds.get(LOGITS, 0)
        return cls(
            rank=rank,
            dense_weights=profile.dense_weights + profile.weight_versions,
            expert_weights=profile.expert_weights,
            gradients=profile.gradients,
            optimizer=profile.optimizer,
            host=profile.host,
            activations=profile.activations - logits,
            logits=logits,
            buffers=profile.gathered_weights + profile.buffers + profile.snapshots,
        )

    def to_json(self) -> dict[str, float]:
        numbers = asdict(self)
        if not self.host:
            del numbers["host"]
        return {**numbers, "total": self.total}


def rank_weights(shape: ModelShape, layout: PlannedLayout, rank: int) -> WeightCounts:
    """Parameters of a pipeline rank before tp, ep and etp: layers, embedding, final norm and head,
    extra prediction layers."""
    content = Stages.of(shape, layout, microbatches=1).contents[rank]
    whole_output, ends = layout.attention_exit == "all_to_all", end_weights(shape)
    weights = WeightCounts()
    for kind, number in content.kinds.items():
        weights = weights.plus(layer_weights(shape, kind.moe, whole_output), number)
    if content.has_embedding:
        weights = weights.plus(ends["embedding"])
    if content.has_head:
        weights = weights.plus(ends["norms"]).plus(ends["head"])
        weights = weights.plus(ends["mtp"], shape.num_mtp_layers)
        if not content.has_embedding and (shape.tied_embeddings or shape.num_mtp_layers):
            # A copy of the table: tied with the first stage, or read by the extra layers.
            weights = weights.plus(WeightCounts(sharded=shape.vocab_size * shape.hidden_size))
    return weights


def _rebuilds_layers(layout: PlannedLayout) -> bool:
    """Whether whole layers are recomputed."""
    return "full" in layout.recompute and layout.recompute_layers != 0


def _kept(layout: PlannedLayout, content: RankContent, chunks: ChunkBytes) -> list[Number]:
    """Bytes that one microbatch keeps on each stage of a rank. Each of the stages recomputes the
    same number of layers."""
    limit = layout.recompute_layers
    limit = None if limit is None else limit / len(content.chunks)
    return [chunks.chunk(chunk, limit) for chunk in content.chunks]


#: Parts of a layer (:func:`moemesh.planner.parameters.layer_parts`) that a base in NF4 packs.
_PACKED = ("attention", "dense_mlp", "shared_experts", "experts")


def held(layout: PlannedLayout, rank: int, kept: Sequence[Number]) -> Number:
    """Peak bytes of activations of pipeline rank `rank`; a microbatch keeps ``kept[i]`` bytes on
    the rank's i-th stage."""
    if np.ndim(layout.microbatches) == 0:
        return _most(alive(pipeline_step(layout))[rank], kept)
    # Numbers of microbatches vary along the first axis only. Those with the same microbatches in
    # flight are evaluated together.
    step, numbers = pipeline_step(layout, 1), np.ravel(layout.microbatches)
    groups: defaultdict[tuple[tuple[float, ...], ...], list[int]] = defaultdict(list)
    for count in np.unique(numbers).tolist():
        groups[alive(step.of(count))[rank]].append(count)
    sizes = np.broadcast_arrays(layout.microbatches, *kept)[1:]
    held_bytes = np.zeros(sizes[0].shape)
    for moments, counts in groups.items():
        rows = np.isin(numbers, counts)
        held_bytes[rows] = _most(moments, [size[rows] for size in sizes])
    return held_bytes


def _most(moments: Sequence[tuple[float, ...]], kept: Sequence[Number]) -> Number:
    """Maximum over `moments` of the bytes of all stages; a moment has the number of microbatches in
    flight on each stage, `kept` their bytes."""
    most: Number = 0.0
    for counts in moments:
        total: Number = 0.0
        for count, size in zip(counts, kept, strict=True):
            total = total + count * size
        most = maximum(most, total)
    return most


def _nf4_savings(
    shape: ModelShape, layout: PlannedLayout, kinds: Mapping[LayerKind, int]
) -> list[Number]:
    """Bytes on one rank that a base in NF4 saves in the dense and in the expert weights; `kinds`
    has the number of layers of each kind."""
    packed, whole_output = WeightCounts(), layout.attention_exit == "all_to_all"
    if layout.base == "nf4":
        for kind, number in kinds.items():
            parts = layer_parts(shape, kind.moe, whole_output)
            for part in (parts[name] for name in _PACKED if name in parts):
                packed = packed.plus(part, number)
    per_number = layout.element_bytes - NF4_BLOCK_BYTES / NF4_BLOCK
    return [per_number * number for number in packed.on_rank(layout)]


def _unsharded(
    shape: ModelShape,
    layout: PlannedLayout,
    content: RankContent,
    weights: WeightCounts,
    block: Number,
) -> Number:
    """Bytes of ZeRO-3's unsharded units: two gathered ones (one in use, one prefetched) and one
    gradient of what trains; with ``reshard = "step"`` all `weights` of the rank, and one gradient.
    Weights without replicas are not gathered.
    `block`: bytes of a dequantized block of a layer."""
    w = layout.element_bytes
    has_replicas = layout.dense_replicas > 1, layout.edp > 1
    shares = layout.trained_dense, layout.trained_experts

    def unit(numbers: Iterable[Number], savings: Iterable[Number]) -> Number:
        """Bytes for one unit's dense and expert weights."""
        total: Number = 0.0
        for size, saving, share, is_cut in zip(numbers, savings, shares, has_replicas, strict=True):
            gathered = 2 * (w * size - saving) * (layout.reshard != "step")
            total = total + where(is_cut, gathered + w * share * size, 0.0)
        return total

    largest: Number = 0.0
    if content.has_embedding or content.has_head:
        largest = unit((shape.vocab_size * shape.hidden_size / layout.tp, 0.0), (0.0, 0.0))
    for kind in content.kinds:
        numbers = layer_weights(shape, kind.moe).on_rank(layout)
        largest = maximum(largest, unit(numbers, _nf4_savings(shape, layout, {kind: 1})) + block)
    if layout.reshard == "step":
        # All weights stay gathered until the step ends.
        savings = _nf4_savings(shape, layout, content.kinds)
        for size, saving, is_cut in zip(
            weights.on_rank(layout), savings, has_replicas, strict=True
        ):
            largest = largest + where(is_cut, w * size - saving, 0.0)
    return largest


def _rank_states(
    shape: ModelShape, layout: PlannedLayout, rank: int
) -> tuple[WeightCounts, dict[str, Number]]:
    """Weights of a rank before tp, ep and etp cut them, and bytes of its weights, gradients and
    optimizer, as keywords of :class:`RankMemory`."""
    weights = rank_weights(shape, layout, rank)
    dense, expert = weights.on_rank(layout)
    if layout.spare_slots and shape.is_moe:
        expert *= 1 + layout.spare_slots * layout.ep / shape.num_experts
    trained = layout.trained_dense * dense, layout.trained_experts * expert
    versions = layout.element_bytes * weight_copies(pipeline_step(layout, 1), rank)
    kinds = Stages.of(shape, layout, microbatches=1).contents[rank].kinds
    savings = _nf4_savings(shape, layout, kinds)
    shards, sharded = (layout.dense_shards, layout.expert_shards), SHARDED_STATES[layout.data]
    cut_w, cut_g, cut_o = (
        shards if state in sharded else (1, 1) for state in ("weights", "gradients", "optimizer")
    )
    if layout.parameter_server:
        cut_o = min(layout.servers, layout.dense_replicas), min(layout.servers, layout.edp)
    updated = trained[0] / cut_o[0] + trained[1] / cut_o[1]
    optimizer: dict[str, Number] = {"optimizer": layout.optimizer_bytes * updated}
    if layout.offload != "none":
        # The host also holds gradients, and a copy of weights that are as wide as gradients:
        # masters of narrower weights are among the optimizer's bytes.
        wide = layout.gradient_bytes
        masters = 0 if layout.element_bytes < wide else wide
        host = (layout.optimizer_bytes + masters + wide) * updated
        optimizer = {"optimizer": 0.0, "host": host}
    return weights, {
        "dense_weights": (versions * (dense + layout.adapters * trained[0]) - savings[0])
        / cut_w[0],
        "expert_weights": (versions * (expert + layout.adapters * trained[1]) - savings[1])
        / cut_w[1],
        "gradients": layout.gradient_bytes * (trained[0] / cut_g[0] + trained[1] / cut_g[1]),
        **optimizer,
    }


def rank_memory(
    shape: ModelShape,
    layout: PlannedLayout,
    rank: int,
    chunks: ChunkBytes | None = None,
    states: tuple[WeightCounts, dict[str, Number]] | None = None,
) -> RankMemory:
    """Every part of the memory at one pipeline rank, on the most loaded of its ranks. `chunks` are
    the layout's, `states` the rank's, if already computed."""
    chunks = chunks or ChunkBytes(shape, layout)
    weights, state_bytes = states or _rank_states(shape, layout, rank)
    content = Stages.of(shape, layout, microbatches=1).contents[rank]
    w = layout.element_bytes
    logits: Number = 0.0
    if content.has_head:
        if layout.loss == "chunked":
            logits = chunk_bytes(shape, layout)
        else:
            numbers = layout.tokens * shape.vocab_size / layout.tp
            logits = numbers * WHOLE_LOGIT_BYTES[layout.loss]
        logits = logits + 2 * w * layout.token_shard * shape.hidden_size
    if rank not in chunks.held:
        # Full recomputation rebuilds one layer at a time.
        work: Number = 0.0
        for kind in content.kinds if _rebuilds_layers(layout) else ():
            stored, whole = chunks.layer(kind)
            work = maximum(work, whole - stored)
        chunks.held[rank] = held(layout, rank, _kept(layout, content, chunks)) + work
    # Buffers of communication: gathered inputs, unsharded units of ZeRO-3; a dequantized block.
    buffers: Number = 0.0
    if layout.sequence_parallel:
        buffers = where(layout.tp > 1, 2 * w * layout.tokens * shape.hidden_size, 0.0)
    block: Number = 0.0
    if layout.base == "nf4":
        for kind in content.kinds:
            block = maximum(block, maximum(*layer_weights(shape, kind.moe).on_rank(layout)))
        block = w * minimum(block, NF4_NUMBERS_AT_ONCE)
    if layout.zero >= 3:
        block = _unsharded(shape, layout, content, weights, block)
    buffers = buffers + block
    return RankMemory(
        rank=rank, **state_bytes, activations=chunks.held[rank], logits=logits, buffers=buffers
    )


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of pipeline ranks: of all, or (of a run,
    :func:`moemesh.planner.estimate.estimate_run`) of the first, the last and the worst by the
    closed forms."""

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


def estimate_memory(shape: ModelShape, layout: PlannedLayout) -> MemoryEstimate:
    """Required memory of every pipeline rank."""
    memory = partial(rank_memory, shape, layout, chunks=ChunkBytes(shape, layout))
    return MemoryEstimate(ranks=tuple(map(memory, range(layout.pp))))


# Peak of the allocator on the worst rank: exact tensors and a framework's overhead.
#
# The formulas above count tensors that every step must hold. A framework holds more: the working
# set of the running layer, unfused or gathered copies, the gradient of a large matrix before it is
# accumulated, libraries. An :class:`Allocation` describes this overhead by a few calibrated numbers
# per software stack.


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Memory that a software stack keeps in addition to the required tensors.

    Defaults are those of Megatron with fused kernels, as measured with
    ``torch.cuda.max_memory_allocated``.
    """

    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    fused_activation: bool = True
    #: Factor on the kept activations.
    activation_scale: float = 1.0
    #: Microbatches in flight beyond those of the schedule (received, not yet released).
    extra_in_flight: float = 0.0
    #: Whole layers that exist while one runs forward or backward.
    working_layers: float = 0.0
    #: Share of the norm outputs that stays gathered despite sequence parallelism.
    gathered_norms: float = 0.0
    #: Bytes per channel of norms in fp32, in addition to the two copies that are always counted.
    unfused_norm_bytes: float = 0.0
    #: Bytes per kept attention score, and per score in the working set, by kind of kernel.
    fused_score_bytes: float = 5.0
    eager_score_bytes: float = 5.0
    fused_score_work: float = 0.0
    eager_score_work: float = 0.0
    #: Bytes per logit on a rank, and per logit of the whole vocabulary if logits are gathered.
    logit_bytes: float = 4.0
    gathered_logit_bytes: float = 0.0
    #: Bytes per weight for an additional gradient of the last layer's largest matrix, and of the
    #: head.
    layer_gradient_bytes: float = 4.0
    head_gradient_bytes: float = 2.0
    #: Bytes per weight that FSDP keeps unsharded in a pipelined step: gathered weights, gradients.
    whole_bytes: float = 0.0
    #: Device bytes outside of allocator statistics: libraries, communicators, fragmentation.
    workspace_bytes: float = 2.0 * 2**30
    #: Share of the device's memory that a job may use.
    usable_share: float = 0.985


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes that the allocator of a rank reports at its peak, and bytes that its device needs."""

    rank: int
    allocated: float
    needed: float
    states: float
    activations: float
    logits: float
    working: float

    @property
    def libraries(self) -> float:
        """The rest of `needed`: libraries, the allocator's loss, and weights that ZeRO-3 has
        gathered."""
        return self.needed - self.states - self.activations - self.logits - self.working

    def fits(self, memory_bytes: float, usable_share: float = 1.0) -> bool:
        """Whether a device with `memory_bytes` can run the layout."""
        return bool(self.needed <= memory_bytes * usable_share)


def peak_memory(shape: ModelShape, layout: PlannedLayout, allocation: Allocation) -> PeakMemory:
    """Peak memory of the worst pipeline rank."""
    return max(_Peaks(shape, allocation).of_ranks(layout), key=lambda peak: peak.needed)


def needed_bytes(
    shape: ModelShape, layouts: Sequence[PlannedLayout], allocation: Allocation
) -> list[Number]:
    """Bytes that a device needs for each of `layouts`, which differ in ZeRO, attention exit and
    recomputation; their numbers may be columns."""
    peaks = map(_Peaks(shape, allocation).of_ranks, layouts)
    return [reduce(maximum, (peak.needed for peak in ranks), 0.0) for ranks in peaks]


class _Peaks:
    """Peaks under one software stack, of layouts that differ in ZeRO, attention exit and
    recomputation; bytes that several of them share are computed once."""

    def __init__(self, shape: ModelShape, allocation: Allocation) -> None:
        self.shape, self.allocation = shape, allocation
        #: (rank, ZeRO, exit) -> weights and states.
        self._states: dict[tuple[int, int, str], tuple[WeightCounts, dict[str, Number]]] = {}
        #: Recomputation -> layers with their tensors alone, and with the stack's overhead.
        self._layers: dict[frozenset[str], tuple[ChunkBytes, ChunkBytes]] = {}
        #: (rank, recomputation) -> bytes of activations, of logits and of the running layer.
        self._parts: dict[tuple[int, frozenset[str]], tuple[Number, Number, Number]] = {}

    def of_ranks(self, layout: PlannedLayout) -> Iterator[PeakMemory]:
        """Peaks of the ranks that may be the worst."""
        shape, allocation, recompute = self.shape, self.allocation, layout.recompute
        of_stack = ("gradient_bytes", "optimizer_bytes", "fused_activation")
        layout = with_values(layout, **{name: getattr(allocation, name) for name in of_stack})
        if recompute not in self._layers:
            chunks = ChunkBytes(shape, layout, self._layer_bytes)
            self._layers[recompute] = ChunkBytes(shape, layout), chunks
        tensors, chunks = self._layers[recompute]
        stages = Stages.of(shape, layout, microbatches=1)
        for rank in worst_ranks(stages):
            if (key := (rank, layout.zero, layout.attention_exit)) not in self._states:
                self._states[key] = _rank_states(shape, layout, rank)
            exact = rank_memory(shape, layout, rank, tensors, self._states[key])
            if (rank, recompute) not in self._parts:
                self._parts[rank, recompute] = self._parts_of(layout, rank, stages, chunks)
            activations, logits, working = self._parts[rank, recompute]
            buffers: Number = 0.0
            if layout.zero >= 3:
                # On one replica nothing is cut, and nothing is gathered.
                is_cut = (layout.dense_replicas > 1) | (shape.is_moe & (layout.edp > 1))
                buffers = where(is_cut, exact.buffers, 0.0)
                if _rebuilds_layers(layout):
                    # The loss is freed before the first layer runs backward.
                    logits = where(is_cut, maximum(logits, working), logits)
                    working = where(is_cut, 0.0, working)
            allocated = exact.states + activations + logits + working + buffers
            if layout.pp > 1 and layout.zero >= 3 and allocation.whole_bytes:
                whole = sum(self._states[key][0].on_rank(layout))
                allocated = allocated + allocation.whole_bytes * whole
            required = exact.total
            if allocation.logit_bytes < Allocation.logit_bytes:
                # A compiled loss keeps fewer bytes per logit than the required tensors.
                required = required - exact.logits + logits
            yield PeakMemory(
                rank=rank,
                allocated=allocated,
                # The required tensors of a step are a lower bound.
                needed=maximum(allocated + allocation.workspace_bytes, required),
                states=exact.states,
                activations=activations,
                logits=logits,
                working=working,
            )

    def _layer_bytes(self, tensors: ActivationBytes, layout: PlannedLayout) -> Number:
        """Bytes that the stack allocates for the kept `tensors` of a layer: also for norms and
        scores, if these are kept."""
        allocation, w, hidden = self.allocation, layout.element_bytes, self.shape.hidden_size
        norms = hidden * layout.recompute.isdisjoint(("norm", "operators"))
        unfused_norms = 0.0 if layout.fused_norm else allocation.unfused_norm_bytes * norms
        shards = layout.tp if layout.sequence_parallel else 1
        gathered_share = allocation.gathered_norms * (1 - 1 / shards)
        gathered_norms = layout.tokens * (2 * w * norms * gathered_share)
        scores: Number = 0.0
        keeps_scores = layout.recompute.isdisjoint(("attention", "operators"))
        if (name := layout.attention_kernel) in KEEP_SCORES and keeps_scores:
            num_scores = layout.tokens * layout.seq_len * self.shape.num_heads / layout.tp
            # Without dropout `tensors` has w bytes of each score.
            scores = (getattr(allocation, f"{name}_score_bytes") - w) * num_scores
        size = tensors._replace(tokens=tensors.tokens + unfused_norms).on_rank(layout)
        return allocation.activation_scale * (size + gathered_norms + scores)

    def _parts_of(
        self, layout: PlannedLayout, rank: int, stages: Stages, chunks: ChunkBytes
    ) -> tuple[Number, Number, Number]:
        """Bytes of activations, of logits with the additional gradient of the head, and of the
        running layer."""
        shape, allocation, content = self.shape, self.allocation, stages.contents[rank]
        kept = _kept(layout, content, chunks)
        activations = held(layout, rank, kept)
        if layout.pp > 1:
            activations = activations + allocation.extra_in_flight * sum(kept)
        logits: Number = 0.0
        if content.has_head:
            num_logits = layout.tokens * shape.vocab_size
            logits = allocation.logit_bytes * num_logits / layout.tp
            gathered = allocation.gathered_logit_bytes * num_logits
            logits = logits + where(layout.tp > 1, gathered, 0.0)
            if layout.loss == "chunked":
                logits = chunk_bytes(shape, layout)
            head = 0 if layout.adapters else shape.vocab_size * shape.hidden_size / layout.tp
            logits = logits + allocation.head_gradient_bytes * head
        # The layer that runs: its tensors and scores, and a gradient.
        scores: Number = 0.0
        if (name := layout.attention_kernel) in KEEP_SCORES:
            per_score = getattr(allocation, f"{name}_score_work")
            scores = per_score * layout.tokens * layout.seq_len * shape.num_heads / layout.tp
        working: Number = 0.0
        for kind in content.kinds:
            stored, whole = chunks.layer(kind)
            # The stored input of the layer is one of its tensors.
            work = whole - stored if _rebuilds_layers(layout) else 0.0
            working = maximum(working, work + allocation.working_layers * whole + scores)
        if content.kinds and not layout.adapters:
            # The gradient of the largest matrix of a layer exists twice.
            matrix = (2 if shape.gated else 1) * shape.hidden_size
            if list(content.kinds)[-1].moe:
                matrix = matrix * shape.expert_intermediate_size / layout.etp
            else:
                matrix = matrix * shape.intermediate_size / layout.tp
            working = working + allocation.layer_gradient_bytes * matrix
        return activations, logits, working


@lru_cache(maxsize=4096)
def worst_ranks(stages: Stages) -> tuple[int, ...]:
    """Pipeline ranks of which one has the most memory, whatever the other degrees are. A rank is
    left out if another rank with the same ends (embedding, head) has at least its layers, its
    microbatches in flight and its versions of weights."""
    step = stages.step
    if step.ranks == 1:
        return (0,)
    # More microbatches than the pipeline holds in flight.
    full = step.of(step.rounded_up(8 * step.ranks))
    moments = alive(full)

    def replaces(rival: int, rank: int) -> bool:
        """Whether `rival` needs at least the memory of `rank`."""
        content, rival_content = stages.contents[rank], stages.contents[rival]
        rival_moments = moments[rival]
        return (
            (content.has_embedding, content.has_head)
            == (rival_content.has_embedding, rival_content.has_head)
            and all(
                number <= other.get(kind, 0)
                for chunk, other in zip(content.chunks, rival_content.chunks, strict=True)
                for kind, number in chunk.items()
            )
            and weight_copies(full, rank) <= weight_copies(full, rival)
            # Each moment of `rank` has at most the microbatches of some moment of `rival`.
            and all(
                any(
                    all(a <= b for a, b in zip(mine, other, strict=True)) for other in rival_moments
                )
                for mine in moments[rank]
            )
        )

    kept: list[int] = []
    for rank in range(step.ranks):
        if not any(replaces(rival, rank) for rival in (*kept, *range(rank + 1, step.ranks))):
            kept.append(rank)
    return tuple(kept)
