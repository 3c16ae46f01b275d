"""The supervisor of the ranks of this machine: starts them, watches them, ends them all.

Every rank is a process and a session of its own. Its progress word, its state and what it
tells of an exception go to the :class:`moemesh.watch.verdict.Judge`; after a verdict the stacks
of all ranks are written, and the ranks are ended. torch is not imported.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Protocol

from moemesh.trace.machine import process_state
from moemesh.watch.devices import FOLDER_VARIABLE, settings_for_gpus
from moemesh.watch.lease import RunFolderError
from moemesh.watch.meeting import STACK_SIGNAL, WORDS, meeting_place, read_told, stack_file
from moemesh.watch.progress_words import RANK_BYTES, SETUP, Word, WordFile
from moemesh.watch.verdict import Judge, Limits, Seen, Told, Verdict

#: Comparisons on which a verdict rests; one is of a step, or of the few between two looks.
_COMPARISONS = 18
#: A slow rank works so many times as long as the others, in the median ...
_RATIO = 1.25
#: ... and so many standard errors longer, by the mean of the middle half.
_DEVIATIONS = 4.5
#: Standard error of the mean of the middle half of normal values, in their deviation / sqrt(n).
_MIDDLE_HALF = 1.1
_MAD_TO_DEVIATION = 1.4826
#: Lateness below this, in seconds a step, is not worth a word.
_LEAST_SECONDS = 0.002
#: In the first steps of a process something is compiled, read or grown for the first time.
_FIRST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """`rank` works `ratio` times as long as the others of its stage, `seconds` more a step, in the
    median of the comparisons up to `step`."""

    rank: int
    step: int
    ratio: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it works {self.ratio:.2f} times as long a step as the "
            f"others of its stage, which wait for it ({1e3 * self.seconds:.0f} ms a step, median "
            f"of {_COMPARISONS}); look for other programs on its cores, a hot device, or more work "
            "than the others have"
        )


class SlowRanks:
    """Looks at the words of all ranks again and again; names each slow rank once.

    Seconds a step say nothing, since collectives make them equal. A rank is late where it works
    longer than the others before it enters what they wait in: its seconds a step outside of
    operations are compared with those of the others of its stage, step by step. Nothing is said of
    stages of one rank.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._stages: dict[int, _StageRanks] = {}
        self._named: set[int] = set()

    def look(self, words: Sequence[Word]) -> list[SlowRank]:
        """Slow ranks that were not named before."""
        by_stage: dict[int, list[Word]] = {}
        for word in words:
            if word.step:
                first = self._first.setdefault(word.rank, word.step)
                if word.step >= first + _FIRST_STEPS:
                    by_stage.setdefault(word.stage, []).append(word)
        stages = {stage: self._stages.setdefault(stage, _StageRanks()) for stage in by_stage}
        slow = (ranks.look(by_stage[stage]) for stage, ranks in stages.items())
        found = [one for one in slow if one is not None and one.rank not in self._named]
        self._named.update(one.rank for one in found)
        return found


class _StageRanks:
    """The ranks of one stage."""

    def __init__(self) -> None:
        self._before: dict[int, Word] = {}
        self._rows: deque[dict[int, float]] = deque(maxlen=_COMPARISONS)

    def look(self, words: Sequence[Word]) -> SlowRank | None:
        """Compare once all have finished a step since the last comparison."""
        now = {word.rank: word for word in words}
        if now.keys() != self._before.keys():
            self._before = now
            self._rows.clear()
            return None
        steps = {rank: word.step - self._before[rank].step for rank, word in now.items()}
        if len(now) < 2 or min(steps.values()) < 1:
            return None
        row = {r: (now[r].worked - self._before[r].worked) / steps[r] for r in now}
        self._before = now
        if min(row.values()) <= 0:
            return None
        self._rows.append(row)
        if len(self._rows) < _COMPARISONS:
            return None
        rows = list(self._rows)
        late: dict[int, list[float]] = {}
        seconds: dict[int, float] = {}
        for rank in rows[0]:
            usual = [statistics.median(v for r, v in row.items() if r != rank) for row in rows]
            pairs = [(row[rank], other) for row, other in zip(rows, usual, strict=True)]
            late[rank] = [math.log(own / other) for own, other in pairs]
            seconds[rank] = statistics.median(own - other for own, other in pairs)
        # The mean of the middle half: a few outliers do not count.
        cut = slice(len(rows) // 4, len(rows) - len(rows) // 4)
        middle = {rank: statistics.fmean(sorted(values)[cut]) for rank, values in late.items()}
        # Of all ranks together: the deviation of one rank's few values often comes out too small.
        spread = statistics.median(abs(v - middle[rank]) for rank in late for v in late[rank])
        error = _MIDDLE_HALF * _MAD_TO_DEVIATION * spread / math.sqrt(len(rows))
        rank = max(middle, key=lambda one: middle[one])
        ratio = math.exp(statistics.median(late[rank]))
        if ratio < _RATIO or middle[rank] < _DEVIATIONS * error or seconds[rank] < _LEAST_SECONDS:
            return None
        step = max(word.step for word in words) - 1
        return SlowRank(rank=rank, step=step, ratio=ratio, seconds=seconds[rank])


# Words and times of Ctrl-C: an answer at once, and an end at the second one.


#: Signals closer together than this are one key that bounced.
SAME_KEY_SECONDS = 0.2
STOPPING_SOON = "stopping; press Ctrl-C again to stop now"
STOPPING = "stopping after this step, and saving; press Ctrl-C again to stop now"
STOPPING_NOW = "stopping now, without saving"


def say(text: str) -> None:
    """One line on stderr, below the terminal's own ``^C``."""
    with suppress(OSError, ValueError):
        print(f"\nmoemesh: {text}", file=sys.stderr, flush=True)


#: Signals closer together than this are one request that came by two ways.
SAME_REQUEST_SECONDS = 2.0


_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Set by SIGINT, SIGTERM, SIGHUP and SIGUSR1. Only a second Ctrl-C stops at once.

    A signal to a whole job reaches a rank twice, directly and through its launcher, and must not
    interrupt the save that the first one has requested. A process that is `alone` has no launcher:
    it answers on stderr itself.
    """

    def __init__(self, *, alone: bool = False, after: int | None = None) -> None:
        """`after`: the step behind which the run stops in any case; None: the last one."""
        self._alone, self.after = alone, after
        self._same_seconds = SAME_KEY_SECONDS if alone else SAME_REQUEST_SECONDS
        self._signal: int | None = None
        self._since = 0.0
        for number in _REQUESTS:
            signal.signal(number, self._receive)

    def ignore(self) -> None:
        """Ignore all of them until the process ends, the end of the interpreter included."""
        for number in _REQUESTS:
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = number, now
            if number == signal.SIGINT:
                self._answer(STOPPING)
        elif number == signal.SIGINT and now - self._since > self._same_seconds:
            self._answer(STOPPING_NOW)
            raise KeyboardInterrupt

    def _answer(self, text: str) -> None:
        # Not print: the signal may have come in the middle of one.
        if self._alone:
            with suppress(OSError):
                os.write(2, f"\nmoemesh: {text}\n".encode())

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after a request to terminate (also when another rank got it)."""
        return 130 if self._signal == signal.SIGINT else 143


#: Between two looks at ranks of which one does not move.
LOOK_SECONDS = 0.03
_STACK_SECONDS = 0.3
#: After a verdict the other ranks have so long to put their own errors into their logs.
_FOLLOW_SECONDS = 1.0


class Processes(Protocol):
    """The processes of the ranks, whoever started them: exit codes as of :class:`Seen` (`word`: the
    newest of the rank), and ids, where a rank has not told its own."""

    def exit_code(self, rank: int, word: Word | None) -> int | None: ...

    def pid(self, rank: int) -> int: ...


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
    stacks: dict[int, str] = field(default_factory=dict[int, str])
    traces: dict[int, str] = field(default_factory=dict[int, str])


class RankWatcher:
    """Watches the `ranks` that meet in `folder`, whoever has started them: looks at them, judges
    what it has seen, and collects what is known of a failure."""

    def __init__(
        self,
        folder: Path,
        words: WordFile,
        ranks: Sequence[int],
        processes: Processes,
        limits: Limits,
        notice: Callable[[SlowRank], None] = lambda slow: None,
    ) -> None:
        """`notice` gets slow ranks."""
        self.folder, self.words, self.ranks = folder, words, ranks
        self.judge = Judge(limits)
        self._processes, self._slow, self._notice = processes, SlowRanks(), notice
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
            at_work = {"state": state, "cpu_seconds": cpu_seconds}
            seen.append(Seen(rank=rank, exit_code=code, word=word, told=told, **at_work))
        return seen

    def verdict(self, now: float, seen: Sequence[Seen]) -> Verdict | None:
        """The verdict on what was seen at `now` (monotonic seconds), once there is one."""
        verdict = self.judge.look(now, seen)
        if verdict is None:
            for slow in self._slow.look([one.word for one in seen if one.word is not None]):
                self._notice(slow)
        return verdict

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


_TAIL_LINES = 30
#: Of ranks of which the caller knows nothing.
_LIMITS = Limits(patience=1200.0)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def describe(ended: Ended, logs: Path, *, kept: Path | None) -> str:
    """The failure of a run for a person: the cause, where the rank was, and its last words.

    `kept`: the folder in which the user finds the files of `logs` later; None where they are lost.
    """
    verdict = ended.verdict
    assert verdict is not None
    lines = [f"moemesh: {verdict.message}"]
    word, told = verdict.seen.word, verdict.seen.told
    if word is not None and not (told is not None and told.is_final):
        lines.append(f"it was in {word.place()}")
    stack = ended.stacks.get(verdict.rank)
    errors = logs / f"rank-{verdict.rank}.err"
    if stack is not None and verdict.kind in ("mismatch", "hung", "busy"):
        where = f" (all of it in {kept / f'rank-{verdict.rank}.stacks'})" if kept else ""
        # Of what faulthandler wrote, the lines of the main thread, innermost first.
        main = [line for line in stack.split("\n\n")[-1].splitlines() if line.startswith("  ")]
        lines += [f"its stack{where}:", *main[:_TAIL_LINES]]
    elif errors.exists() and not (told is not None and told.is_final):
        words = errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        where = f" (all of it in {kept / errors.name})" if kept else ""
        lines += [f"its last words{where}:", *words] if words else []
    return "\n".join(lines)


class Supervisor:
    """Runs the ranks once; see :meth:`run`."""

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        *,
        logs: Path,
        limits: Limits = _LIMITS,
        grace_seconds: float = 120,
        answer: str = STOPPING_SOON,
        check: Callable[[], None] = lambda: None,
        notice: Callable[[SlowRank], None] = lambda slow: None,
        is_last: bool = False,
    ) -> None:
        """`command`: of every rank. Rank 0 writes to this process's output, rank i to
        ``rank-i.out`` and ``rank-i.err`` in `logs`. `answer` is said at the first Ctrl-C.
        `check` raises a RunFolderError where the run must end; called once a second. `notice` gets
        slow ranks. `is_last`: this process exits after the ranks, so that signals are ignored once
        all of them have finished.
        """
        self._command, self._num_ranks, self._logs = command, num_ranks, logs
        self._limits, self._notice = limits, notice
        self._grace, self._answer, self._check = grace_seconds, answer, check
        self._signals: list[int] = []
        self._is_last, self._has_finished = is_last, False
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Ended:
        """Start the ranks and wait until all have left or were ended."""
        size = self._num_ranks * RANK_BYTES
        with meeting_place(size) as folder, self._catching():
            words = WordFile(folder / WORDS, self._num_ranks)
            try:
                for rank in range(self._num_ranks):
                    if self._signals:
                        break
                    self._processes.append(self._start(rank, folder))
                ranks = range(len(self._processes))
                return self._watch(
                    RankWatcher(folder, words, ranks, self, self._limits, self._notice)
                )
            finally:
                self._kill(words)
                words.close()

    def _start(self, rank: int, folder: Path) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        environment |= settings_for_gpus(environment)
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._num_ranks))
        environment[FOLDER_VARIABLE] = str(folder)
        with ExitStack() as opened:
            outputs: dict[str, BinaryIO] = {}
            for name, kind in (("stdout", "out"), ("stderr", "err")) if rank else ():
                file = self._logs / f"rank-{rank}.{kind}"
                try:
                    outputs[name] = opened.enter_context(file.open("wb"))
                except OSError as error:  # ends no run
                    say(f"{file} cannot be written ({error.strerror}): it is left out")
                    outputs[name] = opened.enter_context(open(os.devnull, "wb"))
            return subprocess.Popen(
                self._command, env=environment, start_new_session=True, **outputs
            )

    def _watch(self, watcher: RankWatcher) -> Ended:
        stopped_by: int | None = None
        asked_at, checked_at = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            seen = watcher.look()
            numbers, self._signals = self._signals, []
            is_cut = stopped_by is not None and now - asked_at > self._grace
            for number in numbers:
                if stopped_by is None:
                    stopped_by, asked_at, watcher.judge.stopping = number, now, number
                    if number == signal.SIGINT:
                        say(self._answer)
                    # Nothing is there yet that could be saved, or every rank is to save it.
                    is_cut = not self._were_training(seen)
                    for one, process in zip(seen, self._processes, strict=True):
                        if one.exit_code is None and not is_cut:
                            with suppress(ProcessLookupError):
                                process.send_signal(number)
                elif number == signal.SIGINT and now - asked_at > SAME_KEY_SECONDS:
                    say(STOPPING_NOW)
                    is_cut = True
                if is_cut:
                    break
            if is_cut:
                return self._ended(seen, stopped_by, is_cut=True)
            verdict = watcher.verdict(now, seen)
            if verdict is None and now - checked_at > 1.0:
                checked_at = now
                try:
                    self._check()
                except RunFolderError as error:
                    content: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
                    facts = getattr(error, "facts", {})
                    told = Told(**content, at=now, facts=facts, is_final=True)
                    one = Seen(rank=0, exit_code=1, word=seen[0].word, told=told)
                    verdict = Verdict(kind="exception", rank=0, message=str(error), seen=one)
            if verdict is not None:
                return watcher.failed(verdict, seen, self._logs)
            if all(one.has_left(now) for one in seen) and not watcher.judge.is_deciding:
                return self._ended(seen, stopped_by)
            time.sleep(watcher.pause)

    def _ended(self, seen: Sequence[Seen], number: int | None, *, is_cut: bool = False) -> Ended:
        """The ranks have left, or are to be killed, without a failure."""
        # A rank that has finished has said its code: a signal may still end its interpreter.
        codes = [one.word.code if one.is_done and one.word else one.code for one in seen]
        code = max((one or 0 for one in codes), default=0)
        # A signal after the last step stops nothing.
        self._has_finished = not is_cut and not code and len(seen) == self._num_ranks
        if number is None or self._has_finished:
            return Ended(code=code)
        return Ended(
            code=128 + (signal.SIGTERM if number == signal.SIGUSR1 else number),
            stopped_by=signal.Signals(number),
            is_cut=is_cut,
            was_training=self._were_training(seen),
        )

    def exit_code(self, rank: int, word: Word | None) -> int | None:
        return self._processes[rank].poll()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def _were_training(self, seen: Sequence[Seen]) -> bool:
        words = [one.word for one in seen if one.word is not None]
        are_there = len(words) >= self._num_ranks
        return are_there and all(word.phase != SETUP or word.step for word in words)

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
                    kill = os.killpg if os.getpgid(pid) == pid else os.kill
                    kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """While inside, signals to this process are kept for :meth:`_watch`."""
        handlers = {}
        for number in FORWARDED:
            with suppress(ValueError):  # not in the main thread: they go their usual way
                handlers[number] = signal.signal(number, lambda n, _: self._signals.append(n))
        try:
            yield
        finally:
            ignores = self._is_last and self._has_finished
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_IGN if ignores else handler or signal.SIG_DFL)
