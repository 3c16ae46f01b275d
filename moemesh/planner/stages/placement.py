"""Whole operators on devices: the placement of a branching network, exactly and by program.

Device placement (A. Mirhoseini et al., arXiv:1706.04972) keeps every operator whole and pays a
transfer where an edge joins two devices; it only helps where a network has branches. A device runs
its operators in the order of the graph, forward and then backward in reverse, so a placement has
one makespan: the longest path through operators, transfers and the order on each device, once with
forward and once with backward times. The exact method walks the operators in order and keeps, for
every placement of the outputs still to be read, the undominated times and bytes of all devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.planner.operators.graph import FloatArray, OperatorGraph
from moemesh.planner.operators.solve import IntegerProgram
from moemesh.planner.stages.division import (
    BestDraw,
    IntArray,
    StageError,
    policy_gradient,
    random_search,
)


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Operators in the order in which devices run them, and edges (source, target) between them.

    `seconds` are the forward and the backward times, shape (2, operators); `transfers` those of an
    edge inside a node and between nodes, shape (edges, 2), the same for a gradient on its way back.
    Devices 0 .. node_size - 1 are one node, and so on.
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
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_operators)]
        for edge, (source, target) in enumerate(self.edges):
            found[target].append((edge, source))
        return tuple(map(tuple, found))

    def transfer(self, edge: int, source: int, target: int) -> float:
        """Seconds of an edge between two devices."""
        if source == target:
            return 0.0
        return float(
            self.transfers[edge, int(source // self.node_size != target // self.node_size)]
        )

    def evaluate(self, placements: IntArray) -> FloatArray:
        """Seconds of a step of each placement [placement, operator]; infinite over the cap."""
        count = len(placements)
        rows = np.arange(count)
        total = np.zeros(count)
        nodes = placements // self.node_size
        for times in self.seconds:
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


def random_placement(problem: PlacementProblem, evaluations: int, seed: int) -> BestDraw:
    """The best of `evaluations` placements, all equally likely."""

    def draw(count: int, generator: np.random.Generator) -> IntArray:
        return generator.integers(0, problem.num_devices, (count, problem.num_operators))

    return random_search(draw, problem.evaluate, evaluations=evaluations, seed=seed)


def learned_placement(problem: PlacementProblem, evaluations: int, seed: int) -> BestDraw:
    """Policy gradient over the device of every operator."""
    logits = [np.zeros(problem.num_devices)] * problem.num_operators
    return policy_gradient(logits, problem.evaluate, evaluations=evaluations, seed=seed)


def placement_problem(
    graph: OperatorGraph, cluster: Cluster, num_devices: int, cap_bytes: float
) -> tuple[tuple[str, ...], PlacementProblem]:
    """The names of the operators that compute, and the problem of placing them.

    `graph` has the costs of one device; operators without work (the input data) lie everywhere.
    """
    placed = [number for number, one in enumerate(graph.operators) if one.strategies[0].seconds > 0]
    position = {number: place for place, number in enumerate(placed)}
    operators = [graph.operators[number] for number in placed]
    taken = [operator.strategies[0] for operator in operators]
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
    seconds = np.array([one.seconds for one in taken])
    return tuple(one.name for one in operators), PlacementProblem(
        seconds=np.stack([seconds / 3, 2 * seconds / 3]),
        num_bytes=np.array([one.state_bytes + one.saved_bytes for one in taken]),
        edges=tuple((position[source], position[target]) for source, target in edges),
        transfers=np.array(transfers).reshape(-1, 2),
        num_devices=num_devices,
        node_size=cluster.gpus_per_node,
        cap_bytes=cap_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Label:
    """A placement of the first operators: what the rest needs to know of it.

    `ready[phase][device]`, `ends[operator] = (forward, backward)` of the outputs still to be read.
    """

    devices: tuple[int, ...]
    ready: tuple[tuple[float, ...], tuple[float, ...]]
    ends: dict[int, tuple[float, float]]
    held: tuple[float, ...]

    @cached_property
    def numbers(self) -> FloatArray:
        ends = [time for operator in sorted(self.ends) for time in self.ends[operator]]
        return np.array([*self.ready[0], *self.ready[1], *ends, *self.held])


def best_placement(problem: PlacementProblem) -> BestDraw:
    """The placement of least seconds, by dynamic programming over undominated labels.

    Raises StageError when nothing fits in the cap.
    """
    count = problem.num_operators
    last_reader = [max((t for s, t in problem.edges if s == i), default=i) for i in range(count)]
    zeros = (0.0,) * problem.num_devices
    labels = [_Label(devices=(), ready=(zeros, zeros), ends={}, held=zeros)]
    # Descent from a random start gives a bound that cuts most labels.
    bound = _descend(problem, random_placement(problem, 2048, 0))
    # Per phase, the longest path behind each operator, transfers left out.
    tails: list[list[float]] = []
    for times in problem.seconds:
        behind = [0.0] * problem.num_operators
        for source, target in sorted(problem.edges, key=lambda edge: -edge[1]):
            behind[source] = max(behind[source], float(times[target]) + behind[target])
        tails.append(behind)
    evaluations = 1
    for number in range(count):
        kept: dict[tuple[int, ...], list[_Label]] = {}
        for label in labels:
            for device in _candidates(problem, label):
                found = _extend(problem, label, number, device)
                evaluations += 1
                live = {i: ends for i, ends in found.ends.items() if last_reader[i] > number}
                least = sum(
                    max(max(found.ready[k]), *(found.ends[i][k] + tails[k][i] for i in found.ends))
                    for k in range(2)
                )
                if max(found.held) > problem.cap_bytes or least > bound * (1 + 1e-12):
                    continue
                found = _Label(devices=found.devices, ready=found.ready, ends=live, held=found.held)
                _keep(kept.setdefault(tuple(found.devices[i] for i in sorted(live)), []), found)
        labels = [label for same in kept.values() for label in same]
    if not labels:
        raise StageError(
            f"no placement of {count} operators on {problem.num_devices} devices fits in "
            f"{problem.cap_bytes:.0f} bytes a device; all of them take "
            f"{problem.num_bytes.sum():.0f} bytes, the largest {problem.num_bytes.max():.0f}"
        )
    best = min(labels, key=lambda label: (sum(max(times) for times in label.ready), label.devices))
    return BestDraw(best.devices, sum(max(times) for times in best.ready), evaluations)


def _descend(problem: PlacementProblem, start: BestDraw) -> float:
    """Seconds after moving single operators, and pairs of them, while that helps."""
    seconds = start.seconds
    current = np.array(start.choices or (0,) * problem.num_operators, dtype=np.intp)
    moves = [
        (place, device)
        for place in range(problem.num_operators)
        for device in range(problem.num_devices)
    ]
    while True:
        tried = np.repeat(current[None], len(moves) ** 2, axis=0)
        for row, ((i, a), (j, b)) in enumerate(product(moves, moves)):
            tried[row, i], tried[row, j] = a, b
        found = problem.evaluate(tried)
        place = int(found.argmin())
        if not found[place] < seconds:
            return seconds
        seconds, current = float(found[place]), tried[place]


def _candidates(problem: PlacementProblem, label: _Label) -> Iterator[int]:
    """Devices in use, and the first unused one of each node: its others are the same."""
    fresh: set[int] = set()
    for device in range(problem.num_devices):
        if device in label.devices:
            yield device
        elif device // problem.node_size not in fresh:
            fresh.add(device // problem.node_size)
            yield device


def _extend(problem: PlacementProblem, label: _Label, number: int, device: int) -> _Label:
    ready: list[tuple[float, ...]] = []
    for phase, times in enumerate(problem.seconds):
        free = list(label.ready[phase])
        arrivals = [
            label.ends[source][phase] + problem.transfer(edge, label.devices[source], device)
            for edge, source in problem.inputs[number]
        ]
        free[device] = max([free[device], *arrivals]) + float(times[number])
        ready.append(tuple(free))
    held = list(label.held)
    held[device] += float(problem.num_bytes[number])
    return _Label(
        devices=(*label.devices, device),
        ready=(ready[0], ready[1]),
        ends={**label.ends, number: (ready[0][device], ready[1][device])},
        held=tuple(held),
    )


def _keep(labels: list[_Label], found: _Label) -> None:
    """Add a label unless another is at least as good in every number; drop those it beats."""
    if any((other.numbers <= found.numbers).all() for other in labels):
        return
    labels[:] = [other for other in labels if not (found.numbers <= other.numbers).all()]
    labels.append(found)


def solve_placement(problem: PlacementProblem, *, time_limit: float | None = None) -> BestDraw:
    """The same optimum by an integer program.

    x[i, d] = 1 when operator i is on device d; start times of both phases are continuous. An edge
    waits for its transfer, and of two operators on one device the later one in the order waits for
    the earlier one. `evaluations` are nodes of the search tree. Raises StageError when HiGHS finds
    nothing.
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
    crossings = [_crossing(program, problem, x, source, target) for source, target in problem.edges]
    # Of operators of which neither waits for the other's output: 1 where they share a device.
    together: dict[tuple[int, int], int] = {}
    behind: list[set[int]] = [set() for _ in range(count)]
    for source, target in sorted(problem.edges, key=lambda edge: edge[1]):
        behind[target] |= behind[source] | {source}
    for early, late in combinations(range(count), 2):
        if early not in behind[late]:
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
            big = scale * longest
            terms = [(start[late], 1.0), (start[early], -1.0), (same, -big)]
            program.row(terms, low=float(times[early]) - big)
    if problem.cap_bytes < np.inf:
        for device in devices:
            loads = zip(x, problem.num_bytes / problem.cap_bytes, strict=True)
            program.row([(row[device], float(size)) for row, size in loads], high=1.0)
    answer = program.solve(time_limit=time_limit)
    if answer.values is None:
        raise StageError(f"HiGHS found no placement of {count} operators that fits")
    placement = tuple(int(np.argmax(answer.values[row])) for row in x)
    seconds = float(problem.evaluate(np.array([placement]))[0])
    return BestDraw(placement, seconds, max(answer.num_nodes, 1))


def _crossing(
    program: IntegerProgram, problem: PlacementProblem, x: list[list[int]], source: int, target: int
) -> tuple[int, int]:
    """Variables that are 1 where an edge joins two devices, and two nodes."""
    device, node = (program.variable(integral=False) for _ in range(2))
    for before, after in zip(x[source], x[target], strict=True):
        program.row([(device, 1.0), (before, -1.0), (after, 1.0)], low=0.0)
    for first in range(0, problem.num_devices, problem.node_size):
        part = slice(first, first + problem.node_size)
        terms = [*((v, -1.0) for v in x[source][part]), *((v, 1.0) for v in x[target][part])]
        program.row([(node, 1.0), *terms], low=0.0)
    return device, node
