"""Rows of a run: appended to a ``.jsonl`` file, cut back on resume, and passed to sinks.

A full disk ends no run. Sinks (CSV, TensorBoard, W&B) have a bounded queue; faults in their thread
(an error, a service that hangs) cost rows and one warning, never a step.
"""

from __future__ import annotations

import csv
import io
import json
import os
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from moemesh.checkpoint.files import explain, replace_by
from moemesh.config.limits import parse_json
from moemesh.trace.run import MetricsRow, missing_steps

Row = dict[str, Any]

#: Flags for opening a file of rows, which must not be a link.
_APPENDS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
#: Largest number of rows that wait in memory while writing fails; beyond it the oldest are lost.
MOST_WAITING = 4096


class RowLog:
    """Appends rows, floats in full precision, all rows of a call or none.

    Rows that cannot be written wait in memory for the next successful write.
    """

    def __init__(
        self,
        path: Path,
        log: Callable[[str, str], None] | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """``log(text, "disk")`` reports once that writing fails and once that it works. Rows are
        dropped if `may_write` returns False, since the run has lost the folder."""
        self.path, self._log, self._may_write = path, log, may_write
        self._waiting: deque[str] = deque()
        self._num_lost = 0
        self._fails = self._has_written = False

    def append(self, rows: Sequence[Row], *, waits: bool = True) -> bool:
        """Write `rows`; returns whether that succeeded. ``waits=False``: the caller keeps rows that
        cannot be written."""
        lines = [json.dumps(row) + "\n" for row in rows]
        if (lines or self._waiting) and self._may_write():
            try:
                self._write("".join((*self._waiting, *lines)).encode())
            except OSError as error:
                self._waiting.extend(lines if waits else ())
                while len(self._waiting) > MOST_WAITING:
                    self._waiting.popleft()
                    self._num_lost += 1
                if not self._fails:
                    self._fails = True
                    self._report(
                        f"{explain(error, self.path)}; the run continues, rows wait in memory"
                    )
                return False
        self._waiting.clear()
        if self._fails:
            self._fails = False
            lost = f"; {self._num_lost} rows are lost" if self._num_lost else ""
            self._num_lost = 0
            self._report(f"writing {self.path} works now{lost}")
        return True

    def flush(self) -> bool:
        """Write pending rows."""
        return not self._waiting or self.append(())

    def _write(self, data: bytes) -> None:
        handle = os.open(self.path, _APPENDS, 0o644)
        try:
            size = os.fstat(handle).st_size
            if not self._has_written and size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data  # after a row that a crash left unfinished
            written = 0
            try:
                while written < len(data):
                    written += os.write(handle, data[written:])
            except OSError:
                if written:
                    with suppress(OSError):
                        os.ftruncate(handle, size)
                raise
            self._has_written = True
        finally:
            os.close(handle)

    def _report(self, text: str) -> None:
        if self._log is not None:
            self._log(text, "disk")


class Cut(NamedTuple):
    """The result of :func:`cut_after`."""

    #: Number of removed rows of later steps.
    rows: int = 0
    #: Number of damaged rows, and the first line with one (from 1; 0: none).
    damaged: int = 0
    first_damaged: int = 0
    #: Steps up to the cut that were summed with later ones.
    lost: range = range(0)
    #: A sentence on steps without a row; empty if every step has one.
    missing: str = ""


def cut_after(path: Path, step: int) -> Cut:
    """Cut a ``.jsonl`` file back to the rows of steps up to `step`, without damaged rows.

    A step of -1 cuts every row. A row with "steps" covers that number of steps up to its "step". If
    nothing before the cut is damaged, the file is only truncated, which needs no disk space.
    """
    if not path.exists():
        return Cut(missing=missing_steps(path.name, {}, step))
    removed = damaged = first_damaged = 0
    steps, lost = dict[int, int](), range(0)
    # Whether the remaining rows are the first bytes of the file, up to `kept_end`.
    is_prefix, kept_end = True, 0
    for number, (start, line, row) in enumerate(_rows(path), start=1):
        if row is None:
            damaged, first_damaged = damaged + 1, first_damaged or number
            continue
        last, count = row
        if last > step:
            removed += 1
            if last - count < step:  # a sum of steps before and after the cut
                lost = range(last - count + 1, step + 1)
            continue
        steps[last] = count
        is_prefix = is_prefix and start == kept_end and line.endswith(b"\n")
        kept_end = start + len(line)
    if not is_prefix:
        rows = ((line, row) for _, line, row in _rows(path) if row is not None)
        replace_by(path, (line.rstrip(b"\n") + b"\n" for line, row in rows if row[0] <= step))
    elif kept_end < path.stat().st_size:
        os.truncate(path, kept_end)
    return Cut(removed, damaged, first_damaged, lost, missing_steps(path.name, steps, step))


def _rows(path: Path) -> Iterator[tuple[int, bytes, tuple[int, int] | None]]:
    """Each line: offset in bytes, content, and (step, number of steps), None for a damaged row."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            numbers = None
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                row = cast("Row", parse_json(line))
                step, steps = row["step"], row.get("steps", 1)
                if type(step) is int and type(steps) is int:
                    numbers = step, steps
            yield start, line, numbers
            start += len(line)


#: Largest number of rows that wait for the thread of the sinks.
MOST_QUEUED = 1024
#: Longest time, in seconds, that the end of a run waits for that thread.
CLOSE_SECONDS = 5.0

CSV_FILE, TENSORBOARD_FOLDER, WANDB_ID_FILE = "metrics.csv", "tensorboard", "wandb-id"
_COLUMNS = tuple(item.name for item in fields(MetricsRow))


class Sink(Protocol):
    """Takes the rows of a run in order; calls may raise anything, and may take long."""

    def write(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...


#: Opens the sink of a run folder for rows from step `first_step` on.
Opener = Callable[[Path, int], Sink]


class CsvSink:
    """``metrics.csv``: a column for each key, a row for each step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path = folder / CSV_FILE
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        rows = [row for row in csv.reader(text.splitlines()) if row and row[0].isdecimal()]
        kept = io.StringIO()
        csv.writer(kept).writerows([_COLUMNS, *(row for row in rows if int(row[0]) < first_step)])
        replace_by(self._path, [kept.getvalue().encode()])

    def write(self, row: MetricsRow) -> None:
        values = [getattr(row, name) for name in _COLUMNS]
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(["" if value is None else repr(value) for value in values])

    def close(self) -> None:
        """No-op: no file is open between writes."""


class TensorBoardSink:
    """Event files of TensorBoard in the folder ``tensorboard``: a scalar for each key."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra: pip install tensorboard

        where = str(folder / TENSORBOARD_FOLDER)
        self._writer: Any = SummaryWriter(where, purge_step=first_step)

    def write(self, row: MetricsRow) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, continued after a resume; its settings come from the variables of
    wandb (WANDB_PROJECT, WANDB_MODE=offline, ...)."""

    def __init__(self, folder: Path, first_step: int) -> None:
        import wandb  # an extra: pip install wandb

        file = folder / WANDB_ID_FILE
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        self._run: Any = wandb.init(
            id=file.read_text(encoding="utf-8").strip(),
            name=folder.resolve().name,
            dir=str(folder),
            resume="allow",
        )

    def write(self, row: MetricsRow) -> None:
        self._run.log(_numbers(row), step=row.step)

    def close(self) -> None:
        self._run.finish()


def _numbers(row: MetricsRow) -> dict[str, float]:
    values = {name: getattr(row, name) for name in _COLUMNS if name != "step"}
    return {name: value for name, value in values.items() if value is not None}


OPENERS: dict[str, Opener] = {"csv": CsvSink, "tensorboard": TensorBoardSink, "wandb": WandbSink}


class Sinks:
    """All sinks of a run. :meth:`put` and :meth:`close`, which the training loop calls, raise
    nothing; `put` never waits, `close` at most CLOSE_SECONDS."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        first_step: int,
        log: Callable[[str, str], None],
    ) -> None:
        """`names`: keys of :data:`OPENERS`. ``log(text, "sink")`` is called in the thread of the
        training loop only."""
        self._names, self._folder, self._first_step = names, folder, first_step
        self._log = log
        self._rows: queue.Queue[MetricsRow | None] = queue.Queue(MOST_QUEUED)
        self._messages: deque[str] = deque()
        self._dropped: Counter[str] = Counter()
        self._num_unqueued = 0
        self._thread: threading.Thread | None = None
        if names:
            self._thread = threading.Thread(target=self._run, name="moemesh-sinks", daemon=True)
            self._thread.start()

    def put(self, row: MetricsRow) -> None:
        """Queue `row` for the thread of the sinks; a full queue drops it."""
        if self._thread is None:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._num_unqueued:
                names = ", ".join(self._names)
                self._messages.append(f"sinks ({names}) are too slow: rows are dropped for them")
            self._num_unqueued += 1
        self._report()

    def close(self) -> None:
        """Let the thread write pending rows, for a limited time; log what was dropped."""
        if self._thread is None:
            return
        until = time.monotonic() + CLOSE_SECONDS
        with suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            waiting = self._rows.qsize()
            self._messages.append(
                f"sinks did not end in {CLOSE_SECONDS:g} s; {waiting} rows are lost"
            )
        self._thread = None
        lost = {"not queued": self._num_unqueued, **self._dropped}
        if any(lost.values()):
            parts = ", ".join(f"{name} {count}" for name, count in lost.items() if count)
            self._messages.append(f"rows that sinks did not get: {parts}")
        self._report()

    def _report(self) -> None:
        while self._messages:
            self._log(self._messages.popleft(), "sink")

    def _run(self) -> None:
        opened: dict[str, Sink] = {}
        for name in self._names:
            with self._guarded(name, "cannot be opened"):
                opened[name] = OPENERS[name](self._folder, self._first_step)
        while (row := self._rows.get()) is not None:
            for name in self._names:
                if name not in opened:
                    self._dropped[name] += 1
                    continue
                with self._guarded(name, "fails"):
                    opened[name].write(row)
        for name, sink in opened.items():
            with self._guarded(name, "cannot be closed"):
                sink.close()

    @contextmanager
    def _guarded(self, name: str, what: str) -> Iterator[None]:
        """Catch what a sink raises: report it, unless this sink has dropped a row before, and count
        a row as dropped if a write failed."""
        try:
            yield
        except BaseException as error:  # also SystemExit of a foreign package
            if not self._dropped[name]:
                why = f"{type(error).__name__}: {error}"
                self._messages.append(f"sink {name} {what} ({why}); rows are dropped for it")
            self._dropped[name] += what == "fails"
