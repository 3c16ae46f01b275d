"""Step times with measured collectives: a cluster's link table in place of the closed forms.

| transfer of the time model | measured operation | bytes | group |
|---|---|---|---|
| tensor, with sequence parallelism | all-gather and reduce-scatter | u h w | tp |
| tensor, without | all-reduce | u h w | tp |
| context | all-gather of keys and values | s b (h_k + h_v) w / t | cp |
| expert exchange (not the node-aware one) | all-to-all | k u/t h w | ep |
| expert tensor | all-gather and reduce-scatter | x k u/t h w | etp |
| gradients, weights | all-reduce, or reduce-scatter and all-gather | 4 Psi, 2 Psi | dp_cp, edp |
| stage to stage | send | u h w, / t where cut | 2 ranks |

A group is looked up by its ranks and by how many of them share a node. What was not measured keeps
its closed form: α and β of the cluster, by the shape of the group. So do units of FSDP and ZeRO
inside groups of its own. Exposed shares and everything that is no transfer stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.suggest import nearest_choice
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.peak_memory import PeakMemory
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.arithmetic import FloatArray, Number, maximum, where
from moemesh.planner.timing.columns import (
    HardwareColumns,
    LayoutColumns,
    ModelColumns,
    Software,
    hardware_columns,
    layout_columns,
    model_columns,
)
from moemesh.planner.timing.compute import (
    Workload,
    attention_block,
    expert_block,
    mlp_block,
    model_ends,
)
from moemesh.planner.timing.constants import NAMES
from moemesh.planner.timing.data_time import data_seconds, rank_weights, replicas, sharded_unit
from moemesh.planner.timing.layer_time import (
    ACTIVATION_BYTES,
    LayerTransfers,
    Links,
    dense_layer,
    layer_transfers,
    routed_layer,
)
from moemesh.planner.timing.network import LinkTable, Operation, members_per_node
from moemesh.planner.timing.price import Pricing, exit_share, pricing
from moemesh.planner.timing.step_time import StepTime, step_time

_GRADIENT_BYTES, _WEIGHT_BYTES = 4, 2


@dataclass(frozen=True, kw_only=True)
class MeasuredPricing(Pricing):
    """The calibrated price of layouts, transfers by `table` where it knows them."""

    table: LinkTable

    def price(
        self, shape: ModelShape, layout: PlannedLayout
    ) -> tuple[PeakMemory, dict[str, float]]:
        memory, seconds = super().price(shape, layout)
        if not len(self.table):
            return memory, seconds
        traits = Software(fsdp=layout.zero >= 2, deduplicated=layout.dispatcher == "hierarchical")
        columns = (
            model_columns([shape]),
            layout_columns([layout], [traits]),
            hardware_columns([self.device], [layout]),
        )
        step = step_time(*columns, self.constants)
        change = self.change(*columns, step)
        share = exit_share(shape, layout.attention_exit, layout.tp)
        moved = change.tensor * share
        parts = change._replace(total=change.total - change.tensor + moved, tensor=moved)
        rest = parts.total
        for name, more in zip(parts._fields, parts, strict=True):
            seconds[name] += float(np.ravel(more)[0])
            rest = rest - (0 if name == "total" else more)
        # What a longer or shorter stage makes others wait; FSDP units wait for their weights.
        waits = "data" if traits.fsdp else "bubble"
        seconds[waits] = max(seconds[waits] + float(np.ravel(rest)[0]), 0.0)
        return memory, seconds

    def change(
        self, model: ModelColumns, layout: LayoutColumns, hardware: HardwareColumns, step: StepTime
    ) -> Change:
        """What the table adds to `step`, the closed forms' answer for these columns."""
        work = Workload(model=model, layout=layout, hardware=hardware, constants=self.constants)
        return _change(work, self.table, step)

    def total(
        self,
        model: ModelColumns,
        layout: LayoutColumns,
        hardware: HardwareColumns,
        exit_of_tensor: Number,
    ) -> Number:
        """Seconds of a step; `exit_of_tensor`: share of the tensor traffic that the attention's
        exit leaves (:func:`moemesh.planner.timing.price.exit_share`)."""
        step = step_time(model, layout, hardware, self.constants)
        total, tensor = step.total, step.tensor
        if len(self.table):
            change = self.change(model, layout, hardware, step)
            total, tensor = total + change.total, tensor + change.tensor
        return total - tensor * (1 - exit_of_tensor)


class Change(NamedTuple):
    """Seconds of a step by which measured transfers differ from closed forms: all, and by part."""

    total: Number
    tensor: Number
    context: Number
    experts: Number
    pipeline: Number
    data: Number


def measured_pricing(cluster: Cluster) -> MeasuredPricing:
    """The pricing of a cluster. Raises ConfigError for constants that the time model lacks."""
    problems = [
        Problem(
            code="unknown-key",
            key=f"cluster.constants.{name}",
            value=value,
            message=f"the time model has no constant `{name}`",
            fix=nearest_choice(name, NAMES),
        )
        for name, value in cluster.constants.items()
        if name not in NAMES
    ]
    if problems:
        raise ConfigError(problems)
    known = pricing(cluster)
    return MeasuredPricing(
        device=known.device,
        constants=known.constants,
        allocation=known.allocation,
        table=LinkTable.from_curves(cluster.links),
    )


class _Lookup:
    """The table's answers for groups of a workload, by ranks and the distance between them."""

    def __init__(self, work: Workload, table: LinkTable) -> None:
        self.work, self.table = work, table

    def __call__(
        self, operation: Operation, ranks: Number, stride: Number, num_bytes: Number
    ) -> FloatArray:
        members = members_per_node(ranks, stride, self.work.hardware.node_size)
        return self.table.column(operation, ranks, members, num_bytes)

    def pair(self, ranks: Number, stride: Number, num_bytes: Number) -> FloatArray:
        """An all-gather and a reduce-scatter of one tensor."""
        gathered = self("all_gather", ranks, stride, num_bytes)
        return gathered + self("reduce_scatter", ranks, stride, num_bytes)


def measured_transfers(work: Workload, table: LinkTable) -> LayerTransfers:
    """One layer's transfers by the table; nan where it has no answer."""
    model, layout, constants = work.model, work.layout, work.constants
    t, u, find = layout.tp, work.tokens, _Lookup(work, table)
    stream = u * model.hidden * ACTIVATION_BYTES
    whole, cut = find("all_reduce", t, 1, stream), find.pair(t, 1, stream)
    heads = where(model.latent == 1, model.heads, model.kv_heads)
    width = heads * (model.query_dim + model.value_dim)
    keys = u * layout.cp * width * ACTIVATION_BYTES / t
    rows = u / t * model.top_k * model.hidden * ACTIVATION_BYTES
    load = 1 + layout.natural_routing * constants.routing_imbalance
    exchange = find("all_to_all", layout.ep, layout.etp, rows * load)
    share = where(layout.overlapped_exchange == 1, constants.overlapped_exchange_exposed, 1)
    return LayerTransfers(
        tensor=where(layout.sequence_parallel == 1, cut, whole),
        context=find("all_gather", layout.cp, t, keys) * constants.context_exposed,
        exchange=where(layout.deduplicated == 1, np.nan, exchange * share),
        expert_tensor=find.pair(layout.etp, 1, layout.etp * rows),
    )


def _change(work: Workload, table: LinkTable, step: StepTime) -> Change:
    model, layout, constants = work.model, work.layout, work.constants
    links = Links(
        intra=work.hardware.intra * constants.intra_node_efficiency,
        inter=work.hardware.inter * constants.inter_node_efficiency,
        latency=constants.collective_latency_us * 1e-6,
    )
    closed = layer_transfers(work, links)
    known = measured_transfers(work, table)
    # Where there is nothing to send the closed form says 0, and so it stays.
    measured = LayerTransfers(
        *(
            where((before > 0) & ~np.isnan(after), after, before)
            for before, after in zip(closed, known, strict=True)
        )
    )
    more = LayerTransfers(*(new - old for new, old in zip(measured, closed, strict=True)))
    body, weights = _body(work, links, closed)
    body = _body(work, links, measured)[0] - body
    data = _data_change(work, links, table, weights)
    p, m = layout.pp, layout.microbatches
    send = _send_change(work, table, step.pipeline / m)
    filled = body * (1 - 1 / p) + send * maximum(p - 1.5, 0)
    filled = filled * layout.fill_share / layout.stages_per_rank * constants.fill_slowdown
    total = m * (body / p + send) + where(p > 1, filled, 0) + data
    # By part as `step_time` counts them.
    count, routed = m * model.layers / p, model.moe_layers / model.layers
    halves = 2 - where(layout.parallel_block == 1, 1 - routed, 0)
    exchanged = 4 * more.exchange + 2 * more.expert_tensor
    return Change(
        total=total,
        tensor=count * (2 + layout.again_full) * halves * more.tensor,
        context=count * 3 * more.context,
        experts=count * routed * exchanged * (1 + layout.again_full / 2),
        pipeline=m * send,
        data=data,
    )


def _body(
    work: Workload, links: Links, transfers: LayerTransfers
) -> tuple[Number, tuple[Number, Number]]:
    """(seconds of all layers, forward and backward; dense and expert weights of a rank)."""
    model, layout, constants = work.model, work.layout, work.constants
    attention, mlp, experts = attention_block(work), mlp_block(work), expert_block(work)
    accumulate = where((layout.fsdp == 1) | (layout.adapters == 1), 0.0, constants.accumulate_bytes)
    dense_weights = attention.weights + mlp.weights
    routed_weights = attention.weights + experts.shared_weights
    dense = dense_layer(work, attention, mlp, transfers, accumulate)
    routed = routed_layer(work, attention, experts, transfers, accumulate)
    dense = sharded_unit(work, links, dense, dense_weights, 0.0)
    routed = sharded_unit(work, links, routed, routed_weights, experts.expert_weights)
    body = (model.layers - model.moe_layers) * (dense.forward + dense.backward)
    body = body + model.moe_layers * (routed.forward + routed.backward)
    ends = model_ends(work, accumulate)
    return body, rank_weights(work, dense_weights, routed_weights, experts, ends)


def _data_change(
    work: Workload, links: Links, table: LinkTable, weights: tuple[Number, Number]
) -> Number:
    """Gradients summed, weights gathered."""
    layout, constants = work.layout, work.constants
    find, before = _Lookup(work, table), data_seconds(work, links, *weights)
    found: Number = 0.0
    strides = (layout.tp, layout.ep * layout.etp)
    for psi, ranks, stride in zip(weights, replicas(work), strides, strict=True):
        gradient, weight = psi * _GRADIENT_BYTES, psi * _WEIGHT_BYTES
        summed = find("all_reduce", ranks, stride, gradient) * constants.gradient_exposed
        scattered = find("reduce_scatter", ranks, stride, gradient) * constants.gradient_exposed
        gathered = find("all_gather", ranks, stride, weight) * constants.weight_exposed
        seconds = where(layout.zero == 0, summed, scattered + gathered)
        found = found + where((ranks > 1) & (psi > 0), seconds, 0)
    usable = (before > 0) & (layout.zero_group == 0) & ~np.isnan(found)
    return where(usable, found - before, 0)


def _send_change(work: Workload, table: LinkTable, before: Number) -> Number:
    """All messages of one microbatch at one stage; `before` by the closed form."""
    layout = work.layout
    cut = where((layout.sequence_parallel == 1) | (layout.scatter_gather == 1), layout.tp, 1)
    size = work.tokens * work.model.hidden * ACTIVATION_BYTES / cut
    near = layout.tp * layout.cp * layout.dp < work.hardware.node_size
    once = table.column("send", 2, where(near, 2, 1), size) * work.constants.pipeline_exposed
    found = 2 * layout.stages_per_rank * once
    return where((layout.pp > 1) & ~np.isnan(found), found - before, 0)
