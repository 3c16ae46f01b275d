"""A pipeline's timeline written to files: an SVG picture, a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moemesh.report.files import write_texts
from moemesh.report.timeline_picture import timeline_rows
from moemesh.trace.pipeline import Steps, activations, backlog, flows
from moemesh.trace.timeline import MICROSECONDS, Timeline, WorkRecord

# Timelines as a trace for Perfetto and chrome://tracing.
#
# Format: "Trace Event Format", Google, 2016. Opens next to a profiler's trace of the same step.


Event = dict[str, Any]


def to_perfetto(*timelines: Timeline, held: float = 1.0) -> dict[str, Any]:
    """One process a timeline (0, 1, ...), one thread a rank, times in microseconds from its start.

    Each record is a complete event, each message between ranks a flow from its producer to its
    consumer, and counters follow what a rank holds: activations (see
    :func:`moemesh.trace.pipeline.activations` for `held`) and weight gradients put off.
    """
    events: list[Event] = []
    number = 0
    for process, timeline in enumerate(timelines):
        named = {"ph": "M", "pid": process, "tid": 0}
        title = f"pipeline, {timeline.source}"
        header: list[Event] = [{"name": "process_name", **named, "args": {"name": title}}]
        for rank in timeline.ranks:
            named = {"ph": "M", "pid": process, "tid": rank}
            header.append({"name": "thread_name", **named, "args": {"name": f"rank {rank}"}})
            header.append({"name": "thread_sort_index", **named, "args": {"sort_index": rank}})
        events += header
        clock = _Clock(process, timeline)
        events += [clock.complete(record) for record in timeline.records]
        for flow in flows(timeline):
            number += 1
            events += clock.flow(number, flow.producer, flow.consumer)
        for name, counts in (
            ("activations", activations(timeline, held=held)),
            ("weight gradients put off", backlog(timeline)),
        ):
            for rank, steps in counts.items():
                events += clock.counter(f"{name}, rank {rank}", steps)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Clock:
    """Events of one timeline, in microseconds from its first record."""

    def __init__(self, process: int, timeline: Timeline) -> None:
        self.process = process
        self.scale = MICROSECONDS[timeline.unit]
        self.origin = timeline.start

    def at(self, time: float) -> float:
        return (time - self.origin) * self.scale

    def complete(self, record: WorkRecord) -> Event:
        details = record.to_json()
        for name in ("rank", "start", "end", "name", "kind"):
            details.pop(name, None)
        if record.wait:
            details["wait"] = record.wait * self.scale
        return {
            "name": record.name,
            "cat": record.kind or "work",
            "ph": "X",
            "ts": self.at(record.start),
            "dur": record.duration * self.scale,
            "pid": self.process,
            "tid": record.rank,
            "args": details,
        }

    def flow(self, number: int, producer: WorkRecord, consumer: WorkRecord) -> list[Event]:
        """An arrow from the end of one record to the start of another."""
        common = {"name": "message", "cat": "message", "id": number, "pid": self.process}
        # A flow belongs to the record that encloses its time, and an interval excludes its end.
        left = self.at(producer.end) - producer.duration * self.scale / 1024
        return [
            {**common, "ph": "s", "ts": left, "tid": producer.rank},
            {**common, "ph": "f", "bp": "e", "ts": self.at(consumer.start), "tid": consumer.rank},
        ]

    def counter(self, name: str, steps: Steps) -> list[Event]:
        return [
            {
                "name": name,
                "ph": "C",
                "ts": self.at(time),
                "pid": self.process,
                "args": {"value": value},
            }
            for time, value in steps
        ]


def write(
    timeline: Timeline, *, svg: Path | None, trace: Path | None, title: str, held: float = 1.0
) -> None:
    """Draw `timeline` with the memory of each rank, and write its trace, where a path is given.

    `held` is the share of activations that a weight gradient needs. Raises UserError, with nothing
    written, when a file cannot be.
    """
    contents: list[tuple[Path, str]] = []
    if svg is not None:
        memory = activations(timeline, held=held)
        contents.append((svg, timeline_rows(timeline, memory=memory, title=title) + "\n"))
    if trace is not None:
        contents.append((trace, json.dumps(to_perfetto(timeline, held=held)) + "\n"))
    write_texts(contents)
