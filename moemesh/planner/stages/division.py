"""Division of a model into pipeline stages: dynamic programming, and baselines of it.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

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
    runs = enumerate(runs_of(layers_per_stage))
    seconds = tuple(float(table[stage, run.start, run.stop]) for stage, run in runs)
    return Division(
        seconds=pipeline_seconds(seconds, microbatches),
        layers_per_stage=tuple(layers_per_stage),
        stage_seconds=seconds,
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
    low = int(np.searchsorted(times, smallest))
    high = int(np.searchsorted(times, max(free.stage_seconds)))
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


# Random search and policy gradient for divisions and placements: baselines of the exact methods.
#
# Policy gradient as in device-placement work (A. Mirhoseini et al., arXiv:1706.04972): one
# categorical choice per variable, reward -log T, a penalty where a draw is illegal or does not fit,
# advantages normalised over the batch, an entropy bonus (R. Williams, "Simple statistical
# gradient-following algorithms", 1992). Both see nothing but the value of what they try.


#: Draws [draw, variable] -> seconds, infinite where a draw is illegal or does not fit.
Evaluate = Callable[[IntArray], FloatArray]
_BATCH = 64
_LEARNING_RATE = 0.3
_ENTROPY_BONUS = 0.01
#: Reward of an illegal draw: that of so many times the slowest legal one met so far.
_PENALTY = 4.0


class BestDraw(NamedTuple):
    """The best draw, its seconds (infinite: none was legal), and how many draws were tried."""

    choices: tuple[int, ...]
    seconds: float
    evaluations: int


def random_search(
    draw: Callable[[int, np.random.Generator], IntArray],
    evaluate: Evaluate,
    *,
    evaluations: int,
    seed: int,
) -> BestDraw:
    """The best of `evaluations` draws; `draw(count, generator)` makes [count, variable]."""
    generator = np.random.default_rng(seed)
    best = BestDraw((), np.inf, 0)
    while best.evaluations < evaluations:
        count = min(_BATCH, evaluations - best.evaluations)
        drawn = draw(count, generator)
        best = _better(best, drawn, evaluate(drawn))
    return best


def policy_gradient(
    logits: Sequence[FloatArray], evaluate: Evaluate, *, evaluations: int, seed: int
) -> BestDraw:
    """Policy gradient from a policy with these logits, one array of choices per variable."""
    generator = np.random.default_rng(seed)
    policy = [row.astype(float) for row in logits]
    best, worst = BestDraw((), np.inf, 0), 0.0
    while best.evaluations < evaluations:
        count = min(_BATCH, evaluations - best.evaluations)
        chances = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in policy]
        drawn = np.zeros((count, len(policy)), dtype=np.intp)
        for index, chance in enumerate(chances):
            drawn[:, index] = generator.choice(len(chance), size=count, p=chance)
        seconds = evaluate(drawn)
        best = _better(best, drawn, seconds)
        worst = max(worst, float(seconds[np.isfinite(seconds)].max(initial=0.0)))
        legal = np.where(np.isfinite(seconds), seconds, _PENALTY * (worst or 1.0))
        rewards = -np.log(np.maximum(legal, 1e-300))
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for index, chance in enumerate(chances):
            picked = np.eye(len(chance))[drawn[:, index]]
            logs = np.log(chance + 1e-12)
            gradient = advantage @ (picked - chance) / count
            gradient -= _ENTROPY_BONUS * chance * (logs - float(chance @ logs))
            policy[index] += _LEARNING_RATE * gradient
    return best


def random_division(
    table: FloatArray, num_microbatches: int, evaluations: int, seed: int
) -> Division | None:
    """The best of `evaluations` divisions, all equally likely; None when none fits.

    `table` as for `best_division`.
    """
    num_stages, gaps = len(table), table.shape[1] - 2

    def draw(count: int, generator: np.random.Generator) -> IntArray:
        order = np.argsort(generator.random((count, gaps)), axis=1)
        cuts = np.zeros((count, gaps), dtype=np.intp)
        np.put_along_axis(cuts, order[:, : num_stages - 1], 1, axis=1)
        return cuts

    evaluate = _cuts_evaluator(table, num_microbatches)
    found = random_search(draw, evaluate, evaluations=evaluations, seed=seed)
    return _division(found, table, num_microbatches)


def learned_division(
    table: FloatArray, num_microbatches: int, evaluations: int, seed: int
) -> Division | None:
    """Policy gradient over a cut after each layer; it must also learn how many cuts are legal."""
    num_stages, gaps = len(table), table.shape[1] - 2
    share = min(max((num_stages - 1) / max(gaps, 1), 1e-3), 1 - 1e-3)
    logits = [np.log(np.array([1 - share, share]))] * gaps
    evaluate = _cuts_evaluator(table, num_microbatches)
    found = policy_gradient(logits, evaluate, evaluations=evaluations, seed=seed)
    return _division(found, table, num_microbatches)


def _cuts_evaluator(table: FloatArray, num_microbatches: int) -> Evaluate:
    def seconds(cuts: IntArray) -> float:
        runs = list(pairwise(_borders(cuts)))
        if len(runs) != len(table):
            return np.inf
        times = [float(table[stage, first, end]) for stage, (first, end) in enumerate(runs)]
        return pipeline_seconds(times, num_microbatches)

    return lambda cuts: np.array([seconds(row) for row in cuts])


def _borders(cuts: Sequence[int] | IntArray) -> list[int]:
    """First layer of every stage, and the number of layers."""
    return [0, *(int(gap) + 1 for gap in np.flatnonzero(cuts)), len(cuts) + 1]


def _division(found: BestDraw, table: FloatArray, num_microbatches: int) -> Division | None:
    if not np.isfinite(found.seconds):
        return None
    sizes = [int(size) for size in np.diff(_borders(found.choices))]
    division = division_of(table, sizes, num_microbatches)
    return replace(division, evaluations=found.evaluations)


def _better(best: BestDraw, drawn: IntArray, seconds: FloatArray) -> BestDraw:
    place = int(seconds.argmin())
    tried = best.evaluations + len(drawn)
    if seconds[place] < best.seconds:
        return BestDraw(tuple(int(choice) for choice in drawn[place]), float(seconds[place]), tried)
    return best._replace(evaluations=tried)
