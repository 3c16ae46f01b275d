"""A timeline as rows of boxes: one row a rank, one colour a kind, idle time shaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moemesh.report import svg
from moemesh.report.boxes import KINDS as KINDS
from moemesh.report.boxes import Rectangle, colours_of, legend_entries
from moemesh.report.boxes import boxes_of as boxes_of
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
    last, factors = drawn[-1], list[float]()
    for timeline in drawn:
        factor = MICROSECONDS[timeline.unit] / MICROSECONDS[last.unit]
        if (timeline.unit == "ticks") != (last.unit == "ticks"):
            busy, other = (max(r.busy for r in one.statistics()) for one in (timeline, last))
            factor = other / (busy or 1) or 1.0
        factors.append(factor)
    longest = max(panel.length * factor for panel, factor in zip(panels, factors, strict=True))
    # Instants have no length: any scale will do.
    pixels = (svg.WIDTH - _LEFT - _RIGHT) / (longest or 1)
    boxes = [box for panel in panels for box in panel.boxes]
    colours, rows, y = colours_of(boxes), list[str](), 0.0
    for panel, factor in zip(panels, factors, strict=True):
        if len(panels) > 1:
            heading = panel.timeline.source
            if panel.timeline.unit == "ticks" and last.unit != "ticks":
                heading += f", a tick stretched to {_duration(factor, last)}"
            rows.append(svg.text(_LEFT, y + 10, heading, fill=svg.MUTED))
            y += 16
        y = panel.draw(rows, y, factor * pixels, colours, _MAX_BOXES // len(panels))
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
    rest = (
        ("waiting for inputs", _WAITING),
        ("several, too narrow to draw", _MIXED),
        ("memory held", _MEMORY),
        ("idle", svg.IDLE),
    )
    entries = legend_entries(boxes, colours)[:_MAX_KEYS]
    entries += [(name, colour) for name, colour in rest if f'fill="{colour}"' in picture]
    key, used = svg.legend(entries, left=0, top=4)
    body = [key, f'<g transform="translate(0 {used + 14:g})">', *rows, "</g>"]
    description = " ".join(panel.description() for panel in panels)
    return svg.figure(identity, title, description, used + y + 50, body)


class _Panel:
    """One timeline's rows."""

    def __init__(self, timeline: Timeline, memory: Mapping[int, Steps] | None) -> None:
        self.timeline, self.memory = timeline, memory or {}
        by_rank = timeline.by_rank()
        self.layout = {rank: boxes_of(by_rank[rank]) for rank in timeline.ranks[:_MAX_ROWS]}
        self.boxes = [box for boxes in self.layout.values() for box in boxes]
        records = [box.record for box in self.boxes]
        self.origin = min((record.start - record.wait for record in records), default=0.0)
        self.length = max((record.end for record in records), default=self.origin) - self.origin

    def description(self) -> str:
        timeline, shown = self.timeline, len(self.layout)
        which = f"the first {shown} of " if shown < len(timeline.ranks) else ""
        return (
            f"Operations of {which}{len(timeline.ranks)} ranks, {timeline.source}; span "
            f"{_duration(timeline.span, timeline)}, {timeline.bubble_rate:.1%} of it without work."
        )

    def draw(
        self, parts: list[str], y: float, pixels: float, colours: dict[str, str], limit: int
    ) -> float:
        """Add the rows from `y` downwards, `pixels` to a unit of time; returns where they end."""

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
            # Wider and wider boxes are "too narrow" until few enough remain.
            narrow, drawn = 0.5, list[str]()
            while True:
                drawn = _row(boxes, at, y, height / lanes, colours, narrow)
                if len(drawn) <= limit or narrow >= svg.WIDTH:
                    break
                narrow *= 2
            parts += [*waits[:limit], *drawn]
            y += height
            if steps := self.memory.get(rank):
                # The memory of the rank over time as an area, with its peak at the left.
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
    """Boxes wider than `narrow` pixels as they are, a run of narrower ones as one box."""
    drawn: list[str] = []
    # Per lane: colour, left and right edge of the boxes being joined.
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
    factor, unit = _axis_unit(length, timeline)
    return f"{length * factor:.4g} {unit}"
