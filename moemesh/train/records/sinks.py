"""Sinks: rows of metrics for other programs (CSV, TensorBoard, W&B), behind a bounded queue.

A thread writes them. Whatever happens in it (a full disk, an error, a service that hangs) costs
rows, which are counted, and one warning: never a step.
"""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from moemesh.trace.run import MetricsRow

#: Rows that wait for the thread at most.
MOST_WAITING = 1024
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
        kept: list[list[str]] = []
        if self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                for row in csv.reader(file):
                    if row and row[0].isdecimal() and int(row[0]) < first_step:
                        kept.append(row)
        temporary = self._path.with_name(f".{CSV_FILE}.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([_COLUMNS, *kept])
        os.replace(temporary, self._path)

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
        self._rows: queue.Queue[MetricsRow | None] = queue.Queue(MOST_WAITING)
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
        with contextlib.suppress(queue.Full):
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

    @contextlib.contextmanager
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
