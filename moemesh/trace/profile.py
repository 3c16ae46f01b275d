"""Merged traces of torch's profiler on several ranks, on one clock.

Format: "Trace Event Format", Google, 2016. Every rank is a process of the merged trace, with an
additional row for the phases of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from moemesh.config.errors import UserError
from moemesh.config.limits import parse_json
from moemesh.trace.timeline import WorkRecord

# Alignment of the clocks of several machines by barriers.

#: Clock readings of one rank around each barrier: (before, after), in seconds.
Readings = Sequence[tuple[float, float]]


class Offset(NamedTuple):
    """Offset of a clock: `seconds` ahead of another one, ± `uncertainty`."""

    seconds: float
    uncertainty: float


def offset_of(reference: Readings, other: Readings) -> Offset:
    """Time by which the clock of `other` is ahead of that of `reference`.

    No rank leaves a barrier before all have entered it, so every barrier bounds the offset: other's
    begin is before reference's end, and reference's begin before other's end. Returns the middle of
    the remaining interval. Raises ValueError without a barrier.
    """
    if not reference or len(reference) != len(other):
        counts = f"{len(reference)} and {len(other)}"
        raise ValueError(f"{counts} barriers: both ranks need the same number, at least 1")
    low = max(begin - end for (_, end), (begin, _) in zip(reference, other, strict=True))
    high = min(end - begin for (begin, _), (_, end) in zip(reference, other, strict=True))
    return Offset((low + high) / 2, max((high - low) / 2, 0.0))


Event = dict[str, Any]
#: Folder of a run for the traces of its ranks.
FOLDER = "profile"
#: Steps before the trace: those that fill caches, then those that are measured without the
#: profiler, which slows operations.
WARM_UP, PLAIN = 1, 3
#: Thread number of the phases in the merged trace: no real thread has it.
PHASES_THREAD = 0


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Profile of one rank: complete `events` (`ts` and `dur` in microseconds on the common clock),
    `phases` of its steps (seconds on the common clock), and the `offset` of its clock (None: it is
    the common one). For the steps without the profiler: their phases `plain` (seconds on the rank's
    own clock), and `waited`, the share of waiting for other ranks (None: unknown)."""

    rank: int
    host: str
    events: Sequence[Event]
    phases: Sequence[WorkRecord]
    plain: Sequence[WorkRecord] = ()
    waited: float | None = None
    offset: Offset | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profiles of all ranks, ordered, over `num_steps` profiled steps."""

    ranks: Sequence[RankProfile]
    num_steps: int

    def to_json(self) -> dict[str, Any]:
        """The merged trace for Perfetto and chrome://tracing; its first event of the profiler is at
        time 0."""
        start = min((e["ts"] for profile in self.ranks for e in profile.events), default=0.0)
        events: list[Event] = []
        for profile in self.ranks:
            rank, title = profile.rank, f"rank {profile.rank} on {profile.host}"
            named = {"ph": "M", "pid": rank, "tid": PHASES_THREAD}
            events.append({"name": "process_name", **named, "args": {"name": title}})
            events.append({"name": "process_sort_index", **named, "args": {"sort_index": rank}})
            events.append({"name": "thread_name", **named, "args": {"name": "phases"}})
            for record in profile.phases:
                events.append(
                    {
                        "ph": "X",
                        "name": record.name,
                        "cat": "phase",
                        "pid": rank,
                        "tid": PHASES_THREAD,
                        "ts": record.start * 1e6 - start,
                        "dur": record.duration * 1e6,
                        "args": {"step": record.step, "wait_ms": record.wait * 1e3},
                    }
                )
            events += [
                {**event, "pid": rank, "ts": event["ts"] - start} for event in profile.events
            ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_profile(folder: Path) -> Profile:
    """The profile in `folder`, written by the ranks of a run.

    Raises UserError without a profile, and for a missing, truncated or foreign file.
    """
    paths = sorted(folder.glob("rank-*.notes.json"))
    if not paths:
        raise UserError(f"{folder} holds no profile of a rank")
    notes: list[dict[str, Any]] = []
    ranks, num_steps = list[RankProfile](), 0
    for path in paths:
        try:
            notes.append(_object(path))
            ranks.append(_rank_profile(folder, notes[-1], notes[0]))
            num_steps = int(notes[0]["num_steps"])
        except (OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            message = f"{path} and its trace do not make a profile of a rank: {reason}"
            raise UserError(f"{message}\nfix: repeat the profile of the run") from error
    return Profile(ranks=ranks, num_steps=num_steps)


def _rank_profile(folder: Path, note: Mapping[str, Any], first: Mapping[str, Any]) -> RankProfile:
    """The profile of the rank with these notes, on the clock of the `first` rank."""
    offset = None
    if note["boot"] != first["boot"]:
        offset = offset_of(first["readings"], note["readings"])
    trace = _object(folder / str(note["trace"]))
    ahead = offset.seconds if offset else 0.0
    event_shift = int(trace.get("baseTimeNanoseconds", 0)) / 1e3 - ahead * 1e6
    events: list[Event] = []
    for event in cast("list[Event]", trace["traceEvents"]):
        # Spans of the profiler itself have a text as their process.
        if event.get("ph") == "X" and isinstance(event.get("pid"), int):
            start, length = float(event["ts"]) + event_shift, float(event["dur"])
            events.append({**event, "name": str(event["name"]), "ts": start, "dur": length})
    # Seconds from the rank's monotonic clock, on which phases are, to the common clock, which
    # is the time of the first rank since the epoch.
    phase_shift = float(note["epoch_minus_monotonic"]) - ahead
    phases = [WorkRecord.from_json(record) for record in note["phases"]]
    return RankProfile(
        rank=int(note["rank"]),
        host=str(note["host"]),
        events=events,
        phases=[
            replace(phase, start=phase.start + phase_shift, end=phase.end + phase_shift)
            for phase in phases
        ],
        plain=[WorkRecord.from_json(record) for record in note.get("plain", ())],
        waited=note.get("waited"),
        offset=offset,
    )


def _object(path: Path) -> dict[str, Any]:
    content: Any = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", content)
