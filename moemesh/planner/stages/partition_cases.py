"""Cases on which learned and random search are compared with the exact answer.

Each case is solved by dynamic programming (or elimination) and by the integer program, which must
agree, then by every baseline with the same number of evaluations and several seeds. One case has
the simulated 1F1B schedule as its objective, which no dynamic program optimises: there the
baselines may win.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moemesh.config.cluster import load_cluster
from moemesh.config.errors import UserError
from moemesh.config.model import ModelConfig
from moemesh.config.sources import read_preset_table
from moemesh.planner.flops import head_forward, layer_forward
from moemesh.planner.operators import elimination, operator_program
from moemesh.planner.operators.blocks import TransformerBlocks
from moemesh.planner.operators.graph import OperatorGraph, join
from moemesh.planner.operators.pareto import MemoryCapError
from moemesh.planner.operators.strategies import cost_model
from moemesh.planner.parameters import embedding_weights, head_weights, layer_weights
from moemesh.planner.shapes.shape import ModelShape, from_model_config
from moemesh.planner.stages.partition_baselines import (
    BaselineResult,
    PartitionProblem,
    anneal,
    cross_entropy,
    even_division,
    reinforce,
    reinforce_strategies,
    table_problem,
)
from moemesh.planner.stages.partition_program import solve_partition_program
from moemesh.planner.stages.stage_costs import Pipeline, layers_from_costs, plan_stages, stage_table
from moemesh.schedule.one_f_one_b import one_f_one_b
from moemesh.schedule.simulate import Costs, simulate

#: HiGHS is stopped after this long; its bound then says how far it came.
PROGRAM_SECONDS = 60.0
_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one case: the gap to `best_known`, worst and median over seeds.

    `evaluations_to_best` are those until the method's own best, `wall_seconds` of one seed. `gap`
    is None where nothing that fits was found.
    """

    case: str
    method: str
    seconds: float | None
    gap: float | None
    worst_gap: float | None
    evaluations: int
    evaluations_to_best: int | None
    wall_seconds: float


def compare(case: str, evaluations: int, seeds: int) -> list[Row]:
    """All methods on one case of `CASES`, or on "all". Raises UserError."""
    if evaluations < 1 or seeds < 1:
        raise UserError(f"{evaluations} evaluations and {seeds} seeds: both must be at least 1")
    if case != "all" and case not in CASES:
        raise UserError(f"no case {case!r}: choose from all, {', '.join(CASES)}")
    names = list(CASES) if case == "all" else [case]
    return [row for name in names for row in CASES[name](name, evaluations, seeds)]


def deepseek_units() -> tuple[list[float], list[float], list[float]]:
    """Seconds, state and saved bytes of the 63 units of DeepSeek-V3: embedding, layers, head.

    For one microbatch of 4,096 tokens on 8 devices of a node that share experts and tokens, at half
    the peak of an H100; 18 bytes a parameter; 34 bytes a token and channel of a layer.
    """
    shape = preset_shape("deepseek-v3")
    rate = 0.5 * 989.4e12 * 8
    layers = [layer_forward(shape, kind, _TOKENS, "causal") for kind in shape.kinds]
    seconds = [3 * _TOKENS * flops / rate for flops in (*layers, head_forward(shape))]
    parts = [embedding_weights(shape).total]
    parts += [layer_weights(shape, kind.moe).total for kind in shape.kinds]
    parts.append(head_weights(shape).total)
    state = [18.0 * count / 64 for count in parts]
    stream = float(_TOKENS * shape.hidden_size)
    saved = [
        2 * stream / 8,
        *(34 * stream / 8 for _ in layers),
        6.0 * _TOKENS * shape.vocab_size / 8,
    ]
    # Reading the embedding moves bytes and computes nothing.
    read = 6 * stream / 8 / 3.35e12
    return [read, *seconds], state, saved


def preset_shape(name: str) -> ModelShape:
    """The shape of a model preset."""
    return from_model_config(ModelConfig.model_validate(read_preset_table(name)), name)


def _deepseek(name: str, evaluations: int, seeds: int) -> list[Row]:
    seconds, state, saved = deepseek_units()
    layers = layers_from_costs(seconds, state, saved)
    return _pipeline(
        Pipeline(layers=layers, num_stages=16, num_microbatches=64), name, evaluations, seeds
    )


def _tight_memory(name: str, evaluations: int, seeds: int) -> list[Row]:
    """The same with a cap 3 % above the smallest that works."""
    seconds, state, saved = deepseek_units()
    layers = layers_from_costs(seconds, state, saved)
    try:
        plan_stages(Pipeline(layers=layers, num_stages=16, num_microbatches=64, cap_bytes=0.0))
        raise AssertionError("a model fits in 0 bytes")
    except MemoryCapError as error:
        cap = 1.03 * error.smallest_bytes
    pipeline = Pipeline(layers=layers, num_stages=16, num_microbatches=64, cap_bytes=cap)
    return _pipeline(pipeline, name, evaluations, seeds)


def _uneven(name: str, evaluations: int, seeds: int) -> list[Row]:
    """40 layers of random times with boundaries that cost, on 8 stages."""
    generator = np.random.default_rng(0)
    layers = layers_from_costs(generator.lognormal(0.0, 0.5, 40))
    sends = tuple(generator.uniform(0.0, 0.5, 39))
    pipeline = Pipeline(layers=layers, num_stages=8, num_microbatches=32, boundary_seconds=sends)
    return _pipeline(pipeline, name, evaluations, seeds)


def _small(name: str, evaluations: int, seeds: int) -> list[Row]:
    generator = np.random.default_rng(4)
    layers = layers_from_costs(generator.lognormal(0.0, 0.5, 12))
    return _pipeline(
        Pipeline(layers=layers, num_stages=4, num_microbatches=8), name, evaluations, seeds
    )


def _pipeline(pipeline: Pipeline, name: str, evaluations: int, seeds: int) -> list[Row]:
    """Exact, integer program and baselines on the formula's objective."""
    started = time.perf_counter()
    plan = plan_stages(pipeline)
    wall = time.perf_counter() - started
    exact = plan.partition.seconds
    rows = [_row(name, "dynamic program", exact, exact, plan.partition.evaluations, wall)]
    started = time.perf_counter()
    program = solve_partition_program(pipeline, time_limit=PROGRAM_SECONDS)
    wall = time.perf_counter() - started
    title = (
        "integer program"
        if program.optimal
        else f"integer program, stopped at {PROGRAM_SECONDS:.0f} s"
    )
    rows.append(_row(name, title, program.seconds, exact, program.num_nodes, wall))
    problem = table_problem(stage_table(pipeline), pipeline.num_microbatches)
    return rows + _baselines(problem, name, exact, evaluations, seeds)


def _simulated(name: str, evaluations: int, seeds: int) -> list[Row]:
    """20 layers on 5 stages, 8 microbatches; the objective is the simulated 1F1B makespan."""
    generator = np.random.default_rng(2)
    times = generator.lognormal(0.0, 0.4, 20)
    schedule = one_f_one_b(5, 8)
    costs = layers_from_costs(times)
    started = time.perf_counter()
    plan = plan_stages(Pipeline(layers=costs, num_stages=5, num_microbatches=8))
    wall = time.perf_counter() - started

    def makespan(first_layers: tuple[int, ...]) -> tuple[float, int]:
        ends = (*first_layers[1:], len(times))
        stage = [float(times[a:b].sum()) for a, b in zip(first_layers, ends, strict=True)]
        done = simulate(
            schedule,
            Costs(
                forward=[time / 3 for time in stage],
                backward=[2 * time / 3 for time in stage],
                message=0.3,
            ),
        )
        return float(done.makespan), 0

    problem = PartitionProblem(
        num_layers=20, num_stages=5, evaluate=makespan, worst_seconds=float(times.sum()) * 20
    )
    found = makespan(plan.partition.first_layers)[0]
    # Each evaluation runs the simulator, so there are fewer.
    few = max(1, evaluations // 10)
    start = plan.partition.first_layers
    polish = _summary(
        name,
        _timed(lambda seed: anneal(problem, evaluations=few, start=start, seed=seed), seeds),
        found,
    )
    baselines = _baselines(problem, name, found, few, seeds)
    return [
        _row(name, "dynamic program (formula)", found, found, plan.partition.evaluations, wall),
        replace(polish, method="annealing from there"),
        *baselines,
    ]


def _operators(name: str, evaluations: int, seeds: int) -> list[Row]:
    """Four layers of Llama3-8B on one node: a strategy per operator."""
    graph = operator_graph()
    started = time.perf_counter()
    best = elimination.solve(graph).seconds
    rows = [_row(name, "elimination", best, best, 1, time.perf_counter() - started)]
    started = time.perf_counter()
    program = operator_program.solve_program(graph, time_limit=PROGRAM_SECONDS)
    wall = time.perf_counter() - started
    rows.append(_row(name, "integer program", program.assignment.seconds, best, 1, wall))
    runs = _timed(
        lambda seed: reinforce_strategies(graph, evaluations=evaluations, seed=seed), seeds
    )
    return [*rows, _summary(name, runs, best)]


def operator_graph(num_layers: int = 4) -> OperatorGraph:
    """Layers of Llama3-8B in a row, one sequence of 8,192 tokens on 8 H100."""
    shape = preset_shape("llama3-8b")
    costs = cost_model(load_cluster("dgx_h100"), {"tensor": 8}, microbatches=8)
    blocks = TransformerBlocks(shape=shape, batch=1, sequence=8192, costs=costs)
    return join([blocks.layer(shape.kinds[0])] * num_layers)


def _baselines(
    problem: PartitionProblem, name: str, exact: float, evaluations: int, seeds: int
) -> list[Row]:
    methods: list[Callable[[int], BaselineResult]] = [
        lambda seed: reinforce(problem, evaluations=evaluations, seed=seed),
        lambda seed: reinforce(problem, evaluations=evaluations, seed=seed, policy="conditional"),
        lambda seed: cross_entropy(problem, evaluations=evaluations, seed=seed),
        lambda seed: anneal(problem, evaluations=evaluations, seed=seed),
    ]
    rows = [_summary(name, _timed(lambda _: even_division(problem), 1), exact)]
    return rows + [_summary(name, _timed(method, seeds), exact) for method in methods]


def _timed(
    method: Callable[[int], BaselineResult], seeds: int
) -> list[tuple[BaselineResult, float]]:
    runs: list[tuple[BaselineResult, float]] = []
    for seed in range(seeds):
        started = time.perf_counter()
        found = method(seed)
        runs.append((found, time.perf_counter() - started))
    return runs


def _summary(name: str, runs: list[tuple[BaselineResult, float]], exact: float) -> Row:
    """The median seed, and the worst."""
    ordered = sorted(runs, key=lambda run: run[0].seconds)
    found, wall = ordered[(len(ordered) - 1) // 2]
    worst = ordered[-1][0].seconds
    fits = found.choices is not None
    return Row(
        case=name,
        method=found.name,
        seconds=found.seconds if fits else None,
        gap=found.seconds / exact - 1 if fits else None,
        worst_gap=worst / exact - 1 if np.isfinite(worst) else None,
        evaluations=found.evaluations,
        evaluations_to_best=found.history[-1][0] if fits else None,
        wall_seconds=wall,
    )


def _row(
    name: str, method: str, seconds: float, exact: float, evaluations: int, wall: float
) -> Row:
    # Sums in another order differ in the last digit.
    gap = round(seconds / exact - 1, 12) + 0.0
    return Row(
        case=name,
        method=method,
        seconds=seconds,
        gap=gap,
        worst_gap=gap,
        evaluations=evaluations,
        evaluations_to_best=None,
        wall_seconds=wall,
    )


CASES: dict[str, Callable[[str, int, int], list[Row]]] = {
    "deepseek-v3": _deepseek,
    "tight memory": _tight_memory,
    "uneven": _uneven,
    "small": _small,
    "simulated": _simulated,
    "operators": _operators,
}
