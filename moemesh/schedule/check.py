"""Proof that a schedule can run: complete, ordered, without deadlock, within its bounds.

Six points, for generated and hand-written schedules alike:

1. every (pipe, stage, microbatch, slice) has one ``F`` and either one ``B``, or one ``I`` and one
   ``W``, on the rank where the stage lives, and the lists hold nothing else;
2. on its rank ``F`` comes before ``B``/``I`` before ``W``, slices ascend in ``F`` and descend in
   ``B``/``I``, and no operation of a block needs another of the same block;
3. program order and data have no cycle: it runs with asynchronous sends;
4. it also runs with sends that wait for the receiver, one channel an ordered pair of ranks;
5. memory: contexts, activation, pending weight gradients and unread messages are within the caps;
6. with an update rule, every operation uses the version of the weights that the rule declares.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, get_args

from moemesh.config.errors import UserError, check_kind
from moemesh.config.shown import Shown
from moemesh.schedule.action import Message, Op, Schedule, messages
from moemesh.schedule.held_activations import ROUNDING, Amount, HeldActivations, peak_memory
from moemesh.schedule.program import Deadlock, LoweredProgram, issue_order, lower
from moemesh.schedule.versions import ScheduleFault, StageVersions, versions

# A check for deadlocks where a send waits for its receiver, as NCCL's does.
#
# An abstract machine: operations posted on a channel go one after the other, and each occupies
# the channel until the peer's matching operation heads its own. Sends are posted when their
# producer has run, and the rank continues; receives when their consumer is reached, in the
# sender's order, and the rank waits. Whether it deadlocks depends on how channels are shared:
#
# * ``ordered_pair``: one channel per sender and receiver. Fails only where eager sends fail.
# * ``unordered_pair``: a pair of ranks shares one for both directions (one NCCL group of two).
# * ``rank``: all messages of a rank share one queue.


ChannelKind = Literal["ordered_pair", "unordered_pair", "rank"]


class Posted(NamedTuple):
    """A send or receive that is queued in a channel of `rank`."""

    rank: int
    peer: int
    send: bool
    producer: Op

    def __str__(self) -> str:
        what, way = ("send", "to") if self.send else ("receive", "from")
        return f"{what} of {self.producer} {way} rank {self.peer} (on rank {self.rank})"


def rendezvous_deadlock(schedule: Schedule, channels: ChannelKind) -> str:
    """Text with the blocked messages and waiting ranks of a deadlock, if `channels` are shared like
    this; empty without one. The schedule must be complete, in order, and run with eager sends."""
    if channels not in get_args(ChannelKind):
        raise ValueError(f"channels {channels!r} are none of {', '.join(get_args(ChannelKind))}")
    by_producer = messages(schedule)
    by_consumer: dict[Op, list[Message]] = {}
    sequence: dict[tuple[int, int], list[Message]] = {}
    for message in by_producer.values():
        by_consumer.setdefault(message.consumer, []).append(message)
        sequence.setdefault((message.source, message.destination), []).append(message)
    queues = defaultdict[tuple[int, int, int], deque[Posted]](deque)
    # Receives posted and completed of each ordered pair.
    posted, completed = dict.fromkeys(sequence, 0), dict.fromkeys(sequence, 0)
    # Index of the next entry of each rank, and ranks that may be able to continue.
    at, awake = [0] * schedule.num_ranks, list(range(schedule.num_ranks))

    def queue_of(item: Posted) -> deque[Posted]:
        """The channel that `item` shares with others of its rank."""
        if channels == "rank":
            return queues[item.rank, -1, 0]
        return queues[item.rank, item.peer, int(item.send and channels == "ordered_pair")]

    def post(item: Posted) -> None:
        """Append `item` to its channel. An operation that heads its channel completes as soon as
        its counterpart heads that of the peer; then try the next of both channels."""
        queue = queue_of(item)
        queue.append(item)
        pending = [item] if len(queue) == 1 else []
        while pending:
            item = pending.pop()
            other = Posted(item.peer, item.rank, not item.send, item.producer)
            queue, opposite = queue_of(item), queue_of(other)
            if not queue or not opposite or queue[0] != item or opposite[0] != other:
                continue
            for ends in (queue, opposite):
                ends.popleft()
                pending.extend(islice(ends, 1))
            receiver = other if item.send else item
            completed[receiver.peer, receiver.rank] += 1
            awake.append(receiver.rank)

    while awake:
        rank = awake.pop()
        # Run the rank's next entries until it waits for a message that it has posted.
        while at[rank] < len(schedule.orders[rank]):
            entry = schedule.orders[rank][at[rank]]
            inputs = [message for op in entry for message in by_consumer.get(op, ())]
            for message in inputs:
                pair = message.source, message.destination
                while posted[pair] <= message.position:
                    producer = sequence[pair][posted[pair]].producer
                    posted[pair] += 1
                    post(Posted(rank, message.source, False, producer))
            if any(completed[m.source, m.destination] <= m.position for m in inputs):
                break
            at[rank] += 1
            for op in entry:
                if op in by_producer:
                    post(Posted(rank, by_producer[op].destination, True, op))
    heads = [
        f"rank {rank} at {'+'.join(map(str, order[place]))}"
        for rank, (place, order) in enumerate(zip(at, schedule.orders, strict=True))
        if place < len(order)
    ]
    if not heads:
        return ""
    blocked = [str(queue[0]) for queue in queues.values() if queue]
    return f"blocked: {'; '.join(blocked)}; waiting: {'; '.join(heads)}"


#: Findings shown in full; a broken generator may cause thousands.
SHOWN = 50


class ScheduleError(UserError):
    """A schedule that cannot run; `findings` holds everything that is wrong with it."""

    def __init__(self, name: str, findings: Iterable[ScheduleFault]) -> None:
        self.findings = tuple(findings)
        count = len(self.findings)
        lines = [f"schedule {name}: {count} {'finding' if count == 1 else 'findings'}"]
        lines += [f"  {finding}" for finding in self.findings[:SHOWN]]
        if count > SHOWN:
            lines.append(f"  and {count - SHOWN} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Bounds on every rank, None for unbounded. `activation` is in the unit of M_a."""

    contexts: int | None = None
    activation: float | None = None
    weight_backlog: int | None = None
    unread_messages: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckReport(Shown):
    """Proof of a schedule. Per rank: `peaks` of memory, and the most `unread_messages` that can
    have arrived, however late the rank is. `channels`: ways to share rendezvous channels that do
    not deadlock. `versions`: (pipe, stage) -> weight versions; empty without an update rule."""

    peaks: tuple[HeldActivations, ...]
    unread_messages: tuple[int, ...]
    channels: tuple[ChannelKind, ...]
    versions: dict[tuple[int, int], StageVersions] = field(
        default_factory=dict[tuple[int, int], StageVersions]
    )


def check(
    schedule: Schedule,
    caps: Caps | None = None,
    *,
    activation: Amount = 1,
    weight_memory: Amount = 1,
    post_validation: bool = False,
) -> CheckReport:
    """Prove the six points. Raises :class:`ScheduleError` with every finding; points 4 to 6 are
    checked only if the others hold.

    `activation` and `weight_memory` are M_a and M_w, see :func:`peak_memory`. `post_validation`
    also requires that no rank, before its first backward, depends on an operation of another rank
    at or after that one's first backward: until then the last optimizer step may be undone.
    """
    check_kind("schedule", schedule, Schedule, "schedules.zb_h1(4, 8), or another")
    findings = list(_shape(schedule))
    if findings:
        raise ScheduleError(schedule.name, findings)
    findings += _completeness(schedule)
    findings += _order(schedule)
    try:
        program = lower(schedule)
        order = issue_order(program)
    except Deadlock as deadlock:
        if deadlock.cycle:  # without a ring a producer is missing, which is a finding already
            findings.append(ScheduleFault(f"deadlock: {deadlock.ring}"))
        raise ScheduleError(schedule.name, findings) from None
    except ValueError:
        # Operations outside the schedule, which are findings already.
        raise ScheduleError(schedule.name, findings) from None
    if findings:
        raise ScheduleError(schedule.name, findings)
    # Points 4 to 6, for a schedule in which everything else is right.
    channels: list[ChannelKind] = []
    for kind in get_args(ChannelKind):
        blocked = rendezvous_deadlock(schedule, kind)
        if not blocked:
            channels.append(kind)
        elif kind == "ordered_pair":
            findings.append(ScheduleFault(f"deadlock with rendezvous sends: {blocked}"))
    stages: dict[tuple[int, int], StageVersions] = {}
    if schedule.update is not None:
        stages, breaches = versions(schedule)
        findings += breaches
    peaks = peak_memory(schedule, activation=activation, weight_memory=weight_memory)
    unread = unread_messages(program, order)
    for rank, peak in enumerate(peaks):
        for name, value in {**peak._asdict(), "unread_messages": unread[rank]}.items():
            cap: float | None = getattr(caps, name, None)
            if cap is not None and value > cap * (1 + ROUNDING):
                findings.append(ScheduleFault(f"{name} reaches {value}, the cap is {cap}", rank))
    if post_validation:
        findings += _validation(program, order)
    if findings:
        raise ScheduleError(schedule.name, findings)
    return CheckReport(
        peaks=peaks, unread_messages=unread, channels=tuple(channels), versions=stages
    )


def _shape(schedule: Schedule) -> Iterable[ScheduleFault]:
    """Faults of counts, placement and window, and of orders that do not fit them."""
    ranks, stages = schedule.num_ranks, schedule.num_stages
    if min(ranks, stages, schedule.num_slices) < 1:
        yield ScheduleFault(
            f"{ranks} ranks, {stages} stages, {schedule.num_slices} slices: need 1 each"
        )
    if len(schedule.orders) != ranks:
        yield ScheduleFault(f"{len(schedule.orders)} lists for {ranks} ranks")
    if len(schedule.num_microbatches) != schedule.num_pipes:
        counts = len(schedule.num_microbatches)
        yield ScheduleFault(f"{counts} microbatch counts for {schedule.num_pipes} pipes")
    if min(schedule.num_microbatches, default=0) < 0:
        yield ScheduleFault(f"microbatches {schedule.num_microbatches} below 0")
    for pipe, place in enumerate(schedule.placement):
        if len(place) != stages:
            yield ScheduleFault(f"pipe {pipe} places {len(place)} of {stages} stages")
        for stage, rank in enumerate(place):
            if not 0 <= rank < ranks:
                yield ScheduleFault(f"pipe {pipe} has stage {stage} on rank {rank} of {ranks}")
    if schedule.update is not None and schedule.update.window < 1:
        yield ScheduleFault(
            f"the update rule's window is {schedule.update.window}, must be at least 1"
        )


def _completeness(schedule: Schedule) -> Iterable[ScheduleFault]:
    """Faults of operations that are missing, repeated, or on another rank than their stage's."""
    seen: dict[Op, tuple[int, int]] = {}
    legal = {
        (stage, microbatch, pipe, part)
        for pipe, count in enumerate(schedule.num_microbatches)
        for stage in range(schedule.num_stages)
        for microbatch in range(count)
        for part in range(schedule.num_slices)
    }
    for rank, entries in enumerate(schedule.orders):
        for index, entry in enumerate(entries):
            if not entry:
                yield ScheduleFault("an entry without operations", rank, index)
            for op in entry:
                if op[1:] not in legal or op.kind not in ("F", "B", "I", "W"):
                    yield ScheduleFault("does not belong to this schedule", rank, index, op)
                elif op in seen:
                    other = "rank {}, entry {}".format(*seen[op])
                    yield ScheduleFault(f"is already at {other}", rank, index, op)
                else:
                    seen[op] = rank, index
                    if (owner := schedule.rank_of(op)) != rank:
                        yield ScheduleFault(f"its stage is on rank {owner}", rank, index, op)
    for key in sorted(legal, key=lambda key: (schedule.placement[key[2]][key[0]], key)):
        rank = schedule.placement[key[2]][key[0]]
        forward, full, *halves = (Op(kind, *key) for kind in ("F", "B", "I", "W"))
        missing = [half for half in halves if half not in seen]
        if forward not in seen:
            yield ScheduleFault("is missing", rank, None, forward)
        if full in seen:
            for half in (half for half in halves if half in seen):
                yield ScheduleFault(f"{full} does its work already", *seen[half], half)
        elif len(missing) == 2:
            yield ScheduleFault(f"is missing, as is {halves[0]} with its W", rank, None, full)
        else:
            yield from (ScheduleFault("is missing", rank, None, half) for half in missing)


def _order(schedule: Schedule) -> Iterable[ScheduleFault]:
    """Faults of order between operations of one rank that depend on one another."""
    for rank, entries in enumerate(schedule.orders):
        first: dict[Op, int] = {}
        for index, entry in enumerate(entries):
            for op in entry:
                first.setdefault(op, index)
        for op, index in first.items():
            # Dependencies on the same stage are reported first.
            needs = sorted(schedule.dependencies(op), key=lambda other: other.stage != op.stage)
            for needed in needs:
                at, why = first.get(needed), "needs"
                if needed.slice != op.slice:
                    way = "ascend in F" if op.kind == "F" else "descend in backward"
                    why = f"slices {way}: needs"
                if at is not None and at > index:
                    yield ScheduleFault(
                        f"{why} {needed}, which comes later, at {at}", rank, index, op
                    )
                elif at == index:
                    yield ScheduleFault(f"needs {needed} of the same block", rank, index, op)


def unread_messages(program: LoweredProgram, order: Sequence[int]) -> tuple[int, ...]:
    """Per rank, the most messages that can have arrived without being used yet.

    A message can have arrived when its receiver has run n entries, if its producer does not depend,
    by any path, on a later entry of the receiver; it is used when its consumer starts. `order` is
    an order in which all entries can be issued.
    """
    import numpy as np  # Imported late: slow, and most commands do not need it.

    ranks = len(program.schedule.orders)
    # Vector clocks: the number of entries of each rank that must have run before each rank's latest
    # entry [ranks, ranks], and before each message in flight [ranks].
    before = np.zeros((ranks, ranks), dtype=np.int64)
    in_flight: dict[int, np.ndarray] = {}
    # Message -> number of entries of its receiver that must have run before it can arrive.
    earliest: dict[int, int] = {}
    # Per receiver: (number of its entries that have run, change of its number of unread messages).
    changes: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for entry in order:
        rank = program.rank[entry]
        clock = before[rank]
        for slot in program.awaited[entry]:
            np.maximum(clock, in_flight.pop(slot), out=clock)
            changes[rank] += [(earliest.pop(slot), 1), (program.index(entry) + 1, -1)]
        clock[rank] = program.index(entry) + 1
        for message, boundary, place in program.sent[entry]:
            in_flight[message] = clock.copy()
            op = program.entries[entry][place]
            stage = boundary + (op.kind == "F")
            earliest[message] = int(clock[program.schedule.placement[op.pipe][stage]])
    most: list[int] = []
    for rank_changes in changes:
        now = peak = 0
        # At equal counts -1 comes first: the consumer has started.
        for _, change in sorted(rank_changes):
            now += change
            peak = max(peak, now)
        most.append(peak)
    return tuple(most)


def _validation(program: LoweredProgram, order: Sequence[int]) -> Iterable[ScheduleFault]:
    """Faults of warm-up entries that depend on another rank's first backward or what follows it."""
    late: dict[int, str] = {}  # slot -> the entry at or after a first backward that it depends on
    started = [False] * len(program.schedule.orders)
    for entry in order:
        rank = program.rank[entry]
        started[rank] = started[rank] or any(op.kind != "F" for op in program.entries[entry])
        cause = next((late[slot] for slot in program.waits[entry] if slot in late), "")
        if started[rank]:
            cause = program.where(entry)
        elif cause:
            op = program.entries[entry][0]
            message = f"warm-up depends on {cause}, at or after that rank's first backward"
            yield ScheduleFault(message, rank, program.index(entry), op)
        if cause:
            late.update(dict.fromkeys(program.makes[entry], cause))
            late.update((message, cause) for message, _, _ in program.sent[entry])
