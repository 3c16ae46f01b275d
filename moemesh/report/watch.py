"""Live view of a run: incremental reads of its files, and a panel for the terminal."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moemesh.config.limits import parse_json, visible
from moemesh.config.sources import RUN_PLAN
from moemesh.monitor.lease import FILE as LEASE
from moemesh.monitor.lease import body_of
from moemesh.report.heat_maps import squeeze
from moemesh.trace.run import (
    EVENTS,
    METRICS,
    Event,
    MetricsRow,
    missing_steps,
    newest_checkpoint,
    read_failure,
    recorded,
)
from moemesh.trace.step_seconds import duration, flop_rate

#: Most points of a curve; beyond, neighbours are averaged.
MOST_POINTS = 512
#: Number of newest events in the panel; bytes of a file that are read at once.
_NUM_EVENTS, _READ_BYTES = 6, 1 << 22
#: Seconds without a change of its counter after which a lease on another host counts as dead.
_BEAT_SECONDS = 60.0
_BARS = "▁▂▃▄▅▆▇█"
#: Kinds of events that end a run without a failure.
_ENDS = ("finished", "stopped")
#: Share of the newest step in the mean time of a step.
_NEWEST = 0.1

T = TypeVar("T")


@dataclass
class Tail:
    """Incremental reader of the lines of a file; a file that became shorter is reread from the
    beginning."""

    path: Path
    _offset: int = 0

    def objects(self) -> tuple[bool, list[dict[str, Any]] | None]:
        """Whether the file was truncated, and the JSON objects of the next complete lines without
        damaged ones; None without further lines."""
        try:
            with self.path.open("rb") as file:
                is_cut = os.fstat(file.fileno()).st_size < self._offset
                if is_cut:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except OSError:
            return False, None
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _READ_BYTES:
            end = len(data)  # longer than any row: damage
        if not end:
            return is_cut, None
        self._offset += end
        rows: list[dict[str, Any]] = []
        for line in data[:end].splitlines():
            try:
                row: Any = parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(cast("dict[str, Any]", row))
        return is_cut, rows


@dataclass
class Curve:
    """Values of a run in bounded memory: each point is the mean of `width` values."""

    points: list[float] = field(default_factory=list[float])
    width: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Add a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self.width:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) >= MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(a + b) / 2 for a, b in pairs]
            self.width *= 2


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as at most `width` bar characters.

    >>> sparkline([3, 2, 1], 8), sparkline([1, 1], 8), sparkline([], 8)
    ('█▄▁', '▁▁', '')
    """
    if not values:
        return ""
    means = squeeze(values, max(width, 1))
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((mean - low) * scale + 0.5 - 1e-9)] for mean in means)


class View:
    """Displayed state of a run, updated by rows and events."""

    def __init__(self, name: str, total: int | None = None) -> None:
        """`total`: number of steps of the run; None: unknown."""
        self.name, self.total = name, total
        self.row: MetricsRow | None = None
        self.validation: tuple[int, float] | None = None
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self._losses = Curve()
        self._seconds: float | None = None

    def add_row(self, row: MetricsRow) -> None:
        """Add the row of the next step."""
        if self._seconds is None or self.row is None or self.row.step == 1:
            self._seconds = row.seconds  # the first step takes long
        self._seconds += _NEWEST * (row.seconds - self._seconds)
        self.row = row
        self._losses.add(row.loss)
        if row.validation_loss is not None:
            self.validation = row.step, row.validation_loss

    def restart(self) -> None:
        """Forget the added rows, after the file was truncated or a step was repeated."""
        self.row, self._seconds, self._losses = None, None, Curve()

    def line(self) -> str:
        """The newest step on one line."""
        return "" if self.row is None else "  ".join([self._place(), *self._facts()])

    def panel(self, width: int = 80) -> Panel:
        """Renders the view `width` columns wide."""
        parts: list[Any] = [] if self.row else [Text("no step yet")]
        inner = max(width - 4, 20)
        if self.row is not None:
            if self.total:
                bar = Table.grid()  # a bar alone does not end its line
                done = min(self.row.step, self.total)
                bar.add_row(ProgressBar(total=self.total, completed=done, width=inner))
                parts.append(bar)
            parts.append(Text(self._place()))
            parts.append(Text(sparkline(self._losses.points, inner), style="cyan"))
            table = Table.grid(padding=(0, 2))
            for fact in self._facts():
                # The rate of a step begins with its number, a name may have two words.
                match = re.match(r"((?:peak )?[a-z/]+):? (.*)", fact)
                name, value = match.groups() if match else ("compute", fact)
                table.add_row(Text(name, style="dim"), value)
            parts.append(table)
        for event in self.events:
            style = "bold red" if event.kind in ("alarm", "warning") else "dim"
            text = visible(f"{event.kind}: {' '.join(event.text.split())}")
            parts.append(Text(text, style=style, overflow="ellipsis", no_wrap=True))
        return Panel(Group(*parts), title=Text(visible(self.name)), title_align="left", width=width)

    def _place(self) -> str:
        assert self.row is not None
        of = f"/{self.total}" if self.total else ""
        # Expected seconds of the remaining steps, without validation and saves.
        left = max((self.total or 0) - self.row.step, 0) * (self._seconds or 0.0)
        more = f"  {duration(left)} left" if left else ""
        return f"step {self.row.step}{of}  loss {self.row.loss:.4f}{more}"

    def _facts(self) -> Iterator[str]:
        """Yields names with values of the newest row."""
        row = self.row
        assert row is not None
        yield f"tokens/s {row.tokens_per_second:,.0f}"
        if self.validation is not None:
            step, loss = self.validation
            yield f"validation {loss:.4f} (step {step})"
        yield from facts(row)
        if row.load_max_over_mean is not None:
            dropped = f", {row.dropped_share:.1%} dropped" if row.dropped_share else ""
            yield f"experts fullest {row.load_max_over_mean:.2f} x the mean{dropped}"


def facts(row: MetricsRow) -> list[str]:
    """Texts on rate, memory, waits and epoch of a step, as far as the row has them."""
    texts: list[str] = []
    if row.tflops_per_rank is not None:
        share = "" if row.mfu is None else f" (MFU {row.mfu:.1%})"
        texts.append(f"{flop_rate(row.tflops_per_rank)} a rank{share}")
    if row.memory_bytes is not None:
        texts.append(f"peak memory {row.memory_bytes / 2**30:.2f} GiB")
    waits = {"data": row.data_seconds, "ranks": row.communication_seconds}
    if shown := [
        f"{name} {min(seconds / row.seconds, 1):.0%}"
        for name, seconds in waits.items()
        if seconds is not None and row.seconds > 0
    ]:
        texts.append("waits: " + ", ".join(shown))
    if row.epoch is not None and row.epoch >= 0.005:  # less is shown as 0.00
        texts.append(f"epoch {row.epoch:.2f}")
    return texts


def _parsed(objects: Sequence[dict[str, Any]], parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Parsed objects without malformed ones."""
    for item in objects:
        try:
            yield parse(item)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue


class Watched:
    """Folder of a run, polled repeatedly; only new lines are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._events = Tail(folder / METRICS), Tail(folder / EVENTS)
        self._last_kind = ""  # of the newest event that starts or ends a run
        #: Counter of the lease, and the time at which it was first read.
        self._beat: tuple[object, float] = (None, time.monotonic())
        self._has_read_config = self._has_warned = False
        self.view = View(folder.resolve().name)

    @property
    def is_run(self) -> bool:
        """Whether a run has written into the folder; empty files do not count."""
        files = (self.folder / name for name in (METRICS, EVENTS, RUN_PLAN, LEASE))
        return any(file.exists() and file.stat().st_size for file in files)

    def look(self) -> list[Event]:
        """Read new rows and events; returns the new events, and warnings of missing rows."""
        self._read_total()
        events: list[Event] = []
        while True:
            is_cut, objects = self._metrics.objects()
            if is_cut:
                self.view.restart()
            if objects is None:
                break
            for row in _parsed(objects, MetricsRow.from_json):
                before = 0 if self.view.row is None else self.view.row.step
                if row.step <= before:
                    self.view.restart()
                elif text := missing_steps(
                    self._metrics.path.name, {row.step: 1}, row.step, before
                ):
                    events.append(Event(time="", step=before, kind="warning", text=text))
                self.view.add_row(row)
        # A checkpoint without any row: warn once.
        newest = newest_checkpoint(self.folder)
        if self.view.row is None and newest and not self._has_warned:
            self._has_warned = True
            text = missing_steps(self._metrics.path.name, {}, newest)
            events.append(Event(time="", step=None, kind="warning", text=text))
        while (objects := self._events.objects()[1]) is not None:
            events += _parsed(objects, Event.from_json)
        for event in events:
            self.view.events.append(event)
            if event.kind in (*_ENDS, "start"):
                self._last_kind = event.kind
                self._has_read_config = False  # a resumed run may have another number of steps
        self._read_total()
        return events

    def end(self) -> tuple[bool, str] | None:
        """Whether the run ended without a failure, and a text; None while it is running, by its
        files, and on its own host by its process."""
        if self._last_kind in _ENDS:
            how = "has finished" if self._last_kind == "finished" else "has been stopped"
            return True, f"the run {how}"
        # Whether the process with the lease is alive; None if unknown.
        lives: bool | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            body = body_of(self.folder)
            counter, now = body.get("counter"), time.monotonic()
            if body.get("held") is False:
                lives = False
            elif body.get("host") == socket.gethostname():
                try:
                    os.kill(int(body["pid"]), 0)
                    lives = True
                except (ProcessLookupError, PermissionError) as error:
                    lives = isinstance(error, PermissionError)
            elif body and counter is None:
                lives = None if self._failure() is None else False
            else:  # on another host, where the counter changes; None without a lease
                if counter != self._beat[0]:
                    self._beat = counter, now
                lives = None if now - self._beat[1] < _BEAT_SECONDS else False
        if lives is not False:
            return None
        reason = self._failure()
        return False, f"the run has failed: {reason}" if reason else "the run has stopped running"

    def _failure(self) -> str | None:
        message = read_failure(self.folder).get("message")
        return None if message is None else " ".join(str(message).split())

    def _read_total(self) -> None:
        if self._has_read_config:
            return
        if (total := recorded(self.folder, "train", "steps")) is not None:
            self._has_read_config = True
            self.view.total = total if isinstance(total, int) else None
