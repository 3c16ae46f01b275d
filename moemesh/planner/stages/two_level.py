"""Alpa's two levels: operator strategies by integer program, stages by dynamic programming.

A model on N devices is cut into P stages of N / P devices each (arXiv:2201.12023). For every P and
every logical mesh (outer x inner) of a stage's devices the inner level lays out the operators
(`operators.graph`) and the outer level divides the layers. If the fastest answer exceeds the
memory, the inner level is solved at several prices of a byte (in seconds), and every stage takes
the fastest answer that fits.

All stages have the same mesh, and all boundaries between the layers of an assignment one layout,
because a run has one set of degrees. Meshes are tried in the order of their best division under the
fastest assignment, without a memory cap, which is a lower bound where this assignment fits. Where
it does not, stages may take others, of which one may be faster in a part of the model: there the
bound (:attr:`StageMesh.lower_bound`) takes the least seconds of each part by itself. Meshes with a
bound above the best answer are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.config.suggest import divisors
from moemesh.planner.operators.blocks import EMBEDDING, HEAD, TransformerBlocks, group_of
from moemesh.planner.operators.graph import Assignment, Cost, FloatArray, least_seconds, solve
from moemesh.planner.operators.strategies import cost_model
from moemesh.planner.requests import PartitionRequest
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stages.answer import LayoutChange, OperatorAssignment, OperatorChoice, Stage
from moemesh.planner.stages.division import Division, StageCosts, StageError, best_division
from moemesh.planner.timing.price import pricing
from moemesh.schedule.build import build
from moemesh.schedule.held_activations import peak_memory
from moemesh.sharding.stages import layer_runs
from moemesh.trace.memory_profile import format_bytes

#: Maximum number of byte prices tried between the two extremes of a mesh that exceeds the cap.
MOST_PRICES = 6
#: Price at which only bytes count, as a multiple of the fastest answer's seconds per byte.
_LIGHTEST = 1e3

#: (table of stage costs, microbatches) -> the best division, None when nothing fits.
Divide = Callable[[FloatArray, int], Division | None]


class StageMesh:
    """A number of stages and a logical mesh of a stage's devices, with the assignments solved."""

    def __init__(self, search: TwoLevelSearch, num_stages: int, axes: dict[str, int]) -> None:
        self.search, self.num_stages, self.axes = search, num_stages, axes
        self.devices = prod(axes.values())
        # The given number, or the largest that leaves each device of a stage one sequence, else 1.
        request, batch = search.request, search.request.global_batch
        legal = [number for number in divisors(batch) if batch // number >= self.devices]
        self.microbatches = request.microbatches or max(legal, default=1)
        #: Microbatches whose activations each stage holds at its peak, counted in the schedule.
        peaks = peak_memory(build(request.schedule, num_stages, self.microbatches))
        self.in_flight = tuple(float(peak.activation) for peak in peaks)
        costs = cost_model(search.cluster, axes, microbatches=self.microbatches, recompute=True)
        sequences = batch // self.microbatches
        self.blocks = TransformerBlocks(search.shape, sequences, request.seq_len, costs)
        self.graph = self.blocks.graph
        self.assignments: list[Assignment] = []
        self.add(0.0)
        unlimited = best_division(self.costs(np.inf).table(), self.microbatches)
        assert unlimited is not None
        #: Seconds of a step under the fastest assignment, without a memory cap.
        self.unlimited_seconds = unlimited.seconds

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the seconds of a step under any assignments that fit."""
        if self._fits(self.assignments[0]):
            return self.unlimited_seconds
        least = {group: Cost(seconds) for group, seconds in least_seconds(self.graph).items()}
        layers = [least[group_of(kind)] for kind in self.search.shape.kinds]
        layers[0], layers[-1] = layers[0].plus(least[EMBEDDING]), layers[-1].plus(least[HEAD])
        bound = best_division(self._stage_costs([layers], np.inf).table(), self.microbatches)
        assert bound is not None
        return bound.seconds

    def add(self, byte_price: float) -> Assignment:
        """Solve for the best assignment at `byte_price` seconds per byte, and keep it."""
        assignment = solve(
            self.graph, byte_price=byte_price, in_flight=float(np.mean(self.in_flight))
        )
        self.assignments.append(assignment)
        return assignment

    def costs(self, cap_bytes: float, assignments: list[Assignment] | None = None) -> StageCosts:
        """Layer costs under all assignments; the end layers include embedding and head."""
        rows: list[list[Cost]] = []
        for assignment in assignments or self.assignments:
            groups = self.graph.group_costs(assignment.choices)
            layers = [groups[group_of(kind)] for kind in self.search.shape.kinds]
            layers[0] = layers[0].plus(groups[EMBEDDING])
            layers[-1] = layers[-1].plus(groups[HEAD])
            rows.append(layers)
        return self._stage_costs(rows, cap_bytes)

    def _stage_costs(self, rows: list[list[Cost]], cap_bytes: float) -> StageCosts:
        """Costs of the stages from those of each option's layers."""
        seconds, state, saved = np.array(rows, dtype=float).transpose(2, 0, 1)
        # A microbatch's stream to the next stage and its gradient back, shared by all devices.
        cluster = self.search.cluster
        latency, bandwidth = cluster.inter_node_latency, cluster.inter_node_bandwidth
        if self.num_stages * self.devices <= cluster.gpus_per_node:
            latency, bandwidth = cluster.intra_node_latency, cluster.intra_node_bandwidth
        return StageCosts(
            seconds=seconds,
            state_bytes=state,
            saved_bytes=saved,
            in_flight=self.in_flight,
            num_microbatches=self.microbatches,
            cap_bytes=cap_bytes,
            boundary_seconds=2 * (latency + self.blocks.stream_bytes / self.devices / bandwidth),
        )

    @cached_property
    def refined(self) -> StageCosts:
        """Costs with enough assignments to fit under the cap, if any assignment fits.

        The next price of a byte is the slope between an assignment that fits on its own and one
        that does not.
        """
        cap_bytes, heavy = self.search.cap_bytes, self.assignments[0]
        if self._fits(heavy):
            return self.costs(cap_bytes)
        light = self.add(_LIGHTEST * heavy.cost.seconds / max(self._bytes(heavy), 1.0))
        for _ in range(MOST_PRICES if self._fits(light) else 0):
            more_seconds = light.cost.seconds - heavy.cost.seconds
            between = self.add(more_seconds / max(self._bytes(heavy) - self._bytes(light), 1.0))
            if between.choices in (heavy.choices, light.choices):
                self.assignments.pop()
                break
            if self._fits(between):
                light = between
            else:
                heavy = between
        return self.costs(cap_bytes)

    def stages(self, division: Division) -> tuple[Stage, ...]:
        """The stages of a division of this mesh."""
        costs = self.refined
        by_option = costs.options()
        stages: list[Stage] = []
        for number, layers in enumerate(layer_runs(division.layers_per_stage)):
            option = int(by_option[number, :, layers.start, layers.stop].argmin())
            stages.append(
                Stage(
                    layers=layers,
                    ranks=range(number * self.devices, (number + 1) * self.devices),
                    seconds=division.stage_seconds[number],
                    memory_bytes=float(costs.bytes(number)[option, layers.start, layers.stop]),
                    in_flight=self.in_flight[number],
                    assignment=option,
                )
            )
        return tuple(stages)

    def describe(self, stages: Sequence[Stage]) -> tuple[OperatorAssignment, ...]:
        """Node and edge costs of every assignment, and the number of layers in `stages` with it."""
        kinds, graph = self.search.shape.kinds, self.graph
        described: list[OperatorAssignment] = []
        for number, assignment in enumerate(self.assignments):
            holders = [stage for stage in stages if stage.assignment == number]
            counts = Counter(group_of(kinds[layer]) for stage in holders for layer in stage.layers)
            counts[EMBEDDING] = int(stages[0] in holders)
            counts[HEAD] = int(stages[-1] in holders)
            chosen = [
                operator.strategies[choice]
                for operator, choice in zip(graph.operators, assignment.choices, strict=True)
            ]
            operators = [
                OperatorChoice(
                    group=operator.group,
                    operator=operator.name,
                    strategy=strategy.name,
                    count=counts[operator.group],
                    **{name: getattr(strategy, name) for name in Cost._fields},
                )
                for operator, strategy in zip(graph.operators, chosen, strict=True)
            ]
            edges = [
                LayoutChange(
                    group=edge.group,
                    source=graph.operators[edge.source].name,
                    target=graph.operators[edge.target].name,
                    before=",".join(chosen[edge.source].output),
                    after=",".join(chosen[edge.target].inputs[edge.input_index]),
                    seconds=graph.edge_seconds(edge, assignment.choices),
                )
                for edge in graph.edges
            ]
            described.append(OperatorAssignment(operators=tuple(operators), edges=tuple(edges)))
        return tuple(described)

    def _fits(self, assignment: Assignment) -> bool:
        """Whether some division fits if all stages take `assignment`."""
        cap_bytes = self.search.cap_bytes
        return self.costs(cap_bytes, [assignment]).smallest_cap() <= cap_bytes

    def _bytes(self, assignment: Assignment) -> float:
        """Bytes of the whole model on a stage's device, with the stages' mean number in flight."""
        return assignment.cost.memory_bytes(float(np.mean(self.in_flight)))


class TwoLevelSearch:
    """All stage meshes of a model on a cluster, the fastest without a memory cap first. The search
    chooses `stages` and `microbatches` of `request` that are None."""

    def __init__(self, shape: ModelShape, cluster: Cluster, request: PartitionRequest) -> None:
        self.shape, self.cluster, self.request = shape, cluster, request
        #: Bytes of a device that a job may use.
        self.cap_bytes = cluster.memory_bytes * pricing(cluster).usable_share
        # The given number of stages, or all that divide the devices and leave each stage a layer.
        counts = [n for n in divisors(cluster.num_devices) if n <= shape.num_layers]
        meshes: list[StageMesh] = []
        for num_stages in [request.stages] if request.stages else counts:
            # One axis over all devices of a stage, and outer x inner with the inner axis inside a
            # node. Inside one node both have the same links, so only outer <= inner is tried.
            devices, node = cluster.num_devices // num_stages, cluster.gpus_per_node
            meshes.append(StageMesh(self, num_stages, {"devices": devices}))
            for inner in divisors(devices):
                outer = devices // inner
                is_new = devices > node or outer <= inner
                if min(outer, inner) > 1 and not node % inner and is_new:
                    meshes.append(StageMesh(self, num_stages, {"outer": outer, "inner": inner}))
        self.meshes = sorted(meshes, key=lambda mesh: mesh.unlimited_seconds)

    def best(self, divide: Divide) -> tuple[StageMesh, Division]:
        """The best mesh and division; `divide` is the outer level. Raises StageError when nothing
        fits."""
        best: tuple[StageMesh, Division] | None = None
        needed: dict[int, float] = {}
        for mesh in self.meshes:
            # The bound takes time to compute and is at most the seconds without a memory cap.
            limit = np.inf if best is None else best[1].seconds
            if mesh.unlimited_seconds >= limit and mesh.lower_bound >= limit:
                continue
            division = divide(mesh.refined.table(), mesh.microbatches)
            if division is None:
                least = mesh.refined.smallest_cap()
                needed[mesh.num_stages] = min(needed.get(mesh.num_stages, np.inf), least)
            elif best is None or division.seconds < best[1].seconds:
                best = mesh, division
        if best is None:
            stages, smallest = min(needed.items(), key=lambda item: item[1])
            share = self.cap_bytes / self.cluster.memory_bytes
            raise StageError(
                f"no division of {self.shape.num_layers} layers of {self.shape.name} into "
                f"{', '.join(map(str, sorted(needed)))} stages fits in "
                f"{format_bytes(round(self.cap_bytes))} a device of {self.cluster.name} "
                f"({self.cluster.num_devices} devices)\n"
                f"fix: devices with {format_bytes(round(smallest / share))} ({stages} stages), "
                "more nodes, or more microbatches"
            )
        return best
