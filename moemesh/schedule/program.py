"""A schedule in integers: the values that each entry waits for and makes, for fast passes.

Every value an operation makes has a *slot*: the output of ``F``, the input gradient of ``B`` or
``I``, the weight gradient of ``W``. An entry waits for slots and makes slots. A value that is sent
to another rank has a second slot there, for the message. Entries are numbered rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from moemesh.schedule.action import Entry, Op, Schedule, looped

#: A message: slot, boundary and place of its producer in the entry.
Sent = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class LoweredProgram:
    """The integers of one schedule.

    ``entries[i]`` runs on ``rank[i]``; rank r has the entries ``range(first[r], first[r + 1])``.
    ``waits[i]`` are the slots that entry i needs, ``awaited[i]`` those of messages among them;
    ``makes[i]`` the slots that it makes, one for each operation, and ``sent[i]`` its messages:
    their slot, the boundary (s is between stage s and s + 1) and the operation's place. Entries of
    the same kinds of operations on the same stages share ``alike[i]``, a place in ``examples``.
    """

    schedule: Schedule
    entries: tuple[Entry, ...]
    rank: tuple[int, ...]
    first: tuple[int, ...]
    num_slots: int
    waits: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    awaited: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    makes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    sent: list[tuple[Sent, ...]] = field(default_factory=list[tuple[Sent, ...]])
    alike: list[int] = field(default_factory=list[int])
    examples: list[Entry] = field(default_factory=list[Entry])

    @cached_property
    def walk(self) -> list[tuple[int, tuple[int, ...], tuple[Sent, ...]]]:
        """(entry, messages that it awaits, messages that it sends) in an order in which all can be
        issued. Values that stay on a rank are left out: its entries run in order anyway."""
        return [(entry, self.awaited[entry], self.sent[entry]) for entry in issue_order(self)]

    @cached_property
    def made_by(self) -> dict[int, tuple[int, Op]]:
        """Slot -> the entry and the operation that make it."""
        producers: dict[int, tuple[int, Op]] = {}
        for entry, ops in enumerate(self.entries):
            for slot, op in zip(self.makes[entry], ops, strict=True):
                producers.setdefault(slot, (entry, op))
            for slot, _, place in self.sent[entry]:
                producers.setdefault(slot, (entry, ops[place]))
        return producers

    def index(self, entry: int) -> int:
        """Position of an entry in its rank's list."""
        return entry - self.first[self.rank[entry]]

    def where(self, entry: int) -> str:
        """An entry as text for messages: ``1F3 (rank 1, entry 4)``."""
        name = "+".join(map(str, self.entries[entry]))
        return f"{name} (rank {self.rank[entry]}, entry {self.index(entry)})"


def lower(schedule: Schedule, *, relax_wrap: bool = False) -> LoweredProgram:
    """Number the slots of `schedule` and find what each entry waits for.

    `relax_wrap` leaves out, in the looped placement, the edges from a rank's last stage of a chunk
    to rank 0's first of the next (and back) for microbatches that do not open a group of
    num_ranks. Raises ValueError for operations outside the schedule's stages, microbatches, pipes
    or slices, and for `relax_wrap` with another placement.
    """
    stages, slices, counts = schedule.num_stages, schedule.num_slices, schedule.num_microbatches
    chunks, rest = divmod(stages, schedule.num_ranks)
    if relax_wrap and (rest or schedule.placement != (looped(schedule.num_ranks, chunks),)):
        raise ValueError("relax_wrap needs one pipe with stage s on rank s % ranks")
    group = schedule.num_ranks if relax_wrap else 0
    # Key k = ((pipe * S + stage) * M + microbatch) * L + slice, one of K: its forward has slot k,
    # its input gradient K + k, its weight gradient 2K + k; the slot of a message is 3K more.
    row = max(counts, default=0) * slices
    num_keys = schedule.num_pipes * stages * row
    # Of every pipe and stage s: whether the edge between s - 1 and s is a message.
    crosses = [
        [False, *(a != b for a, b in pairwise(ranks)), False] for ranks in schedule.placement
    ]
    program = LoweredProgram(
        schedule=schedule,
        entries=tuple(entry for order in schedule.orders for entry in order),
        rank=tuple(r for r, order in enumerate(schedule.orders) for _ in order),
        first=(0, *accumulate(map(len, schedule.orders))),
        num_slots=6 * num_keys,
    )
    numbers: dict[tuple[object, ...], int] = {}
    for entry in program.entries:
        waits: list[int] = []
        awaited: list[int] = []
        makes: list[int] = []
        sent: list[Sent] = []
        for place, op in enumerate(entry):
            kind, stage, microbatch, pipe, slice = op
            if not (0 <= pipe < len(counts) and 0 <= stage < stages) or not (
                0 <= microbatch < counts[pipe] and 0 <= slice < slices
            ):
                raise ValueError(f"{op} lies outside the schedule's stages, microbatches or slices")
            slot = (pipe * stages + stage) * row + microbatch * slices + slice
            # `source` and `target` are edges as in `crosses`: where the input comes from, where the
            # output goes. `ahead` is the distance to the slot of the stage that makes the input;
            # `has_slice`: another slice comes before this one in the same direction.
            if kind == "F":
                source, target, ahead, has_slice = stage, stage + 1, -row, slice > 0
            else:
                waits.append(slot if kind != "W" else num_keys + slot)
                slot += num_keys
                if kind == "W":
                    makes.append(slot + num_keys)
                    continue
                source, target, ahead, has_slice = stage + 1, stage, row, slice < slices - 1
            if 0 < source < stages and not (group and source % group == 0 and microbatch % group):
                needed = slot + ahead
                if crosses[pipe][source]:
                    needed += 3 * num_keys
                    awaited.append(needed)
                waits.append(needed)
            if has_slice:
                waits.append(slot + (1 if ahead > 0 else -1))
            makes.append(slot)
            if crosses[pipe][target]:
                sent.append((slot + 3 * num_keys, target - 1, place))
        # As tuples, which the garbage collector need not visit.
        program.waits.append(tuple(waits))
        program.awaited.append(tuple(awaited))
        program.makes.append(tuple(makes))
        program.sent.append(tuple(sent))
        kinds = entry[0][:2] if len(entry) == 1 else tuple([op[:2] for op in entry])
        if kinds not in numbers:
            numbers[kinds] = len(numbers)
            program.examples.append(entry)
        program.alike.append(numbers[kinds])
    return program


class Deadlock(ValueError):
    """No rank can continue. `cycle` are entries that wait for each other, in a ring (empty when a
    producer is missing instead); `heads` the entry at which each unfinished rank waits."""

    def __init__(self, program: LoweredProgram, heads: Sequence[int], cycle: Sequence[int]) -> None:
        self.heads = tuple(heads)
        self.cycle = tuple(cycle)
        made_by = program.made_by
        parts: list[str] = []
        for waiter, head in zip(cycle, (*cycle[1:], *cycle[:1]), strict=True):
            for slot in program.waits[waiter]:
                producer, op = made_by.get(slot, (-1, None))
                if producer >= head and program.rank[producer] == program.rank[head]:
                    at = f"rank {program.rank[producer]}, entry {program.index(producer)}"
                    queued = "" if producer == head else f", queued behind {program.where(head)}"
                    parts.append(f"{program.where(waiter)} waits for {op} ({at}){queued}")
                    break
        #: The ring in words: each waiting entry, its missing input, and the producer's place.
        self.ring = "; ".join(parts)
        lines = [f"{program.schedule.name} deadlocks" + (f": {self.ring}" if cycle else "")]
        for entry in heads:
            lines.append(f"  rank {program.rank[entry]} waits at {program.where(entry)}")
        super().__init__("\n".join(lines))


def issue_order(program: LoweredProgram) -> list[int]:
    """Entries in an order in which all can be issued: program order and every wait hold. Raises
    :class:`Deadlock` when there is none. Each rank runs as far as it can."""
    first, waits, makes, sent = program.first, program.waits, program.makes, program.sent
    done = bytearray(program.num_slots)
    heads = list(first[:-1])
    sleepers: dict[int, list[int]] = {}  # slot of a message -> ranks that wait for it
    awake = list(range(len(heads)))[::-1]
    order: list[int] = []
    while awake:
        rank = awake.pop()
        entry, end = heads[rank], first[rank + 1]
        while entry < end:
            blocked = -1
            for slot in waits[entry]:
                if not done[slot]:
                    blocked = slot
                    break
            if blocked >= 0:
                sleepers.setdefault(blocked, []).append(rank)
                break
            order.append(entry)
            for slot in makes[entry]:
                done[slot] = 1
            for slot, _, _ in sent[entry]:
                done[slot] = 1
                if slot in sleepers:
                    awake.extend(sleepers.pop(slot))
            entry += 1
        heads[rank] = entry
    stuck = [entry for rank, entry in enumerate(heads) if entry < first[rank + 1]]
    if stuck:
        raise Deadlock(program, stuck, _cycle(program, stuck, done))
    return order


def _cycle(program: LoweredProgram, heads: Sequence[int], done: bytearray) -> list[int]:
    """A shortest ring of heads that wait for each other; empty if all wait for missing
    producers."""
    at_rank = {program.rank[entry]: entry for entry in heads}
    # Head -> the heads whose queues hold the producers that it waits for.
    blockers = {
        entry: [
            at_rank[program.rank[program.made_by[slot][0]]]
            for slot in program.waits[entry]
            if not done[slot] and slot in program.made_by
        ]
        for entry in heads
    }
    best: list[int] = []
    for start in heads:
        came_from: dict[int, int] = {}
        level = [start]
        while level and start not in came_from:
            reached: list[int] = []
            for entry in level:
                for blocker in blockers[entry]:
                    if blocker not in came_from:
                        came_from[blocker] = entry
                        reached.append(blocker)
            level = reached
        if start not in came_from:
            continue
        ring = [came_from[start]]
        while ring[-1] != start:
            ring.append(came_from[ring[-1]])
        if not best or len(ring) < len(best):
            best = ring[::-1]
    return best
