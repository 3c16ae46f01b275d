"""The file of progress words: the layout of a rank's record, and how others read it.

A record stands in one of two places, in turns, with the same counter in its first and its last
field: a rank that is killed or stopped in the middle of a write leaves the one before whole.
Besides the operation that it entered last, a record counts the operations of each group of ranks.
A rank whose count is below that of the others has not entered the operation that they wait in.
`moemesh.watch.progress_words` writes.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

#: Phases of a rank. "run": a process that tells nothing finer, such as a benchmark.
RUN, SETUP, DATA, STEP, VALIDATE, CHECK, SAVE, FINISH = (
    "run",
    "setup",
    "data",
    "step",
    "validate",
    "check",
    "save",
    "finish",
)
FAILED = -1
#: `inside` of a rank that waits for its device.
ON_DEVICE = 2
#: An operation: its bytes and the place of its group in one number, its own number in the group,
#: and the names of operation, axis and caller.
TICKET = struct.Struct("<QQ16s16s32s")
#: With two operations: the one that is shown, and the one that was shown before.
RECORD = struct.Struct("<Qqq12siiiQBBh80s80sdddQ")
GROUP = struct.Struct("<56sQ")
COUNT = struct.Struct("<Q")
NUM_GROUPS = 64
#: Characters of the name of a group; a longer one is cut.
NAME_BYTES = 55
PLACE_BYTES = 256
HEADER_BYTES = 2 * PLACE_BYTES
#: Bytes of one rank's part of the file.
RANK_BYTES = HEADER_BYTES + NUM_GROUPS * GROUP.size
assert RECORD.size <= PLACE_BYTES and TICKET.size == 80


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An operation of a group: its `number` counts those of the group on this rank, from 1.

    ``members``: the ranks of the group; of a message the sender and the receiver.
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
class Word:
    """The record of one rank. ``changes`` grows with every write; times are of the monotonic clock.

    ``inside``: the rank waits in ``collective``, which otherwise is the one it waited in last, or,
    after a failure, entered last;
    ``on_device``: it waits for its device, which has come to ``collective`` at most.
    ``before``: the operation that it showed before, which it has got past.
    ``waited``: seconds inside of collectives so far;
    ``worked``: seconds outside of them in the steps before this one.
    ``done``: it leaves as intended, with ``code``; ``failed``: with an exception, of which it has
    told.
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
        """Whether this rank has entered `collective` of a group that it is a member of."""
        return self.counts.get(collective.group, 0) >= collective.number

    def place(self) -> str:
        """The rank's place, for a person: ``step 7, microbatch 0, layer 2``."""
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
    """The ranks of a group in short form, cut to 55 characters, unique for groups of one run that
    need no more.

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
    """The inverse of :func:`members_text`; of a text that was cut, the ranks that it names whole.

    >>> members_of("1-7:2"), members_of("0,1,4"), members_of("2>0")
    ((1, 3, 5, 7), (0, 1, 4), (2, 0))
    """
    if ">" in text:
        source, _, destination = text.partition(">")
        return int(source), int(destination)
    if "," in text or "-" not in text:
        parts = text.split(",")
        return tuple(
            int(part) for part in (parts[:-1] if len(text) == NAME_BYTES else parts) if part
        )
    span, _, step = text.partition(":")
    first, _, last = span.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))


class WordFile:
    """The records of `num_ranks` ranks in one file. The file is removed by :meth:`close`."""

    def __init__(
        self,
        path: Path,
        num_ranks: int,
        *,
        is_there: bool = False,
        reserved: range | None = None,
    ) -> None:
        """Create the file, unless it `is_there`; raises OSError where that cannot be.

        `reserved`: the ranks whose records have their room from the start (None: all); those of
        ranks that never come need none.
        """
        self.path, self.num_ranks = path, num_ranks
        size = RANK_BYTES * num_ranks
        created = 0 if is_there else os.O_CREAT | os.O_EXCL
        handle = os.open(path, os.O_RDWR | created, 0o600)
        try:
            if not is_there:
                os.ftruncate(handle, size)
                _reserve(handle, range(num_ranks) if reserved is None else reserved)
            self._memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def read(self, rank: int) -> Word | None:
        """The record of `rank`; None as long as it has not attached."""
        return read_word(self._memory, rank)

    def unmap(self) -> None:
        """Leave the file to others."""
        self._memory.close()

    def close(self) -> None:
        """Unmap and remove the file."""
        self.unmap()
        with suppress(OSError):
            self.path.unlink()


def _reserve(handle: int, ranks: range) -> None:
    """Take the room of these records now: on a full file system, whoever writes or reads a record
    without room is killed by SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, RANK_BYTES * ranks.start, RANK_BYTES * len(ranks))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_word(memory: mmap.mmap | bytearray, rank: int) -> Word | None:
    """The record of `rank` in the memory of all ranks; None where nothing was written."""
    start = rank * RANK_BYTES
    raw = _newest(memory, start)
    if raw is None:
        return None
    fields = RECORD.unpack(raw)
    (changes, pid, step, phase, microbatch, layer, stage, number, inside, done, code) = fields[:11]
    (shown, before, moved, waited, worked, _) = fields[11:]
    counts: dict[str, int] = {}
    names: list[str] = []
    for slot in range(NUM_GROUPS):
        name, count = GROUP.unpack_from(memory, start + HEADER_BYTES + slot * GROUP.size)
        if not name[0]:
            break
        names.append(_text(name))
        counts[names[-1]] = count
    return Word(
        rank=rank,
        changes=changes,
        pid=pid,
        step=step,
        phase=_text(phase),
        microbatch=microbatch,
        layer=layer,
        stage=stage,
        number=number,
        inside=bool(inside),
        done=bool(done),
        failed=code == FAILED,
        code=code,
        collective=_collective(shown, names),
        moved=moved,
        waited=waited,
        worked=worked,
        counts=counts,
        on_device=inside == ON_DEVICE,
        before=_collective(before, names),
    )


def _collective(raw: bytes, groups: Sequence[str]) -> Collective | None:
    group, number, op, axis, caller = TICKET.unpack(raw)
    if not op[0]:
        return None
    num_bytes: int = group >> 8
    place: int = (group & 0xFF) - 1
    among = groups[place] if 0 <= place < len(groups) else ""
    return Collective(
        op=_text(op),
        axis=_text(axis),
        group=among,
        members=members_of(among) if among else (),
        number=number,
        caller=_text(caller),
        num_bytes=num_bytes,
    )


def _newest(memory: mmap.mmap | bytearray, start: int) -> bytes | None:
    """The newer of the two places that is whole; None where nothing was written."""
    places = (start, start + PLACE_BYTES)
    for _ in range(1000):
        raws = [bytes(memory[place : place + RECORD.size]) for place in places]
        again = [bytes(memory[place : place + RECORD.size]) for place in places]
        whole = [raw for raw, same in zip(raws, again, strict=True) if raw == same]
        whole = [raw for raw in whole if raw[:8] == raw[-8:] and any(raw[:8])]
        if whole:
            return max(whole, key=lambda raw: COUNT.unpack_from(raw)[0])
        if not any(map(any, raws)):
            return None
    return None


@lru_cache(maxsize=1024)
def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
