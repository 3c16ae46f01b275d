"""Local improvement: move operations along the longest path until nothing gets shorter.

The longest path is cut in blocks of operations that follow each other on one rank. Only a change
of order inside a block can shorten it, and there only one that changes the block's first or last
operation (Nowicki and Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem",
doi:10.1287/mnsc.42.6.797). A weight gradient may also leave its block for any gap on its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from moemesh.schedule.search.problem import Letters, SearchProblem, TimedOrders

#: Steps without a new best state after which the search ends.
PATIENCE = 60


@dataclass(frozen=True, kw_only=True)
class State:
    """Orders with their evaluation."""

    letters: Letters
    operations: list[list[int]]
    times: TimedOrders

    @property
    def key(self) -> tuple[float, float]:
        """Smaller is better: the objective, then its sum over the ranks."""
        return self.times.cost, sum(self.times.by_rank)


def evaluated(problem: SearchProblem, letters: Letters) -> State | None:
    """The state of these letters; None when they break precedence or memory, or deadlock."""
    operations: list[list[int]] = []
    for rank, order in enumerate(letters):
        row = problem.operations(rank, order)
        if row is None:
            return None
        operations.append(row)
    times = problem.evaluate(operations)
    return None if times is None else State(letters=letters, operations=operations, times=times)


def improve(problem: SearchProblem, start: State, *, budget: int, target: float) -> State:
    """The best state found from `start` within `budget` evaluations or until `target` is reached.
    Each step takes the best neighbour that was not visited before, even when it is worse, so that
    it can leave a local optimum. Deterministic."""
    best = current = start
    visited = {_fingerprint(start.letters)}
    spent = stale = 0
    while spent < budget and stale < PATIENCE and best.times.cost > target:
        chosen: State | None = None
        for rank, order in neighbours(problem, current):
            letters = [*current.letters]
            letters[rank] = order
            mark = _fingerprint(letters)
            if mark in visited:
                continue
            operations = problem.operations(rank, order)
            if operations is None:
                visited.add(mark)
                continue
            all_operations = [*current.operations]
            all_operations[rank] = operations
            times = problem.evaluate(all_operations)
            spent += 1
            if times is None:
                visited.add(mark)
                continue
            state = State(letters=letters, operations=all_operations, times=times)
            if chosen is None or state.key < chosen.key:
                chosen = state
            if spent >= budget:
                break
        if chosen is None:
            break
        visited.add(_fingerprint(chosen.letters))
        current = chosen
        if current.key < best.key:
            best, stale = current, 0
        else:
            stale += 1
    return best


def neighbours(problem: SearchProblem, state: State) -> Iterator[tuple[int, list[int]]]:
    """(rank, new letters of that rank) for every move on the longest path."""
    for rank, first, last in critical_blocks(problem, state):
        order, operations, times = state.letters[rank], state.operations[rank], state.times
        # Waits of the rank, longest first: (negative length, position of the operation after it).
        idle = ((times.ends[a] - times.starts[b]) for a, b in pairwise(operations))
        waits = sorted((length, at) for at, length in enumerate(idle, 1) if length < 0)
        seen: set[tuple[int, int]] = set()
        for position in range(first, last + 1):
            for target in (first, last, position - 1, position + 1):
                if first <= target <= last and target != position:
                    seen.add((position, target))
            if order[position] // problem.num_stages == 2:
                # The two longest waits before the position and after it, and the end. Without the
                # entry at `position`, every later one is one place earlier.
                before = [at for _, at in waits if at <= position][:2]
                after = [at - 1 for _, at in waits if at > position][:2]
                seen.update((position, gap) for gap in (*before, *after, len(order) - 1))
        for position, target in sorted(seen):
            if order[position] != order[target]:
                moved = order[:position] + order[position + 1 :]
                moved.insert(target, order[position])
                yield rank, moved


def critical_blocks(problem: SearchProblem, state: State) -> list[tuple[int, int, int]]:
    """Blocks of several operations on the longest path, from its end: (rank, first and last
    position in its order)."""
    times = state.times
    rank = times.by_rank.index(times.cost)
    place = {op: at for order in state.operations for at, op in enumerate(order)}
    at = len(state.operations[rank]) - 1
    blocks: list[tuple[int, int, int]] = []
    last = at
    while True:
        op = state.operations[rank][at]
        before = problem.source[op]
        start = times.starts[op]
        follows = at > 0 and times.ends[state.operations[rank][at - 1]] == start
        if follows:
            at -= 1
            continue
        if last > at:
            blocks.append((rank, at, last))
        if before < 0 or (at == 0 and start == 0):
            return blocks
        rank = problem.placement[before // problem.num_microbatches % problem.num_stages]
        at = last = place[before]


def _fingerprint(letters: Letters) -> int:
    return hash(tuple(map(tuple, letters)))
