"""The ways to lay operators out over a mesh, what each costs, and graphs of them.

An operator is described by its dims, as an einsum: dims of every input, of the output and of the
weight. A cut of dim d along a mesh axis then determines all placements:

=====================  ================================  =============
dim d is in            placement along the axis          known as
=====================  ================================  =============
input, output          cut, cut; weight gradient summed  data parallel
weight, output         B, cut; weight cut                column
input, weight          cut, P; weight cut                row
input, weight, output  cut, cut; weight cut              expert
=====================  ================================  =============

and no cut means R everywhere: every rank of the axis does the same work. Several axes are cut
independently. Experts need no special rule: tokens cut along an axis and experts cut along the same
axis are two layouts of one tensor, and the change between them is the all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.config.errors import UserError
from moemesh.planner.operators.graph import Edge, Operator, OperatorGraph, Strategy
from moemesh.planner.operators.resharding import MeshAxis, MeshLayout, reshard_seconds
from moemesh.planner.timing.links import Links

#: Choices of an operator along a mesh axis, besides a dim to cut: no cut, or partial sums.
WHOLE = "whole"
PARTIAL = "partial"
#: Share of the peak that products reach.
_EFFICIENCY = 0.6
#: Suffix of the name of a strategy that keeps nothing and recomputes its forward.
RECOMPUTE = " recompute"


@dataclass(frozen=True, kw_only=True)
class OperatorSpec:
    """One operator: its forward for one microbatch, on all devices together.

    `sizes` are the sizes that cuts must divide. Dims are names; "batch sequence" is one dim of a
    tensor, which a cut of either name divides. `cut` are the dims that may be cut. `moved_bytes`:
    inputs and output, without the weight. `kept_bytes`: the output (and intermediate tensors) that
    the backward needs. `exchange_bytes[d]`: tensors gathered along an axis that cuts d, such as
    keys and values. `linear` operators also accept partial sums. Only `recomputable` ones may drop
    their kept tensors; a layer's output is not, because the next layer's recomputation needs it.
    """

    name: str
    sizes: Mapping[str, int]
    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    cut: tuple[str, ...]
    weight: tuple[str, ...] = ()
    weight_elements: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0
    output_bytes: float = 0.0
    kept_bytes: float = 0.0
    exchange_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    linear: bool = False
    recomputable: bool = True


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The mesh of one stage (outermost axis first), its devices and the bytes of its weights.

    Per parameter, every product reads `weight_bytes`; `state_bytes` are weight, gradient and
    optimizer. Gradients are summed once every `microbatches`. `recompute` adds, to every operator
    that keeps tensors, a strategy that keeps none and recomputes its forward.
    """

    axes: tuple[MeshAxis, ...]
    #: (floating-point operations, bytes moved) of one device -> seconds.
    compute_seconds: Callable[[float, float], float]
    state_bytes: float = 18.0
    gradient_bytes: float = 4.0
    weight_bytes: float = 2.0
    microbatches: int = 1
    recompute: bool = False


def cost_model(
    cluster: Cluster, axes: Mapping[str, int], *, microbatches: int = 1, recompute: bool = False
) -> CostModel:
    """A cost model of one cluster: roofline times of operators, and links with a latency and a
    bandwidth that depend on the shape of the group.

    `axes` are names and degrees, innermost (neighbouring ranks) last. Raises UserError for a
    cluster without a peak for bfloat16.
    """
    if "bfloat16" not in cluster.peak_flops:
        known = ", ".join(cluster.peak_flops)
        raise UserError(f"cluster {cluster.name} has no peak for bfloat16; it has {known}")
    links = Links(
        intra=cluster.intra_node_bandwidth,
        inter=cluster.inter_node_bandwidth,
        node_size=cluster.gpus_per_node,
    )
    mesh_axes: list[MeshAxis] = []
    #: Distance in ranks between neighbours along the axis.
    stride = prod(axes.values())
    for name, size in axes.items():
        stride //= size
        per_byte = 1 / float(links.bandwidth(size, stride))
        inside = size * stride <= cluster.gpus_per_node
        latency = cluster.intra_node_latency if inside else cluster.inter_node_latency
        mesh_axes.append(MeshAxis(name=name, size=size, latency=latency, seconds_per_byte=per_byte))
    peak, memory = cluster.peak_flops["bfloat16"] * _EFFICIENCY, cluster.memory_bandwidth

    def compute_seconds(flops: float, moved_bytes: float) -> float:
        return max(flops / peak, moved_bytes / memory)

    return CostModel(
        axes=tuple(mesh_axes),
        compute_seconds=compute_seconds,
        microbatches=microbatches,
        recompute=recompute,
    )


def _legal_ways(
    costs: CostModel, choices: tuple[str, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[str, ...]]:
    """Combinations of one of `choices` per axis for which the cuts of every dim divide its size. An
    axis of one rank takes the first choice, because all are equal."""
    for ways in product(*(choices if axis.size > 1 else choices[:1] for axis in costs.axes)):
        if all(size % _cut(costs, ways, {dim}) == 0 for dim, size in sizes.items()):
            yield ways


def _cut(costs: CostModel, ways: tuple[str, ...], dims: Collection[str]) -> int:
    """Number of parts into which the axes that cut one of `dims` divide a tensor."""
    return prod(axis.size for axis, way in zip(costs.axes, ways, strict=True) if way in dims)


def _layout(dims: tuple[str, ...], ways: tuple[str, ...], missing: str) -> MeshLayout:
    """Placements of a tensor; `missing` for an axis that cuts a dim the tensor does not have."""
    cuts = {name: f"S{index}" for index, dim in enumerate(dims) for name in dim.split()}
    fixed = {WHOLE: "R", PARTIAL: "P"}
    return tuple(fixed.get(way) or cuts.get(way, missing) for way in ways)


def operator_of(spec: OperatorSpec, costs: CostModel, group: str = "") -> Operator:
    """The operator with a strategy for every legal choice of cuts."""
    strategies: list[Strategy] = []
    # Choices per axis: a dim that is cut, WHOLE, or PARTIAL.
    choices = (WHOLE, *spec.cut, *((PARTIAL,) if spec.linear else ()))
    outputs = {name for dim in spec.output for name in dim.split()}
    for ways in _legal_ways(costs, choices, {dim: spec.sizes[dim] for dim in spec.cut}):
        shards = _cut(costs, ways, spec.cut)
        weights = spec.weight_elements / _cut(costs, ways, spec.weight)
        # Seconds of exchanges of a step, and of a microbatch.
        summed = exchanged = 0.0
        for axis, way in zip(costs.axes, ways, strict=True):
            if way in spec.cut and way not in spec.weight:
                # An all-reduce of the weight's gradient.
                summed += 2 * axis.gather(weights * costs.gradient_bytes)
            if spec.exchange_bytes.get(way):
                # All-gather of the other ranks' tensors in the forward, reduce-scatter of their
                # gradients in the backward.
                other_cuts = _cut(costs, ways, set(spec.cut) - {way})
                exchanged += 2 * axis.gather(spec.exchange_bytes[way] / other_cuts)
        seconds = summed / costs.microbatches + exchanged
        moved = spec.moved_bytes / shards + weights * costs.weight_bytes
        forward = costs.compute_seconds(spec.flops / shards, moved)
        way_of_axis = zip(costs.axes, ways, strict=True)
        name = ",".join(f"{axis.name}={way}" for axis, way in way_of_axis if way != WHOLE)
        strategy = Strategy(
            name=name or WHOLE,
            inputs=tuple(_layout(dims, ways, "B") for dims in spec.inputs),
            output=_layout(spec.output, ways, "P"),
            # The backward costs two forwards: one for the input's gradient, one for the weight's.
            seconds=seconds + 3 * forward,
            state_bytes=weights * costs.state_bytes,
            saved_bytes=spec.kept_bytes / _cut(costs, ways, outputs),
        )
        strategies.append(strategy)
        if costs.recompute and spec.recomputable and spec.kept_bytes:
            label, longer = strategy.name + RECOMPUTE, strategy.seconds + forward
            strategies.append(replace(strategy, name=label, seconds=longer, saved_bytes=0.0))
    return Operator(
        name=spec.name, strategies=tuple(strategies), group=group, output_bytes=spec.output_bytes
    )


# Graphs of operators: edges from outputs to inputs, each priced by its resharding.


class GraphBuilder(OperatorGraph):
    """Collects operators and the edges between them; operators are identified by position."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self.costs = costs
        self._constant: set[int] = set()
        self._group = ""

    def group(self, name: str, count: int = 1) -> None:
        """Begin a group of `count` copies, to which all operators added next belong."""
        self._group = name
        self.counts[name] = count

    def port(
        self, name: str, sizes: dict[int, int], num_bytes: float, *, constant: bool = False
    ) -> int:
        """A boundary between groups: a tensor in any layout, at no cost. A `constant` one (token
        ids, images) has no gradient.

        `sizes` are the dims that may be cut, with the size that cuts must divide.
        """
        cuts = {f"S{dim}": size for dim, size in sizes.items()}
        strategies = (
            Strategy(name=",".join(layout), inputs=(layout,), output=layout, seconds=0.0)
            for layout in _legal_ways(self.costs, ("R", *sorted(cuts)), cuts)
        )
        operator = Operator(
            name=name, strategies=tuple(strategies), group=self._group, output_bytes=num_bytes
        )
        self.operators.append(operator)
        position = len(self.operators) - 1
        if constant:
            self._constant.add(position)
        return position

    def add(self, spec: OperatorSpec, *inputs: int) -> int:
        """An operator that reads the outputs of `inputs`, in order."""
        self.operators.append(operator_of(spec, self.costs, self._group))
        target = len(self.operators) - 1
        for index, source in enumerate(inputs):
            self.link(source, target, index)
        return target

    def link(self, source: int, target: int, input_index: int = 0) -> None:
        """`target` reads the output of `source`; the change of layout belongs to this group."""
        reader, num_bytes = self.operators[target], self.operators[source].output_bytes
        outputs = [strategy.output for strategy in self.operators[source].strategies]
        inputs = [strategy.inputs[input_index] for strategy in reader.strategies]
        backward = source not in self._constant
        # Every pair of layouts is priced once: many strategies return the same layout.
        prices = {
            (a, b): reshard_seconds(num_bytes, a, b, self.costs.axes, backward=backward)
            for a, b in product(set(outputs), set(inputs))
        }
        seconds = np.array([[prices[a, b] for b in inputs] for a in outputs])
        ends = {"source": source, "target": target, "input_index": input_index}
        self.edges.append(Edge(**ends, seconds=seconds, group=self._group))
