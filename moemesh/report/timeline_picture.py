"""A timeline as rows of boxes: one row a rank, one colour a kind, idle time shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moemesh.report.boxes import KINDS as KINDS
from moemesh.report.boxes import Rectangle, colours_of, legend_entries
from moemesh.report.boxes import boxes_of as boxes_of
from moemesh.report.svg import (
    GRID,
    IDLE,
    INK,
    MUTED,
    WIDTH,
    coordinate,
    figure,
    ink_on,
    legend,
    line,
    rectangle,
    short,
    text,
    text_width,
    ticks,
)
from moemesh.trace.pipeline import Steps
from moemesh.trace.timeline import MICROSECONDS, Timeline

_WAITING = "#e3b1b1"
#: Neighbours of different colours that are too narrow to be drawn one by one.
_MIXED = "#8b95a3"
_MEMORY = "#6d5a9c"
#: As :data:`moemesh.report.svg.DARK`.
DARK: dict[str, str] = {_WAITING: "#7d4a4a", _MEMORY: "#a797d8"}
_MAX_ROWS = 32
_MAX_BOXES = 5000
_MAX_KEYS = 12
_LEFT, _RIGHT = 66, 12
_STRIP = 14.0


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Pixels of a time: `origin` lies at the left edge."""

    origin: float
    pixels: float

    def x(self, time: float) -> float:
        return _LEFT + (time - self.origin) * self.pixels


def timeline_rows(
    timeline: Timeline,
    *,
    memory: Mapping[int, Steps] | None = None,
    title: str = "Timeline per rank",
    identity: str = "timeline",
) -> str:
    """Every rank's records over time; past 32 ranks the first 32. "" when nothing was recorded.

    Boxes too narrow to be seen are joined with their neighbours; grey where kinds mix. `memory`
    (rank -> steps, such as :func:`moemesh.trace.pipeline.activations` gives) is drawn as a strip
    under each row, all on one scale.
    """
    return timelines_stacked([timeline], memory=memory, title=title, identity=identity)


def timelines_stacked(
    timelines: Sequence[Timeline],
    *,
    memory: Mapping[int, Steps] | None = None,
    title: str = "Timelines per rank",
    identity: str = "timelines",
) -> str:
    """Timelines under one another on one time axis, each from its own start: simulated, measured.

    The axis has the unit of the last one. A timeline in ticks beside others in seconds is stretched
    so that its busiest rank works as long as theirs: what differs then is order and waiting.
    "" when nothing was recorded. `memory` belongs to the first timeline.
    """
    drawn = [timeline for timeline in timelines if timeline.records]
    if not drawn:
        return ""
    panels = [
        _Panel(timeline, memory if index == 0 else None) for index, timeline in enumerate(drawn)
    ]
    # From the unit of each timeline to that of the last one.
    last = panels[-1].timeline
    factors: list[float] = []
    for panel in panels:
        unit = panel.timeline.unit
        if (unit == "ticks") == (last.unit == "ticks"):
            factors.append(MICROSECONDS[unit] / MICROSECONDS[last.unit])
        else:
            busy = max(rank.busy for rank in panel.timeline.statistics())
            factors.append(max(rank.busy for rank in last.statistics()) / (busy or 1) or 1.0)
    longest = max(panel.length * factor for panel, factor in zip(panels, factors, strict=True))
    # Instants have no length: any scale will do.
    pixels = (WIDTH - _LEFT - _RIGHT) / (longest or 1)
    boxes = [box for panel in panels for box in panel.boxes]
    colours = colours_of(boxes)
    rows: list[str] = []
    y = 0.0
    for panel, factor in zip(panels, factors, strict=True):
        if len(panels) > 1:
            rows.append(text(_LEFT, y + 10, panel.heading(factor, drawn[-1]), fill=MUTED))
            y += 16
        parts, y = panel.draw(y, factor * pixels, colours, _MAX_BOXES // len(panels))
        rows += parts
    axis_factor, axis_name = _axis_unit(longest, last)
    for value in ticks(0, longest * axis_factor, 8):
        x = _LEFT + value / axis_factor * pixels
        rows += [
            line(x, y, x, y + 4, INK),
            text(x, y + 16, short(round(value, 9)), anchor="middle", fill=MUTED),
        ]
    right = WIDTH - _RIGHT
    rows += [
        line(_LEFT, y, right, y, INK),
        line(_LEFT, 0, _LEFT, y, GRID),
        text(right, y + 32, axis_name, anchor="end", fill=MUTED),
    ]
    picture = "".join(rows)
    rest = (
        ("waiting for inputs", _WAITING),
        ("several, too narrow to draw", _MIXED),
        ("memory held", _MEMORY),
        ("idle", IDLE),
    )
    entries = legend_entries(boxes, colours)[:_MAX_KEYS]
    entries += [(name, colour) for name, colour in rest if f'fill="{colour}"' in picture]
    key, used = legend(entries, left=0, top=4)
    body = [key, f'<g transform="translate(0 {used + 14:g})">', *rows, "</g>"]
    description = " ".join(panel.description() for panel in panels)
    return figure(identity, title, description, used + y + 50, body)


class _Panel:
    """One timeline's rows."""

    def __init__(self, timeline: Timeline, memory: Mapping[int, Steps] | None) -> None:
        self.timeline = timeline
        self.memory = memory or {}
        self.ranks = timeline.ranks[:_MAX_ROWS]
        by_rank = timeline.by_rank()
        self.layout = {rank: boxes_of(by_rank[rank]) for rank in self.ranks}
        self.boxes = [box for boxes in self.layout.values() for box in boxes]
        records = [box.record for box in self.boxes]
        self.origin = min((record.start - record.wait for record in records), default=0.0)
        self.length = max((record.end for record in records), default=self.origin) - self.origin

    def heading(self, factor: float, last: Timeline) -> str:
        """The source, and how long a stretched tick is in the unit of the last timeline."""
        if self.timeline.unit != "ticks" or last.unit == "ticks":
            return self.timeline.source
        return f"{self.timeline.source}, a tick stretched to {_duration(factor, last)}"

    def description(self) -> str:
        timeline = self.timeline
        fewer = len(self.ranks) < len(timeline.ranks)
        which = f"the first {len(self.ranks)} of " if fewer else ""
        return (
            f"Operations of {which}{len(timeline.ranks)} ranks, {timeline.source}; span "
            f"{_duration(timeline.span, timeline)}, {timeline.bubble_rate:.1%} of it without work."
        )

    def draw(
        self, y: float, pixels: float, colours: dict[str, str], limit: int
    ) -> tuple[list[str], float]:
        """The rows from `y` downwards, and where they end."""
        rows: list[str] = []
        scale = _Scale(origin=self.origin, pixels=pixels)
        most = max((value for steps in self.memory.values() for _, value in steps), default=0.0)
        for rank in self.ranks:
            boxes = self.layout[rank]
            lanes = max((box.lane for box in boxes), default=0) + 1
            height = 20.0 if lanes == 1 else 14.0 * lanes
            rows.append(text(_LEFT - 8, y + height / 2 + 4, f"rank {rank}", anchor="end"))
            rows.append(rectangle(_LEFT, y, WIDTH - _LEFT - _RIGHT, height, IDLE))
            row = _Row(top=y, lane_height=height / lanes, scale=scale)
            rows += row.draw(boxes, colours, limit // len(self.ranks))
            y += height
            if steps := self.memory.get(rank):
                rows += _strip(steps, y + 1, scale, most, self.origin + self.length)
                y += _STRIP + 1
            y += 5
        return rows, y


@dataclass(frozen=True, kw_only=True)
class _Row:
    top: float
    lane_height: float
    scale: _Scale

    def draw(self, boxes: Sequence[Rectangle], colours: dict[str, str], limit: int) -> list[str]:
        waits = [
            rectangle(
                self.scale.x(record.start - record.wait),
                self.top,
                record.wait * self.scale.pixels,
                self.lane_height,
                _WAITING,
            )
            for record in (box.record for box in boxes)
            if record.wait * self.scale.pixels >= 0.3
        ][:limit]
        # Wider and wider boxes are "too narrow" until few enough remain.
        narrow = 0.5
        drawn = self._joined(boxes, colours, narrow)
        while len(drawn) > limit and narrow < WIDTH:
            narrow *= 2
            drawn = self._joined(boxes, colours, narrow)
        return waits + drawn

    def _joined(
        self, boxes: Sequence[Rectangle], colours: dict[str, str], narrow: float
    ) -> list[str]:
        """Boxes wider than `narrow` pixels as they are, a run of narrower ones as one box."""
        drawn: list[str] = []
        # Per lane: colour, left and right edge of the boxes being joined.
        runs: dict[int, tuple[str, float, float]] = {}

        def finish(lane: int) -> None:
            if lane in runs:
                colour, left, right = runs.pop(lane)
                top = self.top + lane * self.lane_height
                width = max(right - left, 0.3)
                drawn.append(rectangle(left, top, width, self.lane_height, colour))

        for box in boxes:
            colour = box.colour(colours)
            left, right = self.scale.x(box.record.start), self.scale.x(box.record.end)
            if right - left > narrow:
                finish(box.lane)
                width = right - left
                height = self.lane_height / box.parts
                top = self.top + box.lane * self.lane_height + box.part * height
                edge = f' stroke="{INK}" stroke-width="0.5"' if width > 3 else ""
                title = box.record.name if width > 2 else ""
                drawn.append(rectangle(left, top, width, height, colour, title=title, more=edge))
                size = min(10.0, height - 2)
                if size >= 7 and text_width(box.label, size) + 2 < width:
                    x, y, ink = left + width / 2, top + height / 2 + size * 0.36, ink_on(colour)
                    drawn.append(text(x, y, box.label, anchor="middle", fill=ink, size=size))
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


def _strip(steps: Steps, top: float, scale: _Scale, most: float, end: float) -> list[str]:
    """The memory of a rank over time as an area, with its peak at the left."""
    bottom = top + _STRIP
    share = (_STRIP - 1) / (most or 1)
    commands = [f"M{coordinate(scale.x(steps[0][0]))} {coordinate(bottom)}"]
    for time, value in steps:
        commands.append(f"H{coordinate(scale.x(time))}V{coordinate(bottom - value * share)}")
    commands.append(f"H{coordinate(scale.x(end))}V{coordinate(bottom)}z")
    peak = max(value for _, value in steps)
    return [
        f'<path d="{"".join(commands)}" fill="{_MEMORY}"/>',
        text(_LEFT - 8, bottom - 3, f"peak {peak:.4g}", anchor="end", fill=MUTED, size=9),
    ]


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
    factor, unit = _axis_unit(length, timeline)
    return f"{length * factor:.4g} {unit}"
