"""Whole operators on devices: the placement of a branching network, exactly and by program.

Device placement (A. Mirhoseini et al., arXiv:1706.04972) puts every operator on one device, with a
transfer for each edge between two devices; only networks with branches gain. A device runs its
operators in the order of the graph, forward, then backward in reverse. The makespan of a placement
is the longest path through operators, transfers and the order on each device: its length in forward
times plus that in backward times. The exact method places the operators in order. For every
placement of the outputs that later operators read, it keeps the undominated times and bytes of all
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.planner.operators.graph import FloatArray, IntegerProgram, OperatorGraph
from moemesh.planner.operators.strategies import CostModel, GraphBuilder, OperatorSpec
from moemesh.planner.stages.division import BestDraw, IntArray, StageError, best_draw


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Operators in the order in which devices run them, and edges (source, target) between them.

    `seconds` are the forward and the backward times, shape (2, operators). `transfers` are the
    seconds of an edge inside a node and between nodes, shape (edges, 2); those of its gradient are
    equal. Consecutive blocks of `node_size` devices are nodes.
    """

    seconds: FloatArray
    num_bytes: FloatArray
    edges: tuple[tuple[int, int], ...]
    transfers: FloatArray
    num_devices: int
    node_size: int
    cap_bytes: float = np.inf

    @property
    def num_operators(self) -> int:
        return len(self.num_bytes)

    @cached_property
    def inputs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(edge, source) of every input of every operator."""
        inputs: list[list[tuple[int, int]]] = [[] for _ in range(self.num_operators)]
        for edge, (source, target) in enumerate(self.edges):
            inputs[target].append((edge, source))
        return tuple(map(tuple, inputs))

    def transfer(self, edge: int, source: int, target: int) -> float:
        """Seconds of an edge between two devices."""
        if source == target:
            return 0.0
        is_far = source // self.node_size != target // self.node_size
        return float(self.transfers[edge, int(is_far)])

    def evaluate(self, placements: IntArray) -> FloatArray:
        """Seconds of a step of each placement [placement, operator]; infinite over the cap."""
        count = len(placements)
        rows = np.arange(count)
        total = np.zeros(count)
        nodes = placements // self.node_size
        for times in self.seconds:
            # Times at which devices are free and operators end.
            ready = np.zeros((count, self.num_devices))
            ends = np.zeros((count, self.num_operators))
            for number, inputs in enumerate(self.inputs):
                device = placements[:, number]
                start = ready[rows, device]
                for edge, source in inputs:
                    far = (nodes[:, source] != nodes[:, number]).astype(int)
                    moved = np.where(placements[:, source] == device, 0, self.transfers[edge][far])
                    start = np.maximum(start, ends[:, source] + moved)
                ends[:, number] = ready[rows, device] = start + times[number]
            total += ends.max(axis=1)
        held = np.zeros((count, self.num_devices))
        for number, size in enumerate(self.num_bytes):
            held[rows, placements[:, number]] += size
        return np.where((held > self.cap_bytes).any(axis=1), np.inf, total)


def baseline_placement(
    method: str, problem: PlacementProblem, evaluations: int, seed: int
) -> BestDraw:
    """The best of `evaluations` placements: drawn with equal chance ("random"), or from a policy
    over the device of every operator ("learned")."""

    def draw(count: int, generator: np.random.Generator) -> IntArray:
        return generator.integers(0, problem.num_devices, (count, problem.num_operators))

    logits = [np.zeros(problem.num_devices)] * problem.num_operators
    return best_draw(method, draw, logits, problem.evaluate, evaluations=evaluations, seed=seed)


def placement_problem(
    graph: OperatorGraph, cluster: Cluster, num_devices: int, cap_bytes: float
) -> tuple[tuple[str, ...], PlacementProblem]:
    """The names of the operators that compute, and the problem of placing them.

    `graph` has the costs of one device; operators without work (the input data) are on every
    device.
    """
    placed = [
        number
        for number, operator in enumerate(graph.operators)
        if operator.strategies[0].seconds > 0
    ]
    position = {number: index for index, number in enumerate(placed)}
    operators = [graph.operators[number] for number in placed]
    strategies = [operator.strategies[0] for operator in operators]
    edges = [(e.source, e.target) for e in graph.edges if e.source in position]
    transfers = [
        [
            latency + graph.operators[source].output_bytes / bandwidth
            for latency, bandwidth in (
                (cluster.intra_node_latency, cluster.intra_node_bandwidth),
                (cluster.inter_node_latency, cluster.inter_node_bandwidth),
            )
        ]
        for source, _ in edges
    ]
    # The backward of an operator costs two forwards (`operators.strategies`).
    seconds = np.array([strategy.seconds for strategy in strategies])
    return tuple(operator.name for operator in operators), PlacementProblem(
        seconds=np.stack([seconds / 3, 2 * seconds / 3]),
        num_bytes=np.array([item.state_bytes + item.saved_bytes for item in strategies]),
        edges=tuple((position[source], position[target]) for source, target in edges),
        transfers=np.array(transfers).reshape(-1, 2),
        num_devices=num_devices,
        node_size=cluster.gpus_per_node,
        cap_bytes=cap_bytes,
    )


class _Label(NamedTuple):
    """A placement of the first operators, with the times and bytes on which the rest depends.

    ``ready[phase, device]`` is the time at which a device is free; ``ends[operator]`` are the
    forward and backward end times of outputs that are still to be read. `numbers` concatenates
    these and the bytes; less is better in each.
    """

    devices: tuple[int, ...]
    ready: FloatArray
    ends: dict[int, FloatArray]
    held: FloatArray
    numbers: FloatArray


def best_placement(problem: PlacementProblem) -> BestDraw:
    """The placement of least seconds, by dynamic programming over undominated labels.

    Raises StageError when nothing fits in the cap.
    """
    count = problem.num_operators
    # Descent from a random start by moves of one or two operators: its result is a bound that cuts
    # most labels.
    start = baseline_placement("random", problem, 2048, 0)
    bound, current = start.seconds, np.array(start.choices or (0,) * count, dtype=np.intp)
    moves = list(product(range(count), range(problem.num_devices)))
    while True:
        tried = np.repeat(current[None], len(moves) ** 2, axis=0)
        for row, ((i, a), (j, b)) in enumerate(product(moves, moves)):
            tried[row, i], tried[row, j] = a, b
        seconds = problem.evaluate(tried)
        fastest = int(seconds.argmin())
        if not seconds[fastest] < bound:
            break
        bound, current = float(seconds[fastest]), tried[fastest]
    # The longest path after each operator in each phase, without transfers.
    tails = np.zeros((2, count))
    for source, target in sorted(problem.edges, key=lambda edge: -edge[1]):
        path = problem.seconds[:, target] + tails[:, target]
        tails[:, source] = np.maximum(tails[:, source], path)
    last_reader = [max((t for s, t in problem.edges if s == i), default=i) for i in range(count)]
    zeros = np.zeros(problem.num_devices)
    labels = [_Label((), np.stack([zeros, zeros]), {}, zeros, zeros)]
    evaluations = 1
    for number in range(count):
        labels_by_outputs: dict[tuple[int, ...], list[_Label]] = {}
        for label in labels:
            fresh: set[int] = set()
            for device in range(problem.num_devices):
                # Unused devices of a node are equal: only the first of them is tried.
                if device not in label.devices and device // problem.node_size in fresh:
                    continue
                if device not in label.devices:
                    fresh.add(device // problem.node_size)
                evaluations += 1
                ready, held = label.ready.copy(), label.held.copy()
                for edge, source in problem.inputs[number]:
                    moved = problem.transfer(edge, label.devices[source], device)
                    ready[:, device] = np.maximum(ready[:, device], label.ends[source] + moved)
                ready[:, device] += problem.seconds[:, number]
                held[device] += problem.num_bytes[number]
                ends = {**label.ends, number: ready[:, device]}
                # A lower bound of each phase: the devices' times, and the paths after open outputs.
                least = ready.max(axis=1)
                for operator, end in ends.items():
                    least = np.maximum(least, end + tails[:, operator])
                if held.max() > problem.cap_bytes or least.sum() > bound * (1 + 1e-12):
                    continue
                live = {i: end for i, end in ends.items() if last_reader[i] > number}
                numbers = np.concatenate([ready.ravel(), *live.values(), held])
                devices = (*label.devices, device)
                same = labels_by_outputs.setdefault(tuple(devices[i] for i in live), [])
                # A label is dropped if another is at least as good in every number.
                if not any((other.numbers <= numbers).all() for other in same):
                    same[:] = [other for other in same if not (numbers <= other.numbers).all()]
                    same.append(_Label(devices, ready, live, held, numbers))
        labels = [label for same in labels_by_outputs.values() for label in same]
    if not labels:
        raise StageError(
            f"no placement of {count} operators on {problem.num_devices} devices fits in "
            f"{problem.cap_bytes:.0f} bytes a device; all of them take "
            f"{problem.num_bytes.sum():.0f} bytes, the largest {problem.num_bytes.max():.0f}"
        )
    seconds, devices = min(
        (float(label.ready.max(axis=1).sum()), label.devices) for label in labels
    )
    return BestDraw(devices, seconds, evaluations)


def solve_placement(problem: PlacementProblem, *, time_limit: float | None = None) -> BestDraw:
    """The same optimum by an integer program.

    x[i, d] = 1 when operator i is on device d; start times of both phases are continuous. An
    operator waits for the transfers of its inputs and for the earlier operators on its device.
    `evaluations` are nodes of the search tree. Raises StageError when HiGHS finds nothing.
    """
    count, devices = problem.num_operators, range(problem.num_devices)
    longest = float(problem.seconds.sum(axis=1).max()) + float(problem.transfers.sum())
    scale = 1e3 / longest
    program = IntegerProgram()
    x = [[program.variable() for _ in devices] for _ in range(count)]
    for row in x:
        program.row([(v, 1.0) for v in row], low=1.0, high=1.0)
    spans = [program.variable(1.0, high=np.inf, integral=False) for _ in problem.seconds]
    starts = [[program.variable(high=np.inf, integral=False) for _ in range(count)] for _ in spans]
    # Two variables per edge: 1 if it joins two devices, 1 if it joins two nodes.
    crossings: list[tuple[int, int]] = []
    for source, target in problem.edges:
        device, node = (program.variable(integral=False) for _ in range(2))
        crossings.append((device, node))
        for before, after in zip(x[source], x[target], strict=True):
            program.row([(device, 1.0), (before, -1.0), (after, 1.0)], low=0.0)
        for first in range(0, problem.num_devices, problem.node_size):
            part = slice(first, first + problem.node_size)
            terms = [*((v, -1.0) for v in x[source][part]), *((v, 1.0) for v in x[target][part])]
            program.row([(node, 1.0), *terms], low=0.0)
    # One variable per pair of operators without a path between them: 1 if they share a device.
    together: dict[tuple[int, int], int] = {}
    ancestors: list[set[int]] = [set() for _ in range(count)]
    for source, target in sorted(problem.edges, key=lambda edge: edge[1]):
        ancestors[target] |= ancestors[source] | {source}
    for early, late in combinations(range(count), 2):
        if early not in ancestors[late]:
            same = together[early, late] = program.variable(integral=False)
            for a, b in zip(x[early], x[late], strict=True):
                program.row([(same, 1.0), (a, -1.0), (b, -1.0)], low=-1.0)
    for span, start, times in zip(spans, starts, problem.seconds * scale, strict=True):
        for device in devices:
            loads = [(row[device], float(time)) for row, time in zip(x, times, strict=True)]
            program.row([*loads, (span, -1.0)], high=0.0)
        for number in range(count):
            program.row([(span, 1.0), (start[number], -1.0)], low=float(times[number]))
        for edge, (source, target) in enumerate(problem.edges):
            near, far = (float(time) * scale for time in problem.transfers[edge])
            moved = [(crossings[edge][0], -near), (crossings[edge][1], near - far)]
            terms = [(start[target], 1.0), (start[source], -1.0), *moved]
            program.row(terms, low=float(times[source]))
        for (early, late), same in together.items():
            # `big` turns the row off for operators on different devices.
            big = scale * longest
            terms = [(start[late], 1.0), (start[early], -1.0), (same, -big)]
            program.row(terms, low=float(times[early]) - big)
    if problem.cap_bytes < np.inf:
        for device in devices:
            loads = zip(x, problem.num_bytes / problem.cap_bytes, strict=True)
            program.row([(row[device], float(size)) for row, size in loads], high=1.0)
    values, num_nodes = program.solve(time_limit=time_limit)
    if values is None:
        raise StageError(f"HiGHS found no placement of {count} operators that fits")
    placement = tuple(int(np.argmax(values[row])) for row in x)
    seconds = float(problem.evaluate(np.array([placement]))[0])
    return BestDraw(placement, seconds, max(num_nodes, 1))


# The network: two branches of convolutions, as AlexNet (2012), as an operator graph.
#
# Five convolutions in two branches that exchange their maps before the third, then three dense
# layers. It keeps the planner general: graphs of other networks than transformers are placed too.


class NetworkLayer(NamedTuple):
    """One layer: the layers that it reads, its channels (`inner` of each that it reads), kernel
    side (0: no weights), and side of the map before and after pooling."""

    name: str
    reads: tuple[str, ...]
    inner: int
    outer: int
    kernel: int = 1
    side: int = 1
    pooled_side: int = 1


#: Channels are those of A. Krizhevsky, I. Sutskever, G. Hinton (2012).
ALEXNET = (
    NetworkLayer("conv1a", ("images",), 3, 48, 11, 55, 27),
    NetworkLayer("conv1b", ("images",), 3, 48, 11, 55, 27),
    NetworkLayer("conv2a", ("conv1a",), 48, 128, 5, 27, 13),
    NetworkLayer("conv2b", ("conv1b",), 48, 128, 5, 27, 13),
    NetworkLayer("conv3a", ("conv2a", "conv2b"), 128, 192, 3, 13, 13),
    NetworkLayer("conv3b", ("conv2a", "conv2b"), 128, 192, 3, 13, 13),
    NetworkLayer("conv4a", ("conv3a",), 192, 192, 3, 13, 13),
    NetworkLayer("conv4b", ("conv3b",), 192, 192, 3, 13, 13),
    NetworkLayer("conv5a", ("conv4a",), 192, 128, 3, 13, 6),
    NetworkLayer("conv5b", ("conv4b",), 192, 128, 3, 13, 6),
    NetworkLayer("concatenate", ("conv5a", "conv5b"), 128 * 6**2, 2 * 128 * 6**2, 0),
    NetworkLayer("dense1", ("concatenate",), 2 * 128 * 6**2, 4096),
    NetworkLayer("dense2", ("dense1",), 4096, 4096),
    NetworkLayer("dense3", ("dense2",), 4096, 1000),
)
_IMAGE_BYTES, _ELEMENT_BYTES = 3 * 224**2 * 2, 2


def branching_network(
    batch: int, costs: CostModel, layers: Sequence[NetworkLayer] = ALEXNET
) -> OperatorGraph:
    """The graph of `layers`, which read earlier ones or the "images", and of a loss."""
    builder = GraphBuilder(costs)
    images = builder.port("images", {0: batch}, float(batch * _IMAGE_BYTES), constant=True)
    positions = {"images": images}
    for name, reads, inner, outer, kernel, side, pooled_side in layers:
        elements = float(outer * inner * len(reads) * kernel**2)
        computed = float(batch * outer * side**2)
        # Convolution, activation and pooling; the maps of several branches as one row an image.
        spec = OperatorSpec(
            name=name,
            sizes={"batch": batch, "in": inner, "out": outer},
            inputs=(("batch", "in"),) * len(reads),
            output=("batch", "out"),
            # Several inputs have channels of their own, which no single cut divides.
            cut=("batch", "in", "out") if len(reads) == 1 else ("batch", "out"),
            weight=("in", "out"),
            weight_elements=elements,
            flops=2.0 * computed * elements / outer,
            moved_bytes=(1.0 if side == kernel == 1 else 2.0) * computed * _ELEMENT_BYTES,
            output_bytes=float(batch * outer * pooled_side**2 * _ELEMENT_BYTES),
            kept_bytes=computed * _ELEMENT_BYTES,
        )
        if not kernel:  # a cut of channels would mix the orders of the branches
            spec = replace(spec, cut=("batch",), weight=())
        positions[name] = builder.add(spec, *(positions[source] for source in reads))
    last = layers[-1]
    loss = OperatorSpec(
        name="loss",
        sizes={"batch": batch, "out": last.outer},
        inputs=(("batch", "out"),),
        output=("batch",),
        cut=("batch", "out"),
        moved_bytes=4.0 * batch * last.outer,
        output_bytes=4.0 * batch,
    )
    builder.add(loss, positions[last.name])
    return builder
