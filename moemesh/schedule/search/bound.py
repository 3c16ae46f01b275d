"""Lower bounds on the span and the makespan of any order of a placement.

The span is the longest time from a rank's first start to its last end, the makespan the time from
the first start to the last end of all ranks. A context is what a rank holds of a microbatch from
its forward to its backward. The journey of a microbatch is its way from a rank to the last stage
and back. Three arguments for every rank, with the shortest time of each operation over the
microbatches:

* Until its first input gradient a rank can only run forwards, at most as many as fit into memory,
  and this takes at least a journey.
* After its last forward it can only run gradients of microbatches that were in memory, and this
  takes at least the journey of the last one.
* A context is in memory at least as long as its journey, so all contexts together need at least
  their memory times that time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moemesh.schedule.search.problem import SearchProblem


@dataclass(frozen=True, kw_only=True)
class Shortest:
    """Shortest times per stage: of forwards (F), input gradients (I, `inner`) and full backwards,
    and of messages into F and I of a stage. `block` is the shortest overlapped block of a forward
    and a full backward (infinite: there are none)."""

    forward: list[float]
    inner: list[float]
    full: list[float]
    to_forward: list[float]
    to_inner: list[float]
    block: float = math.inf

    def rest(self, stage: int) -> float:
        """The rest of a backward after its input gradient."""
        return max(0, min(self.full[stage], self.block) - self.inner[stage])


def shortest_times(problem: SearchProblem, full: list[float], block: float = math.inf) -> Shortest:
    """The shortest times over the microbatches. `full` is the shortest full backward per stage in
    hand-made schedules, which may not split backwards."""
    m, stages = problem.num_microbatches, problem.num_stages

    def least(values: list[float], kind: int) -> list[float]:
        starts = range(kind * stages * m, (kind + 1) * stages * m, m)
        return [min(values[start : start + m]) for start in starts]

    inner, weight = least(problem.cost, 1), least(problem.cost, 2)
    return Shortest(
        forward=[min(cost, block) for cost in least(problem.cost, 0)],
        inner=[min(a, b, block) for a, b in zip(inner, full, strict=True)],
        full=[min(a + b, c) for a, b, c in zip(inner, weight, full, strict=True)],
        to_forward=least(problem.delay, 0),
        to_inner=least(problem.delay, 1),
        block=block,
    )


def lower_bound(problem: SearchProblem, times: Shortest) -> float:
    """The bound, by the work and the waits of each rank: no schedule of this placement and memory
    has a smaller objective."""
    bounds: list[float] = []
    for rank in range(problem.num_ranks):
        first, last = problem.stages[rank][0], problem.stages[rank][-1]
        m, owned, room = problem.num_microbatches, problem.stages[rank], problem.rooms[rank]
        # Times from the rank's first stage to its last: forwards, and input gradients back.
        up, down = _forwards(times, first, last), _backwards(times, last, first)
        # Time from a forward on the rank's last stage until the input gradient there may start.
        around = _round_trip(times, last, problem.num_stages)
        # (time, size in memory) of forwards before the first gradient, and of gradients that are
        # due after the last forward.
        held: list[tuple[float, float]] = []
        owed: list[tuple[float, float]] = []
        # Shortest time of the backward of each microbatch.
        least: list[float] = []
        backwards = problem.num_stages * m
        for stage in owned:
            kept = min(problem.kept[stage], problem.whole[stage])
            for op in range(stage * m, (stage + 1) * m):
                inner, weight = problem.cost[op + backwards], problem.cost[op + 2 * backwards]
                held.append((problem.cost[op], problem.whole[stage]))
                owed.append((weight, kept))
                owed.append((inner, problem.whole[stage] - kept))
                least.append(min(inner + weight, times.full[stage]))
        # Least busy time of the rank, with an overlapped block for every pair that it makes
        # shorter. fsum: rounding must not lift the bound above a cost that a schedule reaches.
        forwards = [cost for cost, _ in held]
        pairs = zip(sorted(forwards), sorted(least), strict=True)
        busy = math.fsum(forwards) + math.fsum(least)
        busy += sum(min(0, times.block - a - b) for a, b in pairs)
        idle_before = max(0, up + around - _knapsack(held, problem.caps[rank]))
        after = around + down + times.rest(first)
        idle_after = max(0, after - _knapsack(owed, problem.caps[rank]))
        # If all forwards fit into memory, the same journey may cause both waits.
        fits = m * sum(problem.whole[stage] for stage in owned) <= room
        idle = max(idle_before, idle_after) if fits else idle_before + idle_after
        span = max(busy + idle, _memory_bound(problem, times, rank))
        if problem.objective == "span":
            bounds.append(span)
            continue
        # The makespan also has the time before the rank's first forward, and after its last
        # input gradient.
        head = _forwards(times, 0, first) - times.forward[first]
        tail = _backwards(times, first, 0) - times.inner[first] + times.rest(0) if first else 0
        # All forwards and input gradients of the rank come before its last input gradient.
        forwards = sorted(times.forward[stage] for stage in owned)
        inners = sorted(times.inner[stage] for stage in owned)
        pairs = zip(forwards, inners, strict=True)
        chained = m * sum(min(a + b, times.block) for a, b in pairs)
        bounds.append(head + max(span, idle_before + chained + tail))
    return max(bounds)


def _forwards(times: Shortest, first: int, last: int) -> float:
    """Time from the start of stage `first`'s forward to the end of stage `last`'s."""
    path = times.forward[first]
    for stage in range(first + 1, last + 1):
        path += times.to_forward[stage] + times.forward[stage]
    return path


def _backwards(times: Shortest, first: int, last: int) -> float:
    """Time from the start of stage `first`'s input gradient down to the end of stage `last`'s."""
    path = times.inner[first]
    for stage in range(first - 1, last - 1, -1):
        path += times.to_inner[stage] + times.inner[stage]
    return path


def _round_trip(times: Shortest, stage: int, stages: int) -> float:
    """Time from the end of a stage's forward to the start of its input gradient."""
    path: float = 0
    for other in range(stage + 1, stages):
        path += times.to_forward[other] + times.forward[other]
    for other in range(stages - 1, stage, -1):
        path += times.inner[other] + times.to_inner[other - 1]
    return path


def _knapsack(items: list[tuple[float, float]], room: float) -> float:
    """Upper bound of the value of items (value, size) that fit into `room`: the most valuable per
    size first, the last one in part."""
    total: float = 0
    for value, size in sorted(items, key=lambda item: item[1] / item[0] if item[0] else math.inf):
        if size <= 0:
            total += value
        elif room > 0 and value > 0:
            total += value * min(1, room / size)
            room -= size
    return total


def _memory_bound(problem: SearchProblem, times: Shortest, rank: int) -> float:
    """Memory times time: every context occupies its share for its whole journey."""
    cap, m = problem.caps[rank], problem.num_microbatches
    if math.isinf(cap) or cap <= 0:
        return 0
    area: float = 0
    lives = {
        stage: times.forward[stage]
        + _round_trip(times, stage, problem.num_stages)
        + times.inner[stage]
        for stage in problem.stages[rank]
    }
    for stage, life in lives.items():
        kept = min(problem.kept[stage], problem.whole[stage])
        area += problem.whole[stage] * life + kept * times.rest(stage)
    bound = m * area / cap
    if len(lives) == 1:
        # With a single stage a rank holds whole contexts, at most `at_once`: they take turns.
        ((stage, life),) = lives.items()
        whole, room = problem.whole[stage], problem.rooms[rank]
        at_once = math.floor(room / whole) if whole else m
        bound = max(bound, math.ceil(m / max(at_once, 1)) * life + times.rest(stage))
    return bound
