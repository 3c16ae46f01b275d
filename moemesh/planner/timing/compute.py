"""Time of one layer: matrix products, attention cores, element-wise traffic, its transfers.

A product of [M, K] and [K, N] does 2 M N K operations at

    peak x best efficiency / ((1 + r 64/M) (1 + n 64/N) (1 + n 64/K))

so that each of the three sides saturates by itself (r: `gemm_row_loss`, n: `gemm_width_loss`). r
grows with the peak, because a product with few rows is bound by reading its weights (the roofline
is balanced at M = peak / bandwidth rows). The M of a grouped product is the number of rows of one
expert. Kernels between products take their bytes over HBM bandwidth, each layer has a fixed cost
for kernels that are too short to hide their launch, and an attention core that writes its scores
takes time for their bytes. The backward costs two forwards (input and weight gradients), 2.5 to 3
in a flash core.

Letters: u tokens of a microbatch on a context rank, t, c, x the degrees tp, cp, etp, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moemesh.config.lora import NF4_BLOCK, NF4_BLOCK_BYTES
from moemesh.planner.arithmetic import Number, maximum, minimum, where
from moemesh.planner.timing.calibration import Constants
from moemesh.planner.timing.columns import (
    EAGER,
    FIRST_FLASH,
    FUSED,
    MASKED,
    HardwareColumns,
    LayoutColumns,
    ModelColumns,
)
from moemesh.planner.timing.links import Links, LinkTable, known, visited_nodes

#: Unit of a product's side length M, N or K in the formula of efficiency.
_TILE = 64
#: Peak (operations/s) of the device for which `gemm_row_loss` is stated.
_REFERENCE_PEAK = 312e12
#: Efficiency of attention cores that write their scores, as a share of that of products.
_MASKED_EFFICIENCY = 0.6
#: Share of the 16-bit peak that the router's product reaches.
_ROUTER_EFFICIENCY = 0.1
#: Bytes of a number of activations.
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class PricedStep:
    """One step's model, layout and hardware with the constants that price them; `table` overrides
    the closed forms of transfers."""

    model: ModelColumns
    layout: LayoutColumns
    hardware: HardwareColumns
    constants: Constants
    table: LinkTable = field(default_factory=LinkTable)

    @cached_property
    def links(self) -> Links:
        return Links.of(self.hardware, self.constants, self.table)

    @property
    def tokens(self) -> Number:
        """Tokens of a microbatch, or of a slice of it, before tp cuts them: u = b s / c."""
        return self.layout.microbatch * self.layout.seq_len / self.layout.cp / self.layout.slices

    @property
    def passes(self) -> Number:
        """Number of forwards of `tokens` that a stage runs in one step."""
        return self.layout.microbatches * self.layout.slices

    @property
    def sequence_shards(self) -> Number:
        """Parts of the residual stream: tp with sequence parallelism, else 1."""
        return where(self.layout.sequence_parallel == 1, self.layout.tp, 1)

    @property
    def hbm(self) -> Number:
        """Bytes per second that streaming kernels reach."""
        return self.hardware.memory_bandwidth * self.constants.memory_efficiency

    @property
    def gemm_efficiency(self) -> Number:
        """Best share of the peak of products in the layout's precision."""
        constants, width = self.constants, self.hardware.width
        narrow = where(width == 1, constants.gemm_efficiency_8bit, constants.gemm_efficiency)
        return where(width == 2, constants.gemm_efficiency_4bit, narrow)

    @cached_property
    def accumulate(self) -> Number:
        """Bytes per weight for accumulating gradients over microbatches."""
        is_none = (self.layout.fsdp == 1) | (self.layout.adapters == 1)
        return where(is_none, 0.0, self.constants.accumulate_bytes)

    @property
    def unpack(self) -> Number:
        """Bytes per weight of a base in NF4 in each pass: reads of its codes and scales, and writes
        of the 16-bit numbers for the products."""
        packed = NF4_BLOCK_BYTES / NF4_BLOCK + ACTIVATION_BYTES
        return where(self.layout.packed == 1, packed, 0.0)

    @property
    def load(self) -> Number:
        """Load of the most loaded expert rank over the mean."""
        natural = self.layout.natural_routing * self.constants.routing_imbalance
        return self.layout.imbalance + natural

    @property
    def kept_choices(self) -> Number:
        """Share of the choices that are kept at capacity."""
        capacity = self.layout.capacity_factor
        stated = where(capacity > 0, minimum(capacity, 1), 1)
        return where(self.layout.token_drop == 1, self.constants.capacity_kept, stated)


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Forward seconds of one block of one layer, and the number of its weights on a rank."""

    products: Number
    core: Number
    elementwise: Number
    weights: Number


def product_seconds(work: PricedStep, rows: Number, columns: Number, inner: Number) -> Number:
    """Seconds of a product in the layout's precision."""
    layout, hardware = work.layout, work.hardware
    narrow = hardware.peak * work.gemm_efficiency
    wide = hardware.peak_16bit * work.constants.gemm_efficiency
    rate = 1 / ((1 - layout.wide_share) / narrow + layout.wide_share / wide)
    return _product(work, rows, columns, inner, rate)


def _product(
    work: PricedStep, rows: Number, columns: Number, inner: Number, rate: Number
) -> Number:
    """Seconds of a product: at `rate` operations/s, multiplied by the losses of its three sides."""
    constants = work.constants
    row_loss = constants.gemm_row_loss * work.hardware.peak / _REFERENCE_PEAK
    loss = (
        (1 + row_loss * _TILE / maximum(rows, 1))
        * (1 + constants.gemm_width_loss * _TILE / maximum(columns, 1))
        * (1 + constants.gemm_width_loss * _TILE / maximum(inner, 1))
    )
    return 2 * rows * columns * inner / rate * loss


def mlp_seconds(work: PricedStep, rows: Number, width: Number) -> Number:
    """Seconds of the products of an MLP of `width`: (gate and) up in one, and down."""
    model = work.model
    first = product_seconds(work, rows, (model.mlp_matrices - 1) * width, model.hidden)
    return first + product_seconds(work, rows, model.hidden, width)


def quantize_bytes(work: PricedStep) -> Number:
    """Bytes per number and product for quantizing to 8 or 4 bit."""
    scales = where(work.layout.block_scales == 1, work.constants.block_scale_traffic, 1)
    return where(work.hardware.width > 0, work.constants.quantize_bytes * scales, 0)


def adapter_bytes(work: PricedStep, inner: Number, columns: Number) -> Number:
    """Bytes of the low-rank branch of products [M, `inner`] x [`inner`, `columns`], a third of
    those of forward and backward: the mean of three passes.

    The forward reads its input, writes its output and sums both outputs (inner + 4 columns). The
    backward reads the gradient of the output for either factor, and the input; it writes the
    gradient of the input and sums both (5 inner + 2 columns).
    """
    return work.layout.adapters * work.tokens * ACTIVATION_BYTES * 2 * (inner + columns)


def attended(work: PricedStep) -> Number:
    """Mean number of keys that a query is multiplied with: half the sequence, at most the window,
    if the kernel skips the upper triangle; all of the sequence if the scores are written."""
    layout, model = work.layout, work.model
    half = layout.seq_len / 2
    share = where(model.window > 0, model.window_share, 0)
    keys = share * minimum(maximum(model.window, 1), half) + (1 - share) * half
    keys = where(layout.window > 0, minimum(keys, 0.75 * layout.window), keys)
    return where(layout.kernel >= FUSED, layout.seq_len, keys)


def core_seconds(work: PricedStep) -> Number:
    """Forward seconds of the attention core of one layer."""
    model, layout, constants = work.model, work.layout, work.constants
    size = (model.query_dim + model.value_dim) / 2
    operations = 4 * work.tokens * attended(work) * model.heads * size / layout.tp
    flash = (
        constants.attention_efficiency
        * where(layout.kernel == FIRST_FLASH, constants.attention_first_flash, 1)
        * where(layout.native_kernel == 1, 1, constants.attention_foreign)
        * size
        / (size + constants.attention_head_loss)
        * layout.seq_len
        / (layout.seq_len + constants.attention_short_loss)
    )
    written = constants.gemm_efficiency * _MASKED_EFFICIENCY
    efficiency = where(layout.kernel >= FUSED, written, flash)
    score_bytes = where(
        layout.kernel == FUSED,
        constants.fused_score_bytes,
        where(
            layout.kernel == EAGER,
            constants.eager_score_bytes,
            where(layout.kernel == MASKED, constants.masked_score_bytes, 0.0),
        ),
    )
    scores = work.tokens * layout.seq_len * model.heads / layout.tp
    return operations / (work.hardware.peak_16bit * efficiency) + scores * score_bytes / work.hbm


def core_backward_factor(work: PricedStep) -> Number:
    """Ratio of backward to forward seconds of the core."""
    return where(work.layout.kernel >= FUSED, 2.0, work.constants.attention_backward)


def attention_weights(model: ModelColumns, t: Number = 1) -> Number:
    """Number of weights of one layer before its attention core, on one of `t` tensor ranks."""
    heads, query, value = model.heads, model.query_dim, model.value_dim
    low = model.query_rank + model.kv_rank + model.rotary_dim
    expanded = model.query_inner * query + model.kv_rank * (model.nope_dim + value)
    width = (heads * query + model.kv_heads * (query + value)) / t
    return where(model.latent == 1, model.hidden * low + expanded * heads / t, model.hidden * width)


def attention_block(work: PricedStep) -> BlockTime:
    """Norm, projections and core of one layer."""
    model, layout, constants = work.model, work.layout, work.constants
    u, t, hidden = work.tokens, layout.tp, model.hidden
    heads, query, value = model.heads, model.query_dim, model.value_dim
    low = model.query_rank + model.kv_rank + model.rotary_dim
    latent = (
        product_seconds(work, u, low, hidden) / work.sequence_shards
        + product_seconds(work, u, heads * query / t, model.query_inner)
        + product_seconds(work, u, heads * (model.nope_dim + value) / t, maximum(model.kv_rank, 1))
    )
    plain_width = (heads * query + model.kv_heads * (query + value)) / t
    plain = product_seconds(work, u, plain_width, hidden)
    products = where(model.latent == 1, latent, plain)
    products = products + product_seconds(work, u, hidden, heads * value / t)
    # Bytes per token and channel of norms and residuals.
    norms = 24 + where(layout.fused_norm == 1, 0, constants.unfused_norm_bytes)
    traffic = norms * u * hidden / work.sequence_shards
    traffic = traffic + (8 + quantize_bytes(work)) * u * heads * query / t
    adapted = adapter_bytes(work, 3 * hidden, plain_width)
    adapted = adapted + adapter_bytes(work, heads * value / t, hidden)
    alone = adapter_bytes(work, hidden, plain_width)  # queries, keys and values are one product
    traffic = traffic + where(layout.adapts_qkv_alone == 1, alone, adapted)
    return BlockTime(
        products=products * model.mixer_factor,
        core=core_seconds(work),
        elementwise=constants.elementwise_traffic * traffic / work.hbm,
        weights=(attention_weights(model, t) + hidden * heads * value / t) * model.mixer_factor,
    )


def mlp_block(work: PricedStep) -> BlockTime:
    """A dense MLP; zero if the model has none."""
    model, layout, constants = work.model, work.layout, work.constants
    u, hidden, width = work.tokens, model.hidden, model.mlp_width / layout.tp
    products = mlp_seconds(work, u, width)
    first = adapter_bytes(work, (model.mlp_matrices - 1) * hidden, 2 * width)
    adapted = (first + adapter_bytes(work, width, hidden)) * (1 - layout.adapts_qkv_alone)
    traffic = where(width > 0, (10 + quantize_bytes(work)) * u * width + adapted, 0)
    return BlockTime(
        products=where(width > 0, products, 0),
        core=0.0,
        elementwise=constants.elementwise_traffic * traffic / work.hbm,
        weights=model.mlp_matrices * hidden * width,
    )


@dataclass(frozen=True, kw_only=True)
class ExpertTime(BlockTime):
    """The expert block of one layer: the parts of its products, and its weights by replication.

    `overhead` is the time of launches and of waiting for counts, which is independent of sizes.
    """

    routed_products: Number
    shared_products: Number
    overhead: Number
    expert_weights: Number
    shared_weights: Number


#: Local experts up to which the host's time grows with their number. Runs with few experts launch a
#: product for each of them, grouped kernels launch once. Two of the published runs have more than
#: 32. A layer of 64 on an H200 took 3.7 ms (docs/results/gpu.md); growth up to 64 would mean 17.
_MOST_LAUNCHES = 32


def expert_block(work: PricedStep) -> ExpertTime:
    """Router, grouped products, shared experts, (un)permutation; zero without experts."""
    model, layout, constants = work.model, work.layout, work.constants
    u, t, hidden = work.tokens, layout.tp, model.hidden
    has_experts = where(model.experts > 0, 1, 0)
    local = maximum(model.experts / layout.ep, 1)
    # Rows at the experts of the most loaded rank do not depend on ep.
    rows = u / t * model.top_k * layout.etp * work.load * work.kept_choices
    width = maximum(model.expert_width, 1) / layout.etp
    grouped = local * mlp_seconds(work, rows / local, width)
    router = 2 * u / t * hidden * model.experts / (work.hardware.peak_16bit * _ROUTER_EFFICIENCY)
    shared_width = model.shared_width / t
    shared = mlp_seconds(work, u, shared_width)
    quantized = quantize_bytes(work)
    traffic = (
        (constants.permute_bytes + quantized) * u / t * model.top_k * hidden
        + (10 + quantized) * (rows * width + u * shared_width)
        + 16 * u / t * model.experts
    )
    remaining = where(layout.graphs == 1, constants.graph_overhead, 1)
    remaining = remaining * where(layout.token_drop == 1, constants.capacity_overhead, 1)
    launched = minimum(local, _MOST_LAUNCHES)
    overhead = constants.expert_overhead_us * 1e-6 * (1 + launched / 16) * remaining
    routed = has_experts * (grouped + router)
    shared = has_experts * where(shared_width > 0, shared, 0)
    matrices = has_experts * model.mlp_matrices * hidden
    expert_weights = matrices * model.expert_width * local / layout.etp
    return ExpertTime(
        products=routed + shared,
        core=0.0,
        elementwise=has_experts * constants.elementwise_traffic * traffic / work.hbm,
        weights=expert_weights + matrices * shared_width,
        routed_products=routed,
        shared_products=shared,
        overhead=has_experts * overhead,
        expert_weights=expert_weights,
        shared_weights=matrices * shared_width,
    )


@dataclass(frozen=True, kw_only=True)
class EndTime:
    """Seconds per microbatch of embedding and head, forward and backward, of the head's forward and
    of its weight gradient."""

    embedding: Number
    head: Number
    head_forward: Number
    head_weight_gradient: Number
    #: Number of weights of the table (or of the head) on a rank.
    weights: Number


def model_ends(work: PricedStep) -> EndTime:
    """Embedding, and head with its loss."""
    model, layout, constants = work.model, work.layout, work.constants
    u, width = work.tokens, model.vocab / layout.tp
    traffic = constants.elementwise_traffic / work.hbm
    weights = model.hidden * width
    rate = work.hardware.peak_16bit * constants.gemm_efficiency  # the head stays in 16 bit
    product = _product(work, u, width, model.hidden, rate)
    summed, loss = weights * work.accumulate / work.hbm, 16 * u * width * traffic
    later = where(layout.adapters == 1, 0, product) + summed
    return EndTime(
        embedding=8 * u * model.hidden * traffic,
        head=2 * product + loss + later,
        head_forward=product + loss / 2,
        head_weight_gradient=later,
        weights=weights,
    )


# Time of one layer: its computation with the transfers of its own forward and backward.


class LayerTransfers(NamedTuple):
    """Seconds of each transfer of one layer's forward: entry and exit of one block, the exchange of
    keys and values, one exchange of rows, gather and scatter of ETP."""

    tensor: Number
    context: Number
    exchange: Number
    expert_tensor: Number


class LayerTime(NamedTuple):
    """Forward and backward seconds of one layer. The backward includes recomputation;
    `weight_gradient` is the part of it that may be deferred. `waiting` is the part of both in which
    the device waits for the host."""

    forward: Number
    backward: Number
    weight_gradient: Number
    waiting: Number = 0.0


def layer_transfers(work: PricedStep) -> LayerTransfers:
    """Seconds of a layer's transfers, those with a measured collective from the table."""
    model, layout, constants, links = work.model, work.layout, work.constants, work.links
    t, c, u = layout.tp, layout.cp, work.tokens
    stream = u * model.hidden * ACTIVATION_BYTES
    tensor = 2 * (t - 1) / t * stream / links.bandwidth(t, 1) + 2 * links.latency
    pair, reduced = links.measured_pair(t, 1, stream), links.measured("all_reduce", t, 1, stream)
    tensor = known(where(layout.sequence_parallel == 1, pair, reduced), where(t > 1, tensor, 0))
    kv_heads = where(model.latent == 1, model.heads, model.kv_heads)
    keys = u * c * kv_heads * (model.query_dim + model.value_dim) * ACTIVATION_BYTES / t
    # Ulysses sends a rank's queries, keys, values and outputs, exposed; a ring sends all keys and
    # values, of which products hide a share.
    exchanged = 2 * u * (model.heads + model.kv_heads) * model.value_dim * ACTIVATION_BYTES / t
    is_ulysses = layout.context_exchange == 1
    moved = where(is_ulysses, exchanged, keys * constants.context_exposed)
    context = where(c > 1, (c - 1) / c * moved / links.bandwidth(c, t), 0)
    gathered = links.measured("all_gather", c, t, keys) * constants.context_exposed
    context = known(where(is_ulysses, np.nan, gathered), context)
    exchange, expert_tensor = _expert_transfers(work)
    return LayerTransfers(
        tensor=tensor
        * _attention_share(work)
        * where(layout.overlapped_tensor == 1, constants.overlapped_tensor_exposed, 1),
        context=context,
        exchange=exchange,
        expert_tensor=expert_tensor,
    )


def _expert_transfers(work: PricedStep) -> tuple[Number, Number]:
    """Seconds of a dispatch or combine (their mean, if they differ), and of the pair of gather and
    scatter of ETP."""
    model, layout, links, x = work.model, work.layout, work.links, work.layout.etp
    once = work.tokens / layout.tp * model.hidden * ACTIVATION_BYTES  # bytes: each token once
    nodes = maximum(layout.ep * x / work.hardware.node_size, 1)
    gathers, chosen = layout.gathered == 1, model.top_k * work.kept_choices
    # Rows sent for a token, one for each choice. Slots hold at most every token once for each
    # expert of a rank.
    most = layout.ep * minimum(model.top_k, model.experts / layout.ep)
    fixed = where(layout.slots > 0, minimum(chosen * layout.slots, most), chosen)

    def visited(places: Number) -> Number:
        """Places with an expert of a token, on average."""
        return visited_nodes(model.experts, model.top_k, places, model.groups, model.groups_kept)

    def copies(places: Number) -> Number:
        """Copies of a token sent to other places: one for every choice, or one for every place. A
        gather brings it to all places, and the results of the ranks with its experts come back."""
        gathered = (places + visited(layout.ep) * x) / 2
        sent = where(gathers, gathered, where(layout.deduplicated == 1, visited(places), fixed))
        return sent * (places - 1) / places

    holders = where(gathers, layout.ep * x, layout.ep)
    # Closed form: the slower of the part across nodes and the part inside a node.
    across = once * copies(nodes)
    inside = once * copies(holders) * where(gathers | (layout.slots > 0), 1, work.load)
    exchange = maximum(across / links.network(nodes), inside / links.intra) + 2 * links.latency
    has_experts = model.experts > 0
    exchange = where((holders > 1) & has_experts, exchange, 0)
    # Measured, except for a node-aware exchange across nodes (several operations).
    per_token = where(layout.deduplicated == 1, visited(layout.ep), model.top_k)
    rows = where(layout.slots > 0, once * fixed, once * per_token * work.load)
    measured = links.measured("all_to_all", layout.ep, x, rows)
    measured = where(gathers, links.measured_pair(holders, 1, holders * once) / 2, measured)
    is_relayed = (layout.deduplicated == 1) & (nodes > 1)
    exchange = known(where(is_relayed, np.nan, measured), exchange)
    share = where(layout.overlapped_exchange == 1, work.constants.overlapped_exchange_exposed, 1)
    per_token = where(layout.deduplicated == 1, visited(layout.ep), fixed)
    pair = 2 * (x - 1) * once * per_token / links.bandwidth(x, 1)
    pair = known(links.measured_pair(x, 1, x * once * model.top_k), pair)
    return exchange * share, where((x > 1) & has_experts & (layout.gathered == 0), pair, 0)


def _attention_share(work: PricedStep) -> Number:
    """Ratio of a layer's tensor-parallel traffic to that of two blocks with the stream as input.

    Both blocks have an entry and an exit, each a collective of (t-1)/t u h. The input of latent
    attention are its latents, of width r_q + r_kv + d_r instead of h. An all-to-all exit moves
    A/(h t) of a collective (A is the attention's width).
    """
    model, layout = work.model, work.layout
    latent = model.query_inner + model.kv_rank + model.rotary_dim
    is_latent = (model.latent == 1) & (layout.sequence_parallel == 1)
    entry = where(is_latent, latent / model.hidden, 1)
    moved = model.heads * model.value_dim / (model.hidden * layout.tp)
    return (2 + entry + where(layout.all_to_all_exit == 1, moved, 1)) / 4


#: Exponent of the soft maximum of device and host time: 1 is their sum, infinity the maximum.
_SHARPNESS = 2


def longer(device: Number, host: Number) -> Number:
    """Soft maximum of the seconds of a device and of the host that feeds it.

    With few tokens, launches and the exchange of counts determine the time of an MoE layer; with
    many tokens they are hidden. Measured on one device with 1, 4 and 8 sequences a microbatch.
    """
    return (device**_SHARPNESS + host**_SHARPNESS) ** (1 / _SHARPNESS)


def regathered_share(work: PricedStep) -> Number:
    """Exposed share of the gather of a block's input in the backward. Weight gradients need it
    under sequence parallelism; frozen weights have none."""
    layout = work.layout
    trains = layout.sequence_parallel * where(layout.adapters == 1, 0, 1)
    return trains * work.constants.sequence_parallel_regather


def _block_time(
    work: PricedStep, block: BlockTime, forward: Number, backward: Number, extra: Number = 0.0
) -> LayerTime:
    """A block with the seconds of its transfers, `forward` and `backward`, and of selective
    recomputation: its norms and activations, and `extra`."""
    layout, products = work.layout, block.products
    unpacked = block.weights * work.unpack / work.hbm
    accumulated = block.weights * work.accumulate / work.hbm
    weight_gradient = where(layout.adapters == 1, 0, products) + accumulated
    core_backward = core_backward_factor(work) * block.core
    recomputed = layout.recompute_norm * block.elementwise / 2 + extra
    forward = products + block.core + block.elementwise + unpacked + forward
    computed = products + weight_gradient + core_backward + 2 * block.elementwise
    return LayerTime(forward, computed + unpacked + backward + recomputed, weight_gradient)


def layer_times(
    work: PricedStep,
    attention: BlockTime,
    mlp: BlockTime,
    experts: ExpertTime,
    transfers: LayerTransfers,
) -> tuple[LayerTime, LayerTime]:
    """Times of a dense layer and of a layer with experts."""
    model, layout, constants = work.model, work.layout, work.constants
    fixed = constants.layer_overhead_us * 1e-6
    tensor = transfers.tensor
    tensor_backward = tensor * (1 + regathered_share(work))
    first = _block_time(
        work,
        attention,
        tensor + transfers.context + fixed,
        tensor_backward + 2 * transfers.context + 2 * fixed,
        where(layout.kernel >= FUSED, layout.recompute_attention * attention.core, 0)
        + layout.recompute_products * attention.products,
    )
    # In a parallel block the MLP shares the transfers of attention.
    is_parallel = layout.parallel_block == 1
    dense = _block_time(
        work,
        mlp,
        where(is_parallel, 0, tensor),
        where(is_parallel, 0, tensor_backward),
        layout.recompute_products * mlp.products,
    )
    shared_tensor = where(model.shared_width > 0, tensor, 0)
    moved = 2 * transfers.exchange + transfers.expert_tensor + shared_tensor
    recomputed = layout.recompute_moe * (experts.products + experts.elementwise + moved)
    shared_share = maximum(layout.recompute_shared, layout.recompute_products)
    recomputed = recomputed + shared_share * experts.shared_products
    # All products of an expert but the last; the few FLOPs of the router are counted with them.
    first_products = (model.mlp_matrices - 1) / model.mlp_matrices * experts.routed_products
    recomputed = recomputed + layout.recompute_experts * first_products
    routed = _block_time(work, experts, moved, moved, recomputed)
    layers: list[LayerTime] = []
    for second in (dense, routed):
        forward = first.forward + second.forward
        backward = first.backward + second.backward + layout.recompute_full * forward
        layers.append(LayerTime(forward, backward, first.weight_gradient + second.weight_gradient))
    dense_layer, routed_layer = layers
    forward = longer(routed_layer.forward, experts.overhead)
    weights = routed_layer.weight_gradient
    backward = longer(routed_layer.backward, (2 + layout.recompute_full) * experts.overhead)
    # A schedule that defers weight gradients has two passes, each with its launches. One soft
    # maximum of both would lengthen input gradients as weight gradients get faster.
    inputs = longer(routed_layer.backward - weights, (1 + layout.recompute_full) * experts.overhead)
    deferred = longer(weights, experts.overhead)
    is_split = layout.splits_backward == 1
    backward = where(is_split, inputs + deferred, backward)
    weights = where(is_split, deferred, weights)
    waiting = forward + backward - routed_layer.forward - routed_layer.backward
    return dense_layer, LayerTime(forward, backward, weights, waiting)
