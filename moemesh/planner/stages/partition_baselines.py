"""Learned and random search for the division into stages: baselines, with honest gaps.

Policy gradient as in device-placement work (A. Mirhoseini et al., arXiv:1706.04972): a cut after
each layer with a probability of its own, or a categorical strategy per operator; reward -log T, a
penalty where memory does not suffice, advantages normalised over the batch, an entropy bonus
(R. Williams, "Simple statistical gradient-following algorithms", 1992). Besides it the
cross-entropy method and simulated annealing. All see only the value of what they try, so they also
work where no dynamic program does: any function of the division can be the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moemesh.planner.operators.graph import FloatArray, OperatorError, OperatorGraph
from moemesh.planner.stages.division import StageError, check_counts, pipeline_seconds

BoolArray = NDArray[np.bool_]
#: First layer of every stage -> (seconds, how many stages do not fit); seconds finite if none.
Evaluate = Callable[[tuple[int, ...]], tuple[float, int]]
Policy = Literal["bernoulli", "conditional"]


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """Divide `num_layers` into `num_stages`; `worst_seconds` is above every finite value.

    One stage that does not fit, or one stage too many or too few, counts as `worst_seconds` times
    `penalty`.
    """

    num_layers: int
    num_stages: int
    evaluate: Evaluate
    worst_seconds: float
    penalty: float = 4.0

    def __post_init__(self) -> None:
        check_counts(self.num_layers, self.num_stages, 1)
        if not 0 < self.worst_seconds < np.inf or self.penalty < 1:
            raise StageError(
                f"worst_seconds is {self.worst_seconds} and penalty {self.penalty}: they must be "
                "above 0 (and finite) and at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """The best that was met: infinite seconds and no answer when nothing fitted.

    `choices` are first layers (partition) or strategies (operator graph); `history` has
    (evaluations, seconds) whenever the best improved.
    """

    name: str
    seconds: float
    choices: tuple[int, ...] | None
    evaluations: int
    history: tuple[tuple[int, float], ...]

    def evaluations_to(self, seconds: float, tolerance: float = 1e-9) -> int | None:
        """Evaluations until `seconds` was first met within a relative tolerance; None if never."""
        for count, value in self.history:
            if value <= seconds * (1 + tolerance):
                return count
        return None


def table_problem(table: FloatArray, num_microbatches: int) -> PartitionProblem:
    """The problem of `stages.best_partition` (one kind of mesh) with its formula as objective."""
    num_stages, num_layers = table.shape[0], table.shape[1] - 1
    finite = table[np.isfinite(table)]
    largest = float(finite.max(initial=0.0))

    def evaluate(first_layers: tuple[int, ...]) -> tuple[float, int]:
        ends = (*first_layers[1:], num_layers)
        seconds = [
            float(table[stage, first, end])
            for stage, (first, end) in enumerate(zip(first_layers, ends, strict=True))
        ]
        over = sum(time == np.inf for time in seconds)
        return (np.inf if over else pipeline_seconds(seconds, num_microbatches)), over

    worst = (num_microbatches + num_stages) * (largest or 1.0)
    return PartitionProblem(
        num_layers=num_layers, num_stages=num_stages, evaluate=evaluate, worst_seconds=worst
    )


def even_division(problem: PartitionProblem) -> BaselineResult:
    """As many layers on every stage as possible, one evaluation."""
    record = _Record(problem)
    record.cost(_even(problem))
    return record.result("even")


def reinforce(
    problem: PartitionProblem,
    *,
    evaluations: int = 25_600,
    batch_size: int = 64,
    learning_rate: float = 0.1,
    entropy_bonus: float = 0.01,
    policy: Policy = "bernoulli",
    seed: int = 0,
) -> BaselineResult:
    """Policy gradient over cuts.

    "bernoulli" cuts after each layer independently, so it must also learn how many cuts are legal;
    "conditional" draws from the same policy given the right number of cuts.
    """
    generator = np.random.default_rng(seed)
    record = _Record(problem)
    gaps, cuts = problem.num_layers - 1, problem.num_stages - 1
    share = min(max(cuts / max(gaps, 1), 1e-3), 1 - 1e-3)
    logits = np.full(gaps, np.log(share / (1 - share)))
    while record.evaluations < evaluations:
        count = min(batch_size, evaluations - record.evaluations)
        if policy == "conditional":
            drawn = draw_conditional(logits, cuts, count, generator)
        else:
            drawn = generator.random((count, gaps)) < _sigmoid(logits)
        rewards = np.array([-np.log(record.cost(row)) for row in drawn])
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        # Advantages sum to 0, so the expectation under the policy drops out of the gradient.
        gradient = advantage @ (drawn - _sigmoid(logits)) / count
        spread = _sigmoid(logits) * (1 - _sigmoid(logits))
        logits += learning_rate * (gradient - entropy_bonus * logits * spread)
        logits = np.clip(logits, -12.0, 12.0)
    return record.result(f"reinforce ({policy})")


def cross_entropy(
    problem: PartitionProblem,
    *,
    evaluations: int = 25_600,
    batch_size: int = 1024,
    elite_share: float = 0.1,
    smoothing: float = 0.3,
    seed: int = 0,
) -> BaselineResult:
    """Cross-entropy method (R. Rubinstein, 1999): move the policy to the best of each batch."""
    generator = np.random.default_rng(seed)
    record = _Record(problem)
    gaps, cuts = problem.num_layers - 1, problem.num_stages - 1
    chances = np.full(gaps, cuts / max(gaps, 1))
    while record.evaluations < evaluations:
        count = min(batch_size, evaluations - record.evaluations)
        inner = np.clip(chances, 1e-4, 1 - 1e-4)
        drawn = draw_conditional(np.log(inner / (1 - inner)), cuts, count, generator)
        costs = np.array([record.cost(row) for row in drawn])
        elite = drawn[np.argsort(costs, kind="stable")[: max(2, int(elite_share * count))]]
        chances = (1 - smoothing) * chances + smoothing * elite.mean(axis=0)
    return record.result("cross entropy")


def anneal(
    problem: PartitionProblem,
    *,
    evaluations: int = 25_600,
    start_temperature: float = 0.1,
    end_temperature: float = 1e-4,
    start: tuple[int, ...] | None = None,
    seed: int = 0,
) -> BaselineResult:
    """Simulated annealing on log T: one cut moves, mostly by one layer.

    `start` are first layers (default: the even division).
    """
    generator = np.random.default_rng(seed)
    record = _Record(problem)
    gaps, cuts = problem.num_layers - 1, problem.num_stages - 1
    current = _even(problem)
    if start is not None:
        current = np.zeros(gaps, dtype=bool)
        current[[first - 1 for first in start[1:]]] = True
    cost = np.log(record.cost(current))
    movable = 0 < cuts < gaps
    cooling = (end_temperature / start_temperature) ** (1 / max(evaluations - 1, 1))
    temperature = start_temperature
    while record.evaluations < evaluations and movable:
        after = current.copy()
        taken = int(generator.choice(np.flatnonzero(current)))
        free = np.flatnonzero(~current)
        near = free[np.abs(free - taken) == 1]
        if len(near) and generator.random() < 0.8:
            free = near
        after[taken], after[int(generator.choice(free))] = False, True
        changed = np.log(record.cost(after))
        if changed <= cost or generator.random() < np.exp((cost - changed) / temperature):
            current, cost = after, changed
        temperature *= cooling
    return record.result("annealing")


def reinforce_strategies(
    graph: OperatorGraph,
    *,
    evaluations: int = 25_600,
    batch_size: int = 64,
    learning_rate: float = 0.5,
    entropy_bonus: float = 0.01,
    seed: int = 0,
) -> BaselineResult:
    """Policy gradient over operator graphs: a categorical strategy per operator.

    Raises OperatorError unless all seconds are at least 0 (the reward is a logarithm).
    """
    tables = [*graph.node_seconds, *(edge.seconds for edge in graph.edges)]
    if any((table < 0).any() for table in tables):
        raise OperatorError("policy gradient takes the logarithm of seconds: none may be below 0")
    generator = np.random.default_rng(seed)
    logits = [np.zeros(count) for count in graph.num_strategies]
    finite = [table[np.isfinite(table)].max(initial=0.0) for table in tables]
    # The reward of a forbidden combination is that of the slowest allowed one, and worse.
    worst = 4.0 * (float(sum(finite)) or 1.0)
    best, choices, done = np.inf, None, 0
    history: list[tuple[int, float]] = []
    while done < evaluations:
        count = min(batch_size, evaluations - done)
        chances = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in logits]
        drawn = np.stack([generator.choice(len(p), size=count, p=p) for p in chances], axis=1)
        seconds = _graph_seconds(graph, drawn)
        for place, value in enumerate(seconds):
            if value < best:
                best, choices = float(value), tuple(int(choice) for choice in drawn[place])
                history.append((done + place + 1, best))
        done += count
        rewards = -np.log(np.minimum(np.maximum(seconds, 1e-12 * worst), worst))
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for index, row in enumerate(logits):
            picked = np.eye(len(row))[drawn[:, index]]
            gradient = advantage @ (picked - chances[index]) / count
            log_chances = np.log(chances[index] + 1e-12)
            entropy = -float(chances[index] @ log_chances)
            gradient -= entropy_bonus * chances[index] * (log_chances + entropy)
            logits[index] = row + learning_rate * gradient
    return BaselineResult(
        name="reinforce (categorical)",
        seconds=best,
        choices=choices,
        evaluations=done,
        history=tuple(history),
    )


def draw_conditional(
    logits: FloatArray, num_cuts: int, count: int, generator: np.random.Generator
) -> BoolArray:
    """`count` draws of independent cuts, given that there are exactly `num_cuts`.

    Exact, gap by gap: the chance of a cut is its weight times that of the cuts still to place
    behind it, over all ways to place them.
    """
    gaps = len(logits)
    ways = np.full((gaps + 1, num_cuts + 1), -np.inf)
    ways[gaps, 0] = 0.0
    for gap in range(gaps - 1, -1, -1):
        ways[gap] = ways[gap + 1]
        ways[gap, 1:] = np.logaddexp(ways[gap, 1:], logits[gap] + ways[gap + 1, :-1])
    drawn = np.zeros((count, gaps), dtype=bool)
    left = np.full(count, num_cuts)
    for gap in range(gaps):
        wanted = left > 0
        chance = np.zeros(count)
        chance[wanted] = np.exp(
            logits[gap] + ways[gap + 1, left[wanted] - 1] - ways[gap, left[wanted]]
        )
        drawn[:, gap] = generator.random(count) < chance
        left -= drawn[:, gap]
    return drawn


@dataclass(kw_only=False, eq=False)
class _Record:
    """Counts evaluations and keeps the best."""

    problem: PartitionProblem
    evaluations: int = 0
    best: float = np.inf
    choices: tuple[int, ...] | None = None
    history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def cost(self, cuts: BoolArray) -> float:
        """Seconds of a division; with penalties where it is not one or does not fit."""
        problem = self.problem
        self.evaluations += 1
        first_layers = (0, *(int(gap) + 1 for gap in np.flatnonzero(cuts)))
        wrong = abs(len(first_layers) - problem.num_stages)
        if not wrong:
            seconds, wrong = problem.evaluate(first_layers)
            if not wrong:
                if seconds < self.best:
                    self.best, self.choices = seconds, first_layers
                    self.history.append((self.evaluations, seconds))
                return seconds
        return problem.worst_seconds * problem.penalty**wrong

    def result(self, name: str) -> BaselineResult:
        return BaselineResult(
            name=name,
            seconds=self.best,
            choices=self.choices,
            evaluations=self.evaluations,
            history=tuple(self.history),
        )


def _even(problem: PartitionProblem) -> BoolArray:
    ends = np.linspace(0, problem.num_layers, problem.num_stages + 1).round().astype(int)
    cuts = np.zeros(problem.num_layers - 1, dtype=bool)
    cuts[ends[1:-1] - 1] = True
    return cuts


def _graph_seconds(graph: OperatorGraph, drawn: NDArray[np.int_]) -> FloatArray:
    """Seconds of many assignments, one a row."""
    seconds = np.zeros(len(drawn))
    for index, costs in enumerate(graph.node_seconds):
        seconds += costs[drawn[:, index]]
    for edge in graph.edges:
        seconds += edge.seconds[drawn[:, edge.source], drawn[:, edge.target]]
    return seconds


def _sigmoid(logits: FloatArray) -> FloatArray:
    return 1.0 / (1.0 + np.exp(-logits))
