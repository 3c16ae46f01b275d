"""Division of a model into pipeline stages: inter-operator dynamic programming.

With m microbatches and stage times t_i (forward and backward of one microbatch) a step of 1F1B or
GPipe takes

    T = sum of t_i + (m - 1) * max of t_i

(Alpa, arXiv:2201.12023, equation 2). For a given largest time the least sum is a dynamic program
over (stage, first layer). The least T is found over the largest times that occur, in halves: the
sum can only fall as the largest time may grow, so

    T >= sum at the upper end + (m - 1) * lower end

bounds everything between two of them, and most are never tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.planner.operators.graph import FloatArray

IntArray = NDArray[np.intp]


class StageError(UserError):
    """A division into stages that cannot be."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of one microbatch by option and layer, shape (options, layers), and how stages run.

    A stage takes one option for all of its layers: one assignment of operator strategies, faster or
    lighter. Stage i holds the saved bytes of `in_flight[i]` microbatches at its peak and may use
    `cap_bytes`; every stage but the first pays `boundary_seconds` for its input.
    """

    seconds: FloatArray
    state_bytes: FloatArray
    saved_bytes: FloatArray
    in_flight: tuple[float, ...]
    num_microbatches: int
    cap_bytes: float = np.inf
    boundary_seconds: float = 0.0

    @property
    def num_layers(self) -> int:
        return self.seconds.shape[1]

    @property
    def num_stages(self) -> int:
        return len(self.in_flight)

    def bytes(self, stage: int) -> FloatArray:
        """Bytes [option, first, end] of layers first .. end - 1 on a stage."""
        return _sums(self.state_bytes) + self.in_flight[stage] * _sums(self.saved_bytes)

    def options(self) -> FloatArray:
        """Seconds [stage, option, first, end]; infinite where empty or over the cap."""
        seconds = _sums(self.seconds)
        seconds[:, 1:] += self.boundary_seconds
        first, end = np.indices(seconds.shape[1:])
        seconds[:, first >= end] = np.inf
        return np.stack([
            np.where(self.bytes(stage) <= self.cap_bytes, seconds, np.inf)
            for stage in range(self.num_stages)
        ])  # fmt: skip

    def table(self) -> FloatArray:
        """Seconds [stage, first, end] under the fastest option that fits."""
        return self.options().min(axis=1)

    def smallest_cap(self) -> float:
        """The least `cap_bytes` under which some division fits."""
        loads = np.stack([self.bytes(stage).min(axis=0) for stage in range(self.num_stages)])
        first, end = np.indices(loads.shape[1:])
        loads[:, first >= end] = np.inf
        return _Search(loads, 1).bottleneck()


@dataclass(frozen=True, kw_only=True)
class Division:
    """The best division found: stage i holds `layers_per_stage[i]` layers.

    No division is better than `lower_bound`; `evaluations` counts runs of the inner dynamic
    program, or the divisions that a search tried.
    """

    seconds: float
    layers_per_stage: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    lower_bound: float
    evaluations: int

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return runs_of(self.layers_per_stage)


def runs_of(layers_per_stage: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage of so many layers."""
    ends = np.cumsum(layers_per_stage)
    return tuple(
        range(int(end) - size, int(end)) for size, end in zip(layers_per_stage, ends, strict=True)
    )


def pipeline_seconds(stage_seconds: Sequence[float], num_microbatches: int) -> float:
    """sum of t_i + (m - 1) * max of t_i; infinite if a stage is."""
    largest = max(stage_seconds)
    if largest == np.inf:
        return np.inf
    return float(sum(stage_seconds) + (num_microbatches - 1) * largest)


def division_of(table: FloatArray, layers_per_stage: Sequence[int], microbatches: int) -> Division:
    """A given division, priced by a table of stage costs."""
    seconds = [
        float(table[stage, run.start, run.stop])
        for stage, run in enumerate(runs_of(layers_per_stage))
    ]
    total = pipeline_seconds(seconds, microbatches)
    return Division(
        seconds=total,
        layers_per_stage=tuple(layers_per_stage),
        stage_seconds=tuple(seconds),
        lower_bound=0.0,
        evaluations=1,
    )


def best_division(table: FloatArray, num_microbatches: int) -> Division | None:
    """The division of least `pipeline_seconds`; None when none is finite.

    table[i, first, end] are the seconds of stage i with layers first .. end - 1, infinite where it
    does not fit; shape (stages, layers + 1, layers + 1). Costs need not be sums of layers.
    """
    first, end = np.indices(table.shape[1:])
    costs = np.where(first < end, table, np.inf)
    search = _Search(costs, num_microbatches)
    free = search.run(np.inf)
    if free is None:
        return None
    times = np.unique(costs[np.isfinite(costs)])
    smallest = search.bottleneck()
    tight = search.run(smallest)
    assert tight is not None
    best = min(free, tight, key=lambda found: found.seconds)
    low, high = (int(np.searchsorted(times, max(found.stage_seconds))) for found in (tight, free))
    low = int(np.searchsorted(times, smallest))
    spans = [(low, tight, high, free)] if low < high else []
    while spans:
        low, lower, high, upper = spans.pop()
        least = sum(upper.stage_seconds)
        if high - low < 2 or sum(lower.stage_seconds) <= least:
            continue
        if least + (num_microbatches - 1) * times[low + 1] >= best.seconds:
            continue
        middle = (low + high) // 2
        found = search.run(float(times[middle]))
        assert found is not None
        best = min(best, found, key=lambda one: one.seconds)
        # What was found at `middle` may already hold further down: nothing lies between.
        below = int(np.searchsorted(times, max(found.stage_seconds)))
        spans += [(middle, found, high, upper), (low, lower, max(below, low), found)]
    return replace(best, lower_bound=best.seconds, evaluations=search.runs)


class _Search:
    """The inner dynamic program: the least sum of stage times when none exceeds a limit."""

    def __init__(self, costs: FloatArray, num_microbatches: int) -> None:
        self.costs = costs
        self.num_microbatches = num_microbatches
        self.num_layers = costs.shape[1] - 1
        self.runs = 0

    def run(self, limit: float) -> Division | None:
        """The best division with all stage times <= limit; None when there is none."""
        self.runs += 1
        least = np.full(self.num_layers + 1, np.inf)
        least[0] = 0.0
        back: list[IntArray] = []
        for stage in np.where(self.costs <= limit, self.costs, np.inf):
            total = least[:, None] + stage
            back.append(total.argmin(axis=0))
            least = total.min(axis=0)
        if not np.isfinite(least[self.num_layers]):
            return None
        sizes: list[int] = []
        end = self.num_layers
        for before in reversed(back):
            first = int(before[end])
            sizes.append(end - first)
            end = first
        return division_of(self.costs, sizes[::-1], self.num_microbatches)

    def bottleneck(self) -> float:
        """The least possible largest entry; infinite when there is no division."""
        least = np.full(self.num_layers + 1, np.inf)
        least[0] = -np.inf
        for stage in self.costs:
            least = np.maximum(least[:, None], stage).min(axis=0)
        return float(least[self.num_layers])


def _sums(values: FloatArray) -> FloatArray:
    """Sums [option, first, end] of values [option, layer]."""
    ends = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return ends[:, None, :] - ends[:, :, None]
