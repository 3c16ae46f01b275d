"""The messages that a schedule implies: who sends what to whom, in which place of which queue.

The messages of an ordered pair of ranks form a queue in the *sender's* program order, which both
sides compute from the schedule. Two stages on one rank hand over locally, without a message.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from moemesh.schedule.action import Op, Schedule


class Message(NamedTuple):
    """The output of `producer`, message number `position` from rank `source` to `destination`."""

    source: int
    destination: int
    position: int
    producer: Op
    consumer: Op


def successor(schedule: Schedule, op: Op) -> Op | None:
    """The operation of the neighbouring stage that takes `op`'s output; None at the ends,
    of backwards at the first stage in which anything trains."""
    kind, stage, microbatch, pipe, slice = op
    if kind == "F" and stage < schedule.num_stages - 1:
        return Op("F", stage + 1, microbatch, pipe, slice)
    if kind in ("B", "I") and stage > schedule.first_trained_stage:
        return schedule.backward(stage - 1, microbatch, pipe, slice)
    return None


def messages(schedule: Schedule) -> dict[Op, Message]:
    """Producer -> its message, for every hand-over between two ranks."""
    sent: Counter[tuple[int, int]] = Counter()
    found: dict[Op, Message] = {}
    for source in range(schedule.num_ranks):
        for op in schedule.ops(source):
            consumer = successor(schedule, op)
            if consumer is None or (destination := schedule.rank_of(consumer)) == source:
                continue
            pair = (source, destination)
            found[op] = Message(source, destination, sent[pair], op, consumer)
            sent[pair] += 1
    return found
