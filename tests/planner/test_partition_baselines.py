"""Baselines: honest counting, exact sampling, and never below the exact answer."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from moemesh.bench import partition
from moemesh.config.errors import UserError
from moemesh.planner.operators.elimination import solve
from moemesh.planner.operators.graph import OperatorError, graph_from_costs
from moemesh.planner.stages.division import StageError
from moemesh.planner.stages.partition_baselines import (
    PartitionProblem,
    anneal,
    cross_entropy,
    draw_conditional,
    even_division,
    reinforce,
    reinforce_strategies,
    table_problem,
)
from moemesh.planner.stages.partition_cases import compare, deepseek_units
from moemesh.planner.stages.stage_costs import Pipeline, layers_from_costs, plan_stages, stage_table
from tests.planner.graphs import random_graph

METHODS = {
    "bernoulli": lambda problem, n: reinforce(problem, evaluations=n),
    "conditional": lambda problem, n: reinforce(problem, evaluations=n, policy="conditional"),
    "cross entropy": lambda problem, n: cross_entropy(problem, evaluations=n, batch_size=128),
    "annealing": lambda problem, n: anneal(problem, evaluations=n),
}


def small() -> tuple[Pipeline, PartitionProblem]:
    times = np.random.default_rng(7).lognormal(0, 0.5, 10)
    pipeline = Pipeline(layers=layers_from_costs(times), num_stages=4, num_microbatches=6)
    return pipeline, table_problem(stage_table(pipeline), 6)


@pytest.mark.parametrize("name", METHODS)
def test_small_problems_are_solved_and_never_beaten(name: str) -> None:
    pipeline, problem = small()
    exact = plan_stages(pipeline).partition.seconds
    found = METHODS[name](problem, 3000)
    assert found.seconds == pytest.approx(exact)
    assert found.evaluations == 3000
    assert found.evaluations_to(exact) == found.history[-1][0] <= 3000
    assert found.choices is not None
    assert problem.evaluate(found.choices) == (pytest.approx(found.seconds), 0)
    assert [seconds for _, seconds in found.history] == sorted(
        (seconds for _, seconds in found.history), reverse=True
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    _, problem = small()
    assert METHODS[name](problem, 500) == METHODS[name](problem, 500)


@pytest.mark.parametrize("name", METHODS)
def test_one_stage_one_layer_and_all_layers_cut(name: str) -> None:
    for layers, stages in ((1, 1), (5, 1), (5, 5)):
        pipeline = Pipeline(
            layers=layers_from_costs([1.0] * layers), num_stages=stages, num_microbatches=2
        )
        problem = table_problem(stage_table(pipeline), 2)
        found = METHODS[name](problem, 400)
        assert found.seconds == plan_stages(pipeline).partition.seconds


def test_memory_is_learned_from_its_penalty() -> None:
    # Only 1, 2 and 3 layers on the three stages fit.
    layers = layers_from_costs([1.0] * 6, [0.0] * 6, [1.0] * 6)
    pipeline = Pipeline(layers=layers, num_stages=3, num_microbatches=8, cap_bytes=4)
    problem = table_problem(stage_table(pipeline), 8)
    assert even_division(problem).choices is None
    for method in METHODS.values():
        assert method(problem, 2000).choices == (0, 1, 3)


def test_policy_gradient_learns() -> None:
    """Late batches are better than early ones, not only the best of all draws."""
    times = np.random.default_rng(5).lognormal(0, 0.3, 40)
    pipeline = Pipeline(layers=layers_from_costs(times), num_stages=10, num_microbatches=32)
    problem = table_problem(stage_table(pipeline), 32)
    seen: list[float] = []

    def evaluate(first_layers: tuple[int, ...]) -> tuple[float, int]:
        seconds, over = problem.evaluate(first_layers)
        seen.append(seconds)
        return seconds, over

    watched = PartitionProblem(
        num_layers=40, num_stages=10, evaluate=evaluate, worst_seconds=problem.worst_seconds
    )
    reinforce(watched, evaluations=12_800, learning_rate=1.0, policy="conditional")
    assert np.mean(seen[-1000:]) < 0.85 * np.mean(seen[:1000])


def test_conditional_draws_have_the_right_distribution() -> None:
    logits = np.array([0.5, -1.0, 2.0, 0.0])
    drawn = draw_conditional(logits, 2, 40_000, np.random.default_rng(0))
    assert (drawn.sum(axis=1) == 2).all()
    weights = {pair: np.exp(logits[list(pair)].sum()) for pair in combinations(range(4), 2)}
    total = sum(weights.values())
    for pair, weight in weights.items():
        share = drawn[:, list(pair)].all(axis=1).mean()
        assert share == pytest.approx(weight / total, abs=0.01)


def test_strategies_of_a_graph() -> None:
    graph = random_graph(1, 5, 3)
    found = reinforce_strategies(graph, evaluations=6000)
    assert found.choices is not None
    assert graph.assignment(found.choices).seconds == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(solve(graph).seconds)
    with pytest.raises(OperatorError, match="below 0"):
        reinforce_strategies(graph_from_costs([[-1.0]], {}))


def test_problems_that_make_no_sense() -> None:
    with pytest.raises(StageError, match="5 stages cannot each hold one of 3 layers"):
        PartitionProblem(num_layers=3, num_stages=5, evaluate=lambda _: (1.0, 0), worst_seconds=1)
    with pytest.raises(StageError, match="worst_seconds is 0"):
        PartitionProblem(num_layers=3, num_stages=2, evaluate=lambda _: (1.0, 0), worst_seconds=0)


def test_the_published_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert partition.command(compare, case="small", evaluations=500, seeds=1, json=False) == 0
    printed = capsys.readouterr().out
    assert "integer program" in printed
    assert "reinforce (bernoulli)" in printed
    rows = {row.method: row for row in compare("small", 500, 1)}
    assert rows["integer program"].seconds == pytest.approx(rows["dynamic program"].seconds)
    assert len(deepseek_units()[0]) == 63
    with pytest.raises(UserError, match="no case 'x'"):
        compare("x", 1, 1)
    with pytest.raises(UserError, match="0 evaluations"):
        compare("small", 0, 1)
