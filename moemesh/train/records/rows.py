"""Rows of a run: appended to a ``.jsonl`` file, cut back when it goes on, and handed to sinks.

A full disk ends no run. Sinks (CSV, TensorBoard, W&B) stand behind a bounded queue; whatever
happens in their thread (an error, a service that hangs) costs rows and one warning, never a step.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from moemesh.checkpoint.files import explain, replace_by
from moemesh.config.limits import parse_json
from moemesh.trace.run import MetricsRow, missing_steps

Row = dict[str, Any]

#: Flags of a file of rows, which is no link to another file.
_APPENDS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
#: So many rows wait in memory while nothing can be written; of more the oldest are lost.
MOST_WAITING = 4096


class RowLog:
    """Appends rows, floats in full precision, each call with one write: all of its rows or none.

    What cannot be written waits in memory and is written with the next rows that can be.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str, str], None] | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """``say(text, "disk")`` reports once that writing fails and once that it works. Rows are
        dropped where not `may_write`: the folder is no longer that of the run."""
        self.path, self._say, self._may_write = path, say, may_write
        self._waiting: deque[str] = deque()
        self._num_lost = 0
        self._fails = self._is_open = False

    def append(self, rows: Sequence[Row], *, waits: bool = True) -> bool:
        """Write `rows`; returns whether that went well. ``waits=False``: what cannot be written is
        not kept, since the caller does."""
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
                    self._tell(f"{explain(error, self.path)}; the run goes on, rows wait in memory")
                return False
        self._waiting.clear()
        if self._fails:
            self._fails = False
            lost = f"; {self._num_lost} rows are lost" if self._num_lost else ""
            self._num_lost = 0
            self._tell(f"{self.path} is written again{lost}")
        return True

    def flush(self) -> bool:
        """Write what waits."""
        return not self._waiting or self.append(())

    def _write(self, data: bytes) -> None:
        handle = os.open(self.path, _APPENDS, 0o644)
        try:
            size = os.fstat(handle).st_size
            if not self._is_open and size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data  # behind a row that a crash left unfinished
            written = 0
            try:
                while written < len(data):
                    written += os.write(handle, data[written:])
            except OSError:
                if written:
                    with suppress(OSError):
                        os.ftruncate(handle, size)
                raise
            self._is_open = True
        finally:
            os.close(handle)

    def _tell(self, text: str) -> None:
        if self._say is not None:
            self._say(text, "disk")


class Cut(NamedTuple):
    """The result of :func:`cut_after`: rows of later steps, rows that nobody can read (and the
    number of the first such line), the steps up to the cut that were summed with later ones, and a
    sentence on those without any row."""

    rows: int = 0
    damaged: int = 0
    first_damaged: int = 0
    lost: range = range(0)
    missing: str = ""


def cut_after(path: Path, step: int) -> Cut:
    """Cut a ``.jsonl`` file back to the rows of steps up to `step`, without rows that are damaged.

    A step of -1 cuts every row. A row with "steps" stands for so many steps up to its "step". Where
    nothing before the cut is damaged the file is only shortened, which needs no room on the disk.
    """
    if not path.exists():
        return Cut(missing=missing_steps(path.name, {}, step))
    removed = damaged = first_damaged = 0
    steps = dict[int, int]()
    lost, kept_end, is_whole = range(0), 0, True
    for number, (start, line, row) in enumerate(_rows(path), start=1):
        is_kept = row is not None and row[0] <= step
        if row is None:
            damaged, first_damaged = damaged + 1, first_damaged or number
        elif not is_kept:
            removed += 1
            if row[0] - row[1] < step:
                lost = range(row[0] - row[1] + 1, step + 1)
        if is_kept and row is not None:
            steps[row[0]] = row[1]
            is_whole = is_whole and start == kept_end and line.endswith(b"\n")
            kept_end = start + len(line)
    if not is_whole:
        rows = ((line, row) for _, line, row in _rows(path) if row is not None)
        replace_by(path, (line.rstrip(b"\n") + b"\n" for line, row in rows if row[0] <= step))
    elif kept_end < path.stat().st_size:
        os.truncate(path, kept_end)
    return Cut(removed, damaged, first_damaged, lost, missing_steps(path.name, steps, step))


def _rows(path: Path) -> Iterator[tuple[int, bytes, tuple[int, int] | None]]:
    """The start of each line, the line, and its step and number of steps; None: no row."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            found = None
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                row = cast("Row", parse_json(line))
                step, steps = row["step"], row.get("steps", 1)
                if type(step) is int and type(steps) is int:
                    found = step, steps
            yield start, line, found
            start += len(line)


#: Rows that wait for the thread at most.
MOST_QUEUED = 1024
#: The end of a run waits so long for the thread, and no longer.
CLOSE_SECONDS = 5.0

CSV_FILE, TENSORBOARD_FOLDER, WANDB_ID_FILE = "metrics.csv", "tensorboard", "wandb-id"
_COLUMNS = tuple(item.name for item in fields(MetricsRow))


class Sink(Protocol):
    """Takes the rows of a run in order; every call may raise anything, and may take long."""

    def write(self, row: MetricsRow) -> None: ...

    def close(self) -> None: ...


#: Makes the sink of a run folder; rows from step `first_step` on follow.
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
        """Nothing is open."""


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
    """A run of Weights & Biases, the same one after a resume; settings are those of its variables
    (WANDB_PROJECT, WANDB_MODE=offline, ...)."""

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
    found = {name: getattr(row, name) for name in _COLUMNS if name != "step"}
    return {name: value for name, value in found.items() if value is not None}


OPENERS: dict[str, Opener] = {"csv": CsvSink, "tensorboard": TensorBoardSink, "wandb": WandbSink}


class Sinks:
    """All sinks of a run. The calls of the loop, :meth:`put` and :meth:`close`, raise nothing; the
    first never waits, the second at most CLOSE_SECONDS."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        first_step: int,
        say: Callable[[str, str], None],
        openers: dict[str, Opener] | None = None,
    ) -> None:
        """``say(text, "sink")`` is called by the thread of the loop alone."""
        self._names, self._folder, self._first_step = names, folder, first_step
        self._say, self._openers = say, openers or OPENERS
        self._rows: queue.Queue[MetricsRow | None] = queue.Queue(MOST_QUEUED)
        self._told: deque[str] = deque()
        self._dropped: Counter[str] = Counter()
        self._num_unqueued = 0
        self._thread: threading.Thread | None = None
        if names:
            self._thread = threading.Thread(target=self._run, name="moemesh-sinks", daemon=True)
            self._thread.start()

    def put(self, row: MetricsRow) -> None:
        """Hand over one row."""
        if self._thread is None:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._num_unqueued:
                names = ", ".join(self._names)
                self._told.append(f"sinks ({names}) are too slow: rows are dropped for them")
            self._num_unqueued += 1
        self._tell()

    def close(self) -> None:
        """Let the thread write what waits, but not for long; say what was dropped."""
        if self._thread is None:
            return
        until = time.monotonic() + CLOSE_SECONDS
        with suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            waiting = self._rows.qsize()
            self._told.append(f"sinks did not end in {CLOSE_SECONDS:g} s; {waiting} rows are lost")
        self._thread = None
        lost = {"not queued": self._num_unqueued, **self._dropped}
        if any(lost.values()):
            parts = ", ".join(f"{name} {count}" for name, count in lost.items() if count)
            self._told.append(f"rows that sinks did not get: {parts}")
        self._tell()

    def _tell(self) -> None:
        while self._told:
            self._say(self._told.popleft(), "sink")

    def _run(self) -> None:
        opened: dict[str, Sink] = {}
        for name in self._names:
            with self._guarded(name, "cannot be opened"):
                opened[name] = self._openers[name](self._folder, self._first_step)
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
    def _guarded(self, name: str, what: str) -> Any:
        """Whatever a sink raises costs one row, and the first time a message."""
        try:
            yield
        except BaseException as error:  # also SystemExit of a foreign package
            if not self._dropped[name]:
                why = f"{type(error).__name__}: {error}"
                self._told.append(f"sink {name} {what} ({why}); rows are dropped for it")
            self._dropped[name] += what == "fails"


def missing_package(name: str) -> str | None:
    """The package that a sink needs and that is not installed."""
    needed = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(name)
    return needed if needed is not None and find_spec(needed) is None else None
