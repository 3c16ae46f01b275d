"""Division into stages as a 0/1 integer program; its optimum must equal the dynamic program's.

x[l, j, k] = 1 when layer l is on stage j under option k, z[j, k] = 1 when stage j takes option k.
Least sum of t_j + (m - 1) C, subject to

    t_j = sum of w_lk x[l, j, k] (+ the boundary) <= C      every stage j
    sum over j, k of x[l, j, k] = 1                          every layer l
    sum over k of z[j, k] = 1,  x[l, j, k] <= z[j, k]        one option a stage
    sum over j' <= j of (x[l + 1, j'] - x[l, j']) <= 0       contiguous, in order
    sum of (state_lk + in_flight_j saved_lk) x[l, j, k] <= cap
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moemesh.planner.operators.integer_program import Program
from moemesh.planner.stages.division import Division, StageCosts, division_of

Terms = list[tuple[int, float]]


def solve_division(costs: StageCosts, *, time_limit: float | None = None) -> Division | None:
    """The division of least `pipeline_seconds` by branch and bound; None when nothing fits.

    `evaluations` are the nodes of the search tree, `lower_bound` is HiGHS's own.
    """
    program = Program()
    num_options, num_layers = costs.seconds.shape
    stages, options = range(costs.num_stages), range(num_options)
    # HiGHS has absolute tolerances: layers are scaled to about 1000.
    scale = 1e3 / max(float(costs.seconds.max()), 1e-300)
    x = [[[program.variable() for _ in options] for _ in stages] for _ in range(num_layers)]
    largest = program.variable(costs.num_microbatches - 1.0, high=np.inf, integral=False)
    for layer in x:
        program.row([(v, 1.0) for row in layer for v in row], low=1.0, high=1.0)
    for stage in stages:
        _add_options(program, [layer[stage] for layer in x])
        for before, after in pairwise(x):
            later = [(v, 1.0) for row in after[: stage + 1] for v in row]
            program.row(later + [(v, -1.0) for row in before[: stage + 1] for v in row], high=0.0)
        _add_stage(program, costs, [layer[stage] for layer in x], stage, largest, scale)
    answer = program.solve(time_limit=time_limit)
    if answer.values is None:
        return None
    chosen = answer.values
    stage_of = [int(np.argmax([sum(chosen[v] for v in row) for row in layer])) for layer in x]
    sizes = np.bincount(stage_of, minlength=costs.num_stages)
    table = costs.table()
    found = division_of(table, [int(size) for size in sizes], costs.num_microbatches)
    return Division(
        seconds=found.seconds,
        layers_per_stage=found.layers_per_stage,
        stage_seconds=found.stage_seconds,
        lower_bound=found.seconds if answer.optimal else answer.lower_bound / scale,
        evaluations=max(answer.num_nodes, 1),
    )


def _add_options(program: Program, rows: list[list[int]]) -> None:
    """One option for all layers of a stage, and at least one layer."""
    program.row([(v, 1.0) for row in rows for v in row], low=1.0)
    taken = [program.variable() for _ in rows[0]]
    program.row([(z, 1.0) for z in taken], low=1.0, high=1.0)
    for row in rows:
        for v, z in zip(row, taken, strict=True):
            program.row([(v, 1.0), (z, -1.0)], high=0.0)


def _add_stage(
    program: Program,
    costs: StageCosts,
    rows: list[list[int]],
    stage: int,
    largest: int,
    scale: float,
) -> None:
    """The stage's seconds, below the largest, and its bytes, below the cap."""
    boundary = scale * costs.boundary_seconds if stage else 0.0
    time = program.variable(1.0, high=np.inf, integral=False)
    seconds = [
        (v, float(costs.seconds[k, layer]) * scale)
        for layer, row in enumerate(rows)
        for k, v in enumerate(row)
    ]
    program.row([*seconds, (time, -1.0)], low=-boundary, high=-boundary)
    program.row([(time, 1.0), (largest, -1.0)], high=0.0)
    if costs.cap_bytes < np.inf:
        loads = costs.state_bytes + costs.in_flight[stage] * costs.saved_bytes
        unit = max(costs.cap_bytes, 1.0)
        program.row(
            [
                (v, float(loads[k, layer]) / unit)
                for layer, row in enumerate(rows)
                for k, v in enumerate(row)
            ],
            high=costs.cap_bytes / unit,
        )
