"""An observer of the ranks of this machine: how each one is now, its stacks and its last words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moemesh.trace.machine import process_state
from moemesh.watch.meeting import STACK_SIGNAL, read_told, stack_file
from moemesh.watch.signs import Seen
from moemesh.watch.verdict import Verdict
from moemesh.watch.word_file import Word, WordFile

#: Between two looks at ranks of which one does not move.
LOOK_SECONDS = 0.03
_STACK_SECONDS = 0.3
#: After a verdict the other ranks have so long to put their own errors into their logs.
_FOLLOW_SECONDS = 1.0


class Processes(Protocol):
    """The processes of the ranks, whoever started them."""

    def exit_code(self, rank: int, word: Word | None) -> int | None:
        """As of :class:`Seen`; `word` is the newest one of the rank."""
        ...

    def pid(self, rank: int) -> int:
        """The id of the process, where the rank has not told its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of the ranks: the exit code of the run, and the verdict where it failed.

    ``stopped_by``: the signal that this process was asked to stop with; ``is_cut``: the ranks did
    not leave by themselves; ``was_training``: they were past their start. ``stacks``: of each rank
    that could still write them. ``traces``: of exceptions that ranks told of.
    """

    code: int
    verdict: Verdict | None = None
    stopped_by: signal.Signals | None = None
    is_cut: bool = False
    was_training: bool = True
    stacks: dict[int, str]
    traces: dict[int, str]


class Observer:
    """Looks at `ranks` that meet in `folder`."""

    def __init__(
        self, folder: Path, words: WordFile, ranks: Sequence[int], processes: Processes
    ) -> None:
        self.folder, self.words, self.ranks = folder, words, ranks
        self._processes = processes
        self._changes: dict[int, int] = {}
        self._is_still = True

    @property
    def pause(self) -> float:
        """Seconds until the next look: fewer are needed as long as all ranks move."""
        return LOOK_SECONDS if self._is_still else 2 * LOOK_SECONDS

    def look(self) -> list[Seen]:
        """All ranks at this moment."""
        self._is_still = False
        seen: list[Seen] = []
        for rank in self.ranks:
            word = self.words.read(rank)
            code = self._processes.exit_code(rank, word)
            state, cpu_seconds = "", 0.0
            # Nobody needs the state of a process that moves, and the system takes long to tell.
            if word is not None and word.changes != self._changes.get(rank):
                self._changes[rank] = word.changes
            else:
                self._is_still = True
                if code is None:
                    pid = word.pid if word is not None else self._processes.pid(rank)
                    state, cpu_seconds = process_state(pid)
            may_have_told = code is not None or (word is not None and word.failed)
            told = read_told(self.folder, rank) if may_have_told else None
            seen.append(
                Seen(
                    rank=rank,
                    exit_code=code,
                    state=state,
                    cpu_seconds=cpu_seconds,
                    word=word,
                    told=told,
                )
            )
        return seen

    def failed(self, verdict: Verdict, seen: Sequence[Seen], logs: Path) -> Ended:
        """The end of ranks that `verdict` speaks of: with the stacks of every rank that is alive,
        also written into `logs`, and with what the ranks told of by then."""
        asked = [one for one in seen if one.exit_code is None and one.word is not None]
        for one in asked:
            assert one.word is not None
            with suppress(OSError):
                os.kill(one.word.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        wanted = {one.rank for one in asked if one.state != "T"}
        while wanted and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            wanted = {rank for rank in wanted if not _text(stack_file(self.folder, rank))}
        found = {one.rank: _text(stack_file(self.folder, one.rank)) for one in asked}
        for rank, stack in found.items():
            if stack:
                with suppress(OSError):
                    (logs / f"rank-{rank}.stacks").write_text(stack)
        # Time for the other ranks' own errors, which a dead peer brings at once.
        end = time.monotonic() + _FOLLOW_SECONDS
        is_awaited = verdict.kind not in ("hung", "busy", "stopped", "network-cut")
        while is_awaited and time.monotonic() < end:
            if all(one.exit_code is not None or one.told is not None for one in self.look()):
                break
            time.sleep(LOOK_SECONDS)
        told = {rank: read_told(self.folder, rank) for rank in self.ranks}
        return Ended(
            code=verdict.exit_code,
            verdict=verdict,
            stacks={rank: stack for rank, stack in found.items() if stack},
            traces={rank: one.trace for rank, one in told.items() if one is not None and one.trace},
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
