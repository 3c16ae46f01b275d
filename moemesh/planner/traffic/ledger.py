"""The predicted ledger of a training step of our own library, per rank, to the byte.

It follows the same contracts as the code that communicates (tables in `parallel/tensor`,
`expert/*`, `recompute`, `data`): every collective with axis, phase, count and bytes. Traffic of
experts depends on the routing: the choices of a run make the ledger exact, without them uniform
routing gives expected bytes, rounded once per line.

Per forward of T tokens (a microbatch, or a slice of it), N = tp, w bytes an element (closed forms,
bytes one rank sends):

| what | forward | backward |
|---|---|---|
| embedding | reduce-scatter (N-1)/N T h w | all-gather |
| enter of attention and of every MLP | all-gather (N-1)/N T h w | reduce-scatter |
| enter of latent attention | the same, r_q (or h) + r_kv + d_r wide | reduce-scatter |
| norm over all heads | all-reduce of 2 numbers a token | all-reduce |
| exit reduce_scatter | reduce-scatter (N-1)/N T h w | all-gather |
| exit all_reduce | all-reduce 2 (N-1)/N T h w | all-gather |
| exit all_to_all | all-to-all (N-1)/N^2 T a d_v w | all-to-all |
| head | all-gather (N-1)/N T h w; 3 numbers a token | reduce-scatter |
| context parallelism | see `_context` | |
| extra prediction layers | embedding, a layer and the head for each | |
| experts | see `dispatch_traffic` | |
| pipeline | T/N h w to the next stage | T/N h w to the one before |
| one auxiliary loss of all layers | 8 (2 E + 1) a scope to the next stage | the same |

Units before the first one that trains have neither a backward nor a recomputation. Full
recomputation repeats, as phase "recompute", the collectives of attention, at the entry of MLPs, of
replicas and the dispatch, and at the exit of shared experts, but not at the exit of a layer. If
AMPNet recomputes a stage with the newest weights, everything in the forward happens twice. Messages
of the pipeline are in `predict_ledger`, collectives of a step in `_end`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.model import ModelConfig
from moemesh.config.plan import SHARDED_STATES, Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.planner.traffic.dispatch_traffic import DispatchTraffic, Routing, replicated
from moemesh.planner.traffic.exchanges import (
    BOTH,
    LAYER_EXITS,
    STATE_EXCHANGES,
    LedgerLines,
    Transfer,
    repeated_callers,
)
from moemesh.planner.traffic.tensors import (
    ELEMENT_BYTES,
    RankStep,
    StagePlacement,
    data_buckets,
    gathered_units,
    matrix_parts,
    owned,
)
from moemesh.schedule.action import messages
from moemesh.sharding.buckets import Bucket
from moemesh.sharding.context import context_sizes, head_share
from moemesh.sharding.dispatchers import spare_rows
from moemesh.sharding.matrices import exchanges, splits
from moemesh.trace.ledger import Ledger

_INT64, _FLOAT64 = 8, 8


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
    placement = StagePlacement(model, plan, seq_len, tuning)
    step = RankStep(
        placement=placement,
        global_batch=global_batch,
        w=ELEMENT_BYTES[dtype],
        rank=rank,
        given_routing=routing,
    )
    spare = on_accelerator * spare_rows(model.hidden_size, exact=plan.combine == "exact")
    twice = plan.schedule == "ampnet" and plan.ampnet_backward == "recompute"
    recomputed = repeated_callers(plan.recomputed_parts).difference(LAYER_EXITS)
    # Lines of forwards and backwards, and lines of a whole step.
    lines = LedgerLines(plan.layout, rank, forwards=1 + twice, recomputed=recomputed)
    once = LedgerLines(plan.layout, rank)
    schedule = step.schedule
    for pipe, stage in schedule.stages_of(step.coordinates["pp"]):
        first = schedule.num_slices * schedule.first_sample[pipe]
        for index in range(schedule.num_slices * schedule.num_microbatches[pipe]):
            for has_backward, transfers in _forward(step, lines, stage, first + index, spare):
                lines.enter(transfers, has_backward)
    # Messages between stages: the rank's rows of the residual stream and their gradients. The sums
    # for one auxiliary loss of all layers are a separate message.
    at = step.coordinates["pp"]
    for message in messages(schedule).values():
        if at not in (message.source, message.destination):
            continue
        producer = message.producer
        forward = schedule.sample(producer) * schedule.num_slices + producer.slice
        phase = "forward" if producer.kind == "F" else "backward"
        sizes = [step.tokens(forward)[1] * model.hidden_size * step.w]
        if model.has_joint_aux_loss:
            sizes.append(step.scopes(forward) * (2 * model.num_experts + 1) * _FLOAT64)
        op = "send" if at == message.source else "receive"
        once.enter(Transfer("pp", op, phase, "pipeline", (size,)) for size in sizes)
    once.enter(_end(step, whole_matrices))
    return lines.ledger() + once.ledger()


#: Whether the backward reaches a part of a forward, and the part's transfers.
_Part = tuple[bool, Iterable[Transfer]]


def _forward(
    step: RankStep, lines: LedgerLines, stage: int, forward: int, spare: int
) -> Iterator[_Part]:
    """One forward of one stage, and its backward. Up to `spare` rows are always summed densely."""
    model, plan, placement = step.model, step.plan, step.placement
    tokens, _ = step.tokens(forward)

    def boundary(op: str, caller: str, times: int = 1) -> Transfer:
        """A collective of the residual stream over tp."""
        return Transfer("tp", op, BOTH, caller, (step.blocks(tokens),), times)

    if stage == 0:
        yield placement.has_backward("embedding"), [boundary("reduce_scatter", "embedding")]
    for has_backward in (False, True):
        layers = [
            index
            for index in placement.layers_of(stage)
            if placement.has_backward(f"layers.{index}") == has_backward
        ]
        routed = [index for index in layers if model.is_moe_layer(index)]
        shared = len(routed) if model.shared_width else 0
        mlps = len(layers) - len(routed) + shared
        yield has_backward, _attention(step, tokens, len(layers))
        if plan.cp > 1:
            yield has_backward, _context(step, step.sequences(forward), len(layers))
        yield has_backward, [boundary("all_gather", "mlp.enter", mlps),
                             boundary("reduce_scatter", "mlp.leave", mlps)]  # fmt: skip
        if "full" in plan.recomputed_parts:
            # Shared experts run before the routed experts, whose inputs are recomputed.
            leave = "tp", "reduce_scatter", "recompute", "mlp.leave", (step.blocks(tokens),)
            yield has_backward, [Transfer(*leave, shared)]
        if model.has_aux_loss and not model.has_joint_aux_loss:
            yield has_backward, _balance(step, forward, len(routed))
        yield has_backward, _choices(step, lines, forward, len(routed))
        # Under uniform routing all layers are equal.
        is_uniform = step.given_routing is None
        for layer in routed[:1] if is_uniform else routed:
            times = len(routed) if is_uniform else 1
            for trains, transfers in _experts(step, lines, forward, layer, spare):
                yield has_backward and trains, (item._replace(times=times) for item in transfers)
    if stage < step.schedule.num_stages - 1:
        return
    # The head; every extra prediction layer has an embedding and a head, too.
    ahead = len(model.mtp_layers)
    embedding = boundary("reduce_scatter", "embedding", ahead)
    yield placement.has_backward("embedding"), [embedding]
    for unit in ("head", *(f"layers.{index}" for index in model.mtp_layers)):
        yield placement.has_backward(unit), [boundary("all_gather", "head.enter")]
    loss = "tp", "all_reduce", "forward", "head.loss"
    for numbers in (tokens, 2 * tokens):
        yield True, [Transfer(*loss, (numbers, step.wide), 1 + ahead)]
    if model.has_joint_aux_loss:
        yield True, _balance(step, forward)


def _attention(step: RankStep, tokens: int, times: int) -> Iterator[Transfer]:
    """Collectives over tp of `times` attention blocks."""
    model, plan, leave = step.model, step.plan, "attention.leave"
    for channels in model.entering_widths:
        blocks = step.blocks(tokens, channels)
        yield Transfer("tp", "all_gather", BOTH, "attention.enter", (blocks,), times)
    if model.qk_norm and model.qk_norm_over == "projection":
        numbers = 2 * tokens, step.wide
        yield Transfer("tp", "all_reduce", BOTH, "attention.norm", numbers, times)
    blocks = step.blocks(tokens)
    if plan.attention_exit == "reduce_scatter":
        yield Transfer("tp", "reduce_scatter", BOTH, leave, (blocks,), times)
    elif plan.attention_exit == "all_reduce":
        numbers = tokens * model.hidden_size, step.w
        yield Transfer("tp", "all_reduce", "forward", leave, numbers, times)
        yield Transfer("tp", "all_gather", "backward", leave, (blocks,), times)
    else:
        out = step.blocks(tokens, model.num_heads // plan.tp * model.value_head_dim)
        into = [out[step.coordinates["tp"]]] * plan.tp
        yield Transfer("tp", "all_to_all", BOTH, leave, (out, into), times)


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


def _context(step: RankStep, sequences: int, times: int) -> Iterator[Transfer]:
    """Collectives over cp of `times` attention blocks with `sequences` sequences each."""
    plan, model, element = step.plan, step.model, step.w
    ranks, index = plan.cp, step.coordinates["cp"]
    sizes = context_sizes(step.placement.seq_len, ranks)
    num_heads = model.num_heads // plan.tp
    kv_heads = model.kv_heads // plan.tp
    #: Numbers of a key and its value.
    pair = model.query_head_dim + model.value_head_dim
    numbers = [size * sequences * kv_heads * pair for size in sizes]
    match plan.context:
        case "ring":
            keys, gradients = ("context.keys", element), ("context.gradients", step.wide)
            for hop in range(ranks - 1):
                # Gradients start one rank after the owner of their block.
                passes = (0, "forward", keys), (0, "backward", keys), (1, "backward", gradients)
                for lag, phase, (caller, width) in passes:
                    for owner, op in ((index - hop, "send"), (index - hop - 1, "receive")):
                        size = numbers[(owner - lag) % ranks] * width
                        yield Transfer("cp", op, phase, caller, (size,), times)
        case "all_gather":
            blocks = ([float(number * element) for number in numbers],)
            for phase in (BOTH, "backward"):
                yield Transfer("cp", "all_gather", phase, "context.keys", blocks, times)
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
                ("heads", [size * head for head in heads], [s * heads[index] for s in sizes]),
                ("positions", [s * out for s in sizes], [size * out] * ranks),
            ):
                amounts = list(map(float, sent)), list(map(float, received))
                yield Transfer("cp", "all_to_all", BOTH, f"context.{caller}", amounts, times)


def _choices(step: RankStep, lines: LedgerLines, forward: int, times: int) -> Iterator[Transfer]:
    """Gathers of whole sequences for router choices that compare tokens."""
    model, choose = step.model, ("forward", "moe.choose")
    # Bytes per token of every gather: ids, scores, choices.
    widths: list[int] = []
    if model.router_selection != "token_choice":
        widths += [_INT64, model.num_experts * step.wide]
    if model.capacity_factor and model.router_selection != "expert_choice":
        widths.append(_INT64)
        if model.capacity_policy == "probability":
            widths.append(model.experts_per_token * step.wide)
        widths.append(model.experts_per_token * _INT64)
    for width in widths:
        peers = lines.members(step.sharing)
        blocks = [float(step.tokens(forward, rank)[1] * width) for rank in peers]
        yield Transfer(step.sharing, "all_gather", *choose, (blocks,), times)
    if model.router_selection == "expert_choice":
        yield Transfer("stage", "all_reduce", *choose, (1, _INT64), times)


def _balance(step: RankStep, forward: int, times: int = 1) -> Iterator[Transfer]:
    """Sums of the experts' counts in each scope, for auxiliary losses; after the last slice."""
    if (forward + 1) % step.schedule.num_slices == 0:
        axis = "stage" if step.model.aux_loss_scope == "global" else step.sharing
        counts = step.scopes(forward) * step.model.num_experts, _INT64
        yield Transfer(axis, "all_reduce", "forward", "moe.balance", counts, times)


def _experts(
    step: RankStep, lines: LedgerLines, forward: int, layer: int, spare: int
) -> Iterator[_Part]:
    """Transfers of one MoE layer: counts and weights of replicas, and the dispatch of each
    chunk."""
    plan, model = step.plan, step.model
    plans_all_chunks = dispatcher_row(plan.dispatcher).plans_all_chunks
    for chunk in range(step.chunks):
        # Number of chunks whose counts are exchanged with this chunk.
        counts = 1
        if plans_all_chunks:
            counts = step.chunks if chunk == 0 else 0
        sent_by = step.sent_by(forward, layer, chunk)
        if plan.spreads_replicas:
            rows, stacks = step.placement.tuning.rows, model.expert_stacks(layer)
            replicas: list[Transfer] = []
            if counts:
                blocks = [float(counts * model.num_experts * _INT64)] * (plan.ep * plan.etp)
                gather = "ep_etp", "all_gather", "forward", "moe.counts", (blocks,)
                replicas.append(Transfer(*gather))
            if step.given_routing is not None:
                weights, sent_by = replicated(lines, model, plan, step.w, sent_by)
                replicas += weights
            yield any(rows(stack, model.num_experts) for stack in stacks), replicas
        traffic = DispatchTraffic(
            lines=lines,
            model=model,
            plan=plan,
            element=step.w,
            max_tokens=step.max_tokens,
            sent_by=sent_by,
            counts=counts,
            spare_rows=spare,
        )
        yield True, traffic.exchanges()


# Ledger entries once a step: counts before it; gradient sums, norms and reports after it.
#
# A step ends in one of three ways (D extra prediction layers; s numbers of the gradient norm,
# one per logical tensor and one per expert of a stack; loads: tokens of experts, dropped choices
# and, with replicas and no stream, tokens of ranks):
#
# | way | sums |
# |---|---|
# | validation before the optimizer | losses, loads over stage and pp; s squares, world |
# | validation after it | one vector of 3 + D + loads + s over stage, then along pp and back |
# | a stream | s squares of its stage for every update; one report a step over the world |
#
# Buckets of gradients are summed once an update in all of them, but under ZeRO 2 and 3 scattered
# after every backward. If states are sharded, weights are gathered after the update, or (ZeRO 3)
# before their use. The repeated warm-up of an undone step (clipped after an early update) is left
# out.


def _end(step: RankStep, whole_matrices: bool) -> Iterator[Transfer]:
    """The end of a step, in the plan's way."""
    plan, model, placement, at = step.plan, step.model, step.placement, step.coordinates["pp"]
    ahead, is_stream = len(model.mtp_layers), step.schedule.update is not None
    window = plan.num_update_microbatches if is_stream else plan.microbatches
    updates = plan.microbatches // window
    # Counts before a step, or an update window: tokens with a loss, at each depth, and scopes.
    scopes = window if model.aux_loss_scope == "global" else 1
    numbers = 1 + ahead + scopes, _INT64
    yield Transfer("dp_cp", "all_reduce", "forward", "step.counts", numbers, updates)
    yield from _gradients(step, updates)
    if whole_matrices:
        # Parts of matrices are sent to the ranks that update them, and back.
        ranks = placement.members("stage", step.rank)
        parts_by_rank = [list(matrix_parts(placement, peer, step.w)) for peer in ranks]
        for exchange in exchanges(parts_by_rank).values():
            for parts in (exchange.there, exchange.back):
                sides = splits(parts, ranks.index(step.rank), len(ranks))
                # Masters are never below fp32.
                amounts = tuple([float(n * step.wide) for n in side] for side in sides)
                yield Transfer("stage", "all_to_all", "optimizer", "matrices", amounts, updates)
    layers = len(model.routed_layers)
    #: Number of loads: tokens of each expert of every MoE layer.
    loads = layers * model.num_experts
    #: Number of token counts of ranks, which differ from the loads if experts have replicas.
    rank_tokens = layers * plan.ep if plan.spreads_replicas else 0
    held = placement.held(at) if is_stream else placement.tensors
    trained = (tensor for tensor in held if tensor.trains)
    squares = sum(tensor.shape[0] if tensor.is_expert else 1 for tensor in trained)
    neighbours = (at > 0) + (at < plan.pp - 1)

    def summed(axis: str, numbers: int, width: int, caller: str, times: int = 1) -> Transfer:
        return Transfer(axis, "all_reduce", "optimizer", caller, (numbers, width), times)

    if is_stream:
        yield summed("stage", squares, _FLOAT64, "gradient_norm", updates)
        owned_layers = {i for stage in placement.stages(at) for i in placement.layers_of(stage)}
        if model.router_selection_bias and any(map(model.is_moe_layer, owned_layers)):
            yield summed("stage", loads, _INT64, "stream.loads", updates)
        # A stop request, skips, squares and 2 + `ahead` losses; loads; dropped choices.
        yield summed("world", 5 + ahead + loads + layers, _FLOAT64, "step.report")
        if plan.schedule == "ampnet":
            # A header of two numbers before every message and at the end of the stream, in both
            # directions; and the operations that the first rank of a stage broadcasts.
            header, times = (2 * _INT64,), (plan.microbatches + 1) * neighbours
            for op in ("send", "receive"):
                yield Transfer("world", op, "control", "pipeline", header, times)
            broadcasts = 2 * plan.microbatches + 1
            yield Transfer("stage", "broadcast", "control", "pipeline", header, broadcasts)
    elif plan.optimizer_validation == "after":
        # One vector: a stop request and 2 + `ahead` losses; loads; dropped choices; squares.
        count = 3 + ahead + loads + layers + rank_tokens + squares
        yield summed("stage", count, _FLOAT64, "step.report")
        for op in ("send", "receive"):
            # Partial sums are sent up the pipeline, the total is sent down.
            size = (count * _FLOAT64,)
            yield Transfer("pp", op, "optimizer", "validation", size, neighbours)
    else:
        for axis in ("stage", "pp"):
            yield summed(axis, 2 + ahead, _FLOAT64, "step.losses")
            for count in filter(None, (loads, rank_tokens)):
                yield summed(axis, count, _INT64, "step.loads")
            if model.capacity_factor:
                yield summed(axis, layers, _INT64, "step.dropped")
        yield summed("world", squares, _FLOAT64, "gradient_norm")


def _gradients(step: RankStep, times: int) -> Iterator[Transfer]:
    """Sums of gradients and, if states are sharded, gathers of updated weights."""
    plan, placement, layout = step.plan, step.placement, step.layout
    backwards: Counter[int] | None = None
    if "gradients" in SHARDED_STATES[plan.data]:
        # Stage -> number of operations that are followed by a sum of its gradients.
        ops = step.schedule.ops(step.coordinates["pp"])
        backwards = Counter(op.stage for op in ops if op.kind in ("B", "W"))
    #: ZeRO 3: (bucket, phase) -> number of gathers of its weights.
    gathers: Counter[tuple[Bucket, str]] = Counter()
    if plan.data == "zero3":
        gathers, _ = gathered_units(placement, step.rank, step.w)
    for bucket in data_buckets(placement, step.rank, step.w):
        shard_axis, copies_axis = layout.sharding_axes(bucket.axis)
        axes = {"all": bucket.axis, "shard": shard_axis, "copies": copies_axis}
        sizes, count = (bucket.numbers,), bucket.numbers
        if plan.data != "replicate":
            sizes, index = owned(placement, bucket, step.rank)
            count = sizes[index]
        for ranks, op, phase, caller in STATE_EXCHANGES[plan.data]:
            width = bucket.gradient_bytes if caller == "gradients" else bucket.weight_bytes
            blocks = ([float(numbers * width) for numbers in sizes],)
            amounts = (count, width) if op == "all_reduce" else blocks
            number = times
            if caller == "weights" and phase != "optimizer":
                number = gathers[bucket, phase]
            elif not bucket.trains:
                continue
            elif op == "reduce_scatter" and backwards is not None:
                number = sum(backwards[stage] for stage in bucket.stages)
            yield Transfer(axes[ranks], op, phase, caller, amounts, number)
        if bucket.trains and bucket.mirrored:
            numbers = count, bucket.gradient_bytes
            yield Transfer("mirror", "all_reduce", "backward", "gradients", numbers, times)
