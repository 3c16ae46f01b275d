"""Seconds of one training step: its stages under their schedule, gradients, the optimizer.

    step  = pipeline + exposed gradient traffic + optimizer + fixed

    pipeline = m x busiest rank + waiting
    rank     = its layers x (forward + backward + recomputation) + its end of the model
               + its messages

The waiting time depends on the schedule. If the stages of every row are given, it is simulated
(:func:`moemesh.schedule.step.duration`) with their times of forward, input gradient and weight
gradient. A search over millions of rows uses a lower bound in columns: the longest of two kinds of
paths that every schedule has,

    forwards before a rank, all its work, and (with whole backwards) the backwards after it
    forwards to the last stage, its forwards and (input) gradients, (input) gradients back

Every formula takes floats or numpy arrays, one entry per layout, so that a search bounds a million
layouts in a call. `compute_floor` (operations at best efficiency, no bubble, no traffic) is a true
bound of this model for any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import NamedTuple

import numpy as np

from moemesh.planner.arithmetic import Number, maximum, minimum, where
from moemesh.planner.stage_cut import Stages
from moemesh.planner.timing.columns import RankColumns, rank_row, stacked
from moemesh.planner.timing.compute import (
    ACTIVATION_BYTES,
    BlockTime,
    EndTime,
    ExpertTime,
    LayerTime,
    LayerTransfers,
    PricedStep,
    attended,
    attention_block,
    attention_weights,
    core_backward_factor,
    expert_block,
    layer_times,
    layer_transfers,
    mlp_block,
    model_ends,
    regathered_share,
)
from moemesh.planner.timing.links import known
from moemesh.schedule.step import duration
from moemesh.trace import wire

# Time of data parallelism: replicas, FSDP units, gradient and weight traffic, the optimizer.


#: Bytes per weight that the optimizer reads and writes: gradient, master, two moments, weight.
OPTIMIZER_BYTES = 30
#: Bytes/s of host memory that the update of one device reaches, and of the device's link to its
#: host (PCIe 4, 16 lanes), in one direction. Assumed: no published run was fitted.
HOST_BANDWIDTH, HOST_LINK = 40e9, 25e9
#: Bytes of an accumulated gradient and of a weight on the wire of data parallelism.
_GRADIENT_BYTES = 4
_WEIGHT_BYTES = 2
#: Slowdown of a transfer by computation, as a share of the slowdown of computation by a transfer.
_TRANSFER_SHARE = 0.25
#: Latencies of one gather or reduction of an FSDP unit besides its hops: copies into and out of its
#: buffer, and waits of streams for each other.
_UNIT_LATENCIES = 6
#: Seconds for each rank's shard of a matrix that is gathered into a list of tensors: a hop of the
#: ring and a copy. The sum over 2,240 ranks is the known loss of ZeRO-3 in 2021.
_LISTED_SHARD = 20e-6


def overlapped(compute: Number, transfer: Number, slowdown: Number) -> Number:
    """Seconds of one unit whose transfer overlaps with its computation; `slowdown` is κ.

        T = max(compute + κ transfer, transfer + κ/4 compute)

    Overlap is never free: published slowdowns of kernels that share a device with a transfer are 2
    to 15 %, and more if the transfer's kernels take multiprocessors. A transfer lengthens the
    overlapped computation by κ of its own time; computation slows a transfer far less, which counts
    if the transfer is longer. κ = 0 is perfect overlap.
    """
    bound_by_compute = compute + slowdown * transfer
    bound_by_transfer = transfer + slowdown * _TRANSFER_SHARE * compute
    return maximum(bound_by_compute, bound_by_transfer)


def replicas(work: PricedStep) -> tuple[Number, Number]:
    """Numbers of replicas of dense and of expert weights."""
    layout = work.layout
    dense = layout.dp * layout.cp
    return dense, maximum(dense * layout.tp / (layout.ep * layout.etp), 1)


def _shard_groups(work: PricedStep) -> tuple[Number, Number]:
    """Numbers of ranks among which dense and expert weights are cut: those of ZeRO's group, or all
    replicas."""
    group = work.layout.zero_group
    within = maximum(group / work.layout.tp, 1)
    dense, expert = replicas(work)
    return where(group > 0, minimum(within, dense), dense), where(
        group > 0, minimum(within, expert), expert
    )


def _moved(
    work: PricedStep, dense: Number, expert: Number, groups: tuple[Number, Number]
) -> tuple[Number, tuple[Number, Number]]:
    """Seconds of a gather or scatter of `dense` and `expert` weights in `groups` of ranks, for one
    byte a weight; and the rates of both groups in bytes per second."""
    layout, (n_dense, n_expert), links = work.layout, groups, work.links
    dense_rate = links.bandwidth(n_dense, layout.tp)
    expert_rate = links.bandwidth(n_expert, layout.ep * layout.etp)
    moved = (n_dense - 1) / n_dense * dense / dense_rate
    return moved + (n_expert - 1) / n_expert * expert / expert_rate, (dense_rate, expert_rate)


def sharded_unit(work: PricedStep, layer: LayerTime, dense: Number, expert: Number) -> LayerTime:
    """A layer as an FSDP unit: gathers overlap with the forward, gathers and reduces with the
    backward.

    ZeRO-2 as FSDP keeps the weights that the first microbatch gathered. Shards inside a group
    (HSDP) are gathered inside it, and the gradients of a shard are summed over the groups. Frozen
    weights have no gradients. Gathers into lists of shards (:class:`Software`) move one matrix at
    a time and do not overlap.
    """
    layout, constants, links = work.layout, work.constants, work.links
    (n_dense, n_expert), groups = replicas(work), _shard_groups(work)
    moved, _ = _moved(work, dense, expert, groups)
    # Sums of a shard's gradients over the groups, for one byte a weight.
    across: Number = 0.0
    for size, ranks, group in zip((dense, expert), (n_dense, n_expert), groups, strict=True):
        others = maximum(ranks / group, 1)
        across = across + 2 * (others - 1) / others * size / group / links.network(others)
    listed = layout.listed_gathers == 1
    hops = _UNIT_LATENCIES * links.latency + links.ring_latency(groups[0], layout.tp)
    matrices = 2 + work.model.mlp_matrices
    hops = where(listed, matrices * n_dense * _LISTED_SHARD, hops)
    # Experts may have replicas where dense weights have none: dp = cp = 1 and tp > ep * etp.
    is_cut = (n_dense > 1) | ((n_expert > 1) & (np.asarray(expert) > 0))
    gather = where(is_cut, moved * _WEIGHT_BYTES + hops, 0)
    summed = is_cut & (layout.adapters == 0)
    reduce = where(summed, (moved + across) * constants.reduce_bytes + hops, 0)
    keeps = layout.zero == 2
    in_forward = gather * where(keeps, 1 / layout.microbatches, 1)
    in_backward = reduce + where(keeps, 0, gather)
    kappa = constants.overlap_slowdown
    forward = overlapped(layer.forward, in_forward, kappa)
    backward = overlapped(layer.backward, in_backward, kappa)
    forward = where(listed, layer.forward + in_forward, forward)
    backward = where(listed, layer.backward + in_backward, backward)
    units = layout.fsdp == 1
    return LayerTime(
        where(units, forward, layer.forward),
        where(units, backward, layer.backward),
        layer.weight_gradient,
        layer.waiting,
    )


def rank_weights(
    work: PricedStep, dense_layer: Number, routed_layer: Number, experts: ExpertTime, ends: EndTime
) -> tuple[Number, Number]:
    """(dense, expert) weights of one rank; with two pipes a rank holds two stages."""
    model, layout = work.model, work.layout
    pipes = 1 / layout.pipe_share
    dense = (model.layers - model.moe_layers) * dense_layer + model.moe_layers * routed_layer
    tables = where((layout.pp > 1) & (pipes == 1), 1, 2 - model.tied)
    return (
        dense * pipes / layout.pp + tables * ends.weights,
        model.moe_layers * experts.expert_weights * pipes / layout.pp,
    )


def mirror_seconds(work: PricedStep, dense: Number, expert: Number) -> Number:
    """Seconds of summing the gradients that a rank owns with the other holder of its stages (two
    pipes). The sum follows all others and is not overlapped."""
    layout, links = work.layout, work.links
    # The outermost pair is the farthest apart.
    stride = layout.tp * layout.cp * layout.dp * maximum(layout.pp - 1, 1)
    size = _owned(work, dense, expert) * _GRADIENT_BYTES
    seconds = size / links.bandwidth(2, stride) + links.latency
    return where((layout.pipe_share < 1) & (size > 0), seconds, 0)


def data_seconds(work: PricedStep, dense: Number, expert: Number, backward: Number) -> Number:
    """Exposed seconds of gradient reduction and weight gathering of replicas without FSDP.
    `backward` are the seconds of one microbatch's backward, with which the reduction overlaps."""
    layout, constants, links = work.layout, work.constants, work.links
    summed = layout.wire_gradient_bytes
    n_dense, n_expert = replicas(work)
    moved, (dense_rate, expert_rate) = _moved(work, dense, expert, replicas(work))
    is_summed = layout.zero == 0
    reduced = moved * summed * where(is_summed, 2, 1)
    gathered = where(is_summed, 0, moved * _WEIGHT_BYTES)
    if len(links.table):
        by_table = _measured(work, dense, expert)
        reduced = where(layout.zero_group == 0, known(by_table[0], reduced), reduced)
        gathered = where(layout.zero_group == 0, known(by_table[1], gathered), gathered)
    # ZeRO in a smaller group: scatter and gather inside the group, sums of shards across groups.
    group, _ = _shard_groups(work)
    outside = maximum(n_dense / group, 1)
    across = 2 * (outside - 1) / outside * dense / group * summed / links.network(outside)
    grouped = (layout.zero_group > 0) & (outside > 1)
    reduced = where(grouped, dense * summed / links.intra + across, reduced)
    gathered = where(grouped, dense * _WEIGHT_BYTES / links.intra, gathered)
    sums = where(layout.sums_each == 1, layout.microbatches, 1)
    exposed = sums * _exposed_sums(work, reduced, backward)
    # The fitted share is relative to a ring's time; only serial sends may take longer.
    most = where(layout.serial_gather == 1, np.inf, 1)
    exposed = exposed + gathered * minimum(constants.weight_exposed, most)
    # A parameter server takes pushed gradients and pulled weights instead.
    served = 0.0
    for num_weights, workers, rate in (
        (dense, n_dense, dense_rate),
        (expert, n_expert, expert_rate),
    ):
        servers = minimum(layout.servers, workers)
        gradient, weight = num_weights * _GRADIENT_BYTES, num_weights * _WEIGHT_BYTES
        server = wire.parameter_server(gradient, weight, workers, servers)
        served = served + where(workers > 1, server.link / rate, 0)
    exposed = where(layout.parameter_server == 1, served, exposed)
    is_alone = (n_dense <= 1) & (n_expert <= 1)
    return where((layout.fsdp == 1) | is_alone, 0, exposed)


def _exposed_sums(work: PricedStep, reduced: Number, backward: Number) -> Number:
    """Seconds of the gradients' reduction that no backward hides.

    The last backward hides a share of a short reduction, at most its own length of a long one. An
    interleaved schedule ends with a group of p microbatches for each of a rank's v stages, the last
    stage first: the gradients of a stage are complete, and are summed, while the stages before it
    run p backwards each. Only the first stage has no more than its own last backward.
    """
    layout = work.layout
    stages = (layout.last_stage + 1) / layout.pp
    is_interleaved = (layout.splits_backward == 0) & (layout.pipe_share == 1)
    later = minimum(layout.pp, layout.microbatches) * (stages - 1)
    window = backward * where(is_interleaved, (1 + later) / stages, 1)
    share = minimum(work.constants.gradient_exposed, 1)

    def left(reduced: Number, hidden: Number) -> Number:
        """share x reduced of a short reduction, reduced - (1 - share) x hidden of a long one."""
        excess = reduced - hidden
        return (excess + (excess * excess + 4 * share * reduced * hidden) ** 0.5) / 2

    return maximum(left(reduced, window), left(reduced, backward) / stages)


def _measured(work: PricedStep, dense: Number, expert: Number) -> tuple[Number, Number]:
    """Seconds of reducing gradients and of gathering weights, from the table of links; nan if a
    collective has no measurement."""
    layout, links = work.layout, work.links
    reduced: Number = 0.0
    gathered: Number = 0.0
    strides = (layout.tp, layout.ep * layout.etp)
    for num_weights, ranks, stride in zip((dense, expert), replicas(work), strides, strict=True):
        gradient, weight = num_weights * layout.wire_gradient_bytes, num_weights * _WEIGHT_BYTES
        summed = links.measured("all_reduce", ranks, stride, gradient)
        scattered = links.measured("reduce_scatter", ranks, stride, gradient)
        sent, is_sent = where(layout.zero == 0, summed, scattered), (ranks > 1) & (num_weights > 0)
        reduced = reduced + where(is_sent, sent, 0)
        seconds = links.measured("all_gather", ranks, stride, weight)
        gathered = gathered + where(is_sent, seconds, 0)
    return reduced, gathered


def _owned(work: PricedStep, dense: Number, expert: Number) -> Number:
    """Number of weights whose summed gradients and optimizer states a rank keeps."""
    layout, ranks = work.layout, replicas(work)
    sharded = (layout.zero >= 1) | (layout.fsdp == 1)
    groups, owned = (_shard_groups(work)[0], ranks[1]), 0.0
    for num_weights, workers, group in zip((dense, expert), ranks, groups, strict=True):
        servers = where(layout.parameter_server == 1, minimum(layout.servers, workers), 1)
        owned = owned + num_weights / where(sharded, group, servers)
    return owned


#: Largest waiting time, over the busiest rank's time, that counts as rounding of sums.
_ROUNDING = 1e-11


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, and its parts on the busiest pipeline rank.

    `compute` are matrix products, `attention` its cores, `elementwise` memory-bound kernels, the
    embedding, gradient accumulation and selective recomputation (except products that are
    recomputed one by one), `launches` fixed costs and waiting for the host, `head` the head with
    its loss; `tensor`, `context`, `experts`, `pipeline`, `data` exposed transfers by axis; `bubble`
    waiting for other pipeline ranks.
    """

    total: Number
    compute: Number
    attention: Number
    elementwise: Number
    launches: Number
    head: Number
    tensor: Number
    context: Number
    experts: Number
    pipeline: Number
    data: Number
    bubble: Number
    optimizer: Number

    def row(self, index: int) -> dict[str, float]:
        """The numbers of one row, for JSON."""
        columns = ((item.name, np.ravel(getattr(self, item.name))) for item in fields(self))
        return {name: float(column[index % len(column)]) for name, column in columns}


def step_time(work: PricedStep, stages: Sequence[Stages]) -> StepTime:
    """The time of one step of every row, whose waiting is simulated with the schedule of its
    `stages`. Raises ValueError for `stages` of an impossible schedule."""
    parts = _timed(work, stages)[1]
    assert parts is not None
    return parts


def step_seconds(work: PricedStep) -> Number:
    """Lower bound of the seconds of one step of every row, without its parts."""
    return _timed(work, None)[0]


def _timed(work: PricedStep, stages: Sequence[Stages] | None) -> tuple[Number, StepTime | None]:
    """The seconds of a step of every row, and their parts; without `stages` a lower bound of the
    seconds, and None."""
    layout, constants = work.layout, work.constants
    blocks = attention_block(work), mlp_block(work), expert_block(work)
    attention, mlp, experts = blocks
    ends = model_ends(work)
    transfers = layer_transfers(work)
    dense_weights = attention.weights + mlp.weights
    routed_weights = attention.weights + experts.shared_weights
    dense, routed = layer_times(work, attention, mlp, experts, transfers)
    times = _PassTimes(
        dense=sharded_unit(work, dense, dense_weights, 0.0),
        routed=sharded_unit(work, routed, routed_weights, experts.expert_weights),
        ends=ends,
        message=_message(work),
    )
    rank: RankColumns | None = None
    if stages is None:
        busiest, waiting = _bound(work, times)
    else:
        rank, waiting = _simulated(times, stages)
        busiest = times.busy(rank)
    startup = where(
        (layout.pp > 1) & (layout.slow_startup == 1),
        constants.startup_microbatches * 2 / layout.pp * layout.slices * busiest,
        0.0,
    )
    weights = rank_weights(work, dense_weights, routed_weights, experts, ends)
    # Only adapters have gradients and an update.
    shares = layout.trained_dense, layout.trained_experts
    shares = [where(layout.adapters == 1, share, 1) for share in shares]
    weights = weights[0] * shares[0], weights[1] * shares[1]
    first = layout.ranks[0]
    backward = times.backward(first.dense, first.routed) * layout.slices
    data = data_seconds(work, *weights, backward) + mirror_seconds(work, *weights)
    owned = _owned(work, *weights)
    optimizer = owned * OPTIMIZER_BYTES / work.hbm
    on_host = owned * (OPTIMIZER_BYTES / HOST_BANDWIDTH + _WEIGHT_BYTES / HOST_LINK)
    # Gradients are copied during the backward.
    copied = maximum(owned * _GRADIENT_BYTES / HOST_LINK - backward, 0)
    optimizer = where(layout.offload == 1, on_host + copied, optimizer)
    busy, waiting = work.passes * busiest, waiting + startup
    # Sums in different order differ by rounding: not counted as waiting.
    waiting = where(abs(waiting) > _ROUNDING * busy, waiting, 0.0)
    total = busy + waiting + data + optimizer + constants.step_overhead_ms * 1e-3
    if rank is None:
        return total, None
    outside = {"total": total, "bubble": waiting, "data": data, "optimizer": optimizer}
    return total, _in_parts(work, times, rank, blocks, transfers, outside)


class _PassTimes(NamedTuple):
    """Seconds of one pass (a microbatch, or a slice of it) through a layer of either kind, through
    embedding and head, and of one message between stages."""

    dense: LayerTime
    routed: LayerTime
    ends: EndTime
    message: Number

    def forward(self, dense: Number, routed: Number) -> Number:
        """Seconds of the forward of `dense` and `routed` layers."""
        return dense * self.dense.forward + routed * self.routed.forward

    def backward(self, dense: Number, routed: Number) -> Number:
        """Seconds of the backward of these layers, weight gradients included."""
        return dense * self.dense.backward + routed * self.routed.backward

    def later(self, dense: Number, routed: Number) -> Number:
        """Seconds of weight gradients, which may be deferred."""
        return dense * self.dense.weight_gradient + routed * self.routed.weight_gradient

    def busy(self, rank: RankColumns) -> Number:
        """Seconds of a rank's work for one pass, sending included."""
        layers = self.forward(rank.dense, rank.routed) + self.backward(rank.dense, rank.routed)
        ends = rank.embedding * self.ends.embedding + rank.head * self.ends.head
        return layers + ends + rank.sends * self.message


def _message(work: PricedStep) -> Number:
    """Exposed seconds of one message from a stage to the next."""
    layout, constants, links = work.layout, work.constants, work.links
    cut = where((layout.sequence_parallel == 1) | (layout.scatter_gather == 1), layout.tp, 1)
    size = work.tokens * work.model.hidden * ACTIVATION_BYTES / cut
    near = layout.tp * layout.cp * layout.dp < work.hardware.node_size
    rate = where(near, links.intra, links.inter)
    closed = size / rate * constants.pipeline_exposed + links.latency
    if len(links.table):
        sent = links.table.column("send", 2, where(near, 2, 1), size) * constants.pipeline_exposed
        closed = known(sent, closed)
    return where(layout.pp > 1, closed, 0.0)


def _bound(work: PricedStep, times: _PassTimes) -> tuple[Number, Number]:
    """Seconds of one pass on the busiest of the first, last and heaviest inner rank, and a lower
    bound of its waiting seconds in a step: from the longest path, see the module."""
    layout, model, ends = work.layout, work.model, times.ends
    each = [times.busy(rank) for rank in layout.ranks]
    busiest = reduce(maximum, each)
    passes, split = work.passes, layout.splits_backward
    longest = passes * busiest
    # Forwards before a rank, its work, and (with whole backwards) the backwards after it.
    for rank, busy in zip(layout.ranks, each, strict=True):
        before = rank.dense_before, rank.routed_before
        embedded = where(rank.stages_before > 0, ends.embedding, 0)
        arrival = times.forward(*before) + embedded / 2 + rank.stages_before * times.message
        busy_seconds = passes * busy - where(rank.sends > 0, times.message, 0)
        path = arrival + busy_seconds
        if not np.all(split == 1):
            # The first message of the backward is among those that the rank itself sends.
            back = times.backward(*before) + embedded / 2 + rank.stages_before * times.message
            path = path + where(split == 1, 0, back)
        longest = maximum(longest, path)
    # Forwards to the last stage, its work, and input gradients (or backwards) back.
    num_dense = model.layers - model.moe_layers
    early = num_dense - layout.last_dense, model.moe_layers - layout.last_routed
    # Both halves of a V have their middle stages on one rank: no message between them.
    messages = maximum(layout.last_stage - 1, 0) * times.message
    arrival = times.forward(*early) + ends.embedding / 2 + messages
    input_gradients = times.backward(*early) - times.later(*early)
    back = where(split == 1, input_gradients, times.backward(*early)) + ends.embedding / 2
    back = back + messages
    final = layout.last_dense, layout.last_routed
    per_pass = times.forward(*final) + times.backward(*final) + ends.head
    deferred = times.later(*final) + ends.head_weight_gradient
    per_pass = per_pass - where(split == 1, deferred, 0)
    path = arrival + passes * layout.pipe_share * per_pass + back
    longest = where(layout.pp > 1, maximum(longest, path), longest)
    waiting = longest - passes * busiest
    return busiest, where((layout.pp > 1) & (layout.is_stream == 0), waiting, 0.0)


def _simulated(times: _PassTimes, stages: Sequence[Stages]) -> tuple[RankColumns, Number]:
    """Busiest rank of every row, and its waiting seconds in a step, simulated with the schedule."""
    flat = np.broadcast_arrays(
        *times.dense[:3], *times.routed[:3],
        times.ends.embedding, times.ends.head, times.ends.head_forward,
        times.ends.head_weight_gradient, times.message,
    )  # fmt: skip
    columns = np.stack([np.ravel(column) for column in flat], axis=1)
    ranks: list[RankColumns] = []
    waiting: list[float] = []
    for cut, numbers in zip(stages, columns.tolist(), strict=True):
        f_dense, b_dense, w_dense, f_routed, b_routed, w_routed = numbers[:6]
        embedding, head, head_forward, head_weight, message = numbers[6:]
        # Seconds of one microbatch at every stage: forward, input gradient, weight gradient.
        forwards: list[float] = []
        inputs: list[float] = []
        later: list[float] = []
        for stage, (dense, routed) in enumerate(cut.layers):
            first, final = stage == 0, stage == cut.last
            weight = dense * w_dense + routed * w_routed + final * head_weight
            forward = dense * f_dense + routed * f_routed
            forward += first * embedding / 2 + final * head_forward
            whole = dense * (f_dense + b_dense) + routed * (f_routed + b_routed)
            whole += first * embedding + final * head
            forwards.append(cut.step.slices * forward)
            inputs.append(cut.step.slices * max(whole - forward - weight, 0.0))
            later.append(cut.step.slices * weight)
        span = duration(cut.step, forwards, inputs, later, message)
        waiting.append(max(span.makespan - span.busy, 0.0))
        ranks.append(rank_row(cut, span.rank))
    if np.ndim(flat[0]) == 0:
        return ranks[0], waiting[0]
    return stacked(ranks), np.array(waiting)


def _in_parts(
    work: PricedStep,
    times: _PassTimes,
    rank: RankColumns,
    blocks: tuple[BlockTime, BlockTime, ExpertTime],
    transfers: LayerTransfers,
    outside: dict[str, Number],
) -> StepTime:
    """The step with its parts on the busiest rank. `outside`: parts that are not in the layers."""
    attention, mlp, experts = blocks
    layout, constants, passes = work.layout, work.constants, work.passes
    dense, routed = rank.dense, rank.routed
    layers = dense + routed
    recomputed = layout.recompute_full
    products, elementwise, weights = (
        layers * getattr(attention, name)
        + dense * getattr(mlp, name)
        + routed * getattr(experts, name)
        for name in ("products", "elementwise", "weights")
    )
    touched = work.accumulate + (2 + recomputed) * work.unpack
    core = 1 + core_backward_factor(work) + recomputed
    host = 3 * constants.layer_overhead_us * 1e-6 * layers + routed * times.routed.waiting
    # Blocks that gather their input a second time, and those with any tensor traffic.
    num_regathered = 2 * layers - routed - where(layout.parallel_block == 1, dense, 0)
    num_tensor = num_regathered + where(work.model.shared_width > 0, routed, 0)
    regathers = regathered_share(work) * num_regathered
    exchanged = 4 * transfers.exchange + 2 * transfers.expert_tensor
    single = layout.recompute_products * (layers * attention.products + dense * mlp.products)
    parts: dict[str, Number] = {
        "compute": passes * ((where(layout.adapters == 1, 2, 3) + recomputed) * products + single),
        "attention": passes * layers * core * attention.core,
        "elementwise": passes * ((3 + recomputed) * elementwise + weights * touched / work.hbm),
        "launches": passes * host,
        "head": passes * rank.head * times.ends.head,
        "tensor": passes * ((2 + recomputed) * num_tensor + regathers) * transfers.tensor,
        "context": passes * layers * 3 * transfers.context,
        "experts": passes * routed * exchanged * (1 + recomputed / 2),
        "pipeline": passes * rank.sends * times.message,
    }
    rest = passes * times.busy(rank)
    for seconds in parts.values():
        rest = rest - seconds
    # The rest: selective recomputation and the embedding. Of FSDP units it counts as waiting for
    # weights.
    is_units = layout.fsdp == 1
    parts["elementwise"] = parts["elementwise"] + where(is_units, 0, rest)
    parts["launches"] = parts["launches"] + constants.step_overhead_ms * 1e-3
    parts["data"] = outside["data"] + where(is_units, rest, 0)
    return StepTime(**{**outside, **parts})


def compute_floor(work: PricedStep) -> Number:
    """Lower bound of the seconds of all layouts with the same number of devices: the step's
    operations without recomputation, at the best efficiency of large products (attention cores at
    the peak), spread evenly over devices."""
    model, layout, hardware, constants = work.model, work.layout, work.hardware, work.constants
    heads = model.heads
    # Weights of all layers that a token is multiplied with.
    attention = attention_weights(model) + model.hidden * heads * model.value_dim
    per_width = model.mlp_matrices * model.hidden
    weights = attention * model.mixer_factor * model.layers
    weights = weights + (model.layers - model.moe_layers) * per_width * model.mlp_width
    weights = weights + model.moe_layers * per_width * (
        model.top_k * work.kept_choices * model.expert_width + model.shared_width
    )
    passes = where(layout.adapters == 1, 2.0, 3.0)
    tokens = layout.microbatch * layout.seq_len / layout.cp * layout.microbatches
    products = 2 * passes * tokens * weights / (hardware.peak * work.gemm_efficiency)
    head = 2 * passes * tokens * model.hidden * model.vocab
    head = head / (hardware.peak_16bit * constants.gemm_efficiency)
    core = (
        4 * tokens * attended(work) * heads * (model.query_dim + model.value_dim) / 2 * model.layers
    )
    core = core * (1 + core_backward_factor(work)) / hardware.peak_16bit
    return (products + head + core) / (layout.tp * layout.pp)
