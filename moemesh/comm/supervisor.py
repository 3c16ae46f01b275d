"""The supervisor of the ranks of this machine: starts them, watches them, ends them all.

Every rank is a process and a session of its own. Its progress word, its state in ``/proc`` and what
it tells of an exception go to the :class:`moemesh.comm.verdict.Judge`; after a verdict the stacks
of all ranks are written, and the ranks are ended. torch is not imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from moemesh.comm.devices import settings_for_gpus
from moemesh.comm.interrupts import SAME_KEY_SECONDS, STOPPING_NOW, say
from moemesh.comm.signs import Seen, Told
from moemesh.comm.verdict import Judge, Limits, Verdict
from moemesh.trace.word_file import SETUP, WordFile

#: Set for every rank: the folder in which it meets the others and its supervisor.
FOLDER_VARIABLE = "MOEMESH_LAUNCHER"
WORDS, STORE, LOCK = "words", "store", "lock"
#: A rank writes the stacks of its threads when it gets this signal.
STACK_SIGNAL = signal.SIGUSR2
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

_LOOK_SECONDS = 0.03
_STACK_SECONDS = 0.3
#: After a verdict the other ranks have so long to put their own errors into their logs.
_FOLLOW_SECONDS = 1.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PREFIX = "moemesh-"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended: the exit code of the run, and the verdict where it failed.

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


class Supervisor:
    """Runs the ranks once; see :meth:`run`."""

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        *,
        logs: Path,
        limits: Limits,
        grace_seconds: float,
        answer: str,
        still_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`command`: of every rank. Rank 0 writes to this process's output, rank i to
        ``rank-i.out`` and ``rank-i.err`` in `logs`. `answer` is said at the first Ctrl-C.
        `still_ours`: whether the run may go on; asked once a second.
        """
        self._command, self._num_ranks, self._logs = command, num_ranks, logs
        self._judge, self._limits = Judge(limits), limits
        self._grace, self._answer, self._still_ours = grace_seconds, answer, still_ours
        self._signals: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Ended:
        """Start the ranks and wait until all have left or were ended."""
        with meeting_place() as folder, self._catching():
            words = WordFile(folder / WORDS, self._num_ranks)
            try:
                for rank in range(self._num_ranks):
                    if self._signals:
                        break
                    self._processes.append(self._start(rank, folder))
                return self._watch(folder, words)
            finally:
                self._kill(words)
                words.close()

    def _start(self, rank: int, folder: Path) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        environment |= settings_for_gpus(environment)
        numbers = {"RANK": rank, "LOCAL_RANK": rank}
        sizes = {"WORLD_SIZE": self._num_ranks, "LOCAL_WORLD_SIZE": self._num_ranks}
        environment |= {name: str(number) for name, number in (numbers | sizes).items()}
        environment[FOLDER_VARIABLE] = str(folder)
        if not rank:
            return subprocess.Popen(self._command, env=environment, start_new_session=True)
        out, err = (self._logs / f"rank-{rank}.{kind}" for kind in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.Popen(
                self._command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
            )

    def _watch(self, folder: Path, words: WordFile) -> Ended:
        stopped_by: int | None = None
        asked_at = 0.0
        checked_at = time.monotonic()
        while True:
            now = time.monotonic()
            seen = [self._see(rank, folder, words) for rank in range(len(self._processes))]
            numbers, self._signals = self._signals, []
            for number in numbers:
                if stopped_by is None:
                    stopped_by, asked_at = number, now
                    self._judge.stopping = number
                    if number == signal.SIGINT:
                        say(self._answer)
                    if not self._forward(number, seen):
                        return self._ended(seen, stopped_by, is_cut=True)
                elif number == signal.SIGINT and now - asked_at > SAME_KEY_SECONDS:
                    say(STOPPING_NOW)
                    return self._ended(seen, stopped_by, is_cut=True)
            if stopped_by is not None and now - asked_at > self._grace:
                return self._ended(seen, stopped_by, is_cut=True)
            verdict = self._judge.look(now, seen)
            if verdict is None and now - checked_at > 1.0:
                checked_at = now
                if not self._still_ours():
                    text = "another run has taken over the folder"
                    told = Told(kind="RunFolderError", message=text, at=now, is_final=True)
                    one = Seen(rank=0, exit_code=2, word=seen[0].word, told=told)
                    verdict = Verdict(kind="exception", rank=0, message=text, seen=one)
            if verdict is not None:
                stacks = self._stacks(seen, folder)
                self._let_follow(verdict, folder, words)
                traces = self._traces(folder)
                return Ended(code=verdict.exit_code, verdict=verdict, stacks=stacks, traces=traces)
            if all(one.has_left(now) for one in seen) and not self._judge.is_deciding:
                return self._ended(seen, stopped_by)
            time.sleep(_LOOK_SECONDS)

    def _ended(self, seen: Sequence[Seen], number: int | None, *, is_cut: bool = False) -> Ended:
        """The ranks have left, or are to be killed, without a failure."""
        if number is None:
            code = max((one.code or 0 for one in seen), default=0)
            return Ended(code=code, stacks={}, traces={})
        by = signal.Signals(number)
        code = 128 + (signal.SIGTERM if by == signal.SIGUSR1 else by)
        return Ended(
            code=code,
            stopped_by=by,
            is_cut=is_cut,
            was_training=self._were_training(seen),
            stacks={},
            traces={},
        )

    def _see(self, rank: int, folder: Path, words: WordFile) -> Seen:
        process, word = self._processes[rank], words.read(rank)
        code = process.poll()
        state, cpu_seconds = "", 0.0
        if code is None:
            state, cpu_seconds = _state(word.pid if word is not None else process.pid)
        may_have_told = code is not None or (word is not None and word.failed)
        return Seen(
            rank=rank,
            exit_code=code,
            state=state,
            cpu_seconds=cpu_seconds,
            word=word,
            told=read_told(folder, rank) if may_have_told else None,
        )

    def _forward(self, number: int, seen: Sequence[Seen]) -> bool:
        """Pass a signal on to every rank; False where nothing is there yet that could be saved."""
        if not self._were_training(seen):
            return False
        for one, process in zip(seen, self._processes, strict=True):
            if one.exit_code is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
        return True

    def _were_training(self, seen: Sequence[Seen]) -> bool:
        words = [one.word for one in seen if one.word is not None]
        if len(words) < self._num_ranks:
            return False
        return all(word.phase != SETUP or word.step for word in words)

    def _stacks(self, seen: Sequence[Seen], folder: Path) -> dict[int, str]:
        """Ask every rank that is alive for the stacks of its threads."""
        asked = [one for one in seen if one.exit_code is None and one.word is not None]
        for one in asked:
            assert one.word is not None
            with suppress(OSError):
                os.kill(one.word.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        wanted = {one.rank for one in asked if one.state != "T"}
        while wanted and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            wanted = {rank for rank in wanted if not _size(stack_file(folder, rank))}
        found = {one.rank: _text(stack_file(folder, one.rank)) for one in asked}
        for rank, stack in found.items():
            if stack:
                with suppress(OSError):
                    (self._logs / f"rank-{rank}.stacks").write_text(stack)
        return {rank: stack for rank, stack in found.items() if stack}

    def _let_follow(self, verdict: Verdict, folder: Path, words: WordFile) -> None:
        """Give the other ranks time for their own errors, which a dead peer brings at once."""
        if verdict.kind in ("hung", "busy", "stopped"):
            return
        end = time.monotonic() + _FOLLOW_SECONDS
        while time.monotonic() < end:
            seen = [self._see(rank, folder, words) for rank in range(len(self._processes))]
            if all(one.exit_code is not None or one.told is not None for one in seen):
                return
            time.sleep(_LOOK_SECONDS)

    def _traces(self, folder: Path) -> dict[int, str]:
        told = {rank: read_told(folder, rank) for rank in range(self._num_ranks)}
        return {rank: one.trace for rank, one in told.items() if one is not None and one.trace}

    def _kill(self, words: WordFile) -> None:
        """End every rank, with all that it started; nothing of it stays."""
        for rank, process in enumerate(self._processes):
            pids = {process.pid} if process.poll() is None else set[int]()
            word = words.read(rank)
            if pids and word is not None:
                pids.add(word.pid)
            for pid in pids:
                with suppress(OSError):
                    # A session of its own, or not: never the group of somebody else.
                    if os.getpgid(pid) == pid:
                        os.killpg(pid, signal.SIGKILL)
                    else:
                        os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """While inside, signals to this process are kept for :meth:`_watch`."""

        def keep(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        handlers = {}
        for number in FORWARDED:
            with suppress(ValueError):  # not in the main thread: they go their usual way
                handlers[number] = signal.signal(number, keep)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def meeting_place() -> Iterator[Path]:
    """A private folder in shared memory, or in the folder for temporary files; removed at the end.

    One that a killed supervisor has left is removed by the next: its lock is free.
    """
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    handle = os.open(folder / "locking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / "locking", folder / LOCK)  # others see it only when it is locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def told_file(folder: Path, rank: int) -> Path:
    """Where a rank tells of its exception."""
    return folder / f"told-{rank}.json"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return folder / f"stacks-{rank}"


def write_told(folder: Path, rank: int, told: dict[str, Any]) -> None:
    """Tell of an exception, once; the supervisor may look while this is written."""
    file = told_file(folder, rank)
    if file.exists():
        return
    temporary = file.with_suffix(".tmp")
    with suppress(OSError):
        temporary.write_text(json.dumps(told, default=str))
        os.replace(temporary, file)


def read_told(folder: Path, rank: int) -> Told | None:
    """What a rank has told, if it has."""
    try:
        return Told(**json.loads(told_file(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _state(pid: int) -> tuple[str, float]:
    """State and CPU seconds of a process; ("", 0) where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
    except (OSError, IndexError, ValueError):
        return "", 0.0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def python_command(entry: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """This interpreter with `entry` and `arguments`."""
    return [sys.executable, *entry, *arguments]
