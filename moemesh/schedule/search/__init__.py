"""The automatic scheduler: the best order found for given costs and memory, and how good it is.

Every hand-made schedule that fits the memory is simulated, a heuristic with all its flag settings
runs (:mod:`moemesh.schedule.search.greedy`), the best of both are improved by moves along their
longest path (:mod:`moemesh.schedule.search.improve`), and small cases are searched to the end
(:mod:`moemesh.schedule.search.exact`). The result is never worse than the best hand-made one, and
is compared with a lower bound (:mod:`moemesh.schedule.search.bound`). After Qi et al., "Zero Bubble
Pipeline Parallelism", arXiv:2401.10241, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moemesh.config.errors import UserError, public
from moemesh.config.names import Names
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.shown import Shown
from moemesh.schedule.action import Op, Schedule, looped, v_shape
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import ROUNDING, Amount, peak_memory
from moemesh.schedule.search.bound import lower_bound, shortest_times
from moemesh.schedule.search.exact import applies, branch_and_bound
from moemesh.schedule.search.greedy import greedy, policies
from moemesh.schedule.search.improve import State, evaluated, improve
from moemesh.schedule.search.problem import Objective, SearchProblem, SearchQuestion
from moemesh.schedule.simulate import simulate

#: Budgets, in scheduled operations, of list scheduling and of moves (about a second).
GREEDY_OPERATIONS = 120_000
IMPROVE_OPERATIONS = 2_500_000
#: Largest number of partial orders of the exact search.
EXACT_NODES = 20_000
#: Largest number of operations for which the exact search is tried.
EXACT_OPERATIONS = 96
#: Operations of the largest schedule that is searched for: more would take minutes.
LARGEST_SEARCHED = 200_000
#: Number of states from which moves start.
STARTS = 3

#: Hand-made schedules to start from: synchronous ones of one pipe and whole sequences.
HAND_MADE = Names(
    SCHEDULES,
    where=lambda row: (
        row.stages != "mirrored" and not row.is_asynchronous and "num_slices" not in row.options
    ),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchResult(Shown):
    """The best schedule found. `cost` is its span or makespan, `lower_bound` what no schedule of
    the searched kind can beat, `proven` whether `cost` is the optimum of these kinds. `origin` is
    its source: a hand-made schedule's name, "greedy", "improved" or "exact". `hand_made` holds
    the cost of every hand-made schedule that fits."""

    schedule: Schedule
    cost: float
    lower_bound: float
    proven: bool
    objective: Objective
    origin: str
    hand_made: dict[str, float]

    @property
    def gap(self) -> float:
        """The most by which `cost` exceeds the optimum, as a share of the lower bound."""
        return self.cost / self.lower_bound - 1 if self.lower_bound else 0.0


class _Fitting(NamedTuple):
    """A schedule that fits, and where it comes from."""

    cost: float
    schedule: Schedule
    origin: str


@public
def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    memory_cap: float | Sequence[float] | None = None,
    activation: Amount = 1,
    weight_memory: Amount = 1,
    stages_per_rank: int | Sequence[int] = (1, 2),
    objective: Objective = "span",
    effort: float = 1.0,
) -> SearchResult:
    """The best schedule found for `costs` (one tick for F, I and W by default) under `memory_cap`.

    `memory_cap` is in the unit of M_a, for all ranks or each; p and 2p are the interesting ones
    (ZB-1p, ZB-2p of arXiv:2401.10241). `stages_per_rank` are the cuts to consider; those whose
    number of stages the costs do not fit are left out. `objective`: the longest span of a rank (it
    may start the next step before others finish), or the makespan. `effort` scales the work, 1 is
    at most some seconds. The result passes :func:`moemesh.schedule.check.check` and depends on the
    arguments alone. Raises ValueError for impossible numbers, a cap below one microbatch, and costs
    that fit none of the cuts.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise UserError(
            f"search needs ranks and microbatches of at least 1, got {num_ranks} and "
            f"{num_microbatches}"
        )
    cap = math.inf if memory_cap is None else memory_cap
    caps = tuple(cap) if isinstance(cap, Sequence) else (cap,) * num_ranks
    if len(caps) != num_ranks:
        raise UserError(f"memory_cap has {len(caps)} caps for {num_ranks} ranks")
    for name, value in (("effort", effort), *(("memory_cap", cap) for cap in caps)):
        if not value >= 0 or (name == "effort" and math.isinf(value)):
            raise UserError(f"{name} must be a number of at least 0, not {value}")
    question = SearchQuestion(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=costs or Costs(),
        caps=caps,
        activation=activation,
        weight_memory=weight_memory,
        objective=objective,
    )
    chunks = [stages_per_rank] if isinstance(stages_per_rank, int) else list(stages_per_rank)
    # F, I and W of every microbatch on every stage are to be put in order.
    each = 3 * num_ranks * max(chunks, default=1)
    if num_microbatches * each > LARGEST_SEARCHED:
        most = max(LARGEST_SEARCHED // each, 1)
        raise UserError(
            f"search with ranks {num_ranks}, microbatches {num_microbatches} would order up to "
            f"{num_microbatches * each} operations, more than {LARGEST_SEARCHED} "
            f"(nearest: microbatches {most})"
        )
    problems = _problems(question, chunks)
    # Hand-made schedules that fit the costs and the memory.
    chunk_counts = sorted({problem.num_stages // num_ranks for problem in problems})
    candidates: list[_Fitting] = []
    for name in HAND_MADE:
        fixed = max(SCHEDULES[name].stages_per_rank, default=None)  # None: any above 1
        for count in [n for n in chunk_counts if n == fixed or (fixed is None and n > 1)]:
            num_chunks = count if fixed is None else 1
            try:
                schedule = build(name, num_ranks, num_microbatches, stages_per_rank=num_chunks)
            except ValueError:
                continue  # Its conditions on ranks and microbatches do not hold.
            peaks = peak_memory(schedule, activation=activation, weight_memory=weight_memory)
            pairs = zip(peaks, caps, strict=True)
            if all(peak.activation <= cap * (1 + ROUNDING) for peak, cap in pairs):
                cost = _cost(question, schedule)
                candidates.append(_Fitting(cost, schedule, schedule.name))
    hand_made = {candidate.origin: candidate.cost for candidate in candidates}
    # The best schedule and a lower bound of each placement.
    bounds: list[float] = []
    for problem in problems:
        best, bound = _search_placement(question, problem, candidates, effort)
        bounds.append(bound)
        if best is not None:
            candidates.append(best)
    # The first of equals: hand-made schedules are preferred.
    best = min(candidates, key=lambda candidate: candidate.cost)
    bound = min(bounds)
    proven = best.cost <= bound * (1 + ROUNDING)
    return SearchResult(
        schedule=best.schedule,
        cost=best.cost,
        lower_bound=best.cost if proven else bound,
        proven=proven,
        objective=objective,
        origin=best.origin,
        hand_made=hand_made,
    )


def _cost(question: SearchQuestion, schedule: Schedule) -> float:
    simulation = simulate(schedule, question.costs)
    return simulation.span if question.objective == "span" else simulation.makespan


def _search_placement(
    question: SearchQuestion, problem: SearchProblem, candidates: Sequence[_Fitting], effort: float
) -> tuple[_Fitting | None, float]:
    """The best schedule of one placement, None when none was found, and a lower bound on it."""
    # Shortest times, with the full backwards and blocks that hand-made schedules may use.
    costs = question.costs.bind(problem.schedule("bound", [[]] * problem.num_ranks))
    full = [
        min(costs.op(Op("B", stage, microbatch)) for microbatch in range(problem.num_microbatches))
        for stage in range(problem.num_stages)
    ]
    block, overlapped = math.inf, question.costs.overlapped
    if overlapped is not None and problem.num_stages > problem.num_ranks:
        # The smallest value of a function is unknown; 0 is a bound.
        block = 0 if callable(overlapped) else costs.entry((Op("F", 0, 0), Op("B", 0, 0)))
    bound = lower_bound(problem, shortest_times(problem, full, block))
    states: list[tuple[str, State]] = []
    for candidate in candidates:
        letters = problem.letters(candidate.schedule)
        state = evaluated(problem, letters) if letters else None
        if state is not None:
            states.append(("improved", state))
    # List scheduling; the effort bounds the number of flag settings.
    settings = list(policies(problem))
    affordable = max(int(GREEDY_OPERATIONS * effort / problem.num_operations), 1)
    for policy in settings[:: math.ceil(len(settings) / affordable)]:
        letters = greedy(problem, policy)
        state = evaluated(problem, letters) if letters else None
        if state is not None:
            states.append(("greedy", state))
    states.sort(key=lambda item: item[1].key)
    if not states:
        return None, bound
    origin, best = states[0]
    target = bound * (1 + ROUNDING)
    evaluations = int(IMPROVE_OPERATIONS * effort / STARTS / problem.num_operations)
    # Moves start from the best states, one for each key: states of equal keys are similar.
    starts: dict[tuple[float, float], State] = {}
    for _, state in states:
        starts.setdefault(state.key, state)
    for start in [*starts.values()][:STARTS]:
        if best.times.cost <= target:
            break
        better = improve(problem, start, budget=evaluations, target=target)
        if better.key < best.key:
            origin, best = "improved", better
    if applies(problem) and problem.num_operations <= EXACT_OPERATIONS:
        # An exhausted search below the best known cost proves that it is the optimum.
        reached = min([best.times.cost, *(candidate.cost for candidate in candidates)])
        if reached > target:
            exact = branch_and_bound(problem, reached, max_nodes=int(EXACT_NODES * effort))
            if exact.letters is not None and (state := evaluated(problem, exact.letters)):
                origin, best = "exact", state
            if exact.complete and question.costs.backward is None:
                bound = exact.cost
    schedule = problem.schedule("searched", best.letters)
    return _Fitting(_cost(question, schedule), schedule, origin), bound


def _problems(question: SearchQuestion, chunks: Sequence[int]) -> list[SearchProblem]:
    """A problem for every placement that the costs fit. Raises ValueError when there is none, or
    when a rank cannot hold one microbatch."""
    if not chunks or min(chunks) < 1:
        raise UserError(f"stages_per_rank {list(chunks)} must be numbers of at least 1")
    ranks = question.num_ranks
    placements: list[tuple[int, ...]] = []
    for count in chunks:
        # On one rank more stages change nothing, so that one placement is enough.
        for placement in (v_shape(ranks, count), looped(ranks, count)):
            if placement not in placements and (ranks > 1 or count == chunks[0]):
                placements.append(placement)
    problems: list[SearchProblem] = []
    errors: list[ValueError] = []
    for placement in placements:
        try:
            problems.append(SearchProblem(question, placement))
        except ValueError as error:
            errors.append(error)
    if not problems:
        raise UserError(f"search: {errors[0]}") from errors[0]
    for rank in range(ranks):
        for problem in problems:
            # One microbatch must fit on a rank, in every placement.
            need = sum(problem.whole[stage] for stage in problem.stages[rank])
            if need <= problem.rooms[rank]:
                continue
            cap, pieces = question.caps[rank], problem.caps[rank]
            raise UserError(
                f"memory_cap {cap} of rank {rank} is below one microbatch "
                f"(nearest: {cap * need / pieces if pieces else need:g})"
            )
    return problems
