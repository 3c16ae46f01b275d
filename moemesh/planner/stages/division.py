"""Division of a model into pipeline stages: dynamic programming, and baselines of it.

With m microbatches and stage times t_i (forward and backward of one microbatch) a step of 1F1B or
GPipe takes

    T = sum of t_i + (m - 1) * max of t_i

(Alpa, arXiv:2201.12023, equation 2). Under a limit of the largest time, the least sum is a dynamic
program over (stage, first layer). The least T is found by bisection over limits: all times that a
stage can have. A larger limit can only lower the sum, so

    T >= sum at the upper limit + (m - 1) * lower limit

for every limit between two, and most limits are never tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.planner.operators.graph import FloatArray
from moemesh.sharding.stages import layer_runs

IntArray = NDArray[np.intp]


class StageError(UserError):
    """Error of a model that cannot be divided into stages."""


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
            for stage in range(len(self.in_flight))
        ])  # fmt: skip

    def table(self) -> FloatArray:
        """Seconds [stage, first, end] under the fastest option that fits."""
        return self.options().min(axis=1)

    def smallest_cap(self) -> float:
        """The least `cap_bytes` under which some division fits."""
        stages = range(len(self.in_flight))
        loads = np.stack([self.bytes(stage).min(axis=0) for stage in stages])
        first, end = np.indices(loads.shape[1:])
        loads[:, first >= end] = np.inf
        return _bottleneck(loads)


@dataclass(frozen=True, kw_only=True)
class Division:
    """The best division of a search: stage i holds `layers_per_stage[i]` layers.

    `evaluations` counts runs of the inner dynamic program, nodes of an integer program's search
    tree, or the divisions that a search tried.
    """

    seconds: float
    layers_per_stage: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    evaluations: int


def pipeline_seconds(stage_seconds: Sequence[float], num_microbatches: int) -> float:
    """sum of t_i + (m - 1) * max of t_i; infinite if a stage is."""
    largest = max(stage_seconds)
    if largest == np.inf:
        return np.inf
    return float(sum(stage_seconds) + (num_microbatches - 1) * largest)


def division_of(table: FloatArray, layers_per_stage: Sequence[int], microbatches: int) -> Division:
    """A given division, priced by a table of stage costs."""
    runs = enumerate(layer_runs(layers_per_stage))
    seconds = tuple(float(table[stage, run.start, run.stop]) for stage, run in runs)
    return Division(
        seconds=pipeline_seconds(seconds, microbatches),
        layers_per_stage=tuple(layers_per_stage),
        stage_seconds=seconds,
        evaluations=1,
    )


def best_division(table: FloatArray, num_microbatches: int) -> Division | None:
    """The division of least `pipeline_seconds`; None when none is finite.

    table[i, first, end] are the seconds of stage i with layers first .. end - 1, infinite where it
    does not fit; shape (stages, layers + 1, layers + 1). Costs need not be sums of layers.
    """
    first, end = np.indices(table.shape[1:])
    costs = np.where(first < end, table, np.inf)
    free = _least_sum(costs, np.inf, num_microbatches)
    if free is None:
        return None
    times = np.unique(costs[np.isfinite(costs)])
    smallest = _bottleneck(costs)
    tight = _least_sum(costs, smallest, num_microbatches)
    assert tight is not None
    evaluations = 2
    best = min(free, tight, key=lambda division: division.seconds)
    low = int(np.searchsorted(times, smallest))
    high = int(np.searchsorted(times, max(free.stage_seconds)))
    #: Ranges of limits: (index of the lower limit, its division, index of the upper, its division).
    spans = [(low, tight, high, free)] if low < high else []
    while spans:
        low, lower, high, upper = spans.pop()
        least = sum(upper.stage_seconds)
        if high - low < 2 or sum(lower.stage_seconds) <= least:
            continue
        if least + (num_microbatches - 1) * times[low + 1] >= best.seconds:
            continue
        middle = (low + high) // 2
        division = _least_sum(costs, float(times[middle]), num_microbatches)
        assert division is not None
        evaluations += 1
        best = min(best, division, key=lambda division: division.seconds)
        # `division` is also the best one for every smaller limit that its stages keep.
        below = int(np.searchsorted(times, max(division.stage_seconds)))
        spans += [(middle, division, high, upper), (low, lower, max(below, low), division)]
    return replace(best, evaluations=evaluations)


def _least_sum(costs: FloatArray, limit: float, num_microbatches: int) -> Division | None:
    """Inner dynamic program: the division with the least sum of stage times, each at most `limit`;
    None if no division keeps the limit."""
    least = np.full(costs.shape[1], np.inf)
    least[0] = 0.0
    back: list[IntArray] = []
    for stage in np.where(costs <= limit, costs, np.inf):
        total = least[:, None] + stage
        back.append(total.argmin(axis=0))
        least = total.min(axis=0)
    if not np.isfinite(least[-1]):
        return None
    sizes: list[int] = []
    end = costs.shape[1] - 1
    for before in reversed(back):
        first = int(before[end])
        sizes.append(end - first)
        end = first
    return division_of(costs, sizes[::-1], num_microbatches)


def _bottleneck(costs: FloatArray) -> float:
    """The least possible maximum of the stage times; infinite if no division is legal."""
    least = np.full(costs.shape[1], np.inf)
    least[0] = -np.inf
    for stage in costs:
        least = np.maximum(least[:, None], stage).min(axis=0)
    return float(least[-1])


def _sums(values: FloatArray) -> FloatArray:
    """Sums [option, first, end] of values [option, layer]."""
    ends = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return ends[:, None, :] - ends[:, :, None]


# Random search and policy gradient for divisions and placements: baselines of the exact methods.
#
# Policy gradient as in device-placement work (A. Mirhoseini et al., arXiv:1706.04972): one
# categorical choice per variable, reward -log T, a penalty where a draw is illegal or does not fit,
# advantages normalised over the batch, an entropy bonus (R. Williams, "Simple statistical
# gradient-following algorithms", 1992). Both use only the seconds of the draws that they try.


#: Draws [draw, variable] -> seconds, infinite where a draw is illegal or does not fit.
Evaluate = Callable[[IntArray], FloatArray]
#: Draws between two updates of the policy.
_BATCH = 64
_LEARNING_RATE = 0.3
_ENTROPY_BONUS = 0.01
#: Seconds charged for an illegal draw, as a multiple of the slowest legal draw so far.
_PENALTY = 4.0


class BestDraw(NamedTuple):
    """The best draw, its seconds (infinite if none was legal), and the number of draws tried."""

    choices: tuple[int, ...]
    seconds: float
    evaluations: int


def best_draw(
    method: str,
    draw: Callable[[int, np.random.Generator], IntArray],
    logits: Sequence[FloatArray],
    evaluate: Evaluate,
    *,
    evaluations: int,
    seed: int,
) -> BestDraw:
    """The best of `evaluations` draws by `method`: "random" ones of `draw(count, generator)`, shape
    [count, variable], or those of a "learned" policy, which starts from `logits`, one row per
    variable."""
    generator = np.random.default_rng(seed)
    policy = [row.astype(float) for row in logits] if method == "learned" else []
    best, worst = BestDraw((), np.inf, 0), 0.0
    while best.evaluations < evaluations:
        count = min(_BATCH, evaluations - best.evaluations)
        chances = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in policy]
        if method == "random":
            drawn = draw(count, generator)
        else:
            drawn = np.zeros((count, len(policy)), dtype=np.intp)
            for index, chance in enumerate(chances):
                drawn[:, index] = generator.choice(len(chance), size=count, p=chance)
        seconds = evaluate(drawn)
        fastest = int(seconds.argmin())
        best = best._replace(evaluations=best.evaluations + count)
        if seconds[fastest] < best.seconds:
            choices = tuple(int(choice) for choice in drawn[fastest])
            best = best._replace(choices=choices, seconds=float(seconds[fastest]))
        worst = max(worst, float(seconds[np.isfinite(seconds)].max(initial=0.0)))
        legal = np.where(np.isfinite(seconds), seconds, _PENALTY * (worst or 1.0))
        rewards = -np.log(np.maximum(legal, 1e-300))
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        # One step along the gradient of the mean reward and the entropy.
        for index, chance in enumerate(chances):
            picked = np.eye(len(chance))[drawn[:, index]]
            logs = np.log(chance + 1e-12)
            gradient = advantage @ (picked - chance) / count
            gradient -= _ENTROPY_BONUS * chance * (logs - float(chance @ logs))
            policy[index] += _LEARNING_RATE * gradient
    return best


def baseline_division(
    method: str, table: FloatArray, num_microbatches: int, evaluations: int, seed: int
) -> Division | None:
    """The best of `evaluations` divisions; None when none fits.

    "random" draws all divisions with equal chance; "learned" is policy gradient over a cut after
    each layer, which must also learn the legal number of cuts. `table` as for `best_division`.
    """
    num_stages, gaps = len(table), table.shape[1] - 2

    def draw(count: int, generator: np.random.Generator) -> IntArray:
        order = np.argsort(generator.random((count, gaps)), axis=1)
        cuts = np.zeros((count, gaps), dtype=np.intp)
        np.put_along_axis(cuts, order[:, : num_stages - 1], 1, axis=1)
        return cuts

    def division(cuts: Sequence[int] | IntArray) -> Division | None:
        borders = [0, *(int(gap) + 1 for gap in np.flatnonzero(cuts)), gaps + 1]
        sizes = [int(size) for size in np.diff(borders)]
        return division_of(table, sizes, num_microbatches) if len(sizes) == num_stages else None

    def evaluate(draws: IntArray) -> FloatArray:
        divisions = map(division, draws)
        return np.array([np.inf if result is None else result.seconds for result in divisions])

    cut_chance = min(max((num_stages - 1) / max(gaps, 1), 1e-3), 1 - 1e-3)
    logits = [np.log(np.array([1 - cut_chance, cut_chance]))] * gaps
    winner = best_draw(method, draw, logits, evaluate, evaluations=evaluations, seed=seed)
    best = division(winner.choices) if np.isfinite(winner.seconds) else None
    return best and replace(best, evaluations=winner.evaluations)
