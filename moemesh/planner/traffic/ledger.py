"""The predicted ledger of a training step: what our own library enters, per rank, to the byte.

It follows the same contracts as the code that communicates (tables in `parallel/tensor`,
`tensor/vocabulary`, `expert/*`, `recompute`, `data`): every collective with axis, phase, count and
bytes. Only what depends on the routing needs an input: the choices of a run make the ledger exact,
without them uniform routing gives expected bytes, rounded once per line.

Per forward of T tokens (a microbatch, or a slice of it), N = tp, w bytes an element (closed forms,
bytes one rank sends):

| what | forward | backward |
|---|---|---|
| embedding | reduce-scatter (N-1)/N T h w | all-gather |
| enter of attention and of every MLP | all-gather (N-1)/N T h w | reduce-scatter |
| enter of latent attention | the same, r_q + r_kv + d_r wide in place of h | reduce-scatter |
| norm over all heads | all-reduce of 2 numbers a token | all-reduce |
| exit reduce_scatter | reduce-scatter (N-1)/N T h w | all-gather |
| exit all_reduce | all-reduce 2 (N-1)/N T h w | all-gather |
| exit all_to_all | all-to-all (N-1)/N^2 T a d_v w | all-to-all |
| head | all-gather (N-1)/N T h w; 3 numbers a token | reduce-scatter |
| context parallelism | see `_Step._context` | |
| extra prediction layers | embedding, a layer and the head once more, each | |
| experts | see `dispatch_traffic` | |
| pipeline | T/N h w to the next stage | T/N h w to the one before |
| one auxiliary loss of all layers | 8 (2 E + 1) a scope to the next stage | the same |

Units before the first one that trains have no backward: nothing of that column, and nothing once
more. Full recomputation enters once more, as "recompute", what enters a block and what is
dispatched; not what only leaves a layer. Where AMPNet runs a stage again with the weights of now,
everything of the forward happens twice. What a step does once is in `StepEnd`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.dispatch_traffic import DispatchTraffic, ReplicaTraffic
from moemesh.planner.traffic.ledger_lines import LedgerLines
from moemesh.planner.traffic.routing import Routing, SentRows, uniform_routing
from moemesh.planner.traffic.tensors import (
    ELEMENT_BYTES,
    GatheredUnits,
    StagePlacement,
    data_buckets,
    owned,
)
from moemesh.schedule.messages import messages
from moemesh.sharding.context import context_sizes, head_share
from moemesh.sharding.dispatchers import spare_rows
from moemesh.sharding.parameters import ParameterTensor
from moemesh.trace.ledger import Ledger

#: Callers that a forward enters, in all layers alike.
CONTEXT_CALLERS = ("context.keys", "context.heads", "context.positions")


_INT64, _FLOAT64 = 8, 8


#: Of a layer that is computed again, what is sent again; shared experts leave their block, too.
_AGAIN = (
    "attention.enter", "attention.norm", "attention.leave", "mlp.enter", "moe.dispatch",
    "moe.dispatch.weights", "moe.replicas",
)  # fmt: skip


def predict_ledger(
    model: ModelConfig,
    plan: Plan,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str = "bfloat16",
    rank: int = 0,
    routing: Routing | None = None,
    tuning: Tuning = FULL,
    on_accelerator: bool = False,
) -> Ledger:
    """The ledger of `rank` after one training step (no evaluation, no checkpoint).

    Of an asynchronous schedule: a stream of one step, to its drained end. `routing` None: uniform;
    `tuning`: what trains; `on_accelerator`: not on a CPU. Raises ValueError when the plan's
    schedule cannot be made. See also `volumes`, and
    :func:`moemesh.planner.layout_sources.exact_plan`.
    """
    placement = StagePlacement(model, plan, seq_len, tuning)
    return _Step(placement, global_batch, dtype, rank, routing, on_accelerator).ledger()


class _Step:
    """The lines of one rank."""

    def __init__(
        self,
        placement: StagePlacement,
        global_batch: int,
        dtype: str,
        rank: int,
        routing: Routing | None,
        on_accelerator: bool,
    ) -> None:
        self.placement, self.batch = placement, global_batch
        self.model, self.plan = model, plan = placement.model, placement.plan
        self.layout, self.schedule = placement.layout, placement.schedule
        self.element = ELEMENT_BYTES[dtype]
        self.wide = max(self.element, 4)
        exact = plan.combine == "exact"
        self.spare_rows = on_accelerator * spare_rows(model.hidden_size, exact=exact)
        self.is_uniform = routing is None
        self.routing = routing or uniform_routing(model, self.layout)
        self.max_tokens = plan.tokens_per_rank(placement.seq_len, global_batch)
        self.is_full = plan.recompute == "full"
        twice = plan.schedule == "ampnet" and plan.ampnet_backward == "recompute"
        again: tuple[str, ...] = ()
        if self.is_full:
            again = (*_AGAIN, *CONTEXT_CALLERS)
        elif plan.recompute == "selective" and plan.recompute_attention:
            # The core of attention: not what only leaves it.
            again = tuple(name for name in CONTEXT_CALLERS if name != "context.positions")
        #: What forwards and backwards enter, and what a step enters once.
        self.lines = LedgerLines(self.layout, rank, forwards=2 if twice else 1, recomputed=again)
        #: The ranks that share sequences.
        self.sharing = "cp_tp" if plan.cp > 1 else "tp"
        self.once = LedgerLines(self.layout, rank)

    def _sequences(self, forward: int) -> int:
        """Sequences that this rank has a part of, in one forward."""
        microbatch = forward // self.schedule.num_slices
        return self.placement.sequences(self.batch, self.lines.here["dp"], microbatch)

    def ledger(self) -> Ledger:
        at = self.lines.here["pp"]
        for pipe, stage in self.schedule.stages_of(at):
            slices, first = self.schedule.num_slices, self.schedule.first_sample[pipe]
            for index in range(slices * self.schedule.num_microbatches[pipe]):
                self._stage(stage, slices * first + index)
        self._messages(at)
        StepEnd(self.once, self.placement, self.element).enter()
        return self.lines.ledger() + self.once.ledger()

    # One forward of one stage, and its backward.

    def _stage(self, stage: int, forward: int) -> None:
        tokens, _ = self.placement.tokens(self.batch, self.lines.rank, forward)
        placement = self.placement
        if stage == 0:
            with self.lines.backward(placement.has_backward("embedding")):
                self._scatter(tokens, "embedding")
        for exists in (False, True):
            layers = [
                index
                for index in placement.layers_of(stage)
                if placement.has_backward(f"layers.{index}") == exists
            ]
            if layers:
                with self.lines.backward(exists):
                    self._layers(layers, tokens, forward)
        if stage == self.schedule.num_stages - 1:
            self._head(tokens, forward)

    def _layers(self, layers: list[int], tokens: int, forward: int) -> None:
        num_moe = sum(self.model.is_moe_layer(index) for index in layers)
        self._attention(tokens, len(layers))
        if self.plan.cp > 1:
            self._context(self._sequences(forward), len(layers))
        shared = num_moe if self.model.shared_width else 0
        if mlps := len(layers) - num_moe + shared:
            self._gather(tokens, "mlp.enter", mlps)
            self._scatter(tokens, "mlp.leave", mlps)
        if shared and self.is_full:
            # It lies before the routed experts, whose inputs the backward wants.
            blocks = self._blocks(tokens)
            self.lines.reduce_scatter("tp", blocks, "recompute", "mlp.leave", shared)
        if num_moe:
            self._balance(forward, num_moe)
            routed = [index for index in layers if self.model.is_moe_layer(index)]
            for layer in routed[:1] if self.is_uniform else routed:
                self._experts(forward, layer, num_moe if self.is_uniform else 1)

    def _head(self, tokens: int, forward: int) -> None:
        """The head, and around every extra prediction layer the embedding and the head again."""
        placement, ahead = self.placement, self.model.mtp_layers
        with self.lines.backward(placement.has_backward("embedding")):
            if ahead:
                self._scatter(tokens, "embedding", len(ahead))
        for unit in ("head", *(f"layers.{index}" for index in ahead)):
            with self.lines.backward(placement.has_backward(unit)):
                self._gather(tokens, "head.enter")
        for numbers in (tokens, 2 * tokens):
            times = 1 + len(ahead)
            self.lines.all_reduce("tp", numbers, self.wide, "forward", "head.loss", times)
        if self.model.has_joint_aux_loss:
            self._counts(forward)

    def _blocks(self, tokens: int, channels: int | None = None) -> list[float]:
        width = (self.model.hidden_size if channels is None else channels) * self.element
        return [float(rows * width) for rows in shard_sizes(tokens, self.plan.tp)]

    def _gather(
        self, tokens: int, caller: str, times: int = 1, channels: int | None = None
    ) -> None:
        self.lines.gathered("tp", self._blocks(tokens, channels), caller, times)

    def _scatter(self, tokens: int, caller: str, times: int = 1) -> None:
        self.lines.scattered("tp", self._blocks(tokens), caller, times)

    def _attention(self, tokens: int, times: int) -> None:
        caller, lines, model = "attention.leave", self.lines, self.model
        for channels in model.entering_widths:
            self._gather(tokens, "attention.enter", times, channels)
        if model.qk_norm and model.qk_norm_over == "projection":
            for phase in ("forward", "backward"):
                lines.all_reduce("tp", 2 * tokens, self.wide, phase, "attention.norm", times)
        match self.plan.attention_exit:
            case "reduce_scatter":
                self._scatter(tokens, caller, times)
            case "all_reduce":
                numbers = tokens * model.hidden_size
                lines.all_reduce("tp", numbers, self.element, "forward", caller, times)
                lines.all_gather("tp", self._blocks(tokens), "backward", caller, times)
            case "all_to_all":
                sizes = shard_sizes(tokens, self.plan.tp)
                heads = model.num_heads // self.plan.tp
                width = heads * model.value_head_dim * self.element
                out = [float(rows * width) for rows in sizes]
                into = [float(sizes[lines.here["tp"]] * width)] * self.plan.tp
                lines.exchanged("tp", out, into, caller, times)

    # Ledger entries of context parallelism: keys and values of positions that other ranks hold.
    #
    # c ranks, rank i with S_i positions; of a layer, per sequence and on a tensor rank: N query
    # heads, M key/value heads, d_k and d_v numbers a head, w bytes an element, W of a sum (at
    # least 4).
    #
    # | plan.context | forward | backward |
    # |---|---|---|
    # | ring | c-1 messages S_j M (d_k + d_v) w, sent and received | the same; c-1 with W for w |
    # | all_gather | S_i M (d_k + d_v) w gathered | gathered again, gradients scattered |
    # | all_to_all | heads for positions, positions for heads | the same, the other way |
    #
    # Keys of latent attention are those behind their projection up: one for each query head.

    def _context(self, sequences: int, times: int) -> None:
        """One attention of so many sequences."""
        plan, model, lines, element = self.plan, self.model, self.lines, self.element
        ranks, index = plan.cp, lines.here["cp"]
        sizes = context_sizes(self.placement.seq_len, ranks)
        num_heads = model.num_heads // plan.tp
        kv_heads = num_heads if model.attention == "mla" else model.num_kv_heads // plan.tp
        #: Numbers of a key and its value.
        pair = model.query_head_dim + model.value_head_dim
        numbers = [size * sequences * kv_heads * pair for size in sizes]
        match plan.context:
            case "ring":
                for hop in range(ranks - 1):
                    sent, received = numbers[index - hop], numbers[index - hop - 1]
                    for size, sends in ((sent, True), (received, False)):
                        for phase in ("forward", "backward"):
                            wire = size * element
                            lines.message("cp", wire, phase, "context.keys", times, sends=sends)
                    # Gradients set out one rank behind the owner of their block.
                    sent, received = numbers[index - hop - 1], numbers[(index - hop - 2) % ranks]
                    for size, sends in ((sent, True), (received, False)):
                        wire, caller = size * self.wide, "context.gradients"
                        lines.message("cp", wire, "backward", caller, times, sends=sends)
            case "all_gather":
                blocks = [float(number * element) for number in numbers]
                for phase in ("forward", "backward"):
                    lines.all_gather("cp", blocks, phase, "context.keys", times)
                lines.reduce_scatter("cp", blocks, "backward", "context.keys", times)
            case "all_to_all":
                shares = [head_share(num_heads, kv_heads, ranks, rank) for rank in range(ranks)]
                width, own = sequences * element, sizes[index]
                # Bytes a position of what each rank attends with, and of what comes of it.
                heads = [
                    width * (len(share.queries) * model.query_head_dim + len(share.keys) * pair)
                    for share in shares
                ]
                out = width * len(shares[index].queries) * model.value_head_dim
                there = [float(own * size) for size in heads]
                here = [float(size * heads[index]) for size in sizes]
                lines.exchanged("cp", there, here, "context.heads", times)
                away, back = [float(size * out) for size in sizes], [float(own * out)] * ranks
                lines.exchanged("cp", away, back, "context.positions", times)

    def _balance(self, forward: int, times: int) -> None:
        """Counts of the auxiliary losses, and whole sequences for choices that compare tokens."""
        model, lines = self.model, self.lines
        if model.has_aux_loss and not model.has_joint_aux_loss:
            self._counts(forward, times)
        # Bytes a token of every gather of whole sequences: ids, scores, choices.
        widths: list[int] = []
        if model.router_selection != "token_choice":
            widths += [_INT64, model.num_experts * self.wide]
        if model.capacity_factor and model.router_selection != "expert_choice":
            widths.append(_INT64)
            if model.capacity_policy == "probability":
                widths.append(model.experts_per_token * self.wide)
            widths.append(model.experts_per_token * _INT64)
        for width in widths:
            blocks = [
                float(self.placement.tokens(self.batch, rank, forward)[1] * width)
                for rank in lines.members(self.sharing)
            ]
            lines.all_gather(self.sharing, blocks, "forward", "moe.choose", times)
        if model.router_selection == "expert_choice":
            lines.all_reduce("stage", 1, _INT64, "forward", "moe.choose", times)

    def _counts(self, forward: int, times: int = 1) -> None:
        """Sum the experts' counts in each scope, for auxiliary losses; behind the last slice."""
        if (forward + 1) % self.schedule.num_slices == 0:
            axis = "stage" if self.model.aux_loss_scope == "global" else self.sharing
            numbers = self._scopes(forward) * self.model.num_experts
            self.lines.all_reduce(axis, numbers, _INT64, "forward", "moe.balance", times)

    def _scopes(self, forward: int) -> int:
        return self._sequences(forward) if self.model.aux_loss_scope == "sequence" else 1

    def _experts(self, forward: int, layer: int, times: int) -> None:
        plan = self.plan
        if plan.ep * plan.etp == 1:
            return
        chunks = 1 if plan.combine == "exact" else plan.dispatch_chunks
        has_replicas = plan.spare_slots > 0 and plan.ep > 1
        # Fixed slots are planned chunk by chunk.
        together = plan.dispatcher in ("all_to_all", "auto", "hierarchical")
        for chunk in range(chunks):
            counts = (chunks if chunk == 0 else 0) if together else 1

            @cache
            def sent_by(rank: int, chunk: int = chunk) -> SentRows:
                _, tokens = self.placement.tokens(self.batch, rank, forward)
                return self.routing(rank, forward, layer, tokens, chunk, chunks)

            travels = sent_by
            if has_replicas:
                replicas = ReplicaTraffic(
                    self.lines, self.model, plan, self.element, sent_by, is_uniform=self.is_uniform
                )
                with self.lines.backward(self.placement.trains_experts(layer)):
                    replicas.enter(times, counts)
                travels = cache(replicas.sent)
            DispatchTraffic(
                self.lines,
                self.model,
                plan,
                self.element,
                self.max_tokens,
                travels,
                times,
                counts,
                self.spare_rows,
            ).enter()

    # Between the stages.

    def _messages(self, at: int) -> None:
        """The residual stream's own rows, and their gradients; the same of the sums for one
        auxiliary loss of all layers, which are a tensor, and a message, of their own."""
        width = self.model.hidden_size * self.element
        joint = (2 * self.model.num_experts + 1) * _FLOAT64
        for message in messages(self.schedule).values():
            if at not in (message.source, message.destination):
                continue
            producer = message.producer
            sample = self.schedule.sample(producer)
            forward = sample * self.schedule.num_slices + producer.slice
            size = self.placement.tokens(self.batch, self.once.rank, forward)[1] * width
            phase = "forward" if producer.kind == "F" else "backward"
            sends = at == message.source
            self.once.message("pp", size, phase, "pipeline", sends=sends)
            if self.model.has_joint_aux_loss:
                size = self._scopes(forward) * joint
                self.once.message("pp", size, phase, "pipeline", sends=sends)


# Ledger entries once a step: counts before it; gradient sums, norms and reports after it.
#
# Three ways for a step to end (D extra prediction layers, s numbers of the gradient norm, one a
# logical tensor and one an expert of a stack):
#
# | way | sums |
# |---|---|
# | validation before the optimizer | losses, loads over stage and pp; s squares over the world |
# | validation behind it | one vector of 3 + D + loads + s over stage, then along pp and back |
# | a stream | s squares of its stage for every update; one report a step over the world |
#
# Buckets of gradients are the same in all, once an update; under ZeRO 2 and 3 behind every
# backward. Where states are sharded, weights are gathered behind the update, or (ZeRO 3) before
# their use. A step that is taken back (its norm was clipped behind an early update) runs its
# warm-up twice: that is not in it.


class StepEnd:
    """Enters the lines of one rank; `element` bytes of a weight."""

    def __init__(self, lines: LedgerLines, placement: StagePlacement, element: int) -> None:
        self.lines, self.placement, self.element = lines, placement, element
        self.plan: Plan = placement.plan
        self.model = placement.model
        self.layout = lines.layout
        self.at = lines.here["pp"]
        #: Losses of extra prediction layers, beside the main and the auxiliary one.
        self.ahead = self.model.num_mtp_layers
        self.layers = len(self.model.routed_layers)
        #: Tokens of each expert, of every MoE layer.
        self.loads = self.layers * self.model.num_experts
        #: Tokens that every rank has computed: where replicas make them differ from the loads.
        replicas = self.plan.spare_slots > 0 and self.plan.ep > 1
        self.rank_tokens = self.layers * self.plan.ep if replicas else 0

    def enter(self) -> None:
        """Enter the end of a step in the way that the plan names."""
        if self.placement.schedule.update is not None:
            self._stream()
            return
        lines, model, squares = self.lines, self.model, self._squares(self.placement.tensors)
        self._counts(self.plan.microbatches)
        self._gradients()
        if self.plan.optimizer_validation == "after":
            # A stop request, the losses, loads, choices dropped, squares: one vector.
            numbers = 3 + self.ahead + self.loads + self.layers + self.rank_tokens + squares
            lines.all_reduce("stage", numbers, _FLOAT64, "optimizer", "step.report")
            neighbours = (self.at > 0) + (self.at < self.plan.pp - 1)
            for sends in (True, False):
                # The sum so far goes up the pipeline, the whole sum comes down.
                size = numbers * _FLOAT64
                lines.message("pp", size, "optimizer", "validation", neighbours, sends=sends)
            return
        for axis in ("stage", "pp"):
            lines.all_reduce(axis, 2 + self.ahead, _FLOAT64, "optimizer", "step.losses")
            for numbers in filter(None, (self.loads, self.rank_tokens)):
                lines.all_reduce(axis, numbers, _INT64, "optimizer", "step.loads")
            if model.capacity_factor:
                lines.all_reduce(axis, self.layers, _INT64, "optimizer", "step.dropped")
        lines.all_reduce("world", squares, _FLOAT64, "optimizer", "gradient_norm")

    def _counts(self, microbatches: int, times: int = 1) -> None:
        """Loss-bearing tokens and auxiliary scopes of a step, or of an update window."""
        scopes = microbatches if self.model.aux_loss_scope == "global" else 1
        numbers = 1 + self.ahead + scopes
        self.lines.all_reduce("dp_cp", numbers, _INT64, "forward", "step.counts", times)

    def _gradients(self, times: int = 1) -> None:
        """Sums of gradients and, where their owners alone update, the weights that they send."""
        lines, plan = self.lines, self.plan
        backwards: Counter[int] | None = None
        if plan.data in ("zero2", "zero3"):
            # Of each stage the operations behind which its gradients are summed over ranks.
            ops = self.placement.schedule.ops(self.at)
            backwards = Counter(op.stage for op in ops if op.kind in ("B", "W"))
        for bucket in data_buckets(self.placement, lines.rank, self.element):
            axis, size, own = bucket.axis, bucket.gradient_bytes, bucket.numbers
            if not bucket.trains:
                continue
            if plan.data == "replicate":
                lines.all_reduce(axis, own, size, "backward", "gradients", times)
            else:
                shared, copies = self.layout.sharding_axes(axis)
                sizes, index = owned(self.placement, bucket, lines.rank)
                own = sizes[index]
                sums = times
                if backwards is not None:
                    sums = sum(backwards[stage] for stage in bucket.stages)
                gradients = [float(numbers * size) for numbers in sizes]
                lines.reduce_scatter(shared, gradients, "backward", "gradients", sums)
                lines.all_reduce(copies, own, size, "backward", "gradients", times)
                if plan.data != "zero3":
                    weights = [float(numbers * bucket.weight_bytes) for numbers in sizes]
                    lines.all_gather(shared, weights, "optimizer", "weights", times)
            if bucket.mirrored:
                lines.all_reduce("mirror", own, size, "backward", "gradients", times)
        if plan.data == "zero3":
            units = GatheredUnits(self.placement, lines.rank, self.element)
            for (bucket, phase), count in units.gathers.items():
                sizes, _ = owned(self.placement, bucket, lines.rank)
                weights = [float(numbers * bucket.weight_bytes) for numbers in sizes]
                shared, _ = self.layout.sharding_axes(bucket.axis)
                lines.all_gather(shared, weights, phase, "weights", count)

    def _squares(self, tensors: list[ParameterTensor]) -> int:
        """Number of sums of squares: of what trains of `tensors`."""
        return sum(one.shape[0] if one.is_expert else 1 for one in tensors if one.trains)

    def _stream(self) -> None:
        plan, lines = self.plan, self.lines
        window = plan.num_update_microbatches
        updates = plan.microbatches // window
        self._counts(window, updates)
        self._gradients(updates)
        squares = self._squares(self.placement.held(self.at))
        lines.all_reduce("stage", squares, _FLOAT64, "optimizer", "gradient_norm", updates)
        stages = self.placement.stages(self.at)
        here = {index for stage in stages for index in self.placement.layers_of(stage)}
        if self.model.router_selection_bias and any(map(self.model.is_moe_layer, here)):
            numbers = self.loads
            lines.all_reduce("stage", numbers, _INT64, "optimizer", "stream.loads", updates)
        report = 5 + self.ahead + self.loads + self.layers
        lines.all_reduce("world", report, _FLOAT64, "optimizer", "step.report")
        if plan.schedule == "ampnet":
            # A header of two numbers before every message and at the end of the stream, each way;
            # and what the first rank of a stage tells the others to run.
            size, count = 2 * _INT64, self.plan.microbatches + 1
            neighbours = (self.at > 0) + (self.at < self.plan.pp - 1)
            for sends in (True, False):
                times = count * neighbours
                self.lines.message("world", size, "control", "pipeline", times, sends=sends)
            told = 2 * self.plan.microbatches + 1
            self.lines.broadcast("stage", size, "control", "pipeline", told)
