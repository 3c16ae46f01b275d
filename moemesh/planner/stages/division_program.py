"""Division into stages as a 0/1 integer program; its optimum must equal the dynamic program's.

x[j, a, b] = 1 when stage j holds layers a .. b - 1, for runs that fit only. Least sum of t_j +
(m - 1) C, subject to

    t_j = sum of w_jab x[j, a, b] <= C                                every stage j
    sum over a, b of x[j, a, b] = 1                                   one run a stage
    sum over a of x[j, a, b] = sum over c of x[j + 1, b, c]           the next begins where it ends

Runs whose stage alone would make a step longer than the even division's are left out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from moemesh.planner.operators.graph import FloatArray
from moemesh.planner.operators.integer_program import Program
from moemesh.planner.stages.division import Division, division_of


def solve_division(
    table: FloatArray, num_microbatches: int, *, time_limit: float | None = None
) -> Division | None:
    """The division of least `pipeline_seconds` by branch and bound; None when nothing fits.

    `table` as for `best_division`. `evaluations` are the nodes of the search tree, `lower_bound` is
    HiGHS's own.
    """
    num_stages, num_layers = len(table), table.shape[1] - 1
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    even = division_of(table, [b - a for a, b in pairwise(ends)], num_microbatches)
    # HiGHS has absolute tolerances: times are scaled to about 1000.
    scale = 1e3 / max(float(table[np.isfinite(table)].max(initial=0.0)), 1e-300)
    program = Program()
    largest = program.variable(num_microbatches - 1.0, high=np.inf, integral=False)
    runs: list[dict[tuple[int, int], int]] = []
    for stage, seconds in enumerate(table):
        found: dict[tuple[int, int], int] = {}
        for first, end in np.argwhere(seconds * num_microbatches <= even.seconds).tolist():
            at_ends = (first == 0) == (stage == 0) and (end == num_layers) == (
                stage == num_stages - 1
            )
            if first < end and at_ends and np.isfinite(seconds[first, end]):
                found[first, end] = program.variable(float(seconds[first, end]) * scale)
        runs.append(found)
        program.row([(x, 1.0) for x in found.values()], low=1.0, high=1.0)
        times = [(x, float(seconds[run]) * scale) for run, x in found.items()]
        program.row([*times, (largest, -1.0)], high=0.0)
    for before, after in pairwise(runs):
        for border in range(1, num_layers):
            terms = [(x, 1.0) for (_, end), x in before.items() if end == border]
            terms += [(x, -1.0) for (first, _), x in after.items() if first == border]
            program.row(terms, low=0.0, high=0.0)
    answer = program.solve(time_limit=time_limit)
    if answer.values is None:
        return None
    values = answer.values
    chosen = [max(found, key=lambda run: float(values[found[run]])) for found in runs]
    sizes = [end - first for first, end in chosen]
    division = division_of(table, sizes, num_microbatches)
    bound = division.seconds if answer.optimal else answer.lower_bound / scale
    return replace(division, lower_bound=bound, evaluations=max(answer.num_nodes, 1))
