"""Random search and policy gradient for divisions and placements: baselines of the exact methods.

Policy gradient as in device-placement work (A. Mirhoseini et al., arXiv:1706.04972): one
categorical choice per variable, reward -log T, a penalty where a draw is illegal or does not fit,
advantages normalised over the batch, an entropy bonus (R. Williams, "Simple statistical
gradient-following algorithms", 1992). Both see nothing but the value of what they try.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moemesh.planner.operators.graph import FloatArray
from moemesh.planner.stages.division import Division, IntArray, division_of, pipeline_seconds

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
    def evaluate(cuts: IntArray) -> FloatArray:
        return np.array([_seconds(table, row, num_microbatches) for row in cuts])

    return evaluate


def _borders(cuts: Sequence[int] | IntArray) -> list[int]:
    """First layer of every stage, and the number of layers."""
    return [0, *(int(gap) + 1 for gap in np.flatnonzero(cuts)), len(cuts) + 1]


def _seconds(table: FloatArray, cuts: IntArray, num_microbatches: int) -> float:
    borders = _borders(cuts)
    if len(borders) != len(table) + 1:
        return np.inf
    stages = range(len(table))
    times = [float(table[stage, borders[stage], borders[stage + 1]]) for stage in stages]
    return pipeline_seconds(times, num_microbatches)


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
