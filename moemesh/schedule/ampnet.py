"""AMPNet: each rank runs what has arrived, and its order is recorded.

Gaunt et al., "AMPNet: Asynchronous Model-Parallel Training for Dynamic Neural Networks", 2017,
arXiv:1705.09786.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from moemesh.config.conditions import ScheduleConditionError
from moemesh.config.schedule_table import require_numbers
from moemesh.schedule.action import Op, Schedule, UpdateRule, linear, one_pipe, single


class OldestFirst:
    """Policy of one rank: the oldest waiting backward, else the oldest waiting forward.

    Rank 0 admits a new microbatch when nothing waits and fewer than `max_in_flight` are in flight;
    the last rank queues its own backward after each forward. The executor's loop::

        while not policy.done:
            while (op := policy.next()) is None:
                policy.receive(op_of(wait_for_a_message()))
            ...  # run op, send its result
            policy.finish(op)

    `order` holds what was run, in order: the record that is checked, simulated and replayed.
    """

    def __init__(
        self, rank: int, num_ranks: int, num_microbatches: int, *, max_in_flight: int
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.num_microbatches, self.max_in_flight = num_microbatches, max_in_flight
        self.order: list[Op] = []
        self._forwards: deque[Op] = deque()
        self._backwards: deque[Op] = deque()
        self._admitted = 0
        self._finished = 0

    @property
    def done(self) -> bool:
        """Whether every microbatch has come back through this rank."""
        return self._finished == self.num_microbatches

    def receive(self, op: Op) -> None:
        """The input of `op`, an operation of this rank, has arrived."""
        assert op.stage == self.rank, f"{op} belongs to another rank than {self.rank}"
        (self._forwards if op.kind == "F" else self._backwards).append(op)

    def next(self) -> Op | None:
        """The operation to run now; None if nothing can run before the next message."""
        for waiting in (self._backwards, self._forwards):
            if waiting:
                self.order.append(waiting.popleft())
                return self.order[-1]
        in_flight = self._admitted - self._finished
        fits = self._admitted < self.num_microbatches and in_flight < self.max_in_flight
        if self.rank > 0 or not fits:
            return None
        self.order.append(Op("F", 0, self._admitted))
        self._admitted += 1
        return self.order[-1]

    def finish(self, op: Op) -> None:
        """`op` has been run."""
        if op.kind == "B":
            self._finished += 1
        elif self.rank == self.num_ranks - 1:
            self.receive(Op("B", op.stage, op.microbatch))


def ampnet(
    num_ranks: int,
    num_microbatches: int,
    *,
    max_in_flight: int | None = None,
    window: int = 1,
    cost: Callable[[Op], float] | None = None,
    latency: float = 0,
) -> Schedule:
    """The orders that the policy takes when operations last `cost(op)` and messages `latency`.

    `max_in_flight` microbatches are in flight at once (p by default), each rank updates after every
    `window` local backwards and a backward uses the newest weights; forwards cost 1 and backwards 2
    unless `cost` is given. Stage r on rank r. One copy of the weights, a version lag of at most
    ceil((max_in_flight-1)/window), at most `max_in_flight` microbatches per rank. Raises ValueError
    unless max_in_flight >= 1, window >= 1, and costs and latency are finite and not negative.

    >>> print(draw(simulate(ampnet(3, 5)).timeline))
    rank 0: F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4---
    rank 1: .  F0 F1 F2 .  B0--- .  B1--- F3 B2--- F4 B3--- .  B4---
    rank 2: .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---
    """
    in_flight = num_ranks if max_in_flight is None else max_in_flight
    require_numbers(
        "ampnet",
        ranks=num_ranks,
        microbatches=num_microbatches,
        max_in_flight=max(in_flight, 1) if max_in_flight is None else in_flight,
        window=window,
    )
    policies = [
        OldestFirst(rank, num_ranks, num_microbatches, max_in_flight=in_flight)
        for rank in range(num_ranks)
    ]
    cost = cost or (lambda op: 1 if op.kind == "F" else 2)
    if not (0 <= latency < math.inf):
        raise ScheduleConditionError(f"ampnet needs 0 <= latency < infinity, got {latency}")
    # Simulation by events: first all events of one time, then each free rank starts an operation.
    # (time, number, finished or arrived, operation); the number makes equal times deterministic.
    events: list[tuple[float, int, bool, Op]] = []
    running: list[Op | None] = [None] * len(policies)
    last, now, number = len(policies) - 1, 0.0, 0
    while True:
        while events and events[0][0] == now:
            _, _, finished, op = heapq.heappop(events)
            if not finished:
                policies[op.stage].receive(op)
                continue
            running[op.stage] = None
            policies[op.stage].finish(op)
            # Forwards go up to the last rank, backwards down to the first.
            if op.stage != (last if op.kind == "F" else 0):
                consumer = op._replace(stage=op.stage + (1 if op.kind == "F" else -1))
                heapq.heappush(events, (now + latency, number := number + 1, False, consumer))
        for rank, policy in enumerate(policies):
            if running[rank] is None and (op := policy.next()):
                length = cost(op)
                if not (0 <= length < math.inf):
                    raise ScheduleConditionError(f"ampnet: {op} costs {length}, not 0 or more")
                running[rank] = op
                heapq.heappush(events, (now + length, number := number + 1, True, op))
        if not events:
            break
        now = events[0][0]
    assert all(policy.done for policy in policies), "AMPNet stopped before its end"
    return one_pipe(
        "ampnet",
        linear(num_ranks),
        tuple(single(*policy.order) for policy in policies),
        num_microbatches,
        update=UpdateRule(kind="newest", window=window),
        parameters={"max_in_flight": in_flight},
    )
