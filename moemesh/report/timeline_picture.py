"""A timeline as rows of boxes: one row for each rank, one colour for each kind, idle time shaded.

Overlapping records have separate lanes, equal intervals share one box. :func:`to_perfetto` writes
the same records for a comparison with a profiler's trace of the same step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moemesh.report import svg
from moemesh.trace.pipeline import Steps, activations, backlog, flows, places
from moemesh.trace.timeline import COMMUNICATION, MICROSECONDS, Timeline, WorkRecord

#: Colours of well-known kinds, distinct in hue and in lightness.
KINDS: dict[str, str] = {"F": "#1d4f91", "B": "#f0a030", "I": "#b84f16", "W": "#a3d495"}
#: Share of white in the tint of a second chunk or pipe.
_TINT = 0.5
_WAITING = "#e3b1b1"
#: Colour of joined neighbours of different kinds that are too narrow to be drawn singly.
_MIXED = "#8b95a3"
_MEMORY = "#6d5a9c"
_COMMUNICATION = "#c2347f"
#: Colours in the dark scheme, see :data:`moemesh.report.svg.DARK`: of kinds with white text, of
#: their tints, which stay distinct from them, of waits and of memory.
DARK: dict[str, str] = {
    KINDS["F"]: "#7fb4f0",
    KINDS["I"]: "#ff9f6b",
    svg.tint(KINDS["F"], _TINT): "#c9defa",
    svg.tint(KINDS["I"], _TINT): "#ffd3b8",
    _WAITING: "#7d4a4a",
    _MEMORY: "#a797d8",
}
#: Names of work with the colour of a pipeline kind.
SAME: dict[str, str] = {"forward": "F", "backward": "B"}
LONG_NAMES: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
#: Most lanes of a rank, ranks, boxes, and kinds in the legend of a picture.
_MAX_LANES, _MAX_ROWS, _MAX_BOXES, _MAX_KEYS = 4, 32, 5000, 12
#: Margins, and height of the strip of memory, in pixels.
_LEFT, _RIGHT, _STRIP = 66, 12, 14.0


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A record's position in its rank's row: `lane` downwards, and `part` of `parts` of the lane.

    `place`: index of the rank's chunk or pipe; odd ones are tinted. `sliced`: its microbatch runs
    in slices.
    """

    record: WorkRecord
    lane: int
    part: int = 0
    parts: int = 1
    place: int = 0
    sliced: bool = False

    @property
    def tinted(self) -> bool:
        return self.place % 2 == 1

    @property
    def label(self) -> str:
        """The microbatch with its slice, or the name of other work."""
        record = self.record
        if record.microbatch is None:
            return record.name
        return f"{record.microbatch}.{record.slice}" if self.sliced else str(record.microbatch)

    def colour(self, colours: dict[str, str]) -> str:
        """The kind's colour or its tint."""
        colour = colours[key_of(self.record)]
        return svg.tint(colour, _TINT) if self.tinted else colour


def boxes_of(records: Sequence[WorkRecord]) -> list[Rectangle]:
    """Layout of one rank's records: overlapping ones in lanes, of which the last has all further
    ones, equal intervals as one block.

    `records` in the timeline's order (start, longest first).
    """
    blocks: defaultdict[tuple[float, float], list[WorkRecord]] = defaultdict(list)
    for record in records:
        blocks[record.start, record.end].append(record)
    place_of = places(records)
    sliced = any(record.slice for record in records)
    ends: list[float] = []
    placed: list[Rectangle] = []
    for (start, end), block in blocks.items():
        free = (lane for lane, busy_until in enumerate(ends) if busy_until <= start)
        lane = next(free, len(ends))
        if lane == len(ends):
            ends.append(end)
        ends[lane] = end
        lane = min(lane, _MAX_LANES - 1)
        # The forward on top, for any stage.
        for part, record in enumerate(sorted(block, key=lambda r: r.kind != "F")):
            place = record.pipe
            if record.stage is not None:
                place = place_of[record.pipe, record.stage]
            share = {"lane": lane, "part": part, "parts": len(block)}
            placed.append(Rectangle(record=record, place=place, sliced=sliced, **share))
    return placed


def key_of(record: WorkRecord) -> str:
    """The key of a record's colour: its kind, or its name without a kind."""
    word = record.kind or record.name
    return SAME.get(word, word)


def timeline_rows(
    *timelines: Timeline,
    memory: Mapping[int, Steps] | None = None,
    title: str = "Timeline per rank",
    identity: str = "timeline",
    most: int = _MAX_BOXES,
) -> str:
    """Records of the first 32 ranks over time, as about `most` boxes. "" without records.

    Several timelines (simulated, measured) are drawn below one another on one time axis, each from
    its own start. The axis has the unit of the last timeline. If only one of the two is in ticks,
    the first is stretched so that the busiest ranks of both have the same busy time: order and
    waiting can be compared.

    Boxes too narrow to see are joined with their neighbours, in grey for mixed kinds. `memory` of
    the first timeline (rank -> steps, as returned by :func:`moemesh.trace.pipeline.activations`) is
    drawn as a strip under each row, all on one scale.
    """
    drawn = [timeline for timeline in timelines if timeline.records]
    if not drawn:
        return ""
    panels = [
        _Panel(timeline, memory if index == 0 else None) for index, timeline in enumerate(drawn)
    ]
    # Factors from the unit of each timeline to that of the last one.
    last, factors = drawn[-1], list[float]()
    for timeline in drawn:
        factor = MICROSECONDS[timeline.unit] / MICROSECONDS[last.unit]
        if (timeline.unit == "ticks") != (last.unit == "ticks"):
            busy, target = (max(r.busy for r in x.statistics()) for x in (timeline, last))
            factor = target / (busy or 1) or 1.0
        factors.append(factor)
    longest = max(panel.length * factor for panel, factor in zip(panels, factors, strict=True))
    # Instants have no length: any scale works.
    pixels = (svg.WIDTH - _LEFT - _RIGHT) / (longest or 1)
    boxes = [box for panel in panels for box in panel.boxes]
    # Pipeline kinds first, then the others by busy time: the palette repeats for minor kinds only.
    worked: defaultdict[str, float] = defaultdict(float)
    for box in boxes:
        worked[key_of(box.record)] += box.record.duration
    others = sorted(worked.keys() - {*KINDS, COMMUNICATION}, key=lambda key: (-worked[key], key))
    palette = (*svg.COLOURS[1:], *(svg.tint(colour) for colour in svg.COLOURS))
    colours = (
        KINDS
        | {COMMUNICATION: _COMMUNICATION}
        | {key: palette[i % len(palette)] for i, key in enumerate(others)}
    )
    rows, y = list[str](), 0.0
    for panel, factor in zip(panels, factors, strict=True):
        if len(panels) > 1:
            heading = panel.timeline.source
            if panel.timeline.unit == "ticks" and last.unit != "ticks":
                heading += f", a tick stretched to {_duration(factor, last)}"
            rows.append(svg.text(_LEFT, y + 10, heading, fill=svg.MUTED))
            y += 16
        y = panel.draw(rows, y, factor * pixels, colours, most // len(panels))
    axis_factor, axis_name = _axis_unit(longest, last)
    for value in svg.ticks(0, longest * axis_factor, 8):
        x = _LEFT + value / axis_factor * pixels
        label = svg.text(x, y + 16, svg.short(round(value, 9)), anchor="middle", fill=svg.MUTED)
        rows += [svg.line(x, y, x, y + 4, svg.INK), label]
    right = svg.WIDTH - _RIGHT
    rows += [
        svg.line(_LEFT, y, right, y, svg.INK),
        svg.line(_LEFT, 0, _LEFT, y, svg.GRID),
        svg.text(right, y + 32, axis_name, anchor="end", fill=svg.MUTED),
    ]
    picture = "".join(rows)
    further = (
        ("waiting for inputs", _WAITING),
        ("several, too narrow to draw", _MIXED),
        ("memory held", _MEMORY),
        ("idle", svg.IDLE),
    )
    second = "pipe 1" if any(box.record.pipe for box in boxes) else "odd chunk"
    tints = {key_of(box.record): box.colour(colours) for box in boxes if box.tinted}
    named = [(LONG_NAMES.get(key, key), key) for key in colours]
    entries = [(name, colours[key]) for name, key in named if key in worked]
    entries += [(f"{name}, {second}", tints[key]) for name, key in named if key in tints]
    entries = entries[:_MAX_KEYS]
    entries += [(name, colour) for name, colour in further if f'fill="{colour}"' in picture]
    key, used = svg.legend(entries, left=0, top=4)
    body = [key, f'<g transform="translate(0 {used + 14:g})">', *rows, "</g>"]
    sentences: list[str] = []
    for panel in panels:
        timeline, shown = panel.timeline, len(panel.layout)
        which = f"the first {shown} of " if shown < len(timeline.ranks) else ""
        sentences.append(
            f"Operations of {which}{len(timeline.ranks)} ranks, {timeline.source}; span "
            f"{_duration(timeline.span, timeline)}, {timeline.bubble_rate:.1%} of it without work."
        )
    return svg.figure(identity, title, " ".join(sentences), used + y + 50, body)


class _Panel:
    """Rows of one timeline. `memory`: rank -> steps of its memory; `origin`: start of the time
    axis; `length`: from there to the last end, in the timeline's unit."""

    def __init__(self, timeline: Timeline, memory: Mapping[int, Steps] | None) -> None:
        self.timeline, self.memory = timeline, memory or {}
        by_rank = timeline.by_rank()
        self.layout = {rank: boxes_of(by_rank[rank]) for rank in timeline.ranks[:_MAX_ROWS]}
        self.boxes = [box for boxes in self.layout.values() for box in boxes]
        records = [box.record for box in self.boxes]
        self.origin = min((record.start - record.wait for record in records), default=0.0)
        self.length = max((record.end for record in records), default=self.origin) - self.origin

    def draw(
        self, parts: list[str], y: float, pixels: float, colours: dict[str, str], limit: int
    ) -> float:
        """Add the rows from `y` downwards, `pixels` for a unit of time; returns their lower
        edge."""

        def at(time: float) -> float:
            return _LEFT + (time - self.origin) * pixels

        most = max((value for steps in self.memory.values() for _, value in steps), default=0.0)
        limit //= max(len(self.layout), 1)
        for rank, boxes in self.layout.items():
            lanes = max((box.lane for box in boxes), default=0) + 1
            height = 20.0 if lanes == 1 else 14.0 * lanes
            parts.append(svg.text(_LEFT - 8, y + height / 2 + 4, f"rank {rank}", anchor="end"))
            parts.append(svg.rectangle(_LEFT, y, svg.WIDTH - _LEFT - _RIGHT, height, svg.IDLE))
            waits = [
                svg.rectangle(at(r.start - r.wait), y, r.wait * pixels, height / lanes, _WAITING)
                for r in (box.record for box in boxes)
                if r.wait * pixels >= 0.3
            ]
            # Raise the limit of "too narrow" until few enough boxes remain.
            narrow, drawn = 0.5, list[str]()
            while True:
                drawn = _row(boxes, at, y, height / lanes, colours, narrow)
                if len(drawn) <= limit or narrow >= svg.WIDTH:
                    break
                narrow *= 2
            parts += [*waits[:limit], *drawn]
            y += height
            if steps := self.memory.get(rank):
                # Memory of the rank over time as an area, labelled with its peak.
                bottom, share = y + 1 + _STRIP, (_STRIP - 1) / (most or 1)
                path = f"M{svg.coordinate(at(steps[0][0]))} {svg.coordinate(bottom)}"
                for time, value in steps:
                    path += f"H{svg.coordinate(at(time))}V{svg.coordinate(bottom - value * share)}"
                path += (
                    f"H{svg.coordinate(at(self.origin + self.length))}V{svg.coordinate(bottom)}z"
                )
                peak = f"peak {max(value for _, value in steps):.4g}"
                parts.append(f'<path d="{path}" fill="{_MEMORY}"/>')
                parts.append(
                    svg.text(_LEFT - 8, bottom - 3, peak, anchor="end", fill=svg.MUTED, size=9)
                )
                y += _STRIP + 1
            y += 5
        return y


def _row(
    boxes: Sequence[Rectangle],
    at: Callable[[float], float],
    row: float,
    lane_height: float,
    colours: dict[str, str],
    narrow: float,
) -> list[str]:
    """Boxes wider than `narrow` pixels singly, runs of narrower ones as one box."""
    drawn: list[str] = []
    # Lane -> colour, left and right edge of the run of narrow boxes that is being joined.
    runs: dict[int, tuple[str, float, float]] = {}

    def finish(lane: int) -> None:
        if lane in runs:
            colour, left, right = runs.pop(lane)
            width = max(right - left, 0.3)
            drawn.append(svg.rectangle(left, row + lane * lane_height, width, lane_height, colour))

    for box in boxes:
        colour = box.colour(colours)
        left, right = at(box.record.start), at(box.record.end)
        if (width := right - left) > narrow:
            finish(box.lane)
            height = lane_height / box.parts
            top = row + box.lane * lane_height + box.part * height
            edge = f' stroke="{svg.INK}" stroke-width="0.5"' if width > 3 else ""
            title = box.record.name if width > 2 else ""
            drawn.append(svg.rectangle(left, top, width, height, colour, title=title, more=edge))
            size = min(10.0, height - 2)
            if size >= 7 and svg.text_width(box.label, size) + 2 < width:
                x, y, ink = left + width / 2, top + height / 2 + size * 0.36, svg.ink_on(colour)
                drawn.append(svg.text(x, y, box.label, anchor="middle", fill=ink, size=size))
            continue
        run = runs.get(box.lane)
        if run and left - run[2] <= narrow:
            both = colour if colour == run[0] else _MIXED
            runs[box.lane] = (both, run[1], max(run[2], right))
        else:
            finish(box.lane)
            runs[box.lane] = (colour, left, right)
    for lane in sorted(runs):
        finish(lane)
    return drawn


def _axis_unit(length: float, timeline: Timeline) -> tuple[float, str]:
    """Factor from the timeline's unit to a readable one, and that unit's name."""
    if timeline.unit == "ticks":
        return 1.0, "ticks"
    microseconds = MICROSECONDS[timeline.unit]
    for unit in ("seconds", "milliseconds"):
        if length * microseconds >= MICROSECONDS[unit]:
            return microseconds / MICROSECONDS[unit], unit
    return microseconds, "microseconds"


def _duration(length: float, timeline: Timeline) -> str:
    """`length` in the unit of `timeline`, as text with a readable unit."""
    factor, unit = _axis_unit(length, timeline)
    return f"{length * factor:.4g} {unit}"


def to_perfetto(*timelines: Timeline, held: float = 1.0) -> dict[str, Any]:
    """A trace for Perfetto and chrome://tracing ("Trace Event Format", Google, 2016): one process
    for each timeline (0, 1, ...), one thread for each rank, times in microseconds from the start.

    Each record is a complete event, each message between ranks a flow from its producer to its
    consumer. Counters show what a rank holds: activations (see
    :func:`moemesh.trace.pipeline.activations` for `held`) and deferred weight gradients.
    """
    events: list[dict[str, Any]] = []
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
        # Messages are arrows from the end of one record to the start of another.
        for producer, consumer in ((flow.producer, flow.consumer) for flow in flows(timeline)):
            number += 1
            common = {"name": "message", "cat": "message", "id": number, "pid": process}
            # A flow belongs to the record that encloses its time; intervals exclude their end.
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
                named = {"name": f"{name}, rank {rank}", "ph": "C", "pid": process}
                events += [
                    {**named, "ts": (time - origin) * scale, "args": {"value": value}}
                    for time, value in steps
                ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
