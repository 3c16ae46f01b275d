"""Time of data parallelism: replicas, FSDP units, gradient and weight traffic, the optimizer."""

from __future__ import annotations

from moemesh.planner.arithmetic import Number, log2, maximum, minimum, where
from moemesh.planner.timing.compute import EndTime, ExpertTime, Workload
from moemesh.planner.timing.layer_time import LayerTime
from moemesh.planner.timing.links import Links, known
from moemesh.trace import wire

#: Bytes per weight that the optimizer reads and writes: gradient, master, two moments, weight.
OPTIMIZER_BYTES = 30
#: Bytes of an accumulated gradient and of a weight on the wire of data parallelism.
_GRADIENT_BYTES = 4
_WEIGHT_BYTES = 2
#: How much less a transfer suffers from computation than computation from it.
_TRANSFER_SHARE = 0.25


def overlapped(compute: Number, transfer: Number, slowdown: Number) -> Number:
    """Seconds of one unit whose transfer runs beside its computation; `slowdown` is κ.

        T = max(compute + κ transfer, transfer + κ/4 compute)

    Overlap is never free: published slowdowns of kernels that share a device with a transfer are 2
    to 15 %, and more where the transfer's kernels take multiprocessors. A transfer slows the
    computation beside it by κ of its own length; computation slows a transfer far less, which
    remains when the transfer is the longer one. κ = 0 is perfect overlap.
    """
    bound_by_compute = compute + slowdown * transfer
    bound_by_transfer = transfer + slowdown * _TRANSFER_SHARE * compute
    return maximum(bound_by_compute, bound_by_transfer)


def replicas(work: Workload) -> tuple[Number, Number]:
    """N of dense and of expert weights."""
    layout = work.layout
    dense = layout.dp * layout.cp
    return dense, maximum(dense * layout.tp / (layout.ep * layout.etp), 1)


def _replica_bandwidths(work: Workload, links: Links) -> tuple[Number, Number]:
    layout = work.layout
    dense, expert = replicas(work)
    return links.bandwidth(dense, layout.tp), links.bandwidth(expert, layout.ep * layout.etp)


def sharded_unit(
    work: Workload, links: Links, layer: LayerTime, dense: Number, expert: Number
) -> LayerTime:
    """A layer as an FSDP unit: gathers beside the forward, gathers and reduces beside the backward.

    ZeRO-2 as FSDP keeps what the first microbatch gathered.
    """
    layout, constants = work.layout, work.constants
    n_dense, n_expert = replicas(work)
    dense_rate, expert_rate = _replica_bandwidths(work, links)
    moved = (n_dense - 1) / n_dense * dense / dense_rate
    moved = moved + (n_expert - 1) / n_expert * expert / expert_rate
    hops = 4 * links.latency * log2(maximum(n_dense, 2))
    gather = where(n_dense > 1, moved * _WEIGHT_BYTES + hops, 0)
    reduce = where(n_dense > 1, moved * constants.reduce_bytes + hops, 0)
    keeps = layout.zero == 2
    ahead = gather * where(keeps, 1 / layout.microbatches, 1)
    behind = reduce + where(keeps, 0, gather)
    kappa = constants.overlap_slowdown
    forward = overlapped(layer.forward, ahead, kappa)
    backward = overlapped(layer.backward, behind, kappa)
    units = layout.fsdp == 1
    return LayerTime(
        where(units, forward, layer.forward),
        where(units, backward, layer.backward),
        layer.weight_gradient,
        layer.waiting,
    )


def rank_weights(
    work: Workload, dense_layer: Number, routed_layer: Number, experts: ExpertTime, ends: EndTime
) -> tuple[Number, Number]:
    """(dense, expert) weights of one rank; with two pipes it holds those of two stages."""
    model, layout = work.model, work.layout
    pipes = 1 / layout.pipe_share
    dense = (model.layers - model.moe_layers) * dense_layer + model.moe_layers * routed_layer
    tables = where((layout.pp > 1) & (pipes == 1), 1, 2 - model.tied)
    return (
        dense * pipes / layout.pp + tables * ends.weights,
        model.moe_layers * experts.expert_weights * pipes / layout.pp,
    )


def mirror_seconds(work: Workload, links: Links, dense: Number, expert: Number) -> Number:
    """The sum of the gradients that a rank owns with the other holder of its stages (two pipes),
    behind all other sums and with nothing beside it."""
    layout = work.layout
    # The outermost pair is the farthest apart.
    stride = layout.tp * layout.cp * layout.dp * maximum(layout.pp - 1, 1)
    size = _owned(work, dense, expert) * _GRADIENT_BYTES
    seconds = size / links.bandwidth(2, stride) + links.latency
    return where((layout.pipe_share < 1) & (layout.adapters == 0), seconds, 0)


def data_seconds(work: Workload, links: Links, dense: Number, expert: Number) -> Number:
    """Exposed gradient reduction and weight gathering of replicas that are not FSDP units."""
    layout, constants = work.layout, work.constants
    n_dense, n_expert = replicas(work)
    dense_rate, expert_rate = _replica_bandwidths(work, links)
    moved = (n_dense - 1) / n_dense * dense / dense_rate
    moved = moved + (n_expert - 1) / n_expert * expert / expert_rate
    gradients = moved * _GRADIENT_BYTES * constants.gradient_exposed
    weights = moved * _WEIGHT_BYTES * constants.weight_exposed
    plain = where(layout.zero == 0, 2 * gradients, gradients + weights)
    served = 0.0
    for psi, workers, rate in ((dense, n_dense, dense_rate), (expert, n_expert, expert_rate)):
        servers = minimum(layout.servers, workers)
        gradient, weight = psi * _GRADIENT_BYTES, psi * _WEIGHT_BYTES
        server = wire.parameter_server(gradient, weight, workers, servers)
        served = served + where(workers > 1, server.link / rate, 0)
    plain = where(layout.parameter_server == 1, served, plain)
    # Shards inside a group: scatter and gather stay there, shards are summed across groups.
    group = where(layout.zero_group > 0, layout.zero_group / layout.tp, n_dense)
    group = minimum(maximum(group, 1), n_dense)
    outside = maximum(n_dense / group, 1)
    spread = 1 + constants.network_contention * log2(outside)
    across = 2 * (outside - 1) / outside * dense / group * _GRADIENT_BYTES / links.inter * spread
    inside = dense * _GRADIENT_BYTES / links.intra + across
    grouped = inside * constants.gradient_exposed
    grouped = grouped + dense * _WEIGHT_BYTES / links.intra * constants.weight_exposed
    found = where((layout.zero_group > 0) & (outside > 1), grouped, plain)
    found = where((layout.fsdp == 1) | (n_dense <= 1) | (layout.adapters == 1), 0, found)
    if not len(links.table):
        return found
    return where(
        (layout.zero_group == 0) & (layout.parameter_server == 0),
        known(_measured(work, links, dense, expert), found),
        found,
    )


def _measured(work: Workload, links: Links, dense: Number, expert: Number) -> Number:
    """Gradients summed and weights gathered, by the table of links."""
    layout, constants = work.layout, work.constants
    found: Number = 0.0
    strides = (layout.tp, layout.ep * layout.etp)
    for psi, ranks, stride in zip((dense, expert), replicas(work), strides, strict=True):
        gradient, weight = psi * _GRADIENT_BYTES, psi * _WEIGHT_BYTES
        summed = links.measured("all_reduce", ranks, stride, gradient)
        scattered = links.measured("reduce_scatter", ranks, stride, gradient)
        gathered = links.measured("all_gather", ranks, stride, weight) * constants.weight_exposed
        sharded = scattered * constants.gradient_exposed + gathered
        seconds = where(layout.zero == 0, summed * constants.gradient_exposed, sharded)
        found = found + where((ranks > 1) & (psi > 0), seconds, 0)
    return found


def optimizer_seconds(work: Workload, dense: Number, expert: Number) -> Number:
    """The update of the weights that a rank owns."""
    own = _owned(work, dense, expert)
    return where(work.layout.adapters == 1, 0, own * OPTIMIZER_BYTES / work.hbm)


def _owned(work: Workload, dense: Number, expert: Number) -> Number:
    """Weights of a rank whose sums of gradients and optimizer states it keeps."""
    layout = work.layout
    n_dense, n_expert = replicas(work)
    group = where(layout.zero_group > 0, maximum(layout.zero_group / layout.tp, 1), n_dense)
    sharded = (layout.zero >= 1) | (layout.fsdp == 1)
    served = layout.parameter_server == 1
    alone = where(served, minimum(layout.servers, n_dense), 1)
    own = dense / where(sharded, minimum(group, n_dense), alone)
    alone = where(served, minimum(layout.servers, n_expert), 1)
    return own + expert / where(sharded, n_expert, alone)
