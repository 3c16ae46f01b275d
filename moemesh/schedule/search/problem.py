"""The automatic scheduler's problem in integers: letters per rank, times, memory, one evaluation.

A rank's order is a string of letters. A letter is ``kind * S + stage`` with F = 0, I = 1, W = 2:
its n-th occurrence is microbatch n, so that microbatches of one kind keep their order. Operation
``letter * m + microbatch`` has a cost, and an operation on whose result it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from moemesh.schedule.action import Kind, Op, Schedule, one_pipe, single
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import ROUNDING, Amount, amounts

Objective = Literal["span", "makespan"]

#: Kinds by number.
KINDS: tuple[Kind, ...] = ("F", "I", "W")

Letters = list[list[int]]


class TimedOrders(NamedTuple):
    """One evaluation: the objective, its value on every rank, starts and ends of operations."""

    cost: float
    by_rank: list[float]
    starts: list[float]
    ends: list[float]


@dataclass(frozen=True, kw_only=True)
class SearchQuestion:
    """The arguments of a search, with defaults filled in; `caps` of each rank are infinite without
    a cap."""

    num_ranks: int
    num_microbatches: int
    costs: Costs
    caps: tuple[float, ...]
    activation: Amount
    weight_memory: Amount
    objective: Objective


class SearchProblem:
    """One pipe, one placement, whole sequences, split backwards.

    Per operation: `cost`, `source` (the operation that it waits for, -1 for none) and `delay` (time
    from the end of the source until its output arrives). ``whole[s]`` and ``kept[s]`` are M_a and
    M_w of a stage, ``caps[r]`` what a rank may hold (infinite without a cap), all in the pieces of
    :func:`~moemesh.schedule.held_activations.amounts`; `rooms` are the caps plus the rounding error
    of sums of fractions. ``stages[r]`` are the stages of a rank, ascending, ``busy[r]`` is the sum
    of its costs.
    """

    def __init__(self, question: SearchQuestion, placement: tuple[int, ...]) -> None:
        """Raises ValueError when the costs do not fit the stages."""
        self.placement, self.objective = placement, question.objective
        self.num_ranks, self.num_microbatches = question.num_ranks, question.num_microbatches
        self.num_stages = len(placement)
        shape = one_pipe("searched", placement, ((),) * self.num_ranks, self.num_microbatches)
        self.whole, self.kept, parts = amounts(shape, question.activation, question.weight_memory)
        self.caps = [cap * parts for cap in question.caps]
        self.rooms = [cap * (1 + ROUNDING) for cap in self.caps]
        self.stages = [
            [stage for stage, owner in enumerate(placement) if owner == rank]
            for rank in range(self.num_ranks)
        ]
        self.cost: list[float] = []
        self.source: list[int] = []
        self.delay: list[float] = []
        self.busy: list[float] = [0] * self.num_ranks
        costs, m = question.costs.bind(shape), self.num_microbatches
        for (kind, name), stage in product(enumerate(KINDS), range(self.num_stages)):
            # F waits for the stage before, I for the next stage or its own F; W follows I on the
            # same rank anyway.
            step = -1 if kind == 0 else 1
            neighbour = stage + step
            for microbatch in range(m):
                op, number = Op(name, stage, microbatch), len(self.cost)
                source: int = number + step * m
                delay: float = 0
                if kind == 2 or neighbour < 0:
                    source = -1
                elif neighbour == self.num_stages:
                    source = number - self.num_stages * m
                elif self.placement[neighbour] != self.placement[stage]:
                    delay = costs.message(Op(name, neighbour, microbatch), op)
                self.cost.append(costs.op(op))
                self.busy[self.placement[stage]] += self.cost[-1]
                self.source.append(source)
                self.delay.append(delay)
        self.num_operations = len(self.cost)

    @cached_property
    def origins(self) -> list[float]:
        """Start of the objective's time on each rank: its first start, or 0 for the makespan. The
        first operation of a rank is the forward of microbatch 0 on its first stage, and every rank
        before it starts with that microbatch too: the first start is the same in any order."""
        origins: list[float] = [0] * self.num_ranks
        for rank in range(self.num_ranks if self.objective == "span" else 0):
            for stage in range(1, self.stages[rank][0] + 1):
                op = stage * self.num_microbatches
                before = origins[rank] + self.cost[op - self.num_microbatches]
                origins[rank] = before + self.delay[op]
        return origins

    def operations(self, rank: int, letters: list[int]) -> list[int] | None:
        """Operations of a rank's letters; None when one comes too early or memory is exceeded."""
        stages, microbatches = self.num_stages, self.num_microbatches
        counts = [0] * (3 * stages)
        held: float = 0
        cap = self.rooms[rank]
        operations: list[int] = []
        for letter in letters:
            kind, stage = divmod(letter, stages)
            count = counts[letter]
            if kind == 0:
                held += self.whole[stage]
                if held > cap:
                    return None
            elif count >= counts[letter - stages]:
                return None
            elif kind == 1:
                held -= self.whole[stage] - self.kept[stage]
            else:
                held -= self.kept[stage]
            counts[letter] = count + 1
            operations.append(letter * microbatches + count)
        return operations

    def evaluate(self, orders: list[list[int]]) -> TimedOrders | None:
        """Times of orders of operations; None when they deadlock."""
        cost, source, delay = self.cost, self.source, self.delay
        ends: list[float] = [-1] * len(cost)
        starts: list[float] = [0] * len(cost)
        heads = [0] * len(orders)
        clocks: list[float] = [0] * len(orders)
        sleeping: dict[int, int] = {}
        awake = list(range(len(orders)))[::-1]
        left = len(cost)
        while awake:
            rank = awake.pop()
            order, head, clock = orders[rank], heads[rank], clocks[rank]
            for op in order[head:]:
                before = source[op]
                if before >= 0:
                    arrival = ends[before]
                    if arrival < 0:
                        sleeping[before] = rank
                        break
                    arrival += delay[op]
                    if arrival > clock:
                        clock = arrival
                starts[op] = clock
                clock += cost[op]
                ends[op] = clock
                head += 1
                if op in sleeping:
                    awake.append(sleeping.pop(op))
            left -= head - heads[rank]
            heads[rank], clocks[rank] = head, clock
        if left:
            return None
        by_rank = [clock - start for clock, start in zip(clocks, self.origins, strict=True)]
        return TimedOrders(max(by_rank), by_rank, starts, ends)

    def schedule(self, name: str, letters: Letters) -> Schedule:
        """The schedule `name` with the orders `letters`."""
        orders: list[tuple[tuple[Op, ...], ...]] = []
        for order in letters:
            counts = [0] * (3 * self.num_stages)
            ops: list[Op] = []
            for letter in order:
                kind, stage = divmod(letter, self.num_stages)
                ops.append(Op(KINDS[kind], stage, counts[letter]))
                counts[letter] += 1
            orders.append(single(*ops))
        return one_pipe(name, self.placement, tuple(orders), self.num_microbatches)

    def letters(self, schedule: Schedule) -> Letters | None:
        """The order of another schedule with every backward split in its place; None for a
        schedule with another placement, several pipes, or microbatches out of order."""
        if schedule.placement != (self.placement,) or schedule.num_slices > 1:
            return None
        orders: Letters = []
        for rank in range(self.num_ranks):
            counts = [0] * (3 * self.num_stages)
            order: list[int] = []
            for op in schedule.ops(rank):
                kinds = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}[op.kind]
                for letter in (kind * self.num_stages + op.stage for kind in kinds):
                    if counts[letter] != op.microbatch:
                        return None
                    counts[letter] += 1
                    order.append(letter)
            orders.append(order)
        return orders
