"""List scheduling in event time: each rank, when free, takes what a policy prefers.

After the heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 3.1:
input gradients and forwards alternate, weight gradients fill the gaps. It is wider in that it
serves any placement of one pipe, and tries how far each rank runs ahead instead of fixing it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from moemesh.schedule.search.problem import Letters, SearchProblem


@dataclass(frozen=True, kw_only=True)
class GreedyPolicy:
    """Rule by which a rank chooses. At most ``limits[r]`` contexts are live on rank r. `prefer`
    decides between a forward and an input gradient that are both ready; "alternate" takes the kind
    that did not run last. `gap`: while the next input is in flight, a weight gradient runs if the
    wait is at least that share of its time. `deepest`: of the inputs that have arrived, take the
    forward nearest to the last stage or the input gradient nearest to the first, rather than the
    first arrival."""

    limits: tuple[int, ...]
    prefer: Literal["I", "alternate", "F"]
    gap: float
    deepest: bool


def policies(problem: SearchProblem) -> Iterator[GreedyPolicy]:
    """Policies with all flag settings, the likelier ones first."""
    chunks = [len(stages) for stages in problem.stages]
    ranks, stages, m = problem.num_ranks, problem.num_stages, problem.num_microbatches
    # One microbatch enters a rank in the time that the slowest rank works on one.
    pace = max(problem.busy) / m
    away: list[int] = []
    for rank in range(ranks):
        # From the end of microbatch 0's first forward there until its last input gradient there
        # can start.
        first = problem.stages[rank][0]
        trip: float = 0
        for stage in range(first + 1, stages):
            trip += problem.cost[stage * m] + problem.delay[stage * m]
        for stage in range(stages - 1, first, -1):
            op = (stages + stage) * m
            trip += problem.cost[op] + problem.delay[op - m]
        away.append(math.ceil(trip / pace) if pace else 1)
    # How many microbatches each rank may have in flight.
    shapes = (
        [trip + 1 for trip in away],
        [2 * (ranks - rank) - 1 for rank in range(ranks)],  # as ZB-H2
        [ranks - rank for rank in range(ranks)],  # as 1F1B
        [ranks] * ranks,  # as ZB-V
    )
    profiles = [[n + extra for n in shape] for extra in (0, 1, 2) for shape in shapes]
    limit_settings = dict.fromkeys(
        tuple(min(max(n, 1), m) * chunk for n, chunk in zip(profile, chunks, strict=True))
        for profile in [*profiles, [m] * ranks]
    )
    orders = (False, True) if max(chunks) > 1 else (False,)
    preferences: tuple[Literal["I", "alternate", "F"], ...] = ("I", "alternate", "F")
    for gap, deepest, prefer, limits in product((1.0, 0.5), orders, preferences, limit_settings):
        yield GreedyPolicy(limits=limits, prefer=prefer, gap=gap, deepest=deepest)


def greedy(problem: SearchProblem, policy: GreedyPolicy) -> Letters | None:
    """The orders that `policy` takes; None when it gets stuck."""
    run = _Run(problem, policy)
    heapq.heapify(run.events)
    while run.events:
        now, rank = heapq.heappop(run.events)
        while run.events and run.events[0] == (now, rank):
            heapq.heappop(run.events)
        if run.free[rank] <= now and run.left[rank]:
            letter = run.choose(rank, now)
            if letter >= 0:
                run.start(rank, letter, now)
    return None if any(run.left) else run.letters


class _Run:
    """State of one list scheduling."""

    def __init__(self, problem: SearchProblem, policy: GreedyPolicy) -> None:
        self.problem, self.policy = problem, policy
        ranks, stages = problem.num_ranks, problem.num_stages
        self.num_stages, self.m = stages, problem.num_microbatches
        self.counts = [0] * (3 * stages)
        #: Arrival time of each operation's input; infinite until its producer has run.
        self.arrival: list[float] = [math.inf] * problem.num_operations
        for microbatch in range(self.m):
            self.arrival[microbatch] = 0
        self.consumer = [-1] * problem.num_operations
        for op, before in enumerate(problem.source):
            if before >= 0:
                self.consumer[before] = op
        #: Per rank: time at which it is free, activation held, live contexts, operations left.
        self.free: list[float] = [0] * ranks
        self.held: list[float] = [0] * ranks
        self.live = [0] * ranks
        self.left = [3 * self.m * len(stages) for stages in problem.stages]
        self.last_kind = [1] * ranks
        self.letters: Letters = [[] for _ in range(ranks)]
        self.events: list[tuple[float, int]] = [(0, rank) for rank in range(ranks)]
        # Room and contexts that a forward and the later chunks of its microbatch on this rank need:
        # if they fit, the oldest microbatch can always proceed.
        self.reserve: list[float] = [0] * stages
        self.later = [0] * stages
        for owned in problem.stages:
            for place, stage in enumerate(owned):
                self.reserve[stage] = sum(problem.whole[other] for other in owned[place:])
                self.later[stage] = len(owned) - place

    def choose(self, rank: int, now: float) -> int:
        """The letter that `rank` starts now; -1 to wait."""
        cap, limit = self.problem.rooms[rank], self.policy.limits[rank]
        forward, forward_key = -1, (math.inf, 0.0)
        inner, inner_key = -1, (math.inf, 0.0)
        weight, oldest = -1, self.m
        for stage in self.problem.stages[rank]:
            # The best forward for which there is room, the best input gradient, and the oldest
            # weight gradient owed.
            forwards, inners, weights = self.counts[stage :: self.num_stages]
            fits = self.held[rank] + self.reserve[stage] <= cap
            if forwards < self.m and fits and self.live[rank] + self.later[stage] <= limit:
                key = self._key(self.arrival[stage * self.m + forwards], now, -stage)
                if key < forward_key:
                    forward, forward_key = stage, key
            letter = self.num_stages + stage
            if inners < forwards:
                key = self._key(self.arrival[letter * self.m + inners], now, stage)
                if key < inner_key:
                    inner, inner_key = letter, key
            if weights < min(inners, oldest):
                weight, oldest = letter + self.num_stages, weights
        forward_at, inner_at = forward_key[0], inner_key[0]
        if forward >= 0 and forward_at <= now and inner >= 0 and inner_at <= now:
            prefer = self.policy.prefer
            if prefer == "alternate":
                prefer = "I" if self.last_kind[rank] == 0 else "F"
            return inner if prefer == "I" else forward
        if inner_at <= now:
            return inner
        if forward_at <= now:
            return forward
        if weight < 0:
            return -1
        wait = min(forward_at, inner_at) - now
        op = weight * self.m + self.counts[weight]
        return weight if wait >= self.policy.gap * self.problem.cost[op] else -1

    def _key(self, arrival: float, now: float, depth: int) -> tuple[float, float]:
        """Smaller is better: the earlier arrival; with `deepest` arrivals until now are equal, and
        depth decides."""
        if self.policy.deepest:
            return max(arrival, now), depth
        return arrival, depth

    def start(self, rank: int, letter: int, now: float) -> None:
        """Run the next operation of `letter` and post its end and the arrival of its output."""
        problem = self.problem
        op = letter * self.m + self.counts[letter]
        kind, stage = divmod(letter, self.num_stages)
        self.counts[letter] += 1
        self.letters[rank].append(letter)
        self.left[rank] -= 1
        self.last_kind[rank] = kind if kind < 2 else self.last_kind[rank]
        if kind == 0:
            self.held[rank] += problem.whole[stage]
            self.live[rank] += 1
        elif kind == 1:
            self.held[rank] -= problem.whole[stage] - problem.kept[stage]
            self.live[rank] -= 1
        else:
            self.held[rank] -= problem.kept[stage]
        end = now + problem.cost[op]
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        after = self.consumer[op]
        if after >= 0:
            self.arrival[after] = end + problem.delay[after]
            other = problem.placement[after // self.m % self.num_stages]
            heapq.heappush(self.events, (self.arrival[after], other))
