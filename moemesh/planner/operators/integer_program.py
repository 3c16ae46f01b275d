"""Mixed-integer linear programs through scipy's HiGHS, with a typed door.

Built row by row: `Program.variable`, `Program.row`, `Program.solve`. It solves the operator graphs
and checks the dynamic programs of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramAnswer:
    """The result of HiGHS: `values` is None when it found nothing feasible.

    `objective` and `lower_bound` are those of the program; `optimal` says that they agree within
    HiGHS's tolerances (relative gap 0 is asked for).
    """

    values: NDArray[np.float64] | None
    objective: float
    lower_bound: float
    optimal: bool
    infeasible: bool
    num_nodes: int


@dataclass(kw_only=True)
class IntegerProgram:
    """minimise sum of cost * variable, subject to rows low <= sum of coefficient * x <= high."""

    costs: list[float] = field(default_factory=list[float])
    lows: list[float] = field(default_factory=list[float])
    highs: list[float] = field(default_factory=list[float])
    integral: list[bool] = field(default_factory=list[bool])
    _entries: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    _row_lows: list[float] = field(default_factory=list[float])
    _row_highs: list[float] = field(default_factory=list[float])

    def variable(
        self, cost: float = 0.0, *, low: float = 0.0, high: float = 1.0, integral: bool = True
    ) -> int:
        """A new variable; its position. An infinite cost fixes it to `low`."""
        forbidden = cost == np.inf
        self.costs.append(0.0 if forbidden else cost)
        self.lows.append(low)
        self.highs.append(low if forbidden else high)
        self.integral.append(integral)
        return len(self.costs) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf
    ) -> None:
        """A new row; terms are (variable, coefficient)."""
        number = len(self._row_lows)
        self._entries += [(number, variable, value) for variable, value in terms]
        self._row_lows.append(low)
        self._row_highs.append(high)

    def solve(self, *, time_limit: float | None = None) -> ProgramAnswer:
        """Run HiGHS, at most `time_limit` seconds."""
        # Late and untyped: scipy ships no type stubs, and importing it takes a third of a second.
        optimize: Any = import_module("scipy.optimize")
        sparse: Any = import_module("scipy.sparse")
        rows, columns, values = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        shape = (len(self._row_lows), len(self.costs))
        matrix = sparse.coo_array((values, (rows, columns)), shape=shape).tocsr()
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if time_limit is not None:
            options["time_limit"] = time_limit
        answer: Any = optimize.milp(
            np.array(self.costs),
            integrality=np.array(self.integral, dtype=int),
            bounds=optimize.Bounds(np.array(self.lows), np.array(self.highs)),
            constraints=optimize.LinearConstraint(
                matrix, np.array(self._row_lows), np.array(self._row_highs)
            ),
            options=options,
        )
        found = answer.x is not None
        bound = getattr(answer, "mip_dual_bound", None)
        return ProgramAnswer(
            values=np.asarray(answer.x, dtype=float) if found else None,
            objective=float(answer.fun) if found else float("inf"),
            lower_bound=float(bound) if bound is not None else float("-inf"),
            optimal=int(answer.status) == 0,
            infeasible=int(answer.status) == 2,
            num_nodes=int(getattr(answer, "mip_node_count", 0) or 0),
        )
