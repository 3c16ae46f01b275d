"""AMPNet: the recorded orders follow the policy, under any costs and any arrivals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.schedule.action import Op, Schedule, UpdateRule, linear, single
from moemesh.schedule.ampnet import OldestFirst, ampnet
from moemesh.schedule.check import check
from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate

SMALL = st.integers(1, 5)
#: Quarters add without rounding, so that equal times are equal.
QUARTERS = st.integers(0, 12).map(lambda number: number / 4)


@settings(max_examples=60)
@given(
    ranks=SMALL,
    microbatches=st.integers(1, 8),
    in_flight=st.integers(1, 6),
    forward=st.lists(QUARTERS, min_size=5, max_size=5),
    backward=st.lists(QUARTERS, min_size=5, max_size=5),
    latency=QUARTERS,
)
def test_the_record_obeys_the_policy(
    ranks: int,
    microbatches: int,
    in_flight: int,
    forward: list[float],
    backward: list[float],
    latency: float,
) -> None:
    """Replayed under the same costs, no rank passes over what the policy would have taken."""

    def cost(op: Op) -> float:
        # Nothing takes no time here: what happens at one instant has no order to judge.
        return (forward if op.kind == "F" else backward)[op.stage] + 0.25

    schedule = ampnet(ranks, microbatches, max_in_flight=in_flight, cost=cost, latency=latency)
    check(schedule)
    replay = simulate(schedule, Costs(forward=cost, backward=cost, message=latency))
    ends = {r.name: r.end for r in replay.timeline.records}

    def arrival(op: Op) -> float:
        times = [
            ends[str(needed)] + (latency if needed.stage != op.stage else 0)
            for needed in schedule.dependencies(op)
        ]
        return max(times, default=0)

    for rank in range(ranks):
        waiting = list(schedule.ops(rank))
        free = 0.0
        for op in schedule.ops(rank):
            start = ends[str(op)] - cost(op)
            others = [other for other in waiting if other != op]
            for other in others:
                if arrival(other) > start:
                    continue
                if other.kind == "B":
                    # A waiting backward is taken first, the oldest of them.
                    assert op.kind == "B" and op.microbatch < other.microbatch
                elif op.kind == "F":
                    assert op.microbatch < other.microbatch
            if rank == 0 and op.kind == "F":
                back = [m for m in range(op.microbatch) if ends[f"0B{m}"] <= start]
                assert op.microbatch - len(back) < in_flight
                finished = [ends[f"0B{m}"] for m in range(op.microbatch)]
                needed = op.microbatch - in_flight
                # Admitted at once when it may be: when free, and when enough have come back.
                slot = sorted(finished)[needed] if needed >= 0 else 0.0
                assert start == max(free, slot)
            else:
                assert start == max(free, arrival(op))
            free = ends[str(op)]
            waiting.remove(op)


@pytest.mark.parametrize("seed", range(20))
def test_an_executor_whose_messages_come_in_any_order(seed: int) -> None:
    """Ranks take turns by chance and messages take any time: the record is legal all the same."""
    chance = random.Random(seed)
    ranks, microbatches, in_flight = chance.randint(1, 5), 9, chance.randint(1, 6)
    policies = [
        OldestFirst(rank, ranks, microbatches, max_in_flight=in_flight) for rank in range(ranks)
    ]
    # One queue per ordered pair, as messages between two ranks keep their order.
    queues: dict[tuple[int, int], list[Op]] = {}
    while not all(policy.done for policy in policies):
        rank = chance.randrange(ranks)
        for (_, to), queue in queues.items():
            if to == rank and queue and chance.random() < 0.7:
                policies[rank].receive(queue.pop(0))
        op = policies[rank].next()
        if op is None:
            continue
        policies[rank].finish(op)
        to = rank + (1 if op.kind == "F" else -1)
        if 0 <= to < ranks:
            queues.setdefault((rank, to), []).append(op._replace(stage=to))
    assert policies[0].next() is None
    schedule = Schedule(
        name="recorded",
        num_ranks=ranks,
        num_stages=ranks,
        placement=(linear(ranks),),
        orders=tuple(single(*policy.order) for policy in policies),
        num_microbatches=(microbatches,),
        update=UpdateRule(kind="newest", window=2),
    )
    report = check(schedule)
    assert max(peak.contexts for peak in report.peaks) <= in_flight


def test_it_adapts_to_a_slow_stage() -> None:
    """A fixed 1F1B order waits for the slow rank; the policy keeps it busy from its first input."""
    slow = Costs(forward=[1, 1, 5, 1], input_gradient=[1, 1, 5, 1], weight_gradient=0)
    by_stage = [1, 1, 5, 1]
    recorded = ampnet(4, 12, max_in_flight=8, cost=lambda op: by_stage[op.stage])
    simulation = simulate(recorded, slow)
    statistics = simulation.timeline.statistics()[2]
    assert statistics.busy == 120
    assert statistics.idle <= 7


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="latency"):
        ampnet(2, 2, latency=-1)
    with pytest.raises(ValueError, match="costs nan"):
        ampnet(2, 2, cost=lambda op: float("nan"))
