"""Progress words: fixed-size records in shared memory in which every rank says where it is.

A rank writes its own record only, at the places that all runs pass: :func:`phase` and
:func:`at_step` in the training loop, :func:`at_microbatch` and :func:`at_layer` in the forward,
:func:`entered`, :func:`waiting` and :func:`left` around each operation of `moemesh.comm`. Whoever
supervises the run reads the records of all ranks with :class:`moemesh.watch.word_file.WordFile`.

A process that is not :func:`attached <attach>` writes nothing.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moemesh.watch.word_file import (
    COUNT,
    DATA,
    FAILED,
    GROUP,
    HEADER_BYTES,
    NUM_GROUPS,
    ON_DEVICE,
    PLACE_BYTES,
    RANK_BYTES,
    RECORD,
    STEP,
    TICKET,
    Word,
    members_text,
    read_word,
)

_STEP_PHASES = (DATA.encode(), STEP.encode())


class Ticket(NamedTuple):
    """An operation that was entered: what :func:`waiting` shows while its end is awaited."""

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
        #: What the record shows, and the operation that was entered last.
        self.ticket = self.newest = Ticket(-1, 0, b"", b"", b"", 0)
        #: The bytes of what it shows, and of what it showed before.
        self.shown = self.before = bytes(TICKET.size)
        self.waited = self.waited_in_steps = self.since = 0.0
        self.worked = self.began = 0.0
        self.waited_before: float | None = None
        self.groups: dict[int, tuple[Sequence[int], int]] = {}
        self.slots: dict[str, int] = {}
        self.counts: list[int] = []
        self.names: dict[str, bytes] = {}
        self.background: set[int] = set()

    def write(self) -> None:
        self.changes += 1
        record = RECORD.pack(
            self.changes,
            self.pid,
            self.step,
            self.phase,
            self.microbatch,
            self.layer,
            self.stage,
            self.number,
            self.inside,
            self.done,
            self.code,
            self.shown,
            self.before,
            time.monotonic(),
            self.waited,
            self.worked,
            self.changes,
        )
        # Not pack_into, which fills the place with zeros first.
        place = self.start + PLACE_BYTES * (self.changes & 1)
        self.memory[place : place + RECORD.size] = record

    def show(self, ticket: Ticket) -> None:
        """Let the record show this operation; what it has shown is the one before."""
        if ticket is self.ticket:
            return
        self.ticket, self.before = ticket, self.shown
        self.shown = TICKET.pack(
            # Size and place of the group share a number, so that the record stays small.
            (min(ticket.num_bytes, (1 << 55) - 1) << 8) | (ticket.group + 1),
            ticket.number,
            ticket.op,
            ticket.axis,
            ticket.caller,
        )

    def group(self, ranks: Sequence[int], separator: str) -> int:
        """The slot of a group; -1 when all are taken."""
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
        # The sequence is kept, so that no other one can get its id.
        self.groups[id(ranks)] = ranks, slot
        return slot

    def name(self, text: str) -> bytes:
        found = self.names.get(text)
        if found is None:
            found = self.names[text] = text.encode()
        return found


_own: _Writer | None = None


def attach(path: Path, rank: int) -> None:
    """Write into the record of `rank` in the file of a :class:`WordFile` from now on."""
    handle = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)
    attach_memory(memory, rank)


def attach_memory(memory: mmap.mmap | bytearray, rank: int) -> None:
    """As :func:`attach`, into memory of :data:`RANK_BYTES` for each rank."""
    global _own
    _own = _Writer(memory, rank)
    _own.write()


def detach() -> None:
    """Write nothing any more."""
    global _own
    _own = None


def is_attached() -> bool:
    """Whether this process writes a record."""
    return _own is not None


def in_background() -> None:
    """The calling thread works beside the main one: where it waits is not where the rank is."""
    if _own is not None:
        _own.background.add(threading.get_ident())


def phase(name: str) -> None:
    """The rank is in a phase of a run: one of the constants of this module."""
    if (own := _own) is not None:
        own.phase = own.name(name)
        own.microbatch = own.layer = -1
        own.write()


def at_step(step: int, stage: int = 0) -> None:
    """The rank begins step `step` (from 1); `stage`: its index on the pipeline axis."""
    if (own := _own) is not None:
        own.step, own.stage, own.phase = step, stage, b"step"
        own.began, own.waited_before = time.monotonic(), own.waited_in_steps
        own.microbatch = own.layer = -1
        own.write()


def stepped() -> None:
    """The step is over, and its work is told with the next one; what the first rank alone has yet
    to report is no work of the step."""
    if (own := _own) is not None and own.waited_before is not None:
        waited = own.waited_in_steps - own.waited_before
        own.worked += time.monotonic() - own.began - waited
        own.waited_before = None


def at_microbatch(microbatch: int) -> None:
    """The rank begins an operation on a microbatch (from 0)."""
    if (own := _own) is not None:
        own.microbatch, own.layer = microbatch, -1
        own.write()


def at_layer(layer: int) -> None:
    """The rank begins the forward of a layer (from 0); -1: behind the last."""
    if (own := _own) is not None:
        own.layer = layer
        own.write()


def entered(
    op: str, axis: str, caller: str, ranks: Sequence[int], num_bytes: int, *, separator: str = ""
) -> Ticket | None:
    """The rank starts an operation of the group `ranks`; returns what :func:`waiting` wants.

    The same sequence object must stand for the same ranks. `separator`: ">" for a message from the
    first of `ranks` to the second.
    """
    own = _own
    if own is None:
        return None
    slot = own.group(ranks, separator)
    count = 0
    if slot >= 0:
        count = own.counts[slot] = own.counts[slot] + 1
        COUNT.pack_into(own.memory, own.start + HEADER_BYTES + slot * GROUP.size + 56, count)
    own.number += 1
    ticket = Ticket(slot, count, own.name(op), own.name(axis), own.name(caller), num_bytes)
    if threading.get_ident() not in own.background:
        own.newest = ticket
    return ticket


def waiting(ticket: Ticket | None) -> None:
    """The rank waits for the end of an operation until :func:`left`. After an exception the record
    still says so: whoever supervises tells errors inside of operations from others by that."""
    own = _own
    if own is None or ticket is None:
        return
    if own.background and threading.get_ident() in own.background:
        return
    own.show(ticket)
    own.inside, own.since = 1, time.monotonic()
    own.write()


def waiting_for_device() -> None:
    """The host waits, until :func:`left`, for what its device has been given to do. Operations of
    several ranks stand in that queue, too: the record names the one that was entered last."""
    own = _own
    if own is None or (own.background and threading.get_ident() in own.background):
        return
    own.show(own.newest)
    own.inside = ON_DEVICE
    own.write()


def left() -> None:
    """The operation is over."""
    own = _own
    if own is None or (own.background and threading.get_ident() in own.background):
        return
    if own.inside == ON_DEVICE:
        own.inside = 0
        own.write()
    elif own.inside:
        own.inside = 0
        waited = time.monotonic() - own.since
        own.waited += waited
        # Behind the step ranks ask each other whether to stop, which is no time of a step.
        if own.waited_before is not None and own.phase in _STEP_PHASES:
            own.waited_in_steps += waited
        own.write()


def waited_in_steps() -> float | None:
    """Seconds that the main thread has waited inside operations of steps so far, from
    :func:`at_step` to :func:`stepped`; None where this process writes no record."""
    return None if _own is None else _own.waited_in_steps


def finished(code: int) -> None:
    """The rank leaves as intended, with this exit code."""
    if (own := _own) is not None:
        own.done, own.code = 1, code
        own.write()


def failed() -> None:
    """The rank leaves with an exception, and has told of it. Unless it waits in an operation, the
    record shows the one that was entered last: the start of it may have failed."""
    if (own := _own) is not None and not own.done:
        own.code = FAILED
        if not own.inside:
            own.show(own.newest)
        own.write()


def own_word() -> Word | None:
    """The record of this process; None where it writes none."""
    return None if _own is None else read_word(_own.memory, _own.start // RANK_BYTES)
