"""Random operator graphs and slow, obviously right answers to compare with."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np

from moemesh.planner.operators.graph import Block, OperatorGraph, graph_from_costs
from moemesh.planner.stages.division import pipeline_seconds
from moemesh.planner.stages.stage_costs import Pipeline


def random_graph(
    seed: int, num_operators: int, most_strategies: int = 4, density: float = 0.4
) -> OperatorGraph:
    """Any graph: branches, joins, cycles, parts that are not connected."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, most_strategies + 1, num_operators)
    edges = {
        (i, j): generator.random((counts[i], counts[j]))
        for i, j in combinations(range(num_operators), 2)
        if generator.random() < density
    }
    return graph_from_costs(
        [generator.random(count) for count in counts],
        edges,
        state_bytes=[generator.integers(0, 50, count) for count in counts],
        saved_bytes=[generator.integers(0, 20, count) for count in counts],
    )


def random_block(seed: int, num_strategies: int, num_operators: int = 11) -> Block:
    """A block with the joins of a transformer layer; entry and exit have equal strategies."""
    generator = np.random.default_rng(seed)
    pairs = [(i, i + 1) for i in range(num_operators - 1)]
    pairs += [(0, 5), (5, 10), (6, 8), (1, 3), (2, 4)]
    size = (num_operators, num_strategies)
    state, saved = generator.integers(0, 1000, size), generator.integers(0, 300, size)
    state[0] = saved[0] = 0
    seconds = generator.random(size)
    seconds[0] = 0.0
    edges = {
        pair: generator.random((num_strategies, num_strategies))
        for pair in pairs
        if max(pair) < num_operators
    }
    graph = graph_from_costs(list(seconds), edges, state_bytes=list(state), saved_bytes=list(saved))
    return Block(graph=graph, entry=0, exit=num_operators - 1)


def brute_force(
    graph: OperatorGraph, budget: float = np.inf, in_flight: float = 1.0
) -> tuple[float, float]:
    """(least seconds within the budget, fewest bytes) over all assignments."""
    best, fewest = np.inf, np.inf
    for choices in product(*map(range, graph.num_strategies)):
        found = graph.assignment(choices)
        if not np.isfinite(found.seconds):
            continue
        num_bytes = found.memory_bytes(in_flight)
        fewest = min(fewest, num_bytes)
        if num_bytes <= budget:
            best = min(best, found.seconds)
    return best, fewest


def brute_force_stages(pipeline: Pipeline) -> tuple[float, float]:
    """(least pipeline seconds within the cap, smallest cap that works) over all divisions."""
    num_layers = len(pipeline.layers)
    best, smallest = np.inf, np.inf
    for cuts in combinations(range(1, num_layers), pipeline.num_stages - 1):
        borders = (0, *cuts, num_layers)
        runs = [range(a, b) for a, b in pairwise(borders)]
        for options in product(*(range(len(layer.seconds)) for layer in pipeline.layers)):
            times, worst, fits = [], 0.0, True
            for stage, run in enumerate(runs):
                chosen = [(pipeline.layers[index], options[index]) for index in run]
                count = pipeline.in_flight_counts[stage]
                num_bytes = sum(
                    layer.state_bytes[o] + count * layer.saved_bytes[o] for layer, o in chosen
                )
                worst = max(worst, num_bytes + pipeline.fixed_bytes)
                fits &= num_bytes <= pipeline.caps[stage]
                times.append(sum(layer.seconds[o] for layer, o in chosen))
                times[-1] += pipeline.boundaries[run.start]
            smallest = min(smallest, worst)
            if fits:
                best = min(best, pipeline_seconds(times, pipeline.num_microbatches))
    return best, smallest
