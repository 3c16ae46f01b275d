"""Random operator graphs, placements and stage costs, with slow, obviously right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import numpy as np

from moemesh.planner.operators.graph import Edge, Operator, OperatorGraph, Strategy
from moemesh.planner.stages.division import StageCosts, pipeline_seconds
from moemesh.planner.stages.placement import PlacementProblem


def graph_of(
    seconds: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    *,
    state: Sequence[Sequence[float]] | None = None,
    saved: Sequence[Sequence[float]] | None = None,
    groups: Sequence[str] | None = None,
    counts: Mapping[str, int] | None = None,
) -> OperatorGraph:
    """A graph from plain numbers: seconds[i][s] and edges[i, j][s, t]."""
    operators = tuple(
        Operator(
            name=f"operator {number}",
            group=groups[number] if groups else "",
            strategies=tuple(
                Strategy(
                    seconds=float(time),
                    state_bytes=float(state[number][place]) if state else 0.0,
                    saved_bytes=float(saved[number][place]) if saved else 0.0,
                )
                for place, time in enumerate(row)
            ),
        )
        for number, row in enumerate(seconds)
    )
    made = tuple(
        Edge(
            source=i,
            target=j,
            seconds=np.array(table, dtype=float),
            group=groups[j] if groups else "",
        )
        for (i, j), table in edges.items()
    )
    return OperatorGraph(operators=operators, edges=made, counts=dict(counts or {}))


def random_graph(seed: int, num_operators: int, density: float = 0.4) -> OperatorGraph:
    """Any graph: branches, joins, cycles, parts that are not connected, groups with copies."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 5, num_operators)
    edges = {
        (i, j): generator.integers(0, 4, (counts[i], counts[j])).tolist()
        for i, j in combinations(range(num_operators), 2)
        if generator.random() < density
    }
    return graph_of(
        [generator.random(count).tolist() for count in counts],
        edges,
        state=[generator.integers(0, 50, count).tolist() for count in counts],
        saved=[generator.integers(0, 20, count).tolist() for count in counts],
        groups=[f"group {generator.integers(0, 3)}" for _ in counts],
        counts={f"group {number}": int(generator.integers(1, 9)) for number in range(3)},
    )


def brute_force(graph: OperatorGraph, byte_price: float = 0.0, in_flight: float = 1.0) -> float:
    """Least seconds + byte_price * bytes over all assignments."""
    best = np.inf
    for choices in product(*(range(len(one.strategies)) for one in graph.operators)):
        total = 0.0
        for operator, choice in zip(graph.operators, choices, strict=True):
            one = operator.strategies[choice]
            held = one.state_bytes + in_flight * one.saved_bytes
            total += graph.count(operator.group) * (one.seconds + byte_price * held)
        for edge in graph.edges:
            pair = choices[edge.source], choices[edge.target]
            total += graph.count(edge.group) * edge.seconds[pair]
        best = min(best, total)
    return best


def brute_force_stages(costs: StageCosts) -> tuple[float, float]:
    """(least pipeline seconds within the cap, smallest cap that works) over all divisions."""
    best, smallest = np.inf, np.inf
    options, num_layers = range(len(costs.seconds)), costs.seconds.shape[1]
    for cuts in combinations(range(1, num_layers), len(costs.in_flight) - 1):
        borders = (0, *cuts, num_layers)
        for chosen in product(options, repeat=len(costs.in_flight)):
            times, worst = [], 0.0
            for stage, option in enumerate(chosen):
                layers = slice(borders[stage], borders[stage + 1])
                held = costs.state_bytes[option, layers].sum()
                held += costs.in_flight[stage] * costs.saved_bytes[option, layers].sum()
                worst = max(worst, held)
                boundary = costs.boundary_seconds if stage else 0.0
                times.append(costs.seconds[option, layers].sum() + boundary)
            smallest = min(smallest, worst)
            if worst <= costs.cap_bytes:
                best = min(best, pipeline_seconds(times, costs.num_microbatches))
    return best, smallest


def placement_seconds(problem: PlacementProblem, placement: Sequence[int]) -> float:
    """Forward, then backward in the reverse order, one operator after the other."""
    held = [0.0] * problem.num_devices
    for device, size in zip(placement, problem.num_bytes, strict=True):
        held[device] += size
    if max(held) > problem.cap_bytes:
        return np.inf
    total = 0.0
    order = list(range(problem.num_operators))
    for times, numbers, turned in (
        (problem.seconds[0], order, False),
        (problem.seconds[1], order[::-1], True),
    ):
        free, ends = [0.0] * problem.num_devices, dict[int, float]()
        for number in numbers:
            device = placement[number]
            start = free[device]
            for edge, ends_of in enumerate(problem.edges):
                before, after = ends_of[::-1] if turned else ends_of
                if after == number:
                    far = placement[before] // problem.node_size != device // problem.node_size
                    moved = problem.transfers[edge, int(far)] * (placement[before] != device)
                    start = max(start, ends[before] + moved)
            ends[number] = free[device] = start + times[number]
        total += max(ends.values())
    return total


def brute_force_placement(problem: PlacementProblem) -> float:
    """Least seconds over all placements."""
    devices = range(problem.num_devices)
    return min(
        placement_seconds(problem, placement)
        for placement in product(devices, repeat=problem.num_operators)
    )
