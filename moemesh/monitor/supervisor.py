"""The supervisor of the ranks of this machine: starts, watches and ends them.

Every rank is a process and a session of its own. Progress records, process states and reported
exceptions go to the :class:`moemesh.monitor.detector.FailureDetector`. After a verdict the stacks
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
from typing import Any, BinaryIO

from moemesh.monitor.detector import (
    FIRST_STEPS,
    FailureDetector,
    Limits,
    RankStatus,
    ReportedError,
    Verdict,
)
from moemesh.monitor.devices import FOLDER_VARIABLE, RESOLVED, settings_for_gpus
from moemesh.monitor.lease import RunFolderError
from moemesh.monitor.progress import RANK_BYTES, SETUP, ProgressFile, ProgressRecord
from moemesh.monitor.rendezvous import (
    STACK_SIGNAL,
    WORDS,
    ProcessHandles,
    read_error,
    rendezvous_folder,
    stack_file,
)
from moemesh.trace.machine import process_state, text_of

#: Number of comparisons for a verdict; each covers the steps between two polls, usually one.
_COMPARISONS = 18
#: Least ratio of a straggler's work to that of the others, in the median of the comparisons.
_RATIO = 1.25
#: Least logarithm of this ratio in standard errors, by the mean of the middle half.
_DEVIATIONS = 4.5
#: Standard error of the mean of the middle half of normal values, in units of deviation / sqrt(n).
_MIDDLE_HALF = 1.1
#: Standard deviation of normal values in units of their median absolute deviation.
_MAD_TO_DEVIATION = 1.4826
#: Least lateness that is reported, in seconds a step.
_LEAST_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """`rank` works `ratio` times as long as the others of its stage, `seconds` more a step, in the
    median of the comparisons up to `step`."""

    rank: int
    step: int
    ratio: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it works {self.ratio:.2f} times longer per step than the "
            f"others of its stage, which wait for it ({1e3 * self.seconds:.0f} ms a step, median "
            f"of {_COMPARISONS}); check for other programs on its cores, a hot device, or more "
            "work than the others have"
        )


class StragglerDetector:
    """Straggler detection from the progress records of all ranks; returns each straggler once.

    Seconds a step do not show a straggler, since collectives make them equal. A straggler works
    longer than the others before it enters the operation that they wait in: its seconds a step
    outside of operations are compared with those of the other ranks of its stage, step by step.
    Stages of one rank are skipped.
    """

    def __init__(self) -> None:
        #: First step seen of each rank.
        self._first: dict[int, int] = {}
        #: Records of each stage's ranks at the last comparison; seconds of work a step, by rank, of
        #: each stage's last comparisons.
        self._before: dict[int, dict[int, ProgressRecord]] = {}
        self._rows: dict[int, deque[dict[int, float]]] = {}
        #: Stragglers returned so far.
        self._named: set[int] = set()

    def poll(self, records: Sequence[ProgressRecord]) -> list[Straggler]:
        """Stragglers that were not returned before."""
        by_stage: dict[int, list[ProgressRecord]] = {}
        for record in records:
            if record.step:
                first = self._first.setdefault(record.rank, record.step)
                if record.step >= first + FIRST_STEPS:
                    by_stage.setdefault(record.stage, []).append(record)
        stragglers: list[Straggler] = []
        for stage, of_stage in by_stage.items():
            # Compare the ranks once all of them have finished a step since the last comparison.
            now, before = {record.rank: record for record in of_stage}, self._before.get(stage, {})
            if now.keys() != before.keys():
                self._before[stage], self._rows[stage] = now, deque(maxlen=_COMPARISONS)
                continue
            steps = {rank: record.step - before[rank].step for rank, record in now.items()}
            if len(now) < 2 or min(steps.values()) < 1:
                continue
            work = {r: (now[r].worked - before[r].worked) / steps[r] for r in now}
            self._before[stage], rows = now, self._rows[stage]
            if min(work.values()) <= 0:
                continue
            rows.append(work)
            if len(rows) < _COMPARISONS:
                continue
            # Each rank against the median of the others: log ratios, median difference in seconds.
            logs: dict[int, list[float]] = {}
            seconds: dict[int, float] = {}
            for rank in now:
                usual = [statistics.median(v for r, v in row.items() if r != rank) for row in rows]
                pairs = [(row[rank], median) for row, median in zip(rows, usual, strict=True)]
                logs[rank] = [math.log(value / median) for value, median in pairs]
                seconds[rank] = statistics.median(value - median for value, median in pairs)
            # The mean of the middle half ignores a few outliers.
            cut = slice(len(rows) // 4, len(rows) - len(rows) // 4)
            means = {rank: statistics.fmean(sorted(values)[cut]) for rank, values in logs.items()}
            # Over all ranks: the deviation of one rank's few values often comes out too small.
            spread = statistics.median(abs(v - means[rank]) for rank in logs for v in logs[rank])
            error = _MIDDLE_HALF * _MAD_TO_DEVIATION * spread / math.sqrt(len(rows))
            slowest = max(means, key=lambda rank: means[rank])
            ratio, more = math.exp(statistics.median(logs[slowest])), seconds[slowest]
            is_late = means[slowest] >= _DEVIATIONS * error and more >= _LEAST_SECONDS
            if ratio >= _RATIO and is_late and slowest not in self._named:
                self._named.add(slowest)
                step = max(record.step for record in of_stage) - 1
                stragglers.append(Straggler(rank=slowest, step=step, ratio=ratio, seconds=more))
        return stragglers


# Messages and times of Ctrl-C: the first one is answered at once, the second one ends the run.


#: Signals closer together than this come from one key that bounced.
SAME_KEY_SECONDS = 0.2
STOPPING_SOON = "stopping; press Ctrl-C a second time to stop now"
STOPPING = "stopping after this step, and saving; press Ctrl-C a second time to stop now"
STOPPING_NOW = "stopping now, without saving"


def log(text: str) -> None:
    """Print a line on stderr, below the terminal's own ``^C``."""
    with suppress(OSError, ValueError):
        print(f"\nmoemesh: {text}", file=sys.stderr, flush=True)


#: Signals closer together than this are one request that arrived by two ways.
SAME_REQUEST_SECONDS = 2.0


_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """A stop request by SIGINT, SIGTERM, SIGHUP or SIGUSR1. Only a second Ctrl-C stops at once.

    A signal to a whole job reaches a rank twice, directly and through its launcher, and must not
    interrupt the save that the first one has requested. A process that is `alone` has no launcher:
    it answers on stderr itself.
    """

    def __init__(self, *, alone: bool = False, after: int | None = None) -> None:
        """`after`: the last step to run; None: the last one of the training."""
        self._alone, self.after = alone, after
        self._same_seconds = SAME_KEY_SECONDS if alone else SAME_REQUEST_SECONDS
        self._signal: int | None = None
        self._since = 0.0
        for number in _REQUESTS:
            signal.signal(number, self._receive)

    def ignore(self) -> None:
        """Ignore these signals until the process ends, including the end of the interpreter."""
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
        # os.write, not print: the signal may arrive in the middle of a print.
        if self._alone:
            with suppress(OSError):
                os.write(2, f"\nmoemesh: {text}\n".encode())

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after a request to terminate (also if another rank received it)."""
        return 130 if self._signal == signal.SIGINT else 143


#: Seconds between two polls while a rank does not move.
POLL_SECONDS = 0.03
#: Longest wait in seconds for the stacks of the ranks after a verdict.
_STACK_SECONDS = 0.3
#: Seconds after a verdict in which the other ranks write their own errors into their logs.
_FOLLOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SupervisorResult:
    """The end of the ranks: the exit code of the run, and the verdict if it failed.

    ``stopped_by``: the signal that stopped this process; ``is_cut``: the ranks were killed before
    they left; ``was_training``: they were past their setup. ``stacks``: stacks of each rank that
    could still write them. ``traces``: traces of reported exceptions, by rank.
    """

    code: int
    verdict: Verdict | None = None
    stopped_by: signal.Signals | None = None
    is_cut: bool = False
    was_training: bool = True
    stacks: dict[int, str] = field(default_factory=dict[int, str])
    traces: dict[int, str] = field(default_factory=dict[int, str])


class RankWatcher:
    """Watches the `ranks` of `folder`, with any parent: takes snapshots, passes them to the failure
    detector, and collects the facts of a failure."""

    def __init__(
        self,
        folder: Path,
        records: ProgressFile,
        ranks: Sequence[int],
        processes: ProcessHandles,
        limits: Limits,
        notice: Callable[[Straggler], None] = lambda slow: None,
    ) -> None:
        """`notice` is called with each straggler."""
        self.folder, self.records, self.ranks = folder, records, ranks
        self.detector = FailureDetector(limits)
        self._processes, self._slow, self._notice = processes, StragglerDetector(), notice
        self._changes: dict[int, int] = {}
        self._is_still = True

    @property
    def pause(self) -> float:
        """Seconds until the next poll; longer while all ranks move."""
        return POLL_SECONDS if self._is_still else 2 * POLL_SECONDS

    def poll(self) -> list[RankStatus]:
        """A snapshot of all ranks."""
        self._is_still = False
        statuses: list[RankStatus] = []
        for rank in self.ranks:
            record = self.records.read(rank)
            code = self._processes.exit_code(rank, record)
            state, cpu_seconds = "", 0.0
            # Reading the state of a process is slow: skip ranks that make progress.
            if record is not None and record.changes != self._changes.get(rank):
                self._changes[rank] = record.changes
            else:
                self._is_still = True
                if code is None:
                    pid = record.pid if record is not None else self._processes.pid(rank)
                    state, cpu_seconds = process_state(pid)
            may_have_reported = code is not None or (record is not None and record.failed)
            error = read_error(self.folder, rank) if may_have_reported else None
            process = {"state": state, "cpu_seconds": cpu_seconds}
            statuses.append(
                RankStatus(rank=rank, exit_code=code, record=record, error=error, **process)
            )
        return statuses

    def verdict(self, now: float, statuses: Sequence[RankStatus]) -> Verdict | None:
        """The verdict on a snapshot at `now` (monotonic seconds); None while the run is healthy."""
        verdict = self.detector.poll(now, statuses)
        if verdict is None:
            for slow in self._slow.poll(
                [status.record for status in statuses if status.record is not None]
            ):
                self._notice(slow)
        return verdict

    def failed(
        self, verdict: Verdict, statuses: Sequence[RankStatus], logs: Path
    ) -> SupervisorResult:
        """The result of a run that failed with `verdict`: with the stacks of the living ranks that
        still write them, also in `logs`, and the exceptions reported within a second."""
        running = [
            status for status in statuses if status.exit_code is None and status.record is not None
        ]
        for status in running:
            assert status.record is not None
            with suppress(OSError):
                os.kill(status.record.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        wanted = {status.rank for status in running if status.state != "T"}
        while wanted and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            wanted = {rank for rank in wanted if not text_of(stack_file(self.folder, rank))}
        stacks = {status.rank: text_of(stack_file(self.folder, status.rank)) for status in running}
        for rank, stack in stacks.items():
            if stack:
                with suppress(OSError):
                    (logs / f"rank-{rank}.stacks").write_text(stack)
        # Wait for the errors of the other ranks: a dead peer causes them at once.
        end = time.monotonic() + _FOLLOW_SECONDS
        is_awaited = verdict.kind not in ("hung", "busy", "stopped", "network-cut")
        while is_awaited and time.monotonic() < end:
            if all(
                status.exit_code is not None or status.error is not None for status in self.poll()
            ):
                break
            time.sleep(POLL_SECONDS)
        reported = ((rank, read_error(self.folder, rank)) for rank in self.ranks)
        return SupervisorResult(
            code=verdict.exit_code,
            verdict=verdict,
            stacks={rank: stack for rank, stack in stacks.items() if stack},
            traces={rank: error.trace for rank, error in reported if error and error.trace},
        )


#: Last lines of a rank's log that a failure shows.
_TAIL_LINES = 30
#: Default limits.
_LIMITS = Limits(patience=1200.0)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def describe(ended: SupervisorResult, logs: Path, *, kept: Path | None) -> str:
    """The failure of a run as text for the user: cause, position of the rank, and its stack or the
    end of its log.

    `kept`: the later folder of the files of `logs`; None: they are deleted.
    """
    verdict = ended.verdict
    assert verdict is not None
    lines = [f"moemesh: {verdict.message}"]
    record, error = verdict.status.record, verdict.status.error
    if record is not None and not (error is not None and error.is_final):
        lines.append(f"it was in {record.place()}")
    stack = ended.stacks.get(verdict.rank)
    errors = logs / f"rank-{verdict.rank}.err"
    if stack is not None and verdict.kind in ("mismatch", "hung", "busy"):
        where = f" (all of it in {kept / f'rank-{verdict.rank}.stacks'})" if kept else ""
        # Lines of the main thread in the output of faulthandler, innermost first.
        main = [line for line in stack.split("\n\n")[-1].splitlines() if line.startswith("  ")]
        lines += [f"its stack{where}:", *main[:_TAIL_LINES]]
    elif errors.exists() and not (error is not None and error.is_final):
        tail = errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        where = f" (all of it in {kept / errors.name})" if kept else ""
        lines += [f"its last words{where}:", *tail] if tail else []
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
        notice: Callable[[Straggler], None] = lambda slow: None,
        is_last: bool = False,
        config: str = "",
    ) -> None:
        """`command`: that of every rank. Rank 0 writes to this process's output, rank i to
        ``rank-i.out`` and ``rank-i.err`` in `logs`. `answer` is printed at the first Ctrl-C; ranks
        that have not left `grace_seconds` after it, or after another signal, are killed.
        `check` is called once a second and raises a RunFolderError to end the run. `notice` is
        called with each straggler. `is_last`: this process exits after the ranks, so that signals
        are ignored once all of them have finished. `config`: the resolved configuration, which
        ranks read in place of that of `command`; "" without one.
        """
        self._command, self._num_ranks, self._logs = command, num_ranks, logs
        self._limits, self._notice = limits, notice
        self._grace, self._answer, self._check = grace_seconds, answer, check
        self._signals: list[int] = []
        self._is_last, self._has_finished, self._config = is_last, False, config
        self._processes = ProcessHandles()

    def run(self) -> SupervisorResult:
        """Start the ranks and wait until all have left or were ended."""
        size = self._num_ranks * RANK_BYTES
        with rendezvous_folder(size) as folder, self._catching():
            records = ProgressFile(folder / WORDS, self._num_ranks)
            if self._config:
                (folder / RESOLVED).write_text(self._config, encoding="utf-8")
            try:
                for rank in range(self._num_ranks):
                    if self._signals:
                        break
                    self._processes.started.append(self._start(rank, folder))
                ranks = range(len(self._processes.started))
                arguments = folder, records, ranks, self._processes, self._limits, self._notice
                return self._watch(RankWatcher(*arguments))
            finally:
                # Kill every rank that still runs, with the processes of its group.
                for rank, process in enumerate(self._processes.started):
                    pids = {process.pid} if process.poll() is None else set[int]()
                    record = records.read(rank)
                    if pids and record is not None:
                        pids.add(record.pid)
                    for pid in pids:
                        with suppress(OSError):
                            # Its own process group if it has one, never that of another process.
                            kill = os.killpg if os.getpgid(pid) == pid else os.kill
                            kill(pid, signal.SIGKILL)
                for process in self._processes.started:
                    process.wait()
                records.close()

    def _start(self, rank: int, folder: Path) -> subprocess.Popen[bytes]:
        """Start the process of a rank with its variables; rank 0 keeps this process's output."""
        # Variables of a torchrun around this process do not apply to these ranks.
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
                except OSError as error:  # the run continues without this log
                    log(f"{file} cannot be written ({error.strerror}): it is left out")
                    outputs[name] = opened.enter_context(open(os.devnull, "wb"))
            return subprocess.Popen(
                self._command, env=environment, start_new_session=True, **outputs
            )

    def _watch(self, watcher: RankWatcher) -> SupervisorResult:
        """Poll the ranks and pass signals on, until the ranks have left or must be killed."""
        stopped_by: int | None = None
        stopped_at, checked_at = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            statuses = watcher.poll()
            signals, self._signals = self._signals, []
            is_cut = stopped_by is not None and now - stopped_at > self._grace
            for number in signals:
                if stopped_by is None:
                    stopped_by, stopped_at, watcher.detector.stopping = number, now, number
                    # Before training there is nothing to save; later every rank saves.
                    is_cut = not self._were_training(statuses)
                    if number == signal.SIGINT and not is_cut:
                        log(self._answer)
                    for status, process in zip(statuses, self._processes.started, strict=True):
                        if status.exit_code is None and not is_cut:
                            with suppress(ProcessLookupError):
                                process.send_signal(number)
                elif number == signal.SIGINT and now - stopped_at > SAME_KEY_SECONDS:
                    log(STOPPING_NOW)
                    is_cut = True
                if is_cut:
                    break
            if is_cut:
                return self._ended(statuses, stopped_by, is_cut=True)
            verdict = watcher.verdict(now, statuses)
            if verdict is None and now - checked_at > 1.0:
                checked_at = now
                try:
                    self._check()
                except RunFolderError as error:
                    content: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
                    facts = getattr(error, "facts", {})
                    report = ReportedError(**content, at=now, facts=facts, is_final=True)
                    status = RankStatus(
                        rank=0, exit_code=1, record=statuses[0].record, error=report
                    )
                    verdict = Verdict(kind="exception", rank=0, message=str(error), status=status)
            if verdict is not None:
                return watcher.failed(verdict, statuses, self._logs)
            if (
                all(status.has_left(now) for status in statuses)
                and not watcher.detector.is_deciding
            ):
                return self._ended(statuses, stopped_by)
            time.sleep(watcher.pause)

    def _ended(
        self, statuses: Sequence[RankStatus], number: int | None, *, is_cut: bool = False
    ) -> SupervisorResult:
        """The result of ranks that have left, or are to be killed, without a failure."""
        # The announced exit code of a finished rank counts: a signal may kill its interpreter.
        codes = [
            status.record.code if status.is_done and status.record else status.exit_code
            for status in statuses
        ]
        code = max((code or 0 for code in codes), default=0)
        # A signal after the last step stops nothing.
        self._has_finished = not is_cut and not code and len(statuses) == self._num_ranks
        if number is None or self._has_finished:
            return SupervisorResult(code=code)
        return SupervisorResult(
            code=128 + (signal.SIGTERM if number == signal.SIGUSR1 else number),
            stopped_by=signal.Signals(number),
            is_cut=is_cut,
            was_training=self._were_training(statuses),
        )

    def _were_training(self, statuses: Sequence[RankStatus]) -> bool:
        """Whether all ranks are past their setup."""
        records = [status.record for status in statuses if status.record is not None]
        have_started = len(records) >= self._num_ranks
        return have_started and all(record.phase != SETUP or record.step for record in records)

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """Collect signals to this process for :meth:`_watch`."""
        handlers = {}
        for number in FORWARDED:
            with suppress(ValueError):  # outside of the main thread signals keep their handlers
                handlers[number] = signal.signal(number, lambda n, _: self._signals.append(n))
        try:
            yield
        finally:
            ignores = self._is_last and self._has_finished
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_IGN if ignores else handler or signal.SIG_DFL)
