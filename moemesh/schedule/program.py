"""A schedule in integers: who waits for what, for the passes that must be fast or prove things.

Every value an operation makes has a *slot*: the output of ``F``, the input gradient of ``B`` or
``I``, the weight gradient of ``W``. An entry waits for slots and makes slots; the same value
waited for on another rank, as a message, is another slot. Entries are numbered rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from moemesh.schedule.action import Entry, Op, Schedule, looped


@dataclass(frozen=True, kw_only=True)
class LoweredProgram:
    """The integers of one schedule.

    ``entries[i]`` stands on ``rank[i]``, ranks occupy ``range(first[r], first[r + 1])``.
    ``waits[i]`` are the slots entry i needs, ``makes[i]`` pairs of a slot it makes and the slot of
    the message that carries the value to another rank (-1 when none does). ``consumer`` maps such
    a message slot to the consuming operation.
    """

    schedule: Schedule
    entries: tuple[Entry, ...]
    rank: tuple[int, ...]
    first: tuple[int, ...]
    waits: list[tuple[int, ...]]
    makes: list[tuple[tuple[int, int], ...]]
    num_slots: int

    @cached_property
    def walk(self) -> list[tuple[int, tuple[int, ...], tuple[tuple[int, int, Op], ...]]]:
        """All entries in an order in which they can be issued: each with the slots of the messages
        that it waits for, and of those that it sends with boundary and producer."""
        messages = self.num_slots // 2  # what a rank makes for itself is there in time
        found: list[tuple[int, tuple[int, ...], tuple[tuple[int, int, Op], ...]]] = []
        for entry in issue_order(self):
            awaited = tuple([slot for slot in self.waits[entry] if slot >= messages])
            sent = tuple(
                [
                    (slot, op.stage - (op.kind != "F"), op)
                    for op, (_, slot) in zip(self.entries[entry], self.makes[entry], strict=True)
                    if slot >= 0
                ]
            )
            found.append((entry, awaited, sent))
        return found

    @cached_property
    def alike(self) -> tuple[list[Entry], list[int]]:
        """One entry for all that have the same kinds of operations on the same stages; of each
        entry, which of them."""
        numbers: dict[tuple[tuple[str, int], ...], int] = {}
        examples: list[Entry] = []
        found: list[int] = []
        for entry in self.entries:
            key = tuple([op[:2] for op in entry])
            if key not in numbers:
                numbers[key] = len(examples)
                examples.append(entry)
            found.append(numbers[key])
        return examples, found

    def index(self, entry: int) -> int:
        """Position of an entry in its rank's list."""
        return entry - self.first[self.rank[entry]]

    def where(self, entry: int) -> str:
        """An entry for people: ``1F3 (rank 1, entry 4)``."""
        name = "+".join(map(str, self.entries[entry]))
        return f"{name} (rank {self.rank[entry]}, entry {self.index(entry)})"


def lower(schedule: Schedule, *, relax_wrap: bool = False) -> LoweredProgram:
    """Number the slots of `schedule` and find what each entry waits for.

    `relax_wrap` leaves out, in the looped placement, the edges from a rank's last stage of a chunk
    to rank 0's first of the next (and back) for microbatches that do not open a group of
    num_ranks. Raises ValueError for operations outside the schedule's stages, microbatches, pipes
    or slices, and for `relax_wrap` with another placement.
    """
    chunks, rest = divmod(schedule.num_stages, schedule.num_ranks)
    if relax_wrap and (rest or schedule.placement != (looped(schedule.num_ranks, chunks),)):
        raise ValueError("relax_wrap needs one pipe with stage s on rank s % ranks")
    entries = tuple(entry for order in schedule.orders for entry in order)
    rank = tuple(r for r, order in enumerate(schedule.orders) for _ in order)
    first = [0]
    for order in schedule.orders:
        first.append(first[-1] + len(order))
    lowering = _Lowering(schedule, relax_wrap)
    waits: list[tuple[int, ...]] = []
    makes: list[tuple[tuple[int, int], ...]] = []
    for entry in entries:
        if len(entry) == 1:
            needed, made = lowering.op(entry[0])
            waits.append(needed)
            makes.append((made,))
        else:
            both = [lowering.op(op) for op in entry]
            waits.append(tuple(slot for needed, _ in both for slot in needed))
            makes.append(tuple(made for _, made in both))
    return LoweredProgram(
        schedule=schedule,
        entries=entries,
        rank=rank,
        first=tuple(first),
        waits=waits,
        makes=makes,
        num_slots=6 * lowering.keys,
    )


class _Lowering:
    """Slots of one operation. Key k = ((pipe * S + stage) * M + microbatch) * L + slice; its
    forward has slot k, its input gradient K + k, its weight gradient 2K + k, messages 3K more."""

    def __init__(self, schedule: Schedule, relax_wrap: bool) -> None:
        self.stages = schedule.num_stages
        self.slices = schedule.num_slices
        self.microbatches = max(schedule.num_microbatches, default=0)
        self.counts = schedule.num_microbatches
        self.row = self.microbatches * self.slices
        self.keys = schedule.num_pipes * self.stages * self.row
        # Of every pipe and stage s: whether the edge between s - 1 and s is a message; and whether
        # it is one that a relaxed timeline leaves out.
        self.crosses = [
            [False, *(a != b for a, b in pairwise(ranks)), False] for ranks in schedule.placement
        ]
        self.group = schedule.num_ranks if relax_wrap else 0

    def op(self, op: Op) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Slots that `op` waits for; the slot it makes and its message's (or -1)."""
        kind, stage, microbatch, pipe, slice = op
        stages, keys, row = self.stages, self.keys, self.row
        if not (0 <= pipe < len(self.counts) and 0 <= stage < stages) or not (
            0 <= microbatch < self.counts[pipe] and 0 <= slice < self.slices
        ):
            raise ValueError(f"{op} lies outside the schedule's stages, microbatches or slices")
        forward = (pipe * stages + stage) * row + microbatch * self.slices + slice
        backward = keys + forward
        crosses = self.crosses[pipe]
        if kind == "F":
            made = forward, forward + 3 * keys if crosses[stage + 1] else -1
            if self.slices == 1 and stage and not self.group:
                return (forward - row + (3 * keys if crosses[stage] else 0),), made
            found: list[int] = []
            if stage and not self.relaxed(stage, microbatch):
                found.append(forward - row + (3 * keys if crosses[stage] else 0))
            if slice:
                found.append(forward - 1)
            return tuple(found), made
        if kind == "W":
            return (backward,), (backward + keys, -1)
        found = [forward]
        if stage < stages - 1 and not self.relaxed(stage + 1, microbatch):
            found.append(backward + row + (3 * keys if crosses[stage + 1] else 0))
        if slice < self.slices - 1:
            found.append(backward + 1)
        return tuple(found), (backward, backward + 3 * keys if crosses[stage] else -1)

    def relaxed(self, stage: int, microbatch: int) -> bool:
        """Whether the edge between `stage` - 1 and `stage` is left out for this microbatch."""
        return self.group > 0 and stage % self.group == 0 and microbatch % self.group != 0


class Deadlock(ValueError):
    """No rank can go on. `cycle` are entries that wait for each other, in a ring (empty when a
    producer is missing instead); `heads` the entry at which each unfinished rank stands."""

    def __init__(self, program: LoweredProgram, heads: Sequence[int], cycle: Sequence[int]) -> None:
        self.heads = tuple(heads)
        self.cycle = tuple(cycle)
        self.ring = _ring(program, cycle) if cycle else ""
        lines = [f"{program.schedule.name} deadlocks"]
        if cycle:
            lines = [f"{program.schedule.name} deadlocks: {self.ring}"]
        for entry in heads:
            lines.append(f"  rank {program.rank[entry]} stands at {program.where(entry)}")
        super().__init__("\n".join(lines))


def issue_order(program: LoweredProgram) -> list[int]:
    """Entries in an order in which all can be issued: program order and every wait hold.

    Raises :class:`Deadlock` when there is none. Each rank goes on as far as it can.
    """
    first, waits, makes = program.first, program.waits, program.makes
    done = bytearray(program.num_slots + 1)  # The last is for "no message".
    heads = list(first[:-1])
    sleepers: dict[int, list[int]] = {}
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
            for made in makes[entry]:
                for slot in made:
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
    """A shortest ring of heads that wait for each other; empty when a missing producer is all."""
    at_rank = {program.rank[entry]: entry for entry in heads}
    wanted = {slot for entry in heads for slot in program.waits[entry] if not done[slot]}
    maker: dict[int, int] = {}
    for rank, head in at_rank.items():
        for entry in range(head, program.first[rank + 1]):
            for made in program.makes[entry]:
                for slot in made:
                    if slot in wanted:
                        maker.setdefault(slot, entry)
    # Head -> the heads behind which (or at which) stands what it waits for.
    blockers = {
        entry: [
            at_rank[program.rank[maker[slot]]]
            for slot in program.waits[entry]
            if not done[slot] and slot in maker
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


def _ring(program: LoweredProgram, cycle: Sequence[int]) -> str:
    """The ring in words: who waits for what, and where that stands."""
    made_by = {
        slot: (entry, program.entries[entry][place])
        for rank in {program.rank[entry] for entry in cycle}
        for entry in range(program.first[rank], program.first[rank + 1])
        for place, made in enumerate(program.makes[entry])
        for slot in made
        if slot >= 0
    }
    parts: list[str] = []
    for waiter, head in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        for slot in program.waits[waiter]:
            producer, op = made_by.get(slot, (-1, None))
            if producer >= head and program.rank[producer] == program.rank[head]:
                behind = "" if producer == head else f", which stands behind {program.where(head)}"
                parts.append(
                    f"{program.where(waiter)} waits for {op} "
                    f"(rank {program.rank[producer]}, entry {program.index(producer)}){behind}"
                )
                break
    return "; ".join(parts)
