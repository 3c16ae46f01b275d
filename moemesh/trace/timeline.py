"""Timelines: one type for simulated, virtual and measured time.

A pipeline simulator, a virtual clock and running ranks all produce a :class:`Timeline`, so that
they can be compared. A record starts when its inputs have arrived; `wait` is the time before
`start` in which the rank waited for them. So *busy* means the same for all sources.

An overlapped block (the forward of one microbatch with the backward of another) is several records
of one rank with the same start and end; nested spans are records inside each other. Statistics take
the union of a rank's intervals, so neither is counted twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, cast, get_args

from moemesh.config.shown import Shown
from moemesh.trace.strict_json import read_fields

Source = Literal["simulated", "virtual", "measured"]
Unit = Literal["seconds", "milliseconds", "microseconds", "ticks"]

#: One unit in microseconds. A tick has no length; it is displayed as one microsecond.
MICROSECONDS: dict[Unit, float] = {
    "seconds": 1e6,
    "milliseconds": 1e3,
    "microseconds": 1.0,
    "ticks": 1.0,
}
#: Kinds of passes of the pipeline: forward, backward, input gradient, weight gradient.
PASS_KINDS = ("F", "B", "I", "W")
#: Kind of the waits for other ranks, inside of passes and of sums of gradients.
COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True)
class WorkRecord:
    """A piece of work of one rank, from `start` to `end` in the timeline's unit.

    `name` is displayed ("forward", "0F3"). `kind` determines group and colour: the pipeline kinds
    "F", "B", "I" (input gradient), "W" (weight gradient), or any word such as "communication".
    `stage`, `microbatch`, `pipe` and `slice` identify a pipeline operation, `step` its step. Raises
    ValueError if it ends before it starts, waits a negative time, or is not finite.
    """

    rank: int
    start: float
    end: float
    name: str
    wait: float = 0.0
    kind: str = ""
    stage: int | None = None
    microbatch: int | None = None
    pipe: int = 0
    slice: int = 0
    step: int | None = None

    def __post_init__(self) -> None:
        what = f"{self.name!r} on rank {self.rank}"
        if not all(map(math.isfinite, (self.start, self.end, self.wait))):
            raise ValueError(f"{what}: {self.start}, {self.end}, {self.wait} must be finite")
        if self.end < self.start:
            raise ValueError(f"{what} ends at {self.end}, before it starts at {self.start}")
        if self.wait < 0:
            raise ValueError(f"{what} waits {self.wait} < 0")

    @property
    def duration(self) -> float:
        return self.end - self.start

    def to_json(self) -> dict[str, Any]:
        """Fields that differ from their default; `rank`, `start`, `end`, `name` always."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkRecord:
        """The inverse of :meth:`to_json`; unknown keys are ignored."""
        return read_fields(cls, data)


def of_blocks(records: Iterable[WorkRecord]) -> Iterable[WorkRecord]:
    """The records with distinct times: of an overlapped block (equal rank, start and end) only the
    first record."""
    firsts: dict[tuple[int, float, float], WorkRecord] = {}
    for record in records:
        firsts.setdefault((record.rank, record.start, record.end), record)
    return firsts.values()


class RankStatistics(NamedTuple):
    """The work of one rank: ``span = end - start = busy + idle``; `wait` explains idle time."""

    rank: int
    start: float
    end: float
    span: float
    busy: float
    idle: float
    wait: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline(Shown):
    """Records of some ranks, in one unit, from one source.

    `digest` identifies the executed schedule, "" without one. Records are ordered by rank, start,
    then longest first, so that equal contents are equal values. Raises ValueError for an unknown
    source or unit, repeated ranks, or a record of another rank.
    """

    ranks: tuple[int, ...]
    records: tuple[WorkRecord, ...]
    source: Source
    unit: Unit = "seconds"
    digest: str = ""

    def __post_init__(self) -> None:
        for name, value, legal in (("source", self.source, Source), ("unit", self.unit, Unit)):
            if value not in get_args(legal):
                raise ValueError(f"{name} {value!r} is none of {get_args(legal)}")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"ranks {self.ranks} hold a rank twice")
        unlisted = {record.rank for record in self.records} - set(self.ranks)
        if unlisted:
            raise ValueError(f"records of ranks {sorted(unlisted)}, which are not in the timeline")
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))
        object.__setattr__(self, "records", tuple(sorted(self.records, key=_order)))

    @property
    def start(self) -> float:
        """Earliest start of all records, 0.0 without records."""
        return min((record.start for record in self.records), default=0.0)

    @property
    def end(self) -> float:
        """Latest end of all records, 0.0 without records."""
        return max((record.end for record in self.records), default=0.0)

    @property
    def span(self) -> float:
        """Maximum over the ranks of last end minus first start."""
        return max((rank.span for rank in self.statistics()), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """Share of ``ranks * span`` without work; 0.0 for an empty timeline."""
        capacity = len(self.ranks) * self.span
        if not capacity:
            return 0.0
        return 1.0 - sum(rank.busy for rank in self.statistics()) / capacity

    def statistics(self) -> tuple[RankStatistics, ...]:
        """Span, busy, idle and waiting time of every rank, ascending."""
        statistics: list[RankStatistics] = []
        for rank, records in self.by_rank().items():
            start = min((record.start for record in records), default=0.0)
            end = max((record.end for record in records), default=0.0)
            # The length of the union of the records' intervals.
            busy, reached = 0.0, float("-inf")
            for record in sorted(records, key=lambda record: record.start):
                if record.end > reached:
                    busy += record.end - max(record.start, reached)
                    reached = record.end
            wait = sum(record.wait for record in records)
            # Rounding may leave idle at -1e-17.
            idle = max(end - start - busy, 0.0)
            statistics.append(RankStatistics(rank, start, end, end - start, busy, idle, wait))
        return tuple(statistics)

    def of_kind(self, kind: str) -> Timeline:
        """A timeline with the records of this kind alone."""
        return replace(self, records=tuple(r for r in self.records if r.kind == kind))

    def by_rank(self) -> dict[int, list[WorkRecord]]:
        """Ordered records of every rank, an empty list for a rank without any."""
        by_rank: dict[int, list[WorkRecord]] = {rank: [] for rank in self.ranks}
        for record in self.records:
            by_rank[record.rank].append(record)
        return by_rank

    def last_step(self) -> Timeline:
        """The records of the highest `step`; all records if none has a step."""
        last = max((r.step for r in self.records if r.step is not None), default=None)
        if last is None:
            return self
        return replace(self, records=tuple(r for r in self.records if r.step == last))

    @classmethod
    def merge(cls, timelines: Iterable[Timeline]) -> Timeline:
        """One timeline of disjoint ranks. Raises ValueError for repeated ranks, or another source,
        unit or digest."""
        parts = list(timelines)
        if not parts:
            raise ValueError("no timeline to merge")
        kinds = {(part.source, part.unit, part.digest) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"timelines of different source, unit or digest: {sorted(kinds)}")
        return replace(
            parts[0],
            ranks=tuple(rank for part in parts for rank in part.ranks),
            records=tuple(record for part in parts for record in part.records),
        )

    def to_json(self) -> dict[str, Any]:
        named = {"source": self.source, "unit": self.unit, "digest": self.digest}
        records = [record.to_json() for record in self.records]
        return {**named, "ranks": list(self.ranks), "records": records}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError, ValueError or OverflowError on
        other data."""
        return cls(
            ranks=tuple(int(rank) for rank in data["ranks"]),
            records=tuple(WorkRecord.from_json(record) for record in data["records"]),
            source=cast(Source, data["source"]),
            unit=cast(Unit, data["unit"]),
            digest=str(data.get("digest", "")),
        )


def _order(record: WorkRecord) -> tuple[Any, ...]:
    """The sort key of a record in its timeline."""
    operation = tuple(
        -1 if n is None else n for n in (record.step, record.stage, record.microbatch)
    )
    rest = (record.kind, record.name, record.pipe, record.slice, record.wait)
    return (record.rank, record.start, -record.end, *operation, *rest)


class TimelineRecorder:
    """Recorder of the work of one rank::

        with recorder.span("optimizer"):
            step()

    `clock` returns seconds and must be monotonic; the default is the machine's monotonic clock,
    which all processes of one machine share, so their timelines merge without alignment. A span
    that is left by an exception is recorded as well.
    """

    def __init__(self, rank: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rank = rank
        self.clock = clock
        self.step: int | None = None
        self._records: list[WorkRecord] = []

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """A context that records the time spent inside it."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(name=name, start=start, end=self.clock())

    def add(self, *, name: str, start: float, end: float, **details: Any) -> None:
        """Record work that was timed elsewhere, for example by CUDA events."""
        values: dict[str, Any] = {"rank": self.rank, "step": self.step, **details}
        self._records.append(WorkRecord(name=name, start=start, end=end, **values))

    def seconds(self, name: str, step: int) -> float:
        """Time spent in the records of this name in step `step`."""
        records = (r for r in self._records if r.name == name and r.step == step)
        return sum(record.end - record.start for record in records)

    def replace_since(self, start: float, name: str, kind: str = "") -> None:
        """Replace the records of discarded work, which begin at `start` or later, by one record
        from `start` until now."""
        self._records = [record for record in self._records if record.start < start]
        self.add(name=name, start=start, end=self.clock(), kind=kind)

    def timeline(self) -> Timeline:
        """The records so far."""
        return Timeline(ranks=(self.rank,), records=tuple(self._records), source="measured")
