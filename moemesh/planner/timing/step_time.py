"""Seconds of one training step: the layers of each stage, the pipeline, gradients, the optimizer.

    step = m x slowest stage + fill + exposed gradient traffic + optimizer + fixed

    stage = layers x (forward + backward + what is computed again) + its end of the model + sends
    fill  = (all stages once - slowest) / v        v chunks a rank; 0 without a pipeline

The closed form is exact for equal stages under GPipe, 1F1B and interleaving (bubble (p-1)(F+B)/v;
arXiv:2104.04473) and a good approximation with an embedding, a head or unequal layers; a caller
that wants more passes `pipeline_seconds`, a function of stage times such as a schedule simulation.
Zero-bubble and DualPipe schedules shorten the fill by their own closed form (`fill_share` of
:mod:`moemesh.planner.timing.columns`).

Every formula takes floats or numpy arrays, one entry per layout, so that a search prices a million
layouts in a call. Two lower bounds are true bounds of this model for any layout: `compute_floor`
(operations at best efficiency, no bubble, no traffic) and any single term of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from moemesh.planner.timing.arithmetic import (
    Number,
    ceil,
    floor,
    maximum,
    minimum,
    where,
)
from moemesh.planner.timing.columns import HardwareColumns, LayoutColumns, ModelColumns
from moemesh.planner.timing.compute import (
    BlockTime,
    EndTime,
    ExpertTime,
    Workload,
    attended,
    attention_block,
    core_backward_factor,
    expert_block,
    mlp_block,
    model_ends,
)
from moemesh.planner.timing.constants import Constants
from moemesh.planner.timing.data_time import (
    data_seconds,
    optimizer_seconds,
    rank_weights,
    sharded_unit,
)
from moemesh.planner.timing.layer_time import (
    ACTIVATION_BYTES,
    LayerTransfers,
    Links,
    dense_layer,
    layer_transfers,
    routed_layer,
)

#: (slowest stage, first stage, last stage, microbatches) -> seconds of the pipeline.
PipelineSeconds = Callable[[Number, Number, Number, Number], Number]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, and what they consist of (on the rank that holds the slowest stage).

    `compute` are matrix products, `attention` its cores, `elementwise` memory-bound kernels with
    the gradient accumulation, `launches` fixed costs, `head` the slower end of the model;
    `tensor`, `context`, `experts`, `pipeline`, `data` exposed transfers by axis; `bubble` waiting.
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
        return {
            item.name: float(np.ravel(getattr(self, item.name))[index]) for item in fields(self)
        }


def step_time(
    model: ModelColumns,
    layout: LayoutColumns,
    hardware: HardwareColumns,
    constants: Constants,
    pipeline_seconds: PipelineSeconds | None = None,
) -> StepTime:
    """The time of one step of every row."""
    work = Workload(model=model, layout=layout, hardware=hardware, constants=constants)
    links = Links(
        intra=hardware.intra * constants.intra_node_efficiency,
        inter=hardware.inter * constants.inter_node_efficiency,
        latency=constants.collective_latency_us * 1e-6,
    )
    attention, mlp, experts = attention_block(work), mlp_block(work), expert_block(work)
    accumulate = where((layout.fsdp == 1) | (layout.adapters == 1), 0.0, constants.accumulate_bytes)
    ends = model_ends(work, accumulate)
    transfers = layer_transfers(work, links)
    dense = dense_layer(work, attention, mlp, transfers, accumulate)
    routed = routed_layer(work, attention, experts, transfers, accumulate)
    dense_weights = attention.weights + mlp.weights
    routed_weights = attention.weights + experts.shared_weights
    dense = sharded_unit(work, links, dense, dense_weights, 0.0)
    routed = sharded_unit(work, links, routed, routed_weights, experts.expert_weights)
    num_dense = model.layers - model.moe_layers
    body = num_dense * (dense.forward + dense.backward)
    body = body + model.moe_layers * (routed.forward + routed.backward)

    send = _stage_send(work, links)
    one_layer = body / model.layers
    own = where(model.experts > 0, routed_weights + experts.expert_weights, dense_weights)
    stages = _stage_times(work, one_layer, ends, send, own)
    m = layout.microbatches
    once = body + ends.head + ends.embedding + send * (layout.pp - 0.5)
    fill = where(
        layout.pp > 1,
        maximum(once - stages.slowest, 0)
        * layout.fill_share
        / layout.stages_per_rank
        * constants.fill_slowdown,
        0.0,
    )
    startup = where(
        (layout.pp > 1) & (layout.slow_startup == 1),
        constants.startup_microbatches * stages.slowest,
        0.0,
    )
    if pipeline_seconds is None:
        piped = m * stages.slowest + fill + startup
    else:
        piped = pipeline_seconds(stages.slowest, stages.first, stages.last, m) + startup
    weights = rank_weights(work, dense_weights, routed_weights, experts, ends)
    data = data_seconds(work, links, *weights)
    optimizer = optimizer_seconds(work, *weights)
    total = piped + data + optimizer + constants.step_overhead_ms * 1e-3
    count = m * model.layers / layout.pp
    per_rank = _Breakdown(count=count, dense_share=num_dense / model.layers, waiting=routed.waiting)
    return per_rank.result(
        work, total, piped, stages, (attention, mlp, experts), transfers, accumulate, ends,
        send, data, optimizer,
    )  # fmt: skip


def compute_floor(
    model: ModelColumns,
    layout: LayoutColumns,
    hardware: HardwareColumns,
    constants: Constants,
) -> Number:
    """Seconds that no layout of so many devices undercuts: the step's operations, nothing computed
    twice, at the best efficiency of the widest products, spread evenly over all devices."""
    work = Workload(model=model, layout=layout, hardware=hardware, constants=constants)
    best = maximum(
        where(layout.precision == 2, constants.gemm_efficiency_4bit, 0),
        where(
            layout.precision == 1,
            constants.gemm_efficiency_8bit,
            where(layout.precision == 0, constants.gemm_efficiency, 0),
        ),
    )
    heads = model.heads
    latent = (
        model.hidden * (model.query_rank + model.kv_rank + model.rotary_dim)
        + (model.query_rank * model.query_dim) * heads
        + model.kv_rank * (model.nope_dim + model.value_dim) * heads
    )
    plain = model.hidden * (
        heads * model.query_dim + model.kv_heads * (model.query_dim + model.value_dim)
    )
    attention = where(model.latent == 1, latent, plain) + model.hidden * heads * model.value_dim
    gated = model.mlp_matrices * model.hidden
    per_layer = attention * model.layers
    per_layer = per_layer + (model.layers - model.moe_layers) * gated * model.mlp_width
    per_layer = per_layer + model.moe_layers * gated * (
        model.top_k * model.expert_width + model.shared_width
    )
    passes = where(layout.adapters == 1, 2.0, 3.0)
    tokens = layout.microbatch * layout.seq_len / layout.cp * layout.microbatches
    products = 2 * passes * tokens * per_layer / (hardware.peak * best)
    head = 6 * tokens * model.hidden * model.vocab
    head = head / (hardware.peak_16bit * constants.gemm_efficiency)
    core = (
        4 * tokens * attended(work) * heads * (model.query_dim + model.value_dim) / 2 * model.layers
    )
    core = core * (1 + core_backward_factor(work)) / hardware.peak_16bit
    return (products + head + core) / (layout.tp * layout.pp)


def _stage_send(work: Workload, links: Links) -> Number:
    """Exposed sends of one microbatch at one stage, forward and backward, all chunks."""
    layout = work.layout
    cut = where((layout.sequence_parallel == 1) | (layout.scatter_gather == 1), layout.tp, 1)
    size = work.tokens * work.model.hidden * ACTIVATION_BYTES / cut
    stage_ranks = layout.tp * layout.cp * layout.dp
    rate = where(stage_ranks < work.hardware.node_size, links.intra, links.inter)
    once = size / rate * work.constants.pipeline_exposed + links.latency
    return where(layout.pp > 1, 2 * layout.stages_per_rank * once, 0)


class _Stages(NamedTuple):
    slowest: Number
    first: Number
    last: Number
    #: Layers and end time of the slowest stage.
    layers: Number
    end: Number


def _stage_times(
    work: Workload, layer: Number, ends: EndTime, send: Number, layer_weights: Number
) -> _Stages:
    """Seconds of one microbatch at the first, a middle and the last stage, and the slowest."""
    model, layout = work.model, work.layout
    p, layers = layout.pp, model.layers
    share = ends.weights / maximum(layer_weights, 1)
    share = where(model.experts > 0, minimum(share, ends.head / layer), share)
    outer, inner = balanced_layers(layers, p, share)
    outer = where(layout.balanced_stages == 1, outer, layers / p)
    inner = where(layout.balanced_stages == 1, inner, layers / p)
    whole = layers * layer + ends.head + ends.embedding
    first = where(p > 1, outer * layer + ends.embedding + send, whole)
    middle = where(p > 2, inner * layer + send, 0)
    last = where(p > 1, outer * layer + ends.head + send / 2, whole)
    slowest = maximum(maximum(first, last), middle)
    slowest = where(p > 1, slowest, whole)
    at_last = last >= maximum(first, middle)
    count = where(at_last, outer, where(p > 2, inner, outer))
    return _Stages(slowest, first, last, where(p > 1, count, layers), where(at_last, 1, 0))


def balanced_layers(layers: Number, stages: Number, end_share: Number) -> tuple[Number, Number]:
    """Layers of an outer and of an inner stage when the heaviest stage is as light as it can be.

    `end_share` is the weight of the embedding, and of the head, in layers. Whole layers only: with
    a capacity C per stage the outer stages hold ⌊C - share⌋, the inner ones ⌊C⌋; C is the smallest
    that holds all (it is an integer or an integer plus the share's fraction).
    """
    tiny = 1e-9
    capacity: Number = np.full(np.broadcast(layers, stages, end_share).shape, np.inf)
    base = floor((layers + 2 * end_share) / stages)
    for offset in (-2, -1, 0, 1, 2):
        for fraction in (0.0, 1.0):
            tried = base + offset + fraction * (end_share - floor(end_share))
            held = 2 * maximum(floor(tried - end_share + tiny), 0)
            held = held + (stages - 2) * floor(tried + tiny)
            capacity = where(held >= layers, minimum(capacity, tried), capacity)
    outer = maximum(floor(capacity - end_share + tiny), 0)
    outer = where(stages <= 2, layers / stages, outer)
    most = ceil((layers - 2 * outer) / maximum(stages - 2, 1))
    inner = minimum(floor(where(np.isfinite(capacity), capacity, most) + tiny), most)
    return outer, where(stages > 2, inner, layers / stages)


@dataclass(frozen=True, kw_only=True)
class _Breakdown:
    """How often a rank runs a layer in a step, which share of its layers is dense, and how long
    an MoE layer waits for the host."""

    count: Number
    dense_share: Number
    waiting: Number

    def result(
        self,
        work: Workload,
        total: Number,
        piped: Number,
        stages: _Stages,
        blocks: tuple[BlockTime, BlockTime, ExpertTime],
        transfers: LayerTransfers,
        accumulate: Number,
        ends: EndTime,
        send: Number,
        data: Number,
        optimizer: Number,
    ) -> StepTime:
        """The step in parts; waiting is what none of the others explains."""
        attention, mlp, experts = blocks
        dense, routed = self.dense_share, 1 - self.dense_share
        m, count = work.layout.microbatches, self.count
        passes = where(work.layout.adapters == 1, 2, 3) + work.layout.again_full
        products = attention.products + dense * mlp.products
        products = products + routed * (experts.products + experts.shared_products)
        moved = attention.elementwise + dense * mlp.elementwise + routed * experts.elementwise
        weights = attention.weights + dense * mlp.weights
        weights = weights + routed * (experts.expert_weights + experts.shared_weights)
        core = 1 + core_backward_factor(work) + work.layout.again_full
        launches = 3 * work.constants.layer_overhead_us * 1e-6 + routed * self.waiting
        halves = 2 - where(work.layout.parallel_block == 1, dense, 0)
        twice = 2 + work.layout.again_full
        parts = {
            "compute": count * passes * products,
            "attention": count * core * attention.core,
            "elementwise": count * ((3 + work.layout.again_full) * moved)
            + count * weights * accumulate / work.hbm,
            "launches": count * launches + work.constants.step_overhead_ms * 1e-3,
            "head": m * where(work.layout.pp > 1, stages.end, 1) * ends.head,
            "tensor": count * twice * halves * transfers.tensor,
            "context": count * 3 * transfers.context,
            "experts": count
            * routed
            * (4 * transfers.exchange + 2 * transfers.expert_tensor)
            * (1 + work.layout.again_full / 2),
            "pipeline": m * send,
            "data": data + 0.0 * total,
            "optimizer": optimizer,
        }
        bubble = total
        for seconds in parts.values():
            bubble = bubble - seconds
        # FSDP units that wait for their weights: traffic, not waiting for another stage.
        waiting = maximum(bubble, 0)
        is_units = work.layout.fsdp == 1
        parts["data"] = parts["data"] + where(is_units, waiting, 0)
        return StepTime(total=total, bubble=where(is_units, 0, waiting), **parts)
