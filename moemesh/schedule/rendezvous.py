"""A check for deadlocks where a send waits for its receiver, as NCCL's does.

An abstract machine: operations posted on a channel go one after the other, and each occupies the
channel until the peer's matching operation heads its own. Sends are posted when their producer
has run, and the rank goes on; receives when their consumer is reached, in the sender's order, and
the rank waits. Whether it deadlocks depends on how channels are shared:

* ``ordered_pair``: one channel per sender and receiver. Fails only where eager sends fail.
* ``unordered_pair``: a pair of ranks shares one for both directions (one NCCL group of two).
* ``rank``: all messages of a rank stand in one queue.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import islice
from typing import Literal, NamedTuple, get_args

from moemesh.schedule.action import Op, Schedule
from moemesh.schedule.messages import Message, messages

ChannelKind = Literal["ordered_pair", "unordered_pair", "rank"]


class Posted(NamedTuple):
    """A send or receive that stands in a channel of `rank`."""

    rank: int
    peer: int
    send: bool
    producer: Op

    def __str__(self) -> str:
        """``send of 1F0 to rank 2 (on rank 1)``."""
        if self.send:
            return f"send of {self.producer} to rank {self.peer} (on rank {self.rank})"
        return f"receive of {self.producer} from rank {self.peer} (on rank {self.rank})"


def rendezvous_deadlock(schedule: Schedule, channels: ChannelKind) -> str:
    """What blocks when channels are shared like this; empty when everything arrives.

    Expects a complete schedule, in order and free of deadlock with eager sends.
    """
    if channels not in get_args(ChannelKind):
        raise ValueError(f"channels {channels!r} are none of {', '.join(get_args(ChannelKind))}")
    machine = _Machine(schedule, channels)
    machine.run()
    heads = [f"rank {rank} at {op}" for rank, op in enumerate(machine.standing()) if op]
    if not heads:
        return ""
    blocked = [str(queue[0]) for queue in machine.queues.values() if queue]
    return f"blocked: {'; '.join(blocked)}; waiting: {'; '.join(heads)}"


class _Machine:
    def __init__(self, schedule: Schedule, channels: ChannelKind) -> None:
        self.schedule = schedule
        self.channels = channels
        self.by_producer = messages(schedule)
        self.by_consumer: dict[Op, list[Message]] = {}
        self.sequence: dict[tuple[int, int], list[Message]] = {}
        for message in self.by_producer.values():
            self.by_consumer.setdefault(message.consumer, []).append(message)
            pair = message.source, message.destination
            self.sequence.setdefault(pair, []).append(message)
        self.queues = defaultdict[tuple[int, int, int], deque[Posted]](deque)
        self.heads = [0] * schedule.num_ranks
        #: Receives posted and completed of each ordered pair.
        self.posted: dict[tuple[int, int], int] = dict.fromkeys(self.sequence, 0)
        self.completed: dict[tuple[int, int], int] = dict.fromkeys(self.sequence, 0)
        self.awake = list(range(schedule.num_ranks))

    def run(self) -> None:
        while self.awake:
            rank = self.awake.pop()
            while self.advance(rank):
                pass

    def standing(self) -> list[str]:
        """The entry at which each rank stands; empty for a rank that has finished."""
        pairs = zip(self.heads, self.schedule.orders, strict=True)
        return ["+".join(map(str, order[at])) if at < len(order) else "" for at, order in pairs]

    def advance(self, rank: int) -> bool:
        """Run the head entry of `rank`, or post what it waits for; whether it ran."""
        order = self.schedule.orders[rank]
        if self.heads[rank] == len(order):
            return False
        entry = order[self.heads[rank]]
        inputs = [message for op in entry for message in self.by_consumer.get(op, ())]
        for message in inputs:
            pair = message.source, message.destination
            while self.posted[pair] <= message.position:
                producer = self.sequence[pair][self.posted[pair]].producer
                self.posted[pair] += 1
                self.post(Posted(rank, message.source, False, producer))
        if any(self.completed[m.source, m.destination] <= m.position for m in inputs):
            return False
        self.heads[rank] += 1
        for op in entry:
            if op in self.by_producer:
                self.post(Posted(rank, self.by_producer[op].destination, True, op))
        return True

    def post(self, item: Posted) -> None:
        queue = self.queues[self.channel(item)]
        queue.append(item)
        if len(queue) == 1:
            self.match(item)

    def channel(self, item: Posted) -> tuple[int, int, int]:
        """The rank, and what of it shares a queue with `item`."""
        if self.channels == "rank":
            return item.rank, -1, 0
        return item.rank, item.peer, int(item.send and self.channels == "ordered_pair")

    def match(self, item: Posted) -> None:
        """Complete `item`, and what follows it in either channel, as long as both ends are up."""
        pending = [item]
        while pending:
            item = pending.pop()
            other = Posted(item.peer, item.rank, not item.send, item.producer)
            queue, opposite = self.queues[self.channel(item)], self.queues[self.channel(other)]
            if not queue or not opposite or queue[0] != item or opposite[0] != other:
                continue
            for ends in (queue, opposite):
                ends.popleft()
                pending.extend(islice(ends, 1))
            receiver = other if item.send else item
            self.completed[receiver.peer, receiver.rank] += 1
            self.awake.append(receiver.rank)
