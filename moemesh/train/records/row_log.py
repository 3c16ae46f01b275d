"""Rows appended to a ``.jsonl`` file, and cut back when a run goes on; a full disk ends no run."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from moemesh.checkpoint.files import explain, replace_by

Row = dict[str, Any]

#: So many rows wait in memory while nothing can be written; of more the oldest are lost.
MOST_WAITING = 4096


class RowLog:
    """Appends rows, floats in full precision, each call with one write: all of its rows or none.

    What cannot be written waits in memory and is written with the next rows that can be.
    """

    def __init__(self, path: Path, say: Callable[[str, str], None] | None = None) -> None:
        """``say(text, "disk")`` tells once that writing fails and once that it goes on."""
        self.path, self._say = path, say
        self._waiting: deque[str] = deque()
        self._num_lost = 0
        self._fails = self._is_open = False

    def append(self, rows: Sequence[Row], *, waits: bool = True) -> bool:
        """Write `rows`; returns whether that went well. ``waits=False``: what cannot be written is
        not kept, since the caller does."""
        lines = [json.dumps(row) + "\n" for row in rows]
        if lines or self._waiting:
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
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
    number of the first such line), and the steps up to the cut that were summed with later ones."""

    rows: int = 0
    damaged: int = 0
    first_damaged: int = 0
    lost: range = range(0)


def cut_after(path: Path, step: int) -> Cut:
    """Cut a ``.jsonl`` file back to the rows of steps up to `step`, without rows that are damaged.

    A step of -1 cuts every row. A row with "steps" stands for so many steps up to its "step". Where
    nothing before the cut is damaged the file is only shortened, which needs no room on the disk.
    """
    if not path.exists():
        return Cut()
    removed = damaged = first_damaged = 0
    lost, kept_end, is_whole = range(0), 0, True
    for number, (start, line, row) in enumerate(_rows(path), start=1):
        is_kept = row is not None and row[0] <= step
        if row is None:
            damaged, first_damaged = damaged + 1, first_damaged or number
        elif not is_kept:
            removed += 1
            if row[0] - row[1] < step:
                lost = range(row[0] - row[1] + 1, step + 1)
        if is_kept:
            is_whole = is_whole and start == kept_end and line.endswith(b"\n")
            kept_end = start + len(line)
    if not is_whole:
        rows = ((line, row) for _, line, row in _rows(path) if row is not None)
        replace_by(path, (line.rstrip(b"\n") + b"\n" for line, row in rows if row[0] <= step))
    elif kept_end < path.stat().st_size:
        os.truncate(path, kept_end)
    return Cut(removed, damaged, first_damaged, lost)


def _rows(path: Path) -> Iterator[tuple[int, bytes, tuple[int, int] | None]]:
    """The start of each line, the line, and its step and number of steps; None: no row."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            found = None
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                row = cast("Row", json.loads(line))
                step, steps = row["step"], row.get("steps", 1)
                if type(step) is int and type(steps) is int:
                    found = step, steps
            yield start, line, found
            start += len(line)
