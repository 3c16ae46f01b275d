"""Time of one layer: its computation with the transfers of its own forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moemesh.planner.arithmetic import Number, maximum, where
from moemesh.planner.timing.compute import BlockTime, ExpertTime, PricedStep, core_backward_factor
from moemesh.planner.timing.links import Links, known
from moemesh.planner.timing.network import visited_nodes

ACTIVATION_BYTES = 2


class LayerTransfers(NamedTuple):
    """Seconds of the transfers of one layer's forward (one all-reduce, one exchange, ...)."""

    tensor: Number
    context: Number
    exchange: Number
    expert_tensor: Number


class LayerTime(NamedTuple):
    """One layer: forward and backward seconds, what is computed again in the backward with them;
    `weight_gradient` is the part of the backward that may be put off, `waiting` the part of both in
    which the device waits for the host."""

    forward: Number
    backward: Number
    weight_gradient: Number
    waiting: Number = 0.0


def layer_transfers(work: PricedStep, links: Links) -> LayerTransfers:
    """One all-reduce (or gather and scatter), one context exchange, one dispatch, one ETP pair."""
    model, layout, constants = work.model, work.layout, work.constants
    t, c, u = layout.tp, layout.cp, work.tokens
    size = work.hardware.node_size
    stream = u * model.hidden * ACTIVATION_BYTES
    tensor = 2 * (t - 1) / t * stream / links.bandwidth(t, 1) + 2 * links.latency
    pair, whole = links.measured_pair(t, 1, stream), links.measured("all_reduce", t, 1, stream)
    tensor = known(where(layout.sequence_parallel == 1, pair, whole), where(t > 1, tensor, 0))
    keys = u * c * model.kv_heads * (model.query_dim + model.value_dim) * ACTIVATION_BYTES / t
    latent_keys = u * c * model.heads * (model.query_dim + model.value_dim) * ACTIVATION_BYTES / t
    keys = where(model.latent == 1, latent_keys, keys)
    context = where(c > 1, (c - 1) / c * keys / links.bandwidth(c, t), 0)
    context = known(links.measured("all_gather", c, t, keys), context)
    once = u / t * model.hidden * ACTIVATION_BYTES
    rows = once * model.top_k * work.kept_choices
    nodes = maximum(layout.ep * layout.etp / size, 1)

    def copies(places: Number) -> Number:
        """Places of a token's experts: every choice is sent, or every place once."""
        visited = visited_nodes(model.experts, model.top_k, places, model.groups, model.groups_kept)
        sent = where(layout.deduplicated == 1, visited, model.top_k * work.kept_choices)
        return sent * (places - 1) / places

    across = once * copies(nodes)
    inside = once * copies(layout.ep) * work.load
    exchange = maximum(across / links.inter, inside / links.intra) + 2 * links.latency
    has = model.experts > 0
    exchange = where((layout.ep > 1) & has, exchange, 0)
    routed = once * model.top_k
    counted = links.measured("all_to_all", layout.ep, layout.etp, routed * work.load)
    exchange = known(where(layout.deduplicated == 1, np.nan, counted), exchange)
    share = where(layout.overlapped_exchange == 1, constants.overlapped_exchange_exposed, 1)
    x = layout.etp
    expert_tensor = where((x > 1) & has, 2 * (x - 1) * rows / links.bandwidth(x, 1), 0)
    return LayerTransfers(
        tensor=tensor * _attention_share(work),
        context=context * constants.context_exposed,
        exchange=exchange * share,
        expert_tensor=known(links.measured_pair(x, 1, x * routed), expert_tensor),
    )


def _attention_share(work: PricedStep) -> Number:
    """Tensor-parallel traffic of a layer, over that of two blocks which the stream enters whole.

    A layer enters and leaves two blocks, each a collective of (t-1)/t u h. Into latent attention go
    its latents, r_q + r_kv + d_r wide in place of h; its exit, where it is an all-to-all, moves
    A/(h t) of one (A the attention's width).
    """
    model, layout = work.model, work.layout
    latent = model.query_inner + model.kv_rank + model.rotary_dim
    is_latent = (model.latent == 1) & (layout.sequence_parallel == 1)
    entry = where(is_latent, latent / model.hidden, 1)
    moved = model.heads * model.value_dim / (model.hidden * layout.tp)
    return (2 + entry + where(layout.all_to_all_exit == 1, moved, 1)) / 4


#: How sharply the longer of device and host wins: 1 adds them up, infinity is the maximum.
_SHARPNESS = 2


def longer(device: Number, host: Number) -> Number:
    """Seconds of a device and of the host that feeds it: the longer of both, softly.

    An MoE layer of few tokens takes as long as its launches and the exchange of counts; one with
    many hides them. Measured on one device with 1, 4 and 8 sequences a microbatch.
    """
    return (device**_SHARPNESS + host**_SHARPNESS) ** (1 / _SHARPNESS)


def _backward_tensor(work: PricedStep, transfers: LayerTransfers) -> Number:
    """Backward traffic of one tensor-parallel block: with SP it gathers its input again."""
    regather = work.layout.sequence_parallel * work.constants.sequence_parallel_regather
    return transfers.tensor * (1 + regather)


def _attention_part(
    work: PricedStep, block: BlockTime, transfers: LayerTransfers, accumulate: Number
) -> LayerTime:
    layout, constants = work.layout, work.constants
    fixed = constants.layer_overhead_us * 1e-6
    passes = where(layout.adapters == 1, 1, 2)
    forward = block.products + block.core + block.elementwise + transfers.tensor
    forward = forward + transfers.context + fixed
    backward = passes * block.products + core_backward_factor(work) * block.core
    backward = backward + 2 * block.elementwise + _backward_tensor(work, transfers)
    backward = backward + 2 * transfers.context + 2 * fixed + block.weights * accumulate / work.hbm
    again = layout.again_norm * block.elementwise / 2
    again = again + where(layout.kernel >= 2, layout.again_attention * block.core, 0)
    return LayerTime(
        forward, backward + again, _weight_gradient(work, block.products, block.weights, accumulate)
    )


def _weight_gradient(
    work: PricedStep, products: Number, weights: Number, accumulate: Number
) -> Number:
    """Weight gradients of products: as many operations again, and the sum of gradients."""
    return where(work.layout.adapters == 1, 0, products) + weights * accumulate / work.hbm


def dense_layer(
    work: PricedStep,
    attention: BlockTime,
    mlp: BlockTime,
    transfers: LayerTransfers,
    accumulate: Number,
) -> LayerTime:
    layout = work.layout
    first = _attention_part(work, attention, transfers, accumulate)
    passes = where(layout.adapters == 1, 1, 2)
    tensor = where(layout.parallel_block == 1, 0, transfers.tensor)
    back = where(layout.parallel_block == 1, 0, _backward_tensor(work, transfers))
    forward = mlp.products + mlp.elementwise + tensor
    backward = passes * mlp.products + 2 * mlp.elementwise + back
    backward = backward + mlp.weights * accumulate / work.hbm
    backward = backward + layout.again_norm * mlp.elementwise / 2
    whole = first.forward + forward
    back = first.backward + backward + layout.again_full * whole
    later = _weight_gradient(work, mlp.products, mlp.weights, accumulate)
    return LayerTime(whole, back, first.weight_gradient + later)


def routed_layer(
    work: PricedStep,
    attention: BlockTime,
    experts: ExpertTime,
    transfers: LayerTransfers,
    accumulate: Number,
) -> LayerTime:
    layout = work.layout
    first = _attention_part(work, attention, transfers, accumulate)
    passes = where(layout.adapters == 1, 1, 2)
    shared_tensor = where(work.model.shared_width > 0, transfers.tensor, 0)
    moved = 2 * transfers.exchange + transfers.expert_tensor + shared_tensor
    products = experts.products + experts.shared_products
    forward = products + experts.elementwise + moved
    backward = passes * products + 2 * experts.elementwise + moved
    weights = experts.expert_weights + experts.shared_weights
    backward = backward + weights * accumulate / work.hbm
    again = layout.again_moe * forward + layout.again_norm * experts.elementwise / 2
    again = again + layout.again_shared * experts.shared_products
    # All products of an expert but the last; the few FLOPs of the router are counted with them.
    first_products = (work.model.mlp_matrices - 1) / work.model.mlp_matrices * experts.products
    again = again + layout.again_experts * first_products
    ahead = first.forward + forward
    back = first.backward + backward + again + layout.again_full * ahead
    host = experts.overhead
    whole = longer(ahead, host)
    behind = longer(back, (2 + layout.again_full) * host)
    later = _weight_gradient(work, products, weights, accumulate)
    return LayerTime(whole, behind, first.weight_gradient + later, whole + behind - ahead - back)
