"""Summary of a profile in at most 20 lines: the parts of a step's time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moemesh.report.document import plural
from moemesh.report.timeline_picture import KINDS, LONG_NAMES
from moemesh.trace.profile import PLAIN, Event, Profile, RankProfile
from moemesh.trace.timeline import WorkRecord

#: Prefix of the names of marks at the start of a collective.
MARK = "collective: "
#: Shorter pauses of a thread are Python's overhead.
_PAUSE_MICROSECONDS = 100.0
#: Most operations and waits that are listed.
_OPERATIONS, _WAITS = 5, 3
_AUTOGRAD = ("autograd::", "torch::autograd::")


@dataclass(frozen=True)
class Pause:
    """Interval in which a thread ran no operation. `collective`: text of its last mark, such as
    "all_reduce over tp"; `is_in_pass`: during a forward or backward."""

    rank: int
    microseconds: float
    collective: str
    is_in_pass: bool

    @property
    def axis(self) -> str:
        return self.collective.split(" over ")[-1].split(" ")[0]


def verdict(profile: Profile) -> list[str]:
    """The lines of the summary, for a terminal."""
    spans = [_span(rank.phases) for rank in profile.ranks]
    steps = max(profile.num_steps, 1)
    step = statistics.fmean(spans) / steps if spans else 0.0
    lines = [
        f"profile     {plural(profile.num_steps, 'step')} on {plural(len(profile.ranks), 'rank')}, "
        f"{step / 1e3:,.1f} ms a step with the profiler, which slows operations and long waits"
    ]
    # Phases of each rank, and their microseconds in all: those of steps without the profiler, if
    # they were recorded.
    plain = [rank.plain for rank in profile.ranks if rank.plain]
    phases_of, total = [rank.phases for rank in profile.ranks], step * steps
    if plain:
        phases_of, total = plain, statistics.fmean(map(_span, plain))
        lines.append(f"without it  {total / PLAIN / 1e3:,.1f} ms a step, of which the shares are")
    parts: defaultdict[str, float] = defaultdict(float)
    for phases in phases_of:
        counted: set[tuple[float, float]] = set()  # operations of a block share one interval
        for record in phases:
            parts["waiting for stages"] += record.wait * 1e6 / len(phases_of)
            if (record.start, record.end) not in counted:
                counted.add((record.start, record.end))
                name = LONG_NAMES.get(record.kind, record.name)
                parts[name] += record.duration * 1e6 / len(phases_of)
    lines.append("phases      " + _shares(dict(parts), total) + "  (mean rank)")
    pauses = [pause for rank in profile.ranks for pause in pauses_of(rank)]
    # Measured waits are divided among axes like the pauses of the profiled steps; without a
    # measurement the pauses are shown.
    by_axis: defaultdict[str, float] = defaultdict(float)
    for pause in pauses:
        by_axis[pause.axis] += pause.microseconds / len(profile.ranks)
    if waited := [rank.waited for rank in profile.ranks if rank.waited is not None]:
        share = statistics.fmean(waited)
        shares = _shares(by_axis, sum(by_axis.values()) / share if share else 0.0) or f"{share:.1%}"
        lines.append(f"waits       {shares}  (for other ranks, divided by axis as pauses are)")
    else:
        shares = _shares(by_axis, step * steps) or "none above 0.1 ms"
        how = "with the profiler: pauses after a collective, by its axis"
        lines.append(f"waits       {shares}  ({how})")
    lines += _longest_operations(profile, steps)
    for pause in sorted(pauses, key=lambda pause: -pause.microseconds)[:_WAITS]:
        milliseconds = pause.microseconds / 1e3
        lines.append(f"long wait   {milliseconds:,.1f} ms on rank {pause.rank}, {pause.collective}")
    if len(profile.ranks) > 1:
        busy: dict[int, float] = {}  # microseconds in passes, without waits
        for rank in profile.ranks:
            passes = sum(record.duration for record in rank.phases if record.kind in KINDS) * 1e6
            waits = sum(p.microseconds for p in pauses if p.rank == rank.rank and p.is_in_pass)
            busy[rank.rank] = max(passes - waits, 0.0)
        mean = statistics.fmean(busy.values()) if busy else 0.0
        if not mean:
            lines.append("imbalance   no rank recorded a forward or backward pass")
        else:
            slowest = max(busy, key=lambda rank: (busy[rank], -rank))
            quickest = min(busy, key=lambda rank: (busy[rank], rank))
            lines.append(
                f"imbalance   rank {slowest} works {busy[slowest] / mean:.2f} times the mean, "
                f"rank {quickest} {busy[quickest] / mean:.2f} times (passes without waits)"
            )
    offsets = {rank.host: rank.offset for rank in profile.ranks if rank.offset is not None}
    if not offsets:
        return [*lines, "clocks      one machine: the ranks share a clock"]
    worst = max(rank.offset.uncertainty for rank in profile.ranks if rank.offset is not None)
    shown = [f"{host} {offset.seconds * 1e3:+.3f} ms" for host, offset in list(offsets.items())[:4]]
    named = f"{', '.join(shown)}, ± {worst * 1e3:.3f} ms"
    return [*lines, f"clocks      aligned to rank {profile.ranks[0].rank}: {named}"]


def _span(phases: Sequence[WorkRecord]) -> float:
    """Microseconds from the first phase to the end of the last one."""
    if not phases:
        return 0.0
    start = min(record.start - record.wait for record in phases)
    return (max(record.end for record in phases) - start) * 1e6


def _shares(parts: dict[str, float], whole: float) -> str:
    """Shares of `whole` of at least 0.1 %, largest first."""
    named = sorted(parts.items(), key=lambda item: -item[1])
    return "  ".join(
        f"{name} {value / whole:.1%}" for name, value in named if whole and value / whole >= 0.001
    )


def pauses_of(rank: RankProfile) -> list[Pause]:
    """Pauses above 0.1 ms between operations of a thread, after a mark of a collective and inside
    the computing phases of a step."""
    computing = [r for r in rank.phases if r.kind in KINDS or r.name == "reduce"]
    spans = [(record.start * 1e6, record.end * 1e6, record) for record in computing]
    threads: defaultdict[object, list[Event]] = defaultdict(list)
    for event in rank.events:
        name, kind = str(event["name"]), event.get("cat")
        if name.startswith(MARK) or kind == "cpu_op":
            threads[event["tid"]].append(event)
    pauses: list[Pause] = []
    for events in threads.values():
        marks = [event for event in events if str(event["name"]).startswith(MARK)]
        num_passed = 0  # marks before the pause
        outer = [event for event, _, is_outer in _operations(events) if is_outer]
        for before, after in pairwise(outer):
            begin, end = before["ts"] + before["dur"], after["ts"]
            while num_passed < len(marks) and marks[num_passed]["ts"] <= begin:
                num_passed += 1
            length = end - begin
            if length < _PAUSE_MICROSECONDS or not num_passed:
                continue
            # Phases around the pause: whether each is a forward or backward.
            are_passes = [record.kind in KINDS for start, stop, record in spans
                          if start <= begin and end <= stop]  # fmt: skip
            if are_passes:
                name = str(marks[num_passed - 1]["name"]).removeprefix(MARK)
                pauses.append(Pause(rank.rank, length, name, any(are_passes)))
    return pauses


def _operations(events: Sequence[Event]) -> list[tuple[Event, float, bool]]:
    """Operations of a thread ordered by time, each with its self time in microseconds, and whether
    it is an outermost one.

    Steps of autograd are excluded: the time outside of their operations is Python, or waiting.
    """
    operations = [
        event
        for event in events
        if event.get("cat") == "kernel"
        or ("::" in (name := str(event["name"])) and not name.startswith(_AUTOGRAD))
    ]
    operations.sort(key=lambda event: (event["ts"], -event["dur"]))
    self_times = [float(event["dur"]) for event in operations]
    enclosing: list[int] = []  # numbers of the operations around the present one, outermost first
    is_outer: list[bool] = []
    ends = [event["ts"] + event["dur"] for event in operations]
    for number, event in enumerate(operations):
        while enclosing and ends[enclosing[-1]] <= event["ts"]:
            enclosing.pop()
        is_outer.append(not enclosing)
        if enclosing:
            self_times[enclosing[-1]] -= event["dur"]
        enclosing.append(number)
    return list(zip(operations, self_times, is_outer, strict=True))


def _longest_operations(profile: Profile, steps: int) -> list[str]:
    """Lines on the operations with the largest self time (without nested operations)."""
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for rank in profile.ranks:
        threads: defaultdict[object, list[Event]] = defaultdict(list)
        for event in rank.events:
            if event.get("cat") in ("cpu_op", "kernel"):
                threads[event["tid"]].append(event)
        for events in threads.values():
            for event, self_time, _ in _operations(events):
                if not str(event["name"]).startswith("c10d::"):
                    totals[str(event["name"])].append(self_time)
    named = sorted(totals, key=lambda name: -sum(totals[name]))[:_OPERATIONS]
    ranks = len(profile.ranks)
    return [
        f"operation   {name[:60]}: {sum(totals[name]) / steps / ranks / 1e3:,.2f} ms a step and "
        f"rank, {len(totals[name]) / steps / ranks:,.0f} calls"
        for name in named
    ]
