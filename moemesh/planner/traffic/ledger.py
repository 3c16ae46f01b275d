"""The predicted ledger of a training step of our own library, per rank, to the byte.

It follows the same contracts as the code that communicates (tables in `parallel/tensor`,
`tensor/vocabulary`, `expert/*`, `recompute`, `data`): every collective with axis, phase, count and
bytes. Traffic of experts depends on the routing: the choices of a run make the ledger exact,
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
| extra prediction layers | embedding, a layer and the head for each | |
| experts | see `dispatch_traffic` | |
| pipeline | T/N h w to the next stage | T/N h w to the one before |
| one auxiliary loss of all layers | 8 (2 E + 1) a scope to the next stage | the same |

Units before the first one that trains have neither a backward nor a recomputation. Full
recomputation repeats, as phase "recompute", the collectives at the entry of a block and of the
dispatch, but not those at the exit of a layer. If AMPNet recomputes a stage with the newest
weights, everything in the forward happens twice. Collectives of a whole step are in `_Step._end`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.dispatch_traffic import DispatchTraffic, Routing, replicated
from moemesh.planner.traffic.ledger_lines import LedgerLines
from moemesh.planner.traffic.matrices import matrix_exchanges
from moemesh.planner.traffic.tensors import (
    ELEMENT_BYTES,
    RankStep,
    StagePlacement,
    data_buckets,
    gathered_units,
    owned,
)
from moemesh.schedule.action import messages
from moemesh.sharding.context import context_sizes, head_share
from moemesh.sharding.dispatchers import spare_rows
from moemesh.sharding.matrices import splits
from moemesh.trace.ledger import Ledger

#: Callers of context parallelism in a forward, the same in all layers.
CONTEXT_CALLERS = ("context.keys", "context.heads", "context.positions")


_INT64, _FLOAT64 = 8, 8


#: Callers whose collectives full recomputation of a layer repeats. The exit of shared experts is
#: repeated, too (`_Step._stage`).
_RECOMPUTED = (
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
    whole_matrices: bool = False,
) -> Ledger:
    """The ledger of `rank` after one training step, without evaluation and checkpoints.

    For an asynchronous schedule the step is a stream of one step until it has drained. `routing`
    None is uniform routing; `tuning` selects the parameters that train; `on_accelerator` is False
    on a CPU; `whole_matrices`: the optimizer updates matrices as a whole. Raises ValueError if the
    plan's schedule is impossible. See also `volumes`, and
    :func:`moemesh.planner.layout_sources.exact_plan`.
    """
    step = _Step(
        placement=StagePlacement(model, plan, seq_len, tuning),
        global_batch=global_batch,
        w=ELEMENT_BYTES[dtype],
        rank=rank,
        given_routing=routing,
        on_accelerator=on_accelerator,
        whole_matrices=whole_matrices,
    )
    return step.ledger()


@dataclass(kw_only=True, eq=False)
class _Step(RankStep):
    """Ledger lines of one rank."""

    on_accelerator: bool
    whole_matrices: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        model, plan = self.model, self.plan
        exact = plan.combine == "exact"
        self.spare_rows = self.on_accelerator * spare_rows(model.hidden_size, exact=exact)
        self.is_uniform = self.given_routing is None
        self.is_full = plan.recompute == "full"
        twice = plan.schedule == "ampnet" and plan.ampnet_backward == "recompute"
        recomputed: tuple[str, ...] = ()
        if self.is_full:
            recomputed = (*_RECOMPUTED, *CONTEXT_CALLERS)
        elif plan.recompute == "selective" and plan.recompute_attention:
            # The core of attention, without the collectives at its exit.
            recomputed = tuple(name for name in CONTEXT_CALLERS if name != "context.positions")
        #: Lines of forwards and backwards, and lines of a whole step.
        self.lines = LedgerLines(self.layout, self.rank, forwards=1 + twice, recomputed=recomputed)
        self.once = LedgerLines(self.layout, self.rank)
        self.at = self.coordinates["pp"]
        #: Axis of the ranks that share sequences.
        self.sharing = "cp_tp" if plan.cp > 1 else "tp"
        #: Number of losses of extra prediction layers.
        self.ahead = len(model.mtp_layers)

    def ledger(self) -> Ledger:
        schedule, slices = self.schedule, self.schedule.num_slices
        for pipe, stage in schedule.stages_of(self.at):
            first = schedule.first_sample[pipe]
            for index in range(slices * schedule.num_microbatches[pipe]):
                self._stage(stage, slices * first + index)
        # Messages between stages: the rank's rows of the residual stream and their gradients. The
        # sums for one auxiliary loss of all layers are a separate message.
        width = self.model.hidden_size * self.w
        joint = (2 * self.model.num_experts + 1) * _FLOAT64
        for message in messages(schedule).values():
            if self.at not in (message.source, message.destination):
                continue
            producer = message.producer
            forward = schedule.sample(producer) * slices + producer.slice
            phase = "forward" if producer.kind == "F" else "backward"
            sizes = [self.placement.tokens(self.global_batch, self.rank, forward)[1] * width]
            if self.model.has_joint_aux_loss:
                sizes.append(self.scopes(forward) * joint)
            for size in sizes:
                sends = self.at == message.source
                self.once.message("pp", size, phase, "pipeline", sends=sends)
        self._end()
        return self.lines.ledger() + self.once.ledger()

    # One forward of one stage, and its backward.

    def _stage(self, stage: int, forward: int) -> None:
        model, placement = self.model, self.placement
        tokens, _ = placement.tokens(self.global_batch, self.rank, forward)
        if stage == 0:
            with self.lines.backward(placement.has_backward("embedding")):
                self._boundary(tokens, "reduce_scatter", "embedding")
        for exists in (False, True):
            layers = [
                index
                for index in placement.layers_of(stage)
                if placement.has_backward(f"layers.{index}") == exists
            ]
            routed = [index for index in layers if model.is_moe_layer(index)]
            shared = len(routed) if model.shared_width else 0
            mlps = len(layers) - len(routed) + shared
            with self.lines.backward(exists):
                if layers:
                    self._attention(tokens, len(layers))
                if layers and self.plan.cp > 1:
                    self._context(self.sequences(forward), len(layers))
                if mlps:
                    self._boundary(tokens, "all_gather", "mlp.enter", mlps)
                    self._boundary(tokens, "reduce_scatter", "mlp.leave", mlps)
                if shared and self.is_full:
                    # Shared experts run before the routed experts, whose inputs are recomputed.
                    leave = "tp", "reduce_scatter", "recompute", "mlp.leave", self._blocks(tokens)
                    self.lines.enter(*leave, times=shared)
                if routed and model.has_aux_loss and not model.has_joint_aux_loss:
                    self._balance(forward, len(routed))
                if routed:
                    self._choices(forward, len(routed))
                for layer in routed[:1] if self.is_uniform else routed:
                    self._experts(forward, layer, len(routed) if self.is_uniform else 1)
        if stage < self.schedule.num_stages - 1:
            return
        # The head; every extra prediction layer has an embedding and a head, too.
        with self.lines.backward(placement.has_backward("embedding")):
            if self.ahead:
                self._boundary(tokens, "reduce_scatter", "embedding", self.ahead)
        for unit in ("head", *(f"layers.{index}" for index in self.model.mtp_layers)):
            with self.lines.backward(placement.has_backward(unit)):
                self._boundary(tokens, "all_gather", "head.enter")
        for numbers in (tokens, 2 * tokens):
            loss = "tp", "all_reduce", "forward", "head.loss", numbers, self.wide
            self.lines.enter(*loss, times=1 + self.ahead)
        if self.model.has_joint_aux_loss:
            self._balance(forward)

    def _blocks(self, tokens: int, channels: int | None = None) -> list[float]:
        width = (self.model.hidden_size if channels is None else channels) * self.w
        return [float(rows * width) for rows in shard_sizes(tokens, self.plan.tp)]

    def _boundary(
        self, tokens: int, op: str, caller: str, times: int = 1, channels: int | None = None
    ) -> None:
        self.lines.paired("tp", op, caller, self._blocks(tokens, channels), times=times)

    def _attention(self, tokens: int, times: int) -> None:
        lines, model = self.lines, self.model
        for channels in model.entering_widths:
            self._boundary(tokens, "all_gather", "attention.enter", times, channels)
        if model.qk_norm and model.qk_norm_over == "projection":
            lines.paired("tp", "all_reduce", "attention.norm", 2 * tokens, self.wide, times=times)
        leave, exit_form = partial(lines.enter, "tp", times=times), self.plan.attention_exit
        caller = "attention.leave"
        if exit_form == "reduce_scatter":
            self._boundary(tokens, exit_form, caller, times)
        elif exit_form == "all_reduce":
            leave(exit_form, "forward", caller, tokens * model.hidden_size, self.w)
            leave("all_gather", "backward", caller, self._blocks(tokens))
        else:
            width = model.num_heads // self.plan.tp * model.value_head_dim
            out = self._blocks(tokens, width)
            into = [out[self.coordinates["tp"]]] * self.plan.tp
            lines.paired("tp", "all_to_all", caller, out, into, times=times)

    # Ledger entries of context parallelism: keys and values of positions that other ranks hold.
    #
    # c ranks, rank i with S_i positions. Bytes per layer and sequence on a tensor rank: N query
    # heads, M key/value heads, d_k and d_v numbers a head, w bytes an element, W of a sum (at
    # least 4).
    #
    # | plan.context | forward | backward |
    # |---|---|---|
    # | ring | c-1 messages S_j M (d_k + d_v) w, sent and received | the same; c-1 with W for w |
    # | all_gather | S_i M (d_k + d_v) w gathered | re-gathered, gradients scattered |
    # | all_to_all | heads for positions, positions for heads | the same in reverse |
    #
    # Keys of latent attention are those after the up projection: one for each query head.

    def _context(self, sequences: int, times: int) -> None:
        """Enter the attention of `sequences` sequences, `times` times."""
        plan, model, lines, element = self.plan, self.model, self.lines, self.w
        ranks, index = plan.cp, self.coordinates["cp"]
        sizes = context_sizes(self.placement.seq_len, ranks)
        num_heads = model.num_heads // plan.tp
        kv_heads = num_heads if model.attention == "mla" else model.num_kv_heads // plan.tp
        #: Numbers of a key and its value.
        pair = model.query_head_dim + model.value_head_dim
        numbers = [size * sequences * kv_heads * pair for size in sizes]
        match plan.context:
            case "ring":
                keys, gradients = ("context.keys", element), ("context.gradients", self.wide)
                for hop in range(ranks - 1):
                    # Gradients start one rank after the owner of their block.
                    ways = (0, "forward", keys), (0, "backward", keys), (1, "backward", gradients)
                    for lag, phase, (caller, width) in ways:
                        for place, sends in ((index - hop, True), (index - hop - 1, False)):
                            size = numbers[(place - lag) % ranks] * width
                            lines.message("cp", size, phase, caller, times, sends=sends)
            case "all_gather":
                blocks = [float(number * element) for number in numbers]
                lines.paired("cp", "all_gather", "context.keys", blocks, times=times)
                lines.enter("cp", "all_gather", "backward", "context.keys", blocks, times=times)
            case "all_to_all":
                shares = [head_share(num_heads, kv_heads, ranks, rank) for rank in range(ranks)]
                width, size = sequences * element, sizes[index]
                # Bytes per position of each rank's queries, keys and values, and of its outputs.
                heads = [
                    width * (len(share.queries) * model.query_head_dim + len(share.keys) * pair)
                    for share in shares
                ]
                out = width * len(shares[index].queries) * model.value_head_dim
                for caller, sent, received in (
                    ("heads", [size * head for head in heads], [n * heads[index] for n in sizes]),
                    ("positions", [n * out for n in sizes], [size * out] * ranks),
                ):
                    both = list(map(float, sent)), list(map(float, received))
                    lines.paired("cp", "all_to_all", f"context.{caller}", *both, times=times)

    def _choices(self, forward: int, times: int) -> None:
        """Enter gathers of whole sequences for router choices that compare tokens."""
        model, lines = self.model, self.lines
        # Bytes per token of every gather: ids, scores, choices.
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
                float(self.placement.tokens(self.global_batch, rank, forward)[1] * width)
                for rank in lines.members(self.sharing)
            ]
            choose = self.sharing, "all_gather", "forward", "moe.choose", blocks
            lines.enter(*choose, times=times)
        if model.router_selection == "expert_choice":
            lines.enter("stage", "all_reduce", "forward", "moe.choose", 1, _INT64, times=times)

    def _balance(self, forward: int, times: int = 1) -> None:
        """Enter sums of the experts' counts in each scope, for auxiliary losses; after the last
        slice."""
        if (forward + 1) % self.schedule.num_slices == 0:
            axis = "stage" if self.model.aux_loss_scope == "global" else self.sharing
            counts = self.scopes(forward) * self.model.num_experts, _INT64
            self.lines.enter(axis, "all_reduce", "forward", "moe.balance", *counts, times=times)

    def _experts(self, forward: int, layer: int, times: int) -> None:
        plan, chunks = self.plan, self.chunks
        together = dispatcher_row(plan.dispatcher).plans_all_chunks
        lines, model = self.lines, self.model
        for chunk in range(chunks):
            counts = (chunks if chunk == 0 else 0) if together else 1
            travels = sent_by = self.sent_by(forward, layer, chunk)
            if plan.spare_slots > 0 and plan.ep > 1:
                rows, stacks = self.placement.tuning.rows, model.expert_stacks(layer)
                trains = any(rows(stack, model.num_experts) for stack in stacks)
                with lines.backward(trains):
                    if counts:
                        blocks = [float(counts * model.num_experts * _INT64)]
                        gather = "ep_etp", "all_gather", "forward", "moe.counts"
                        lines.enter(*gather, blocks * (plan.ep * plan.etp), times=times)
                    if not self.is_uniform:
                        travels = replicated(lines, model, plan, self.w, sent_by, times)
            traffic = DispatchTraffic(
                lines=lines,
                model=model,
                plan=plan,
                element=self.w,
                max_tokens=self.max_tokens,
                sent_by=travels,
                counts=counts,
                spare_rows=self.spare_rows,
            )
            for exchange in traffic.exchanges():
                lines.enter(*exchange[:4], *exchange.amounts, times=times)

    # Ledger entries once a step: counts before it; gradient sums, norms and reports after it.
    #
    # A step ends in one of three ways (D extra prediction layers; s numbers of the gradient norm,
    # one per logical tensor and one per expert of a stack):
    #
    # | way | sums |
    # |---|---|
    # | validation before the optimizer | losses, loads over stage and pp; s squares, world |
    # | validation after it | one vector of 3 + D + loads + s over stage, then along pp and back |
    # | a stream | s squares of its stage for every update; one report a step over the world |
    #
    # Buckets of gradients are summed once an update in all of them; under ZeRO 2 and 3 after every
    # backward. If states are sharded, weights are gathered after the update, or (ZeRO 3) before
    # their use. The repeated warm-up of an undone step (clipped after an early update) is left out.

    def _end(self) -> None:
        """Enter the end of a step, in the plan's way."""
        plan, model, placement, once = self.plan, self.model, self.placement, self.once
        is_stream = self.schedule.update is not None
        window = plan.num_update_microbatches if is_stream else plan.microbatches
        updates = plan.microbatches // window
        # Counts of loss-bearing tokens and auxiliary scopes of a step, or of an update window.
        scopes = window if model.aux_loss_scope == "global" else 1
        counts = "dp_cp", "all_reduce", "forward", "step.counts", 1 + self.ahead + scopes, _INT64
        once.enter(*counts, times=updates)
        self._gradients(updates)
        if self.whole_matrices:
            self._matrices(updates)
        layers = len(model.routed_layers)
        #: Number of loads: tokens of each expert of every MoE layer.
        loads = layers * model.num_experts
        #: Number of token counts of ranks, which differ from the loads if experts have replicas.
        rank_tokens = layers * plan.ep if plan.spare_slots > 0 and plan.ep > 1 else 0
        held = placement.held(self.at) if is_stream else placement.tensors
        trained = (tensor for tensor in held if tensor.trains)
        squares = sum(tensor.shape[0] if tensor.is_expert else 1 for tensor in trained)
        neighbours = (self.at > 0) + (self.at < plan.pp - 1)

        def summed(axis: str, numbers: int, width: int, caller: str, times: int = 1) -> None:
            once.enter(axis, "all_reduce", "optimizer", caller, numbers, width, times=times)

        if is_stream:
            summed("stage", squares, _FLOAT64, "gradient_norm", updates)
            stages = placement.stages(self.at)
            owned_layers = {index for stage in stages for index in placement.layers_of(stage)}
            if model.router_selection_bias and any(map(model.is_moe_layer, owned_layers)):
                summed("stage", loads, _INT64, "stream.loads", updates)
            summed("world", 5 + self.ahead + loads + layers, _FLOAT64, "step.report")
            if plan.schedule == "ampnet":
                # A header of two numbers before every message and at the end of the stream, in both
                # directions; and the operations that the first rank of a stage broadcasts.
                size, times = 2 * _INT64, (plan.microbatches + 1) * neighbours
                for sends in (True, False):
                    once.message("world", size, "control", "pipeline", times, sends=sends)
                broadcasts = 2 * plan.microbatches + 1
                once.enter("stage", "broadcast", "control", "pipeline", size, times=broadcasts)
        elif plan.optimizer_validation == "after":
            # A stop request, the losses, loads, choices dropped, squares: one vector.
            numbers = 3 + self.ahead + loads + layers + rank_tokens + squares
            summed("stage", numbers, _FLOAT64, "step.report")
            for sends in (True, False):
                # Partial sums are sent up the pipeline, the total is sent down.
                size = numbers * _FLOAT64
                once.message("pp", size, "optimizer", "validation", neighbours, sends=sends)
        else:
            for axis in ("stage", "pp"):
                summed(axis, 2 + self.ahead, _FLOAT64, "step.losses")
                for numbers in filter(None, (loads, rank_tokens)):
                    summed(axis, numbers, _INT64, "step.loads")
                if model.capacity_factor:
                    summed(axis, layers, _INT64, "step.dropped")
            summed("world", squares, _FLOAT64, "gradient_norm")

    def _matrices(self, times: int) -> None:
        """Enter the parts of matrices on the way to the ranks that update them, and back."""
        ranks = self.placement.members("stage", self.rank)
        index, width = ranks.index(self.rank), max(self.w, 4)  # masters are never below fp32
        for exchange in matrix_exchanges(self.placement, self.rank, self.w).values():
            for parts in (exchange.there, exchange.back):
                both = (
                    [float(n * width) for n in side] for side in splits(parts, index, len(ranks))
                )
                self.once.enter("stage", "all_to_all", "optimizer", "matrices", *both, times=times)

    def _gradients(self, times: int) -> None:
        """Enter sums of gradients and, if states are sharded, gathers of updated weights."""
        once, plan, placement = self.once, self.plan, self.placement
        backwards: Counter[int] | None = None
        if plan.data in ("zero2", "zero3"):
            # Stage -> number of operations that are followed by a sum of its gradients.
            ops = self.schedule.ops(self.at)
            backwards = Counter(op.stage for op in ops if op.kind in ("B", "W"))
        for bucket in data_buckets(placement, self.rank, self.w):
            axis, size, count = bucket.axis, bucket.gradient_bytes, bucket.numbers
            if not bucket.trains:
                continue
            if plan.data == "replicate":
                once.enter(axis, "all_reduce", "backward", "gradients", count, size, times=times)
            else:
                shared, copies = self.layout.sharding_axes(axis)
                sizes, index = owned(placement, bucket, self.rank)
                count = sizes[index]
                sums = times
                if backwards is not None:
                    sums = sum(backwards[stage] for stage in bucket.stages)
                gradients = [float(numbers * size) for numbers in sizes]
                scattered = shared, "reduce_scatter", "backward", "gradients", gradients
                once.enter(*scattered, times=sums)
                once.enter(copies, "all_reduce", "backward", "gradients", count, size, times=times)
                if plan.data != "zero3":
                    weights = [float(numbers * bucket.weight_bytes) for numbers in sizes]
                    gathered = shared, "all_gather", "optimizer", "weights", weights
                    once.enter(*gathered, times=times)
            if bucket.mirrored:
                mirror = "mirror", "all_reduce", "backward", "gradients", count, size
                once.enter(*mirror, times=times)
        if plan.data == "zero3":
            gathers, _ = gathered_units(placement, self.rank, self.w)
            for (bucket, phase), count in gathers.items():
                sizes, _ = owned(placement, bucket, self.rank)
                weights = [float(numbers * bucket.weight_bytes) for numbers in sizes]
                shared, _ = self.layout.sharding_axes(bucket.axis)
                once.enter(shared, "all_gather", phase, "weights", weights, times=count)
