"""Division into stages as a 0/1 integer program; its optimum must equal the dynamic program's.

x[l, j] = 1 when layer l is on stage j (with options: one such variable an option). Least C, or
least sum of t_j + (m - 1) C, subject to

    sum over l of w_l x[l, j] <= C                              every stage j
    sum over j of x[l, j] = 1                                   every layer l
    sum over j' <= j of (x[l + 1, j'] - x[l, j']) <= 0          contiguous, in order
    sum over l of (state_l + in_flight_j saved_l) x[l, j] <= cap_j

With y[l, j] = sum over j' <= j of x[l, j'], stage j + 1 begins after layer l exactly where
y[l, j] - y[l + 1, j] = 1, so seconds of a boundary are linear too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moemesh.planner.operators.integer_program import Program
from moemesh.planner.stages.division import StageError, pipeline_seconds
from moemesh.planner.stages.stage_costs import Pipeline, check_fits

Goal = Literal["pipeline", "bottleneck"]
Terms = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class ProgramPartition:
    """What HiGHS found; `optimal` says that its own bound met it.

    `seconds` is sum of t_i + (m - 1) max t_i of the division, `bottleneck` max t_i.
    """

    first_layers: tuple[int, ...]
    options: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    seconds: float
    bottleneck: float
    optimal: bool
    num_nodes: int


def solve_partition_program(
    pipeline: Pipeline, *, goal: Goal = "pipeline", time_limit: float | None = None
) -> ProgramPartition:
    """Divide by branch and bound.

    Raises MemoryCapError when nothing fits, StageError when HiGHS finds nothing in time.
    """
    check_fits(pipeline)
    program = Program()
    scale = _scale(pipeline)
    stages = range(pipeline.num_stages)
    # x[layer][stage][option]
    x = [
        [[program.variable(high=float(time < np.inf)) for time in layer.seconds] for _ in stages]
        for layer in pipeline.layers
    ]
    total_weight = 1.0 if goal == "pipeline" else 0.0
    bottleneck_weight = pipeline.num_microbatches - 1.0 if goal == "pipeline" else 1.0
    largest = program.variable(bottleneck_weight, high=np.inf, integral=False)
    times = [program.variable(total_weight, high=np.inf, integral=False) for _ in stages]
    _add_order(program, x)
    for stage in stages:
        seconds = _stage_terms(pipeline, x, stage, scale)
        program.row([*seconds, (times[stage], -1.0)], low=0.0, high=0.0)
        program.row([(times[stage], 1.0), (largest, -1.0)], high=0.0)
    _add_memory(program, pipeline, x)
    answer = program.solve(time_limit=time_limit)
    if answer.values is None:
        raise StageError(
            f"HiGHS found no division of {len(pipeline.layers)} layers into "
            f"{pipeline.num_stages} stages"
        )
    return _read(pipeline, x, answer.values, answer.optimal, answer.num_nodes)


def _scale(pipeline: Pipeline) -> float:
    """HiGHS has absolute tolerances: layers are scaled to about 1000."""
    finite = [time for layer in pipeline.layers for time in layer.seconds if time < np.inf]
    return 1e3 / max(finite) if finite and max(finite) > 0 else 1.0


def _up_to(x: list[list[list[int]]], layer: int, stage: int, sign: float) -> Terms:
    """sign * y[layer, stage]."""
    return [(variable, sign) for j in range(stage + 1) for variable in x[layer][j]]


def _add_order(program: Program, x: list[list[list[int]]]) -> None:
    num_stages = len(x[0])
    for layer in x:
        program.row([(v, 1.0) for options in layer for v in options], low=1.0, high=1.0)
    for stage in range(num_stages):
        program.row([(v, 1.0) for layer in x for v in layer[stage]], low=1.0)
        for layer in range(len(x) - 1):
            terms = [*_up_to(x, layer + 1, stage, 1.0), *_up_to(x, layer, stage, -1.0)]
            program.row(terms, high=0.0)


def _stage_terms(pipeline: Pipeline, x: list[list[list[int]]], stage: int, scale: float) -> Terms:
    """The scaled seconds of a stage as a sum over variables."""
    terms: Terms = [
        (variable, time * scale)
        for layer, variables in zip(pipeline.layers, x, strict=True)
        for variable, time in zip(variables[stage], layer.seconds, strict=True)
        if time < np.inf
    ]
    for layer, seconds in enumerate(pipeline.boundary_seconds):
        if stage and seconds:
            terms += _up_to(x, layer, stage - 1, seconds * scale)
            terms += _up_to(x, layer + 1, stage - 1, -seconds * scale)
    return _merged(terms)


def _merged(terms: Terms) -> Terms:
    sums: dict[int, float] = {}
    for variable, value in terms:
        sums[variable] = sums.get(variable, 0.0) + value
    return list(sums.items())


def _add_memory(program: Program, pipeline: Pipeline, x: list[list[list[int]]]) -> None:
    caps = zip(pipeline.in_flight_counts, pipeline.caps, strict=True)
    for stage, (count, cap) in enumerate(caps):
        if cap == np.inf:
            continue
        unit = max(abs(cap), 1.0)
        terms = [
            (variable, (state + count * saved) / unit)
            for layer, variables in zip(pipeline.layers, x, strict=True)
            for variable, state, saved in zip(
                variables[stage], layer.state_bytes, layer.saved_bytes, strict=True
            )
        ]
        program.row(terms, high=cap / unit)


def _read(
    pipeline: Pipeline,
    x: list[list[list[int]]],
    values: np.ndarray,
    optimal: bool,
    num_nodes: int,
) -> ProgramPartition:
    """The division, priced again from the layers' own numbers."""
    chosen = [
        max(
            ((stage, option) for stage, row in enumerate(layer) for option in range(len(row))),
            key=lambda place: float(values[layer[place[0]][place[1]]]),
        )
        for layer in x
    ]
    seconds = [0.0] * pipeline.num_stages
    firsts: list[int] = []
    for index, (stage, option) in enumerate(chosen):
        if stage == len(firsts):
            firsts.append(index)
            seconds[stage] += pipeline.boundaries[index]
        seconds[stage] += pipeline.layers[index].seconds[option]
    return ProgramPartition(
        first_layers=tuple(firsts),
        options=tuple(option for _, option in chosen),
        stage_seconds=tuple(seconds),
        seconds=pipeline_seconds(seconds, pipeline.num_microbatches),
        bottleneck=max(seconds),
        optimal=optimal,
        num_nodes=num_nodes,
    )
