"""Branch and bound: the best order of a small problem.

Orders are built in time (Giffler and Thompson, "Algorithms for Solving Production-Scheduling
Problems", doi:10.1287/opre.8.4.487): take the operation that can end first; on its rank, branch
over every operation that could start before that end. This keeps an optimal order for any objective
that only grows with the ends. Spans do, since the first starts are fixed. Memory breaks the
argument with several stages on a rank, or weight gradients that hold more than contexts (see
:func:`applies`): otherwise moving the next forward before gradients adds memory only where nothing
else needs it. A partial order that reaches the counts of another one no earlier is dropped.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from moemesh.schedule.search.problem import Letters, SearchProblem

_T = TypeVar("_T")


class ExactSearch(NamedTuple):
    """The best order, None if none beats the given bound; whether the tree was exhausted."""

    letters: Letters | None
    cost: float
    complete: bool


def applies(problem: SearchProblem) -> bool:
    """Whether the search is exact despite memory: each rank has one stage and weight gradients hold
    no more than their contexts did, or the caps have room for everything."""
    single = all(len(stages) == 1 for stages in problem.stages)
    if single and all(k <= w for k, w in zip(problem.kept, problem.whole, strict=True)):
        return True
    m = problem.num_microbatches
    return all(
        m * sum(max(problem.whole[stage], problem.kept[stage]) for stage in stages) <= room
        for stages, room in zip(problem.stages, problem.rooms, strict=True)
    )


def branch_and_bound(problem: SearchProblem, best: float, *, max_nodes: int) -> ExactSearch:
    """The best order if it beats the cost `best`, within `max_nodes` partial orders."""
    m, stages = problem.num_microbatches, problem.num_stages
    arrivals = tuple((0.0,) * m if letter == 0 else () for letter in range(2 * stages))
    zeros = (0.0,) * problem.num_ranks
    tree = _Tree(problem, best)
    stack = [_Node((0,) * 3 * stages, zeros, zeros, tuple(problem.busy), arrivals, None, -1)]
    while stack and tree.nodes < max_nodes:
        node = stack.pop()
        tree.nodes += 1
        if tree.bound(node) >= tree.best or tree.dominated(node):
            continue
        if min(node.counts) == m:
            pairs = zip(node.clocks, problem.origins, strict=True)
            cost = max(clock - origin for clock, origin in pairs)
            if cost < tree.best:
                tree.best, tree.best_node = cost, node
            continue
        # The stack pops the last first: the likeliest child is pushed last.
        stack.extend(reversed(tree.children(node)))
    letters, node = None, tree.best_node
    if node is not None:
        letters = [list[int]() for _ in range(problem.num_ranks)]
    while letters is not None and node is not None and node.letter >= 0:
        letters[problem.placement[node.letter % stages]].insert(0, node.letter)
        node = node.parent
    return ExactSearch(letters, tree.best, not stack)


class _Node(NamedTuple):
    """A partial order. `counts`: operations run of each letter. Per rank: `clocks`, the end of its
    last operation; `held` activation; `left`, its remaining work in time. `arrivals`: per letter of
    F and I, arrival times of inputs that were not used yet. `letter`: the last letter run."""

    counts: tuple[int, ...]
    clocks: tuple[float, ...]
    held: tuple[float, ...]
    left: tuple[float, ...]
    arrivals: tuple[tuple[float, ...], ...]
    parent: _Node | None
    letter: int


class _Tree:
    """State of a search: the best cost and order, and the partial orders seen, by their counts."""

    def __init__(self, problem: SearchProblem, best: float) -> None:
        self.problem, self.best = problem, best
        self.nodes = 0
        self.best_node: _Node | None = None
        self.seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def dominated(self, node: _Node) -> bool:
        """Whether the same operations were run before, with everything ready as early."""
        placement, stages = self.problem.placement, self.problem.num_stages
        inputs = (
            max(time, node.clocks[placement[letter % stages]])
            for letter, queue in enumerate(node.arrivals)
            for time in queue
        )
        times = (*node.clocks, *inputs)
        others = self.seen.setdefault(node.counts, [])
        for other in others:
            if all(a <= b for a, b in zip(other, times, strict=True)):
                return True
        others.append(times)
        return False

    def children(self, node: _Node) -> list[_Node]:
        """Partial orders one operation longer."""
        ready = [self.ready(node, rank) for rank in range(self.problem.num_ranks)]
        options = [(end, rank) for rank, entries in enumerate(ready) for _, end, _ in entries]
        if not options:
            return []
        first_end, rank = min(options)
        chosen = [
            (start, letter)
            for start, end, letter in ready[rank]
            if start < first_end or end == first_end
        ]
        # Of equal starts, input gradients first, then forwards: other operations wait for both.
        stages = self.problem.num_stages
        order = sorted(chosen, key=lambda item: (item[0], (1, 0, 2)[item[1] // stages]))
        return [self.step(node, rank, letter, start) for start, letter in order]

    def ready(self, node: _Node, rank: int) -> list[tuple[float, float, int]]:
        """(start, end, letter) of what the rank could run next."""
        problem, stages = self.problem, self.problem.num_stages
        entries: list[tuple[float, float, int]] = []
        for stage in problem.stages[rank]:
            done = node.counts[stage::stages]
            for kind in range(3):
                letter = kind * stages + stage
                count = done[kind]
                if count == (problem.num_microbatches if kind == 0 else done[kind - 1]):
                    continue
                start = node.clocks[rank]
                if kind < 2:
                    if not node.arrivals[letter]:
                        continue
                    start = max(start, node.arrivals[letter][0])
                if kind == 0 and node.held[rank] + problem.whole[stage] > problem.rooms[rank]:
                    continue
                op = letter * problem.num_microbatches + count
                entries.append((start, start + problem.cost[op], letter))
        return entries

    def step(self, node: _Node, rank: int, letter: int, start: float) -> _Node:
        """`node` with the next operation of `letter`, which begins at `start`."""
        problem, m = self.problem, self.problem.num_microbatches
        stages = problem.num_stages
        kind, stage = divmod(letter, stages)
        op = letter * m + node.counts[letter]
        end = start + problem.cost[op]
        whole, kept = problem.whole[stage], problem.kept[stage]
        arrivals = list(node.arrivals)
        if kind < 2:
            arrivals[letter] = arrivals[letter][1:]
        # The letter that takes the output: F of the next stage, I of the stage before, or, after
        # the last F, I of the same stage.
        after = letter + 1 if kind == 0 else letter - 1
        if kind == 0 and stage == stages - 1:
            after = stages + stage
        if kind == 0 or (kind == 1 and stage > 0):
            consumer = after * m + node.counts[letter]
            arrivals[after] = (*arrivals[after], end + problem.delay[consumer])
        return _Node(
            _changed(node.counts, letter, node.counts[letter] + 1),
            _changed(node.clocks, rank, end),
            _changed(node.held, rank, node.held[rank] + (whole, kept - whole, -kept)[kind]),
            _changed(node.left, rank, node.left[rank] - problem.cost[op]),
            tuple(arrivals),
            node,
            letter,
        )

    def bound(self, node: _Node) -> float:
        """Lower bound of completions: work left, and each rank's wait for a gradient."""
        problem, m, stages = self.problem, self.problem.num_microbatches, self.problem.num_stages
        # Earliest start of each stage's next forward.
        next_forward: list[float] = []
        for stage in range(stages):
            start = node.clocks[problem.placement[stage]]
            count = node.counts[stage]
            if node.arrivals[stage]:
                start = max(start, node.arrivals[stage][0])
            elif count < m and stage > 0:
                below = (stage - 1) * m
                made = node.counts[stage - 1]
                path = next_forward[stage - 1] + sum(problem.cost[below + made : below + count + 1])
                start = max(start, path + problem.delay[stage * m + count])
            next_forward.append(start)
        # Earliest start of the next input gradient of each stage that has any left.
        next_inner: dict[int, float] = {}
        for stage in range(stages - 1, -1, -1):
            letter = stages + stage
            count = node.counts[letter]
            if count == m:
                continue
            start = node.clocks[problem.placement[stage]]
            if node.arrivals[letter]:
                start = max(start, node.arrivals[letter][0])
            elif stage == stages - 1:
                start = next_forward[stage] + problem.cost[stage * m + count]
            else:
                above = (letter + 1) * m
                made = node.counts[letter + 1]
                path = next_inner[stage + 1] + sum(problem.cost[above + made : above + count + 1])
                start = max(start, path + problem.delay[letter * m + count])
            next_inner[stage] = start
        worst: float = 0
        for rank, clock in enumerate(node.clocks):
            total = clock + node.left[rank]
            start = min((next_inner[s] for s in problem.stages[rank] if s in next_inner), default=0)
            if start > clock:
                total += max(0, start - clock - self.fill(node, rank))
            worst = max(worst, total - problem.origins[rank])
        # Rounding of the remaining work must not cut off a better order.
        return worst * (1 - 1e-12)

    def fill(self, node: _Node, rank: int) -> float:
        """Work that the rank can do before its next input gradient: weight gradients owed, and
        forwards that memory can hold once these are paid."""
        problem, m, stages = self.problem, self.problem.num_microbatches, self.problem.num_stages
        total: float = 0
        for stage in problem.stages[rank]:
            forwards, inners, weights = node.counts[stage::stages]
            room = m - forwards
            if problem.whole[stage] > 0 and len(problem.stages[rank]) == 1:
                free = problem.rooms[rank] - (forwards - inners) * problem.whole[stage]
                room = min(room, int(min(free / problem.whole[stage] + 1e-9, m)))
            first = stage * m + forwards
            owed = (2 * stages + stage) * m
            total += sum(problem.cost[first : first + max(room, 0)])
            total += sum(problem.cost[owed + weights : owed + inners])
        return total


def _changed(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*values[:index], value, *values[index + 1 :])
