"""Predicted memory of a run of our own library on a CPU, per rank, in the form of memory.json.

Model states are exact, activations approximate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from math import ceil

from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import SHARDED_STATES, Plan
from moemesh.config.run import RunConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.dispatch_traffic import Routing
from moemesh.planner.traffic.gradient_buffers import most_gradient_buffers
from moemesh.planner.traffic.held_memory import HeldMemory, Saved, SavedTensors
from moemesh.planner.traffic.tensors import (
    ELEMENT_BYTES,
    RankStep,
    StagePlacement,
    data_buckets,
    gathered_units,
    owned_range,
)
from moemesh.schedule.step import PipelineStep, weight_copies
from moemesh.sharding.context import head_share
from moemesh.sharding.dispatchers import EXACT_ROWS, rows_at_once, slots_per_pair
from moemesh.trace.memory_profile import (
    LOGITS,
    ONE_PASS_NUMBERS,
    ROW_POSITIONS,
    MemoryProfile,
    logits_per_token,
)

# Model states: weights to snapshots.
#
# A rank keeps a state for every number of its local shard of a parameter, or only for the numbers
# that it owns, if `plan.data` shards this state (:data:`moemesh.config.plan.SHARDED_STATES`).
# Snapshots are sharded like the optimizer. Sharded weights are gathered unit by unit. Frozen
# parameters have weights only.
#
# | state | bytes a number |
# |---|---|
# | weights | bytes of the run's dtype; routers never below fp32 |
# | gradients | 4; 8 in float64 |
# | masters | 4 if a weight has 2 bytes, else the weight is its own master |
# | optimizer states | tensors as wide as a gradient: two of AdamW, one or none of SGD, ... |
# | weight versions | asynchronous schedule: older versions that it keeps, with biases |
# | host | plan.offload: masters of all trained weights, optimizer states, gradients |
# | snapshots | if the norm is validated after the update: masters, moments, biases |
#
# With plan.offload the device has no masters and no optimizer states. A run that is too short has
# fewer weight versions than are counted. A rank takes a snapshot when it updates before the whole
# norm is known: not in the first steps of a run, nor if every step is clipped.


#: Bytes of one number of a router's selection bias, in any run.
_BIAS = 4


def predict_states(
    placement: StagePlacement,
    *,
    element: int,
    num_states: Callable[[str], int] = lambda name: 2,
    rank: int = 0,
) -> MemoryProfile:
    """Model states of `rank`, without activations. `element` is the bytes of a weight, `num_states`
    the number of tensors that the optimizer keeps of a parameter, by its name."""
    plan, pp_rank = placement.plan, placement.coordinates(rank)["pp"]
    model, schedule = placement.model, placement.schedule
    sharded = SHARDED_STATES[plan.data]
    #: Whether a weight is an expert's -> bytes.
    weights = {True: 0, False: 0}
    # `all_masters` also has weights that are as wide as their gradients, their own masters.
    gradients = masters = all_masters = moments = 0
    for bucket in data_buckets(placement, rank, element):
        whole, share = range(bucket.numbers), owned_range(placement, bucket, rank)
        kept = share if "weights" in sharded else whole
        of_experts = bucket.expert_numbers(kept)
        weights[True] += of_experts * bucket.weight_bytes
        weights[False] += (len(kept) - of_experts) * bucket.weight_bytes
        if bucket.trains:
            wide = bucket.gradient_bytes
            gradients += len(share if "gradients" in sharded else whole) * wide
            masters += len(share) * wide if bucket.weight_bytes < wide else 0
            all_masters += len(share) * wide
            parts = bucket.parts(share)
            moments += wide * sum(num_states(member.name) * len(part) for member, part in parts)
    biases = 0
    if model.router_selection_bias:
        # Selection biases of routers are whole on every rank of their stage.
        held = map(placement.layers_of, placement.stages(pp_rank))
        layers = set(chain.from_iterable(held))
        biases = _BIAS * model.num_experts * sum(map(model.is_moe_layer, layers))
    versions = 1
    if schedule.update is not None:
        # An asynchronous schedule keeps older versions of the weights.
        step = PipelineStep(plan.schedule, schedule.num_ranks, plan.microbatches)
        versions = weight_copies(step, pp_rank)
    # The host holds a master of every trained weight that the rank updates, and its gradient.
    is_offloaded = plan.offload == "optimizer"
    #: Whether an update may be undone from a snapshot.
    is_undone = plan.optimizer_validation == "after" and schedule.update is None
    gathered = 0
    if "weights" in sharded:
        _, gathered = gathered_units(placement, rank, element)
    return MemoryProfile(
        rank=rank,
        gathered_weights=gathered,
        buffers=most_gradient_buffers(placement, rank, element),
        dense_weights=weights[False],
        expert_weights=weights[True],
        gradients=gradients,
        optimizer=0 if is_offloaded else masters + moments,
        host=2 * all_masters + moments if is_offloaded else 0,
        weight_versions=(versions - 1) * (sum(weights.values()) + biases),
        snapshots=all_masters + moments + biases if is_undone else 0,
    )


# Activations: tensors kept for the backward.
#
# First the kept tensors of each part of a forward, then a rank's operations in their order
# (:mod:`moemesh.planner.traffic.held_memory`).


_INT64, _FLOAT64 = 8, 8


class LayerMemory(RankStep):
    """Tensors that the layers of one rank's stages keep for a forward, each as a `Saved`.

    Each storage is counted once, by the first operation that keeps it. A rank has `whole` tokens of
    a microbatch's sequences and, between tensor-parallel blocks, `local` of them (1/tp). Numbers
    have `w` bytes, and `wide` = max(w, 4) in norms, routers and sums. On a CPU a norm of few
    numbers, or of a view, consists of several operations, which keep copies; CUDA's fused norm
    keeps only its input and the inverse root. Of the positions of a dispatch only those that
    autograd saves are counted, without those in the dispatcher's plan.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        model, plan = self.model, self.plan
        #: Numbers of query heads and of key/value heads of this rank.
        self.heads, self.keys = model.num_heads / plan.tp, model.kv_heads / plan.tp
        # The fused kernels of a CPU need equal head sizes; kernels that merge blocks do not pad.
        pads = plan.cp == 1 or plan.context == "all_to_all"
        self.is_padded = model.value_head_dim < model.query_head_dim and pads
        #: Whether the core of attention, between its projections, is recomputed.
        self.recomputes_core = "attention" in plan.recomputed_parts
        #: Whether heads are exchanged for positions: received projections are kept, not sent ones.
        self.swaps = plan.cp > 1 and plan.context == "all_to_all"
        #: Whether the backward of attention is `backward_in_rows`, which reads no output.
        self.is_by_rows = (
            self.w == 2
            and (plan.cp == 1 or self.swaps)
            and not (model.attention_sinks or model.sliding_window)
            and self.placement.seq_len <= ROW_POSITIONS * model.query_head_dim
        )

    def stage(self, stage: int, forward: int) -> list[SavedTensors]:
        """Kept tensors of one forward on one stage, of all layers with a backward."""
        whole, local = self.tokens(forward)
        length = self.placement.positions(
            self.coordinates["cp"], forward % len(self.placement.lengths)
        )
        parts: list[SavedTensors] = []
        has_backward = self.placement.has_backward
        #: Token ids, and the mask of those in other ranks' rows.
        ids = _INT64 * whole + (whole if self.plan.tp > 1 else 0)
        norm, stream = self._norm(local), local * self.w * self.model.hidden_size
        if stage == 0 and has_backward("embedding"):
            parts.append(SavedTensors([Saved("stream", ids)]))
        layers = [i for i in self.placement.layers_of(stage) if has_backward(f"layers.{i}")]
        for layer in (index for index in layers if index < self.model.num_layers):
            parts.append(self._layer(forward, layer, whole, local, length))
        if stage < self.placement.schedule.num_stages - 1:
            return parts
        # Per token: the input, a target and a log-sum-exp.
        size = whole * (self.w * self.model.hidden_size + _INT64 + self.wide)
        rows = len(shard_range(self.model.vocab_size, self.plan.tp, self.coordinates["tp"]))
        logits = Saved(LOGITS, 0.0, working=whole * self.w * logits_per_token(rows))
        kept_head = Saved("head", size, held=size, gradient=whole * self.wide)
        head = SavedTensors([norm, kept_head, logits])
        if has_backward("head"):
            parts.append(head)
        for layer in (index for index in layers if index >= self.model.num_layers):
            # An extra prediction layer: token ids, two norms, and both halves of the projection's
            # input. The norm of the stream has the same input as the head's norm, which was
            # counted.
            duplicate = Saved("norms", -stream * (self.w == self.wide))
            halves = Saved("head", 2 * stream, held=2 * stream, gradient=stream)
            parts.append(SavedTensors([Saved("head", ids), norm, duplicate, norm, halves]))
            parts.append(self._layer(forward, layer, whole, local, length))
            parts.append(head)
        if self.model.has_joint_aux_loss:
            size = self.scopes(forward) * (_FLOAT64 * self.model.num_experts + _INT64)
            parts.append(SavedTensors([Saved("dispatch", size)]))
        return parts

    def _layer(self, forward: int, layer: int, whole: int, local: int, length: int) -> SavedTensors:
        """Kept tensors of one layer in one forward, with `whole` and `local` tokens; `length` is
        that of a sequence or slice."""
        stream = local * self.w * self.model.hidden_size
        entry = stream * (self.w == self.wide)
        if self.model.architecture is not None:
            # A layer of transformers' code, whose kept bytes are in `costs`, and its experts.
            prefix, element = ("", 2) if self.w < self.wide else ("wide_", 4)
            kept, per_key, of_experts = (
                self.w / element * self.model.architecture.costs[prefix + name][layer]
                for name in ("kept_bytes", "kept_per_key", "expert_bytes")
            )
            saved = [Saved("other", whole * (kept + length * per_key))]
            if self.model.is_moe_layer(layer):
                source, rows, kept_rows, picks = self._rows(forward, layer)
                saved.append(Saved("dispatch", picks))
                experts = self._routed(source, rows, kept_rows)
                if of_experts:
                    # Their code multiplies results by weights of 1, the exchange by the router's.
                    hidden = self.w * self.model.hidden_size
                    size = of_experts / self.model.experts_per_token + hidden + self.wide
                    experts = Saved("experts", rows * size, pauses=True)
                saved.append(experts)
            return SavedTensors(saved, input=stream, entry=entry)
        saved = [self._norm(local), *self._attention(forward, whole, local, length)]
        # Gradients of the adapters' narrow products, kept until the weight gradients.
        if self.model.attention == "gqa":
            narrow = self._narrow(whole, "q_proj", "k_proj", "v_proj")
        else:
            narrow = self._narrow(local, "kv_a_proj_with_mqa") + self._narrow(whole, "kv_b_proj")
            if self.model.q_lora_rank:
                narrow += self._narrow(local, "q_a_proj") + self._narrow(whole, "q_b_proj")
            else:
                narrow += self._narrow(whole, "q_proj")
        exit_tokens = local if self.plan.attention_exit == "all_to_all" else whole
        gradient = narrow + self._narrow(exit_tokens, "o_proj")
        saved += [Saved("attention", 0.0, gradient=gradient), self._norm(local)]
        if self.model.is_moe_layer(layer):
            saved += self._moe(forward, layer, whole, local)
        else:
            saved += self._mlp(whole, self.model.intermediate_size, owns_input=True)
        return SavedTensors(saved, input=stream, entry=entry)

    def _attention(self, forward: int, whole: int, local: int, length: int) -> Iterator[Saved]:
        """An attention block without its norm; `length` is that of a sequence or slice."""
        model, plan, w, recomputed = self.model, self.plan, self.w, self.recomputes_core
        if model.attention == "mla":
            yield from self._latent(whole, local)
        else:
            yield from self._grouped(whole)
        if whole:
            # Cosines and sines, converted once for all layers.
            tables = 2 * length * model.rotary_dim * w
            yield Saved("attention", tables, is_recomputed=recomputed, is_shared=True)
        if self.swaps:
            # Whole sequences. Per token: queries, keys, values, outputs and log-sum-exp of the
            # heads of this cp rank.
            heads, kv_heads = round(self.heads), round(self.keys)
            share = head_share(heads, kv_heads, plan.cp, self.coordinates["cp"])
            queries, keys = len(share.queries), len(share.keys)
            if not share.is_even(heads // kv_heads):
                keys = queries  # each query head gets a copy of its key/value head
            size = model.query_head_dim
            values = size if self.is_padded else model.value_head_dim
            outputs = 0 if self.is_by_rows else queries * values
            core = ((queries + keys) * size + keys * values + outputs) * w + queries * self.wide
            core *= self.sequences(forward) * self.placement.seq_len
        else:
            # The log-sum-exp, and outputs that are copied for the last product, or recomputed.
            copied_size = model.value_head_dim if recomputed else 0
            copied_size = model.query_head_dim if self.is_padded else copied_size
            core = self.heads * (self.wide + (0 if self.is_by_rows else w * copied_size))
            core *= whole
        yield Saved("attention", core, is_recomputed=recomputed)
        result, hidden = whole * w * self.heads * model.value_head_dim, model.hidden_size
        if plan.attention_exit == "all_to_all" and plan.tp > 1:
            all_heads = local * w * model.output_width
            if not (recomputed or self.is_padded or self.is_by_rows):
                yield Saved("attention", result)
            yield Saved("attention", all_heads, held=all_heads, gradient=local * w * hidden)
        else:
            yield Saved("attention", result, held=result, gradient=whole * w * hidden)

    def _grouped(self, whole: int) -> Iterator[Saved]:
        """Grouped-query attention: the stream after its norm; the projections; rotated queries and
        keys, and copies made by their norms (of each head, or over all heads) and by clipping."""
        model, w, heads, keys = self.model, self.w, self.heads, self.keys
        size = model.head_dim
        entered = whole * w * model.hidden_size
        projected = whole * w * size * (heads + 2 * keys)
        yield Saved("attention", entered, held=entered, gradient=projected)
        # Heads with a kept copy (the rotated queries and keys), and bytes per token of their norms
        # and of sums over all heads.
        copied_heads = 0.0 if self.swaps else heads + keys
        norm_bytes = sum_bytes = 0.0
        # Query heads of several groups are copied next to each other; those of one are a view.
        grouped_heads = heads if keys > 1 else 0.0
        if model.qk_norm and model.qk_norm_over == "head":
            # The norm's input is a view of the projections, unless it is converted to fp32.
            of_keys = self.wide * keys * (size * (1 + (w < self.wide)) + 1)
            converted_heads = heads if w < self.wide else grouped_heads
            of_queries = self.wide * (size * (heads + converted_heads) + heads)
            if self._is_one_pass(whole * heads * size):
                of_queries = w * size * heads
            if self._is_one_pass(whole * keys * size):
                of_keys = w * size * keys
            norm_bytes = of_queries + of_keys
            if model.clip_qkv:
                copied_heads += heads + 2 * keys
        elif model.qk_norm:
            copied_heads += grouped_heads + heads + keys
            norm_bytes = 2 * self.wide
            # The sums of squares are an input of the recomputed part; fp32 copies of queries and
            # keys are squared.
            sum_bytes = 2 * self.wide * self.recomputes_core
            if w < self.wide:
                sum_bytes += self.wide * size * (heads + keys)
            if model.clip_qkv:
                copied_heads += heads + 2 * keys
        elif model.clip_qkv:
            copied_heads += grouped_heads + keys
        # The projections stay allocated if a view of them is kept: values, or keys before the norm.
        is_read = model.clip_qkv > 0 or (model.qk_norm and w == self.wide)
        if self.swaps and not (is_read or self.recomputes_core):
            projected = 0.0
        yield Saved("attention", projected + whole * sum_bytes)
        core = whole * (w * size * copied_heads + norm_bytes)
        yield Saved("attention", core, is_recomputed=self.recomputes_core)

    def _latent(self, whole: int, local: int) -> Iterator[Saved]:
        """Latent attention: the stream, the latents before and after their norms; queries, keys
        and values of all heads, padded to one size if the kernel needs that."""
        model, w, wide, heads = self.model, self.w, self.wide, self.heads
        low_rank, latent, rotary = model.q_lora_rank, model.kv_lora_rank, model.qk_rotary_head_dim
        queries = whole * w * heads * model.query_head_dim
        expanded = whole * w * heads * (model.qk_nope_head_dim + model.v_head_dim)
        stream = local * w * model.hidden_size
        yield Saved(
            "attention", stream, held=stream, gradient=local * w * (low_rank + latent + rotary)
        )
        for size, extra in ((latent, rotary), (low_rank, 0)):
            if size:
                # Input, normalised copy and inverse root of a norm.
                kept = wide * (2 * size + 1) + w * extra * (w == wide)
                if self._is_one_pass(local * size):
                    kept = w * size
                yield Saved("attention", local * kept)
        if not low_rank and self.plan.tp > 1:
            gathered = whole * w * model.hidden_size
            yield Saved("attention", gathered, held=gathered)
        entered = whole * w * (low_rank + latent + rotary)
        yield Saved("attention", entered, held=entered, gradient=queries + expanded)
        values = whole * w * heads * model.query_head_dim if self.is_padded else expanded
        if self.recomputes_core:
            yield Saved("attention", queries + expanded)
            values = values if self.is_padded else 0.0
        if self.swaps:
            return
        yield Saved("attention", 2 * queries + values, is_recomputed=self.recomputes_core)

    def _norm(self, rows: int) -> Saved:
        """A norm of `rows` rows: its input; unless it is one operation, in fp32 at least, with the
        normalised copy and the inverse root."""
        hidden = self.model.hidden_size
        if self._is_one_pass(rows * hidden):
            return Saved("norms", rows * self.w * hidden)
        return Saved("norms", rows * self.wide * (2 * hidden + 1))

    def _is_one_pass(self, numbers: float) -> bool:
        """Whether a norm of this many numbers is one operation, which keeps only its input."""
        return self.w <= 4 and numbers >= ONE_PASS_NUMBERS

    def _mlp(self, whole: int, width: int, *, owns_input: bool) -> Iterator[Saved]:
        """A dense MLP, or the shared experts: input; gate, up and their product."""
        hidden, inner = whole * self.w * self.model.hidden_size, whole * self.w * width
        inner /= self.plan.tp
        entered = hidden if owns_input else 0
        yield Saved("mlp", entered, held=entered, gradient=2 * inner)
        yield Saved("mlp", 0.0, gradient=self._narrow(whole, "gate_proj", "up_proj", "down_proj"))
        if "activation" in self.plan.recomputed_parts:
            yield Saved("mlp", 2 * inner, gradient=inner + hidden)
        else:
            yield Saved("mlp", 2 * inner)  # gate and up; silu(gate) is recomputed
            yield Saved("mlp", inner, held=inner, gradient=hidden)

    def _moe(self, forward: int, layer: int, whole: int, local: int) -> Iterator[Saved]:
        """Router, auxiliary loss, dispatch, shared and routed experts."""
        model, plan, w, wide = self.model, self.plan, self.w, self.wide
        has_all_experts = plan.ep * plan.etp == 1
        k, experts = model.experts_per_token, model.num_experts
        entered = local * wide * model.hidden_size
        yield Saved("router", entered, held=entered, gradient=local * wide * experts)
        scores = wide * experts + (0 if model.router_score == "softmax" else wide)
        # Choices, normalised weights and their sum, and a mask if a choice may be empty.
        weights = k * _INT64 + (k + 1) * wide * model.router_normalize
        if model.router_selection in ("expert_choice", "sinkhorn"):
            weights += k + model.router_normalize
        yield Saved("router", local * (scores + weights))
        if model.has_aux_loss:
            # The scope of each token: the sequence's index for all layers, else zeros per layer.
            is_shared = model.aux_loss_scope == "sequence"
            yield Saved("dispatch", _INT64 * local, is_shared=is_shared)
            # Frequencies and number of tokens of each scope.
            size = self.scopes(forward) * (wide * experts + _INT64) * (not model.has_joint_aux_loss)
            if model.router_score != "softmax":
                size += local * wide * experts
            if model.z_loss_coefficient:
                size += local * wide * (experts + 2)
            yield Saved("dispatch", size)
        source, rows, kept_rows, picks = self._rows(forward, layer)
        yield Saved("dispatch", picks)
        stream = local * w * model.hidden_size
        # The stream after the norm is the router's input, in fp32 at least. In the same precision
        # it is also the input of the local experts and of the shared expert; else these keep a
        # copy.
        is_shared_input = bool(model.shared_width) and (plan.tp == 1 or model.shared_gate)
        if w < wide and (has_all_experts or is_shared_input):
            kind = "mlp" if is_shared_input else "experts"
            yield Saved(kind, stream, held=stream)
        if model.shared_width:
            yield from self._mlp(whole, model.shared_width, owns_input=plan.tp > 1)
        if model.shared_gate:
            # Both factors: the sigmoid, and the shared experts' output.
            yield Saved("mlp", local * w + stream, gradient=local * w)
        yield self._routed(source, rows, kept_rows)

    def _routed(self, source: float, rows: float, kept_rows: float) -> Saved:
        """The routed experts: their rows; gate and up; a weight per row. The arguments are the
        first three numbers of :meth:`_rows`."""
        plan, hidden = self.plan, self.w * self.model.hidden_size
        is_copied = plan.ep * plan.etp > 1 or plan.combine == "exact"
        copied = source * hidden if is_copied else 0.0
        width = self.w * self.model.expert_intermediate_size / plan.etp
        inner = 0.0 if "experts" in plan.recomputed_parts else 2 * kept_rows * width
        narrow = 2 * self._narrow(rows, "gate_proj", "up_proj", "down_proj")
        gradient = rows * (hidden + 3 * width) + narrow
        size = copied + rows * self.wide + inner
        return Saved("experts", size, held=copied, gradient=gradient, pauses=True)

    def _narrow(self, rows: float, *targets: str) -> float:
        """Bytes of `rows` rows of the adapters' rank, for each target with an adapter."""
        lora = self.model.lora
        return rows * self.w * lora.rank * sum(map(lora.adapts, targets))

    def _rows(self, forward: int, layer: int) -> tuple[float, ...]:
        """Sums over all chunks of this rank in one layer: rows of the buffer from which the
        experts' rows are picked, rows at the experts, rows with kept gate and up (padded for the
        products), and bytes of positions and weights of the dispatch."""
        plan, ep_index = self.plan, self.coordinates["ep"]
        most = rows_at_once(self.max_tokens, self.model.experts_per_token, plan.etp)
        chunks: list[tuple[float, float, float, float]] = []
        wide, k = self.wide, self.model.experts_per_token
        for chunk in range(self.chunks):
            sent = self.sent_by(forward, layer, chunk)
            local = sent(self.rank)
            peers = [sent(peer) for peer in self.placement.members("ep_etp", self.rank)]
            source = total = sum(peer.rows[ep_index] for peer in peers)
            # Positions and weights that are kept for picking and sorting weights.
            weights, positions = local.tokens * k * wide, _INT64 * total
            picks = weights + _INT64 * sum(local.rows) + wide * total + positions
            slots = slots_per_pair(self.max_tokens, k, self.model.num_experts, plan.ep)
            last = dispatcher_row(plan.dispatcher).hops[-1]
            if plan.ep * plan.etp == 1 and plan.combine == "fast":
                picks = weights + positions
            elif last.is_of_tokens:
                is_all = last.rows == "tokens"
                source = sum(peer.tokens if is_all else peer.visits[ep_index] for peer in peers)
                picks = source * k * wide + positions
            elif last.rows == "slots" and all(
                count <= slots for peer in peers for count in peer.rows
            ):
                source = slots * len(peers)
                picks = weights + _INT64 * slots * plan.ep + wide * source + positions
            if plan.combine == "exact":
                # The rows of each expert are padded, and so is their total.
                experts = shard_range(self.model.num_experts, plan.ep, ep_index)
                rows = (sum(peer.by_expert[expert] for peer in peers) for expert in experts)
                padded = sum(ceil(count / EXACT_ROWS) * EXACT_ROWS for count in rows)
                source, kept = total, ceil(padded / (4 * EXACT_ROWS)) * 4 * EXACT_ROWS
            else:
                # Rows above the bound are computed in blocks, and recomputed in the backward.
                kept = total if total <= most else 0.0
            chunks.append((source, total, kept, picks))
        return tuple(map(sum, zip(*chunks, strict=True)))

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind that the rank keeps for its backward at the peak of a step, without
        replicas of experts."""
        plan, schedule, stages = self.plan, self.schedule, cache(self.stage)
        held = HeldMemory(is_full="full" in plan.recomputed_parts)
        for entry in schedule.orders[self.coordinates["pp"]]:
            ops = sorted(entry, key=lambda op: op.kind != "F")
            runs = [
                held.run(
                    op.kind, stages(op.stage, schedule.sample(op) * schedule.num_slices + op.slice)
                )
                for op in ops
            ]
            # The backward of an overlapped block continues at each pause of the forward. With
            # replicas it does not pause (moemesh/parallel/pipeline/program.py).
            if plan.overlap_blocks and [op.kind for op in ops] == ["F", "B"]:
                segments = None if plan.spreads_replicas else 1
                for _ in runs[0]:
                    deque(islice(runs[1], segments), maxlen=0)
            deque(chain.from_iterable(runs), maxlen=0)
        return {kind: round(size) for kind, size in held.peak.items() if round(size)}


def predict_memory(
    model: ModelConfig,
    plan: Plan,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str = "bfloat16",
    num_states: Callable[[str], int] = lambda name: 2,
    rank: int = 0,
    routing: Routing | None = None,
    tuning: Tuning = FULL,
) -> MemoryProfile:
    """The memory of `rank` in a training step; `peak` is the sum of the parts.

    `num_states` is the number of tensors that the optimizer keeps of a parameter, by its name;
    `routing` None is uniform routing; `tuning` selects the parameters that train. Raises ValueError
    if the plan's schedule is impossible.
    """
    placement, element = StagePlacement(model, plan, seq_len, tuning), ELEMENT_BYTES[dtype]
    states = predict_states(placement, element=element, rank=rank, num_states=num_states)
    kinds = LayerMemory(
        placement=placement, global_batch=global_batch, w=element, rank=rank, given_routing=routing
    ).at_peak()
    profile = replace(states, activations=sum(kinds.values()), activation_kinds=kinds)
    return replace(profile, peak=profile.total)


def predicted_memory(config: RunConfig, rank: int, *, on_cpu: bool = True) -> MemoryProfile:
    """Memory of `rank` in a step of a run with uniform routing; `on_cpu` nothing is offloaded."""
    return predict_memory(
        config.model,
        config.plan.without_offload if on_cpu else config.plan,
        seq_len=config.data.seq_len,
        global_batch=config.data.global_batch,
        dtype=config.train.dtype,
        num_states=config.train.num_states,
        rank=rank,
        tuning=config.tuning,
    )
