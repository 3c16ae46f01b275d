"""A timeline as rows of boxes: one row a rank, one colour a kind, idle time shaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moemesh.report.svg import (
    COLOURS,
    GRID,
    IDLE,
    INK,
    MUTED,
    WIDTH,
    figure,
    ink_on,
    legend,
    line,
    rectangle,
    short,
    text,
    text_width,
    ticks,
    tint,
)
from moemesh.trace.timeline import MICROSECONDS, Record, Timeline

#: Colours of well-known kinds, apart in hue and in lightness.
KINDS: dict[str, str] = {
    "F": "#1d4f91",
    "B": "#f0a030",
    "I": "#b84f16",
    "W": "#bfe3b4",
}
#: Names and kinds that mean the same as a pipeline kind, for its colour.
SAME: dict[str, str] = {"forward": "F", "backward": "B"}
LONG_NAMES: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
_WAITING = "#e3b1b1"
#: Neighbours of different colours that are too narrow to be drawn one by one.
_MIXED = "#8b95a3"
_MAX_ROWS = 32
_MAX_BOXES = 5000
_MAX_LANES = 4
_MAX_KEYS = 12
_LEFT, _RIGHT = 66, 12


@dataclass(frozen=True, kw_only=True)
class Box:
    """A record's place in its rank's row: `lane` downwards, and which `part` of `parts` of it."""

    record: Record
    lane: int
    part: int = 0
    parts: int = 1


def boxes_of(records: Sequence[Record]) -> list[Box]:
    """Lay out one rank's records: overlapping ones in lanes, equal intervals as one block.

    `records` in the timeline's order (start, longest first).
    """
    blocks: defaultdict[tuple[float, float], list[Record]] = defaultdict(list)
    for record in records:
        blocks[record.start, record.end].append(record)
    ends: list[float] = []
    placed: list[Box] = []
    for (start, end), block in blocks.items():
        free = (lane for lane, busy_until in enumerate(ends) if busy_until <= start)
        lane = next(free, len(ends))
        if lane == len(ends):
            ends.append(end)
        ends[lane] = end
        lane = min(lane, _MAX_LANES - 1)
        for part, record in enumerate(block):
            placed.append(Box(record=record, lane=lane, part=part, parts=len(block)))
    return placed


def timeline_rows(timeline: Timeline) -> str:
    """Every rank's records over time; past 32 ranks the first 32. "" when nothing was recorded.

    Boxes too narrow to be seen are joined with their neighbours; grey where kinds mix.
    """
    if not timeline.records:
        return ""
    ranks = timeline.ranks[:_MAX_ROWS]
    layout = {rank: boxes_of(items) for rank, items in timeline.by_rank().items() if rank in ranks}
    shown = [box for boxes in layout.values() for box in boxes]
    colours = _colours(shown)
    origin = min((box.record.start - box.record.wait for box in shown), default=0.0)
    latest = max((box.record.end for box in shown), default=origin)
    scale = (WIDTH - _LEFT - _RIGHT) / ((latest - origin) or 1)
    rows: list[str] = []
    y = 0.0
    for rank in ranks:
        boxes = layout[rank]
        lanes = max((box.lane for box in boxes), default=0) + 1
        height = 20.0 if lanes == 1 else 14.0 * lanes
        rows.append(text(_LEFT - 8, y + height / 2 + 4, f"rank {rank}", anchor="end"))
        rows.append(rectangle(_LEFT, y, WIDTH - _LEFT - _RIGHT, height, IDLE))
        row = _Row(top=y, lane_height=height / lanes, origin=origin, scale=scale)
        rows += row.draw(boxes, colours, _MAX_BOXES // len(ranks))
        y += height + 5
    rows.append(_time_axis(timeline, latest - origin, scale, y))
    key, used = legend(_legend_entries(shown, colours, "".join(rows)), left=0, top=4)
    body = [key, f'<g transform="translate(0 {used + 14:g})">', *rows, "</g>"]
    which = f"the first {len(ranks)} of " if len(ranks) < len(timeline.ranks) else ""
    description = (
        f"What {which}{len(timeline.ranks)} ranks did, {timeline.source}; span "
        f"{_duration(timeline.span, timeline)}, {timeline.bubble_rate:.1%} of it without work."
    )
    return figure("timeline", "Timeline per rank", description, used + y + 50, body)


def key_of(record: Record) -> str:
    """What a record is coloured by: its kind, or its name when it has none."""
    word = record.kind or record.name
    return SAME.get(word, word)


def _colours(boxes: Sequence[Box]) -> dict[str, str]:
    keys = sorted({key_of(box.record) for box in boxes} - KINDS.keys())
    # The most busy time first, so that the eleventh kind of helper does not take a colour away.
    busy: defaultdict[str, float] = defaultdict(float)
    for box in boxes:
        busy[key_of(box.record)] += box.record.duration
    keys.sort(key=lambda key: (-busy[key], key))
    palette = (*COLOURS[1:], *(tint(colour) for colour in COLOURS))
    others = {key: palette[index % len(palette)] for index, key in enumerate(keys)}
    return KINDS | others


def _legend_entries(
    boxes: Sequence[Box], colours: dict[str, str], drawn: str
) -> list[tuple[str, str]]:
    present = {key_of(box.record) for box in boxes}
    entries = [(LONG_NAMES.get(key, key), colours[key]) for key in colours if key in present]
    if any(box.record.pipe % 2 for box in boxes):
        entries += [(f"{name}, odd pipe", tint(colour)) for name, colour in entries]
    entries = entries[:_MAX_KEYS]
    rest = (
        ("waiting for inputs", _WAITING),
        ("several, too narrow to draw", _MIXED),
        ("idle", IDLE),
    )
    return entries + [(name, colour) for name, colour in rest if f'fill="{colour}"' in drawn]


@dataclass(frozen=True, kw_only=True)
class _Row:
    top: float
    lane_height: float
    origin: float
    scale: float

    def draw(self, boxes: Sequence[Box], colours: dict[str, str], limit: int) -> list[str]:
        waits = [
            rectangle(
                _LEFT + (record.start - record.wait - self.origin) * self.scale,
                self.top,
                record.wait * self.scale,
                self.lane_height,
                _WAITING,
            )
            for record in (box.record for box in boxes)
            if record.wait * self.scale >= 0.3
        ][:limit]
        # Wider and wider boxes are "too narrow" until few enough remain.
        narrow = 0.5
        drawn = self._joined(boxes, colours, narrow)
        while len(drawn) > limit and narrow < WIDTH:
            narrow *= 2
            drawn = self._joined(boxes, colours, narrow)
        return waits + drawn

    def _joined(self, boxes: Sequence[Box], colours: dict[str, str], narrow: float) -> list[str]:
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
            record = box.record
            colour = colours[key_of(record)]
            colour = tint(colour) if record.pipe % 2 else colour
            left = _LEFT + (record.start - self.origin) * self.scale
            right = _LEFT + (record.end - self.origin) * self.scale
            if right - left > narrow:
                finish(box.lane)
                drawn.append(self._box(box, left, right - left, colour))
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

    def _box(self, box: Box, left: float, width: float, colour: str) -> str:
        record = box.record
        height = self.lane_height / box.parts
        top = self.top + box.lane * self.lane_height + box.part * height
        edge = f' stroke="{INK}" stroke-width="0.5"' if width > 3 else ""
        title = record.name if width > 2 else ""
        drawn = rectangle(left, top, width, height, colour, title=title, more=edge)
        size = min(10.0, height - 2)
        label = record.name if record.microbatch is None else str(record.microbatch)
        if size >= 7 and text_width(label, size) + 4 < width:
            x, y = left + width / 2, top + height / 2 + size * 0.36
            drawn += text(x, y, label, anchor="middle", fill=ink_on(colour), size=size)
        return drawn


def _time_axis(timeline: Timeline, length: float, scale: float, bottom: float) -> str:
    factor, unit = _axis_unit(length, timeline)
    parts: list[str] = []
    for value in ticks(0, length * factor, 8):
        x = _LEFT + value / factor * scale
        parts += [
            line(x, bottom, x, bottom + 4, INK),
            text(x, bottom + 16, short(round(value, 9)), anchor="middle", fill=MUTED),
        ]
    right = WIDTH - _RIGHT
    parts.append(line(_LEFT, bottom, right, bottom, INK))
    parts.append(line(_LEFT, 0, _LEFT, bottom, GRID))
    parts.append(text(right, bottom + 32, unit, anchor="end", fill=MUTED))
    return "".join(parts)


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
