"""A pipeline's timeline written to files: an SVG picture, a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moemesh.report.files import write_texts
from moemesh.report.timeline_picture import timeline_rows
from moemesh.trace.pipeline import activations, backlog, flows
from moemesh.trace.timeline import MICROSECONDS, Timeline

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
        scale, origin = MICROSECONDS[timeline.unit], timeline.start
        named = {"ph": "M", "pid": process, "tid": 0}
        title = f"pipeline, {timeline.source}"
        events.append({"name": "process_name", **named, "args": {"name": title}})
        for rank in timeline.ranks:
            named = {"ph": "M", "pid": process, "tid": rank}
            events.append({"name": "thread_name", **named, "args": {"name": f"rank {rank}"}})
            events.append({"name": "thread_sort_index", **named, "args": {"sort_index": rank}})
        for record in timeline.records:
            details = record.to_json()
            for name in ("rank", "start", "end", "name", "kind"):
                details.pop(name, None)
            if record.wait:
                details["wait"] = record.wait * scale
            events.append(
                {
                    "name": record.name,
                    "cat": record.kind or "work",
                    "ph": "X",
                    "ts": (record.start - origin) * scale,
                    "dur": record.duration * scale,
                    "pid": process,
                    "tid": record.rank,
                    "args": details,
                }
            )
        # A message is an arrow from the end of one record to the start of another.
        for producer, consumer in ((flow.producer, flow.consumer) for flow in flows(timeline)):
            number += 1
            common = {"name": "message", "cat": "message", "id": number, "pid": process}
            # A flow belongs to the record that encloses its time, and an interval excludes its end.
            left = (producer.end - origin) * scale - producer.duration * scale / 1024
            right = (consumer.start - origin) * scale
            events += [
                {**common, "ph": "s", "ts": left, "tid": producer.rank},
                {**common, "ph": "f", "bp": "e", "ts": right, "tid": consumer.rank},
            ]
        for name, counts in (
            ("activations", activations(timeline, held=held)),
            ("weight gradients put off", backlog(timeline)),
        ):
            for rank, steps in counts.items():
                named = {"name": f"{name}, rank {rank}", "ph": "C"}
                events += [
                    {
                        **named,
                        "ts": (time - origin) * scale,
                        "pid": process,
                        "args": {"value": value},
                    }
                    for time, value in steps
                ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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
