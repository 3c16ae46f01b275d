"""Progress records: fixed-size records in shared memory with the position of every rank in a run.

A rank writes its own record only, at the places that all runs pass: :func:`phase` and
:func:`at_step` in the training loop, :func:`at_microbatch` in the pipeline's executor,
:func:`at_layer` in the forward, :func:`entered`, :func:`waiting` and :func:`left` around each
operation of `moemesh.comm`. The supervisor of the run reads the records of all ranks with
:class:`ProgressFile`.

A record has two places that are written in turns, with the same counter in its first and its last
field: if a rank is killed or stopped during a write, the previous record is intact. Besides the
operation that the rank waits in, a record counts the operations of each group of ranks (of the
first 64). A rank whose count is below that of the others has not entered the operation that they
wait in. A process that is not :func:`attached <attach>` writes nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

#: Phases of a rank; "run" is that of a process without finer phases, such as a benchmark.
RUN, SETUP, DATA, STEP = "run", "setup", "data", "step"
VALIDATE, CHECK, SAVE, FINISH = "validate", "check", "save", "finish"
#: Value of `code` after a reported exception.
FAILED = -1
#: Value of `inside` while a rank waits for its device.
ON_DEVICE = 2
#: Layout of an operation: its bytes and the slot of its group in one number, its number in the
#: group, and the names of operation, axis and caller.
TICKET = struct.Struct("<QQ16s16s32s")
#: Layout of a record, with two operations: the one shown now, and the one shown before.
RECORD = struct.Struct("<Qqq12siiiQBBh80s80sdddQ")
#: Layout of a group: its name, and how many of its operations the rank has entered.
GROUP = struct.Struct("<56sQ")
COUNT = struct.Struct("<Q")
NUM_GROUPS = 64
#: Longest name of a group, in characters; a longer one is truncated.
NAME_BYTES = 55
#: Bytes of each of the two places of a record.
PLACE_BYTES = 256
HEADER_BYTES = 2 * PLACE_BYTES
#: Bytes of one rank in the file.
RANK_BYTES = HEADER_BYTES + NUM_GROUPS * GROUP.size
assert RECORD.size <= PLACE_BYTES and TICKET.size == 80
#: Names of the fields of RECORD, in a ProgressRecord and in its writer.
_FIELDS = (
    *("changes", "pid", "step", "phase", "microbatch", "layer", "stage", "number", "inside"),
    *("done", "code", "shown", "before", "moved", "waited", "worked", "repeated"),
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An operation of a group: its `number` counts those of the group on this rank, from 1.

    ``members``: the ranks of the group; sender and receiver of a message.
    """

    op: str
    axis: str
    group: str
    members: tuple[int, ...]
    number: int
    caller: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.op} #{self.number} of {self.axis} ({self.caller})"


@dataclass(frozen=True, kw_only=True)
class ProgressRecord:
    """The record of one rank. ``changes`` grows with every write, ``moved`` is the time of the last
    one; times are monotonic seconds. ``microbatch`` and ``layer``: from 0, -1 outside of them.
    ``number``: operations that the rank has entered so far.

    ``inside``: the rank waits in ``collective``. Otherwise ``collective`` is the operation that it
    waited in last, or, after a failure, entered last.
    ``on_device``: it waits for its device, which has reached ``collective`` at most.
    ``before``: the operation shown before, which the rank has completed.
    ``waited``: seconds inside of collectives so far;
    ``worked``: seconds outside of them in finished steps.
    ``done``: it leaves as intended, with ``code``; ``failed``: it leaves with a reported exception.
    """

    rank: int
    changes: int
    pid: int
    step: int
    phase: str
    microbatch: int
    layer: int
    stage: int
    number: int
    inside: bool
    done: bool
    failed: bool
    code: int
    collective: Collective | None
    moved: float
    waited: float
    worked: float
    counts: dict[str, int] = field(default_factory=dict[str, int])
    on_device: bool = False
    before: Collective | None = None

    def entered(self, collective: Collective) -> bool:
        """Whether this rank has entered `collective`, an operation of one of its groups."""
        return self.counts.get(collective.group, 0) >= collective.number

    def place(self) -> str:
        """The rank's position as text: ``step 7, microbatch 0, layer 2``."""
        where = f"step {self.step}" if self.step else self.phase
        if self.step and self.phase != STEP:
            where += f" ({self.phase})"
        if self.microbatch >= 0:
            where += f", microbatch {self.microbatch}"
        if self.layer >= 0:
            where += f", layer {self.layer}"
        if self.on_device:
            where += ", waiting for its device"
        if self.collective is not None and self.inside:
            where += f"{' behind' if self.on_device else ', inside'} {self.collective}"
        return where


def members_text(ranks: Sequence[int]) -> str:
    """The ranks of a group in short form, truncated to 55 characters; unique among the groups of a
    run unless truncated.

    >>> members_text((0, 1, 2, 3)), members_text((1, 3, 5, 7)), members_text((0, 1, 4, 5))
    ('0-3', '1-7:2', '0,1,4,5')
    """
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 1 and len(steps) == 1 and min(steps) > 0:
        (step,) = steps
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))[:NAME_BYTES]


@lru_cache(maxsize=1024)
def members_of(text: str) -> tuple[int, ...]:
    """The inverse of :func:`members_text`; for a truncated text, the ranks named in full.

    >>> members_of("1-7:2"), members_of("0,1,4"), members_of("2>0")
    ((1, 3, 5, 7), (0, 1, 4), (2, 0))
    """
    if ">" in text:
        sender, _, receiver = text.partition(">")
        return int(sender), int(receiver)
    if "," in text or "-" not in text:
        parts = text.split(",")
        return tuple(
            int(part) for part in (parts[:-1] if len(text) == NAME_BYTES else parts) if part
        )
    span, _, step = text.partition(":")
    first, _, last = span.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))


class ProgressFile:
    """The records of `num_ranks` ranks in one file. The file is removed by :meth:`close`."""

    def __init__(
        self,
        path: Path,
        num_ranks: int,
        *,
        exists: bool = False,
        reserved: range | None = None,
    ) -> None:
        """Create the file, or open it if it `exists`. Raises OSError on failure.

        `reserved`: the ranks whose records get disk space now (None: all); ranks of other nodes
        need none.
        """
        self.path, self.num_ranks = path, num_ranks
        size = RANK_BYTES * num_ranks
        created = 0 if exists else os.O_CREAT | os.O_EXCL
        handle = os.open(path, os.O_RDWR | created, 0o600)
        try:
            if not exists:
                os.ftruncate(handle, size)
                ranks = range(num_ranks) if reserved is None else reserved
                # Allocate these records now: on a full file system, a process that writes or reads
                # a record without space is killed by SIGBUS.
                try:
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(
                            handle, RANK_BYTES * ranks.start, RANK_BYTES * len(ranks)
                        )
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
            self._memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def read(self, rank: int) -> ProgressRecord | None:
        """The record of `rank`; None before it has attached."""
        return read_record(self._memory, rank)

    def unmap(self) -> None:
        """Unmap the file and leave it in place."""
        self._memory.close()

    def close(self) -> None:
        """Unmap and remove the file."""
        self.unmap()
        with suppress(OSError):
            self.path.unlink()


def read_record(memory: mmap.mmap | bytearray, rank: int) -> ProgressRecord | None:
    """The record of `rank` in the memory of all ranks; None before the first write."""
    start = rank * RANK_BYTES
    raw = _newest(memory, start)
    if raw is None:
        return None
    fields = dict(zip(_FIELDS, RECORD.unpack(raw), strict=True))
    shown, inside, code, _ = (fields.pop(key) for key in ("shown", "inside", "code", "repeated"))
    counts: dict[str, int] = {}
    names: list[str] = []
    for slot in range(NUM_GROUPS):
        name, count = GROUP.unpack_from(memory, start + HEADER_BYTES + slot * GROUP.size)
        if not name[0]:
            break
        names.append(_text(name))
        counts[names[-1]] = count
    fields["phase"], fields["done"] = _text(fields["phase"]), bool(fields["done"])
    fields["before"] = _collective(fields["before"], names)
    return ProgressRecord(
        **fields,
        rank=rank,
        inside=bool(inside),
        on_device=inside == ON_DEVICE,
        code=code,
        failed=code == FAILED,
        collective=_collective(shown, names),
        counts=counts,
    )


def _collective(raw: bytes, groups: Sequence[str]) -> Collective | None:
    """The operation packed in `raw`; None without one. `groups`: names of groups by slot."""
    group, number, op, axis, caller = TICKET.unpack(raw)
    if not op[0]:
        return None
    num_bytes: int = group >> 8
    slot: int = (group & 0xFF) - 1
    name = groups[slot] if 0 <= slot < len(groups) else ""
    return Collective(
        op=_text(op),
        axis=_text(axis),
        group=name,
        members=members_of(name) if name else (),
        number=number,
        caller=_text(caller),
        num_bytes=num_bytes,
    )


def _newest(memory: mmap.mmap | bytearray, start: int) -> bytes | None:
    """The newest intact record of the two places; None before the first write."""
    places = (start, start + PLACE_BYTES)
    for _ in range(1000):
        # A read while the rank writes may be torn: only two equal reads count.
        raws = [bytes(memory[place : place + RECORD.size]) for place in places]
        reread = [bytes(memory[place : place + RECORD.size]) for place in places]
        stable = [raw for raw, same in zip(raws, reread, strict=True) if raw == same]
        intact = [raw for raw in stable if raw[:8] == raw[-8:] and any(raw[:8])]
        if intact:
            return max(intact, key=lambda raw: COUNT.unpack_from(raw)[0])
        if not any(map(any, raws)):
            return None
    return None


@lru_cache(maxsize=1024)
def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


# The writer of the rank's own record.

_STEP_PHASES = (DATA.encode(), STEP.encode())
_fields_of = attrgetter(*_FIELDS)


class Ticket(NamedTuple):
    """An operation that was entered, as :func:`waiting` shows it until its end."""

    group: int
    number: int
    op: bytes
    axis: bytes
    caller: bytes
    num_bytes: int


class _Writer:
    """The record of this process."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int) -> None:
        self.memory, self.start = memory, rank * RANK_BYTES
        self.changes, self.pid = 0, os.getpid()
        self.step, self.phase = 0, b"run"
        self.microbatch = self.layer = -1
        self.stage = self.number = 0
        self.inside = self.done = self.code = 0
        #: The operation that the record shows, and the one that was entered last.
        self.ticket = self.newest = Ticket(-1, 0, b"", b"", b"", 0)
        #: Packed operations: the one shown now, and the one shown before.
        self.shown = self.before = bytes(TICKET.size)
        #: Time of the last write, and `changes` as the last field of the record repeats it.
        self.moved, self.repeated = 0.0, 0
        #: Seconds of waiting, in total and in steps; the time at which the present wait began.
        self.waited = self.waited_in_steps = self.since = 0.0
        #: Seconds of work in finished steps, and the time at which the present step began.
        self.worked = self.began = 0.0
        #: `waited_in_steps` at the begin of the present step; None between steps.
        self.waited_before: float | None = None
        #: Id of a sequence of ranks -> the sequence and its slot; name of a group -> its slot.
        self.groups: dict[int, tuple[Sequence[int], int]] = {}
        self.slots: dict[str, int] = {}
        self.counts: list[int] = []
        self.names: dict[str, bytes] = {}
        #: Ids of background threads.
        self.background: set[int] = set()
        self.listener: Callable[[str, float, float], None] | None = None

    def write(self) -> None:
        self.changes = self.repeated = self.changes + 1
        self.moved = time.monotonic()
        record = RECORD.pack(*_fields_of(self))
        # Not pack_into, which fills the place with zeros first.
        place = self.start + PLACE_BYTES * (self.changes & 1)
        self.memory[place : place + RECORD.size] = record

    def show(self, ticket: Ticket) -> None:
        """Show this operation; the one shown until now becomes the one before."""
        if ticket is self.ticket:
            return
        self.ticket, self.before = ticket, self.shown
        self.shown = TICKET.pack(
            # Size and slot of the group share a number, so that the record stays small.
            (min(ticket.num_bytes, (1 << 55) - 1) << 8) | (ticket.group + 1),
            ticket.number,
            ticket.op,
            ticket.axis,
            ticket.caller,
        )

    def group(self, ranks: Sequence[int], separator: str) -> int:
        """The slot of a group; -1 if all slots are taken."""
        known = self.groups.get(id(ranks))
        if known is not None:
            return known[1]
        text = separator.join(map(str, ranks)) if separator else members_text(ranks)
        slot = self.slots.get(text)
        if slot is None:
            slot = len(self.slots) if len(self.slots) < NUM_GROUPS else -1
            if slot >= 0:
                self.slots[text] = slot
                self.counts.append(0)
                place = self.start + HEADER_BYTES + slot * GROUP.size
                GROUP.pack_into(self.memory, place, text.encode(), 0)
        # Keep the sequence alive, so that its id stays unique.
        self.groups[id(ranks)] = ranks, slot
        return slot

    def name(self, text: str) -> bytes:
        encoded = self.names.get(text)
        if encoded is None:
            encoded = self.names[text] = text.encode()
        return encoded


_writer: _Writer | None = None


def attach(path: Path, rank: int) -> None:
    """Write into the record of `rank` in the file of a :class:`ProgressFile` from now on."""
    handle = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)
    attach_memory(memory, rank)


def attach_memory(memory: mmap.mmap | bytearray, rank: int) -> None:
    """Same as :func:`attach`, into memory of :data:`RANK_BYTES` for each rank."""
    global _writer
    _writer = _Writer(memory, rank)
    _writer.write()


def detach() -> None:
    """Stop writing records."""
    global _writer
    _writer = None


def is_attached() -> bool:
    """Whether this process writes a record."""
    return _writer is not None


def in_background() -> None:
    """Mark the calling thread as a background thread: its waits are not the rank's position."""
    if _writer is not None:
        _writer.background.add(threading.get_ident())


def phase(name: str) -> None:
    """The rank is in a phase of a run: one of the constants of this module."""
    if (writer := _writer) is not None:
        writer.phase = writer.name(name)
        writer.microbatch = writer.layer = -1
        writer.write()


def at_step(step: int, stage: int = 0) -> None:
    """The rank begins step `step` (from 1); `stage`: its index on the pipeline axis."""
    if (writer := _writer) is not None:
        writer.step, writer.stage, writer.phase = step, stage, b"step"
        writer.began, writer.waited_before = time.monotonic(), writer.waited_in_steps
        writer.microbatch = writer.layer = -1
        writer.write()


def stepped() -> None:
    """The step is over; its work is counted in the record from the next write on. Reporting, which
    only the first rank does, does not count as work of the step."""
    if (writer := _writer) is not None and writer.waited_before is not None:
        waited = writer.waited_in_steps - writer.waited_before
        writer.worked += time.monotonic() - writer.began - waited
        writer.waited_before = None


def at_microbatch(microbatch: int) -> None:
    """The rank begins an operation on a microbatch (from 0)."""
    if (writer := _writer) is not None:
        writer.microbatch, writer.layer = microbatch, -1
        writer.write()


def at_layer(layer: int) -> None:
    """The rank begins the forward of a layer (from 0); -1: after the last."""
    if (writer := _writer) is not None:
        writer.layer = layer
        writer.write()


def entered(
    op: str, axis: str, caller: str, ranks: Sequence[int], num_bytes: int, *, separator: str = ""
) -> Ticket | None:
    """The rank starts an operation of the group `ranks`; returns the ticket for :func:`waiting`.

    The same sequence object must always mean the same ranks. `separator`: ">" for a message from
    the first of `ranks` to the second.
    """
    writer = _writer
    if writer is None:
        return None
    slot = writer.group(ranks, separator)
    count = 0
    if slot >= 0:
        count = writer.counts[slot] = writer.counts[slot] + 1
        place = writer.start + HEADER_BYTES + slot * GROUP.size
        COUNT.pack_into(writer.memory, place + GROUP.size - COUNT.size, count)
    writer.number += 1
    ticket = Ticket(slot, count, writer.name(op), writer.name(axis), writer.name(caller), num_bytes)
    if threading.get_ident() not in writer.background:
        writer.newest = ticket
    return ticket


def _foreground_writer() -> _Writer | None:
    """The writer; None in a background thread."""
    writer = _writer
    if writer is not None and writer.background and threading.get_ident() in writer.background:
        return None
    return writer


def waiting(ticket: Ticket | None) -> None:
    """The rank waits for the end of an operation until :func:`left`. After an exception the record
    still shows the operation: the supervisor recognizes errors inside of operations by that."""
    if ticket is not None and (writer := _foreground_writer()) is not None:
        writer.show(ticket)
        writer.inside, writer.since = 1, time.monotonic()
        writer.write()


def waiting_for_device() -> None:
    """The host waits, until :func:`left`, for work queued on its device. Operations of several
    ranks are in that queue, too: the record names the one that was entered last."""
    if (writer := _foreground_writer()) is not None:
        writer.show(writer.newest)
        writer.inside = ON_DEVICE
        writer.write()


def left() -> None:
    """The operation is over."""
    if (writer := _foreground_writer()) is None:
        return
    if writer.inside == ON_DEVICE:
        writer.inside = 0
        writer.write()
    elif writer.inside:
        writer.inside = 0
        waited = time.monotonic() - writer.since
        writer.waited += waited
        # After the step ranks agree on whether to stop; that is not time of the step.
        if writer.waited_before is not None and writer.phase in _STEP_PHASES:
            writer.waited_in_steps += waited
            if writer.listener is not None:
                axis = writer.ticket.axis.decode()
                writer.listener(axis, writer.since, writer.since + waited)
        writer.write()


def waited_in_steps() -> float | None:
    """Seconds that the main thread has waited inside operations of steps so far, from
    :func:`at_step` to :func:`stepped`; None if this process writes no record."""
    return None if _writer is None else _writer.waited_in_steps


def on_wait(listener: Callable[[str, float, float], None] | None) -> None:
    """Call `listener` after each wait of :func:`waited_in_steps` with its axis, and with its start
    and its end on the monotonic clock; None ends the calls."""
    if _writer is not None:
        _writer.listener = listener


def finished(code: int) -> None:
    """The rank leaves as intended, with this exit code."""
    if (writer := _writer) is not None:
        writer.done, writer.code = 1, code
        writer.write()


def failed() -> None:
    """The rank leaves with a reported exception. Unless it waits in an operation, the record shows
    the one that was entered last: its start may have failed."""
    if (writer := _writer) is not None and not writer.done:
        writer.code = FAILED
        if not writer.inside:
            writer.show(writer.newest)
        writer.write()


def own_record() -> ProgressRecord | None:
    """The record of this process; None if it writes none."""
    return None if _writer is None else read_record(_writer.memory, _writer.start // RANK_BYTES)
