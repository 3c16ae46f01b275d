"""Charts: curves over the steps of a run, and predictions over measurements as dots."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from moemesh.report import svg
from moemesh.trace.loads import LayerLoads
from moemesh.trace.run import MetricsRow

Point = tuple[float, float]
#: Two charts of the same data: for a wide page, and for a phone.
Pictures = tuple[str, str]
#: Positions on the horizontal axis with their names.
Marks = Sequence[tuple[float, str]]

#: Buckets of a curve, each with at most five points: more are invisible and enlarge the page.
_NUM_BUCKETS = 300
#: Margins and height of a chart in pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 62, 16, 34, 40, 290
#: Width of a chart for a phone, where labels keep their size.
NARROW = 350
_LEGEND_ROW = 18
#: Palette index of single curves, by the key of their rows.
_COLOUR_OF = {"tokens_per_second": 2, "grad_norm": 3, "lr": 6}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One named curve; `colour` is an index into the palette, `dots` marks every point."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False


class Frame(NamedTuple):
    """Data range of the plotting area of a chart, and in pixels the chart's `width` and the height
    above the area, `top`. `x` and `y` turn data into pixels."""

    left: float
    right: float
    low: float
    high: float
    log: bool
    width: float = svg.WIDTH
    top: float = _TOP

    def x(self, value: float) -> float:
        share = (value - self.left) / ((self.right - self.left) or 1)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        share = (value - low) / ((high - low) or 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - self.top - _BOTTOM)


def downsample(points: Sequence[Point], num_buckets: int = _NUM_BUCKETS) -> list[Point]:
    """First, lowest, highest and last point of each bucket, so that no spike is lost.

    The first non-finite point of a bucket is kept: it breaks the line.
    """
    if len(points) <= 4 * num_buckets:
        return list(points)
    points_kept: list[Point] = []
    for bucket in range(num_buckets):
        start = bucket * len(points) // num_buckets
        end = (bucket + 1) * len(points) // num_buckets
        bucket_points = points[start:end]
        finite = [point for point in bucket_points if math.isfinite(point[1])]
        broken = [point for point in bucket_points if not math.isfinite(point[1])]
        chosen = {*finite[:1], *finite[-1:], *broken[:1]}
        if finite:
            chosen |= {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))}
        points_kept += sorted(chosen, key=itemgetter(0))
    return points_kept


def line_chart(
    identity: str,
    title: str,
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str = "step",
    description: str,
    levels: Sequence[tuple[str, float]] = (),
    from_zero: bool = False,
    log: bool = False,
    marks: Marks = (),
    width: float = svg.WIDTH,
) -> str:
    """Curves over steps; `levels` are named horizontal lines, `marks` vertical ones. "" without
    finite points."""
    buckets = max(int(_NUM_BUCKETS * width / svg.WIDTH), 2)
    thinned = [replace(item, points=downsample(item.points, buckets)) for item in series]
    drawn = [item for item in thinned if any(math.isfinite(y) for _, y in item.points)]
    if not drawn:
        return ""
    levels = [(name, value) for name, value in levels if math.isfinite(value)]
    names = [(item.name, item.colour) for item in drawn]
    for index, (name, value) in enumerate(levels):
        colour = len(svg.COLOURS) - 1 - index % len(svg.COLOURS)
        names.append((f"{svg.clip(name, 40)} {value:.4g}", colour))
    key, rows = _legend(names, y_label, width) if len(names) > 1 else ("", 0)
    xs = [x for item in drawn for x, _ in item.points]
    ys = [y for item in drawn for _, y in item.points if math.isfinite(y)]
    ys += [value for _, value in levels]
    low, high = min(ys), max(ys)
    if log := log and low > 0:
        low, high = low / 1.1, high * 1.1
    else:
        low = min(low, 0.0) if from_zero else low
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low if low == 0 and from_zero else low - room, high + room
    frame = Frame(min(xs), max(xs), low, high, log, width, _TOP + rows * _LEGEND_ROW)
    body = [_axes(frame, x_label, y_label)]
    for value, name in marks:  # named vertical lines inside of the plotting area
        if frame.left < value < frame.right:
            x = frame.x(value)
            side, anchor = (-4, "end") if x > frame.width / 2 else (4, "start")
            body += [
                svg.line(x, frame.top, x, _HEIGHT - _BOTTOM, svg.MUTED),
                svg.text(x + side, frame.top + 10, name, anchor=anchor, fill=svg.MUTED, size=11),
            ]
    for index, item in enumerate(drawn):
        body.append(_path(item.points, item.colour, index, frame))
        if item.dots and len(item.points) <= _NUM_BUCKETS:
            fill = svg.COLOURS[item.colour % len(svg.COLOURS)]
            body += [
                f'<circle cx="{svg.coordinate(frame.x(x))}" cy="{svg.coordinate(frame.y(y))}" '
                f'r="3" fill="{fill}"/>'
                for x, y in item.points
                if math.isfinite(y)
            ]
    for index, (_, value) in enumerate(levels, start=len(drawn)):
        ends = [(frame.left, value), (frame.right, value)]
        body.append(_path(ends, names[index][1], index, frame))
    return svg.figure(identity, title, description, _HEIGHT, [*body, key], width)


def line_charts(
    identity: str, title: str, series: Sequence[Series], y_label: str, description: str, **look: Any
) -> Pictures:
    """:func:`line_chart` for a wide page, and for a phone."""
    thinned = [replace(item, points=downsample(item.points)) for item in series]
    look |= {"y_label": y_label, "description": description}
    return (
        line_chart(identity, title, thinned, **look),
        line_chart(f"{identity}-narrow", title, thinned, **look, width=NARROW),
    )


def _axes(frame: Frame, x_label: str, y_label: str) -> str:
    """Both axes with their ticks; those of the horizontal axis are whole numbers."""
    bottom, right = _HEIGHT - _BOTTOM, frame.width - _RIGHT
    parts = [svg.text(_LEFT if frame.width == svg.WIDTH else 0, _TOP - 20, y_label, fill=svg.MUTED)]
    values = svg.ticks(frame.low, frame.high)
    if frame.log:
        low, high = math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high))
        factors = (1, 2, 5) if high - low <= 3 else (1,)
        ticks = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
        values = [value for value in ticks if frame.low <= value <= frame.high]
    for value in values:
        y = frame.y(value)
        parts += [
            svg.line(_LEFT, y, right, y),
            svg.text(_LEFT - 8, y + 4, svg.short(value), anchor="end", fill=svg.MUTED),
        ]
    parts.append(svg.line(_LEFT, bottom, right, bottom, svg.INK))
    count = 8 if frame.width == svg.WIDTH else 3
    for value in (tick for tick in svg.ticks(frame.left, frame.right, count) if tick == int(tick)):
        x = frame.x(value)
        anchor = "end" if x > right - 24 else "middle"
        parts += [
            svg.line(x, bottom, x, bottom + 4, svg.INK),
            svg.text(x, bottom + 18, f"{int(value):,}", anchor=anchor, fill=svg.MUTED),
        ]
    parts.append(svg.text(right, _HEIGHT - 6, x_label, anchor="end", fill=svg.MUTED))
    return "".join(parts)


def _path(points: Sequence[Point], colour: int, dash: int, frame: Frame) -> str:
    """A curve, with a gap at each point that is not finite; `colour`, `dash`: indices."""
    commands: list[str] = []
    pen = "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        commands.append(f"{pen}{svg.coordinate(frame.x(x))} {svg.coordinate(frame.y(y))}")
        pen = "L"
    # A single point shows as a dot: a zero-length line with round caps.
    if len(commands) == 1:
        commands.append("h0")
    return f'<path d="{"".join(commands)}" fill="none" {_stroke(colour, dash)}/>'


def _stroke(colour: int, dash: int) -> str:
    dashes = svg.DASHES[dash % len(svg.DASHES)]
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    look = f'stroke="{svg.COLOURS[colour % len(svg.COLOURS)]}" stroke-width="1.8"'
    return f'{look} stroke-linejoin="round" stroke-linecap="round"{pattern}'


def _legend(names: Sequence[tuple[str, int]], y_label: str, width: float) -> tuple[str, int]:
    """Legend to the right of the vertical axis' name, or in rows under it if it does not fit; also
    the number of these rows."""
    sizes = [svg.text_width(name) + 48 for name, _ in names]
    free = width - _LEFT - svg.text_width(y_label) - 16
    fits = sum(sizes) - 16 <= free - _RIGHT
    parts: list[str] = []
    x, row = (width - _RIGHT - sum(sizes) + 16, 0) if fits else (0.0, 1)
    for dash, ((name, colour), size) in enumerate(zip(names, sizes, strict=True)):
        if not fits and x and x + size - 16 > width:
            x, row = 0.0, row + 1
        y = _TOP - 20 + row * _LEGEND_ROW
        parts.append(f'<path d="M{svg.coordinate(x)} {y - 4}h26" {_stroke(colour, dash)}/>')
        parts.append(svg.text(x + 32, y, name))
        x += size
    return "".join(parts), row


def loss_curve(
    rows: Sequence[MetricsRow],
    *,
    unigram_loss: float | None = None,
    unit: str = "nats a token",
    marks: Marks = (),
) -> Pictures:
    """Training and validation loss, and the loss of a unigram model."""
    series = [Series(name="training", points=[(row.step, row.loss) for row in rows])]
    validation = [(r.step, r.validation_loss) for r in rows if r.validation_loss is not None]
    if validation:
        series.append(Series(name="validation", points=validation, colour=1, dots=True))
    levels = [] if unigram_loss is None else [("unigram", unigram_loss)]
    finite = [row for row in rows if math.isfinite(row.loss)]
    text = "No finite loss."
    if finite:
        lowest = min(finite, key=lambda row: row.loss)
        text = (
            f"Training loss {finite[0].loss:.4f} at step {finite[0].step}, "
            f"{finite[-1].loss:.4f} at step {finite[-1].step}; "
            f"lowest {lowest.loss:.4f} at step {lowest.step}."
        )
    return line_charts("loss", "Loss over steps", series, unit, text, levels=levels, marks=marks)


def auxiliary_curve(rows: Sequence[MetricsRow], *, unit: str, marks: Marks = ()) -> Pictures:
    """The auxiliary loss, and the loss of extra prediction layers, if any."""
    points = [(row.step, row.aux_loss) for row in rows]
    series = [Series(name="auxiliary", points=points, colour=4)]
    ahead = [(row.step, row.mtp_loss) for row in rows if row.mtp_loss is not None]
    if ahead:
        series.append(Series(name="extra prediction layers", points=ahead, colour=5))
    if not any(value for item in series for _, value in item.points):
        return "", ""
    title, text = "Auxiliary losses over steps", _range_text("Auxiliary loss", points)
    return line_charts("auxiliary", title, series, unit, text, marks=marks)


def one_curve(
    rows: Sequence[MetricsRow], name: str, title: str, *, marks: Marks = (), y_label: str = ""
) -> Pictures:
    """The key `name` of every row over the steps, from zero; a gradient norm that spans more than a
    factor of 30 has a log scale instead. `y_label`: by default the title."""
    points = [(row.step, getattr(row, name)) for row in rows]
    finite = [value for _, value in points if math.isfinite(value)]
    log = name == "grad_norm" and bool(finite) and 0 < 30 * min(finite) < max(finite)
    series = [Series(name=title, points=points, colour=_COLOUR_OF[name])]
    identity, heading = title.lower().replace(" ", "-"), f"{title} over steps"
    label, text = y_label or title.lower(), _range_text(title, points)
    label += ", log scale" if log else ""
    look: dict[str, Any] = {"from_zero": not log, "log": log, "marks": marks}
    return line_charts(identity, heading, series, label, text, **look)


def imbalance_curve(loads: Sequence[LayerLoads], marks: Marks = ()) -> Pictures:
    """Max over mean over the steps: of experts in the worst layer and as a mean of the layers, of
    ranks in the worst layer."""
    of_step: defaultdict[int, list[LayerLoads]] = defaultdict(list)
    for load in loads:
        of_step[load.step].append(load)
    steps = sorted(of_step)
    # Curves: name, function over the layers of a step, field of the loads, colour.
    kinds: list[tuple[str, Callable[[list[float]], float], str, int]] = [
        ("experts, worst layer", max, "expert_max_over_mean", 1),
        ("experts, mean", statistics.fmean, "expert_max_over_mean", 0),
    ]
    if any(load.tokens_per_rank for load in loads):
        kinds.append(("ranks, worst layer", max, "rank_max_over_mean", 2))
    series: list[Series] = []
    for name, over_layers, key, colour in kinds:
        points = [(s, over_layers([getattr(load, key) for load in of_step[s]])) for s in steps]
        series.append(Series(name=name, points=points, colour=colour))
    worst = [value for _, value in series[0].points]
    text, label = "No loads.", "fullest / mean (1 = balanced)"
    if steps:
        text = (
            f"Fullest expert over the mean, worst layer: {worst[0]:.2f} at step {steps[0]}, "
            f"{worst[-1]:.2f} at step {steps[-1]}, highest {max(worst):.2f}. 1 is balanced."
        )
    title = "Load imbalance over steps"
    return line_charts("imbalance", title, series, label, text, marks=marks)


def _range_text(what: str, points: Sequence[Point]) -> str:
    """Smallest, largest and median finite value as a sentence."""
    finite = sorted(value for _, value in points if math.isfinite(value))
    if not finite:
        return f"{what}: no finite value."
    ends = f"from {svg.short(finite[0])} to {svg.short(finite[-1])}"
    return f"{what} {ends}, median {svg.short(finite[len(finite) // 2])}, over {len(points)} steps."


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One run: `name` for the tooltip, its series, measured and predicted value (above 0)."""

    name: str
    series: str
    measured: float
    predicted: float


def agreement_chart(title: str, points: Sequence[Agreement], *, unit: str) -> str:
    """Predicted over measured on logarithmic axes, one dot for each run, with the diagonal and a
    shaded band of ± 10 % around it.

    The largest series have a colour each, the others share a grey. "" without finite points.
    """
    drawn = [
        point
        for point in points
        if all(math.isfinite(value) and value > 0 for value in (point.measured, point.predicted))
    ]
    if not drawn:
        return ""
    values = [value for point in drawn for value in (point.measured, point.predicted)]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    left, right, top, bottom, side = 70, svg.WIDTH - 20, 20, 540, 520

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (right - left)

    def y(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * side

    counts = Counter(point.series for point in drawn)
    names = sorted(counts, key=lambda name: (-counts[name], name))
    colours = dict(zip(names, svg.COLOURS[:-1], strict=False))
    first, last = 10**low, 10**high
    corners = [(first, 1.1), (last, 1.1), (last, 0.9), (first, 0.9)]
    pixels = [(svg.coordinate(x(end)), svg.coordinate(y(end * share))) for end, share in corners]
    path = " ".join(map(",".join, pixels))
    body = [
        f'<polygon points="{path}" fill="{svg.GRID}" fill-opacity="0.6"/>',
        svg.line(x(first), y(first), x(last), y(last), stroke=svg.INK),
    ]
    for tick in (10.0**power for power in range(math.ceil(low), math.floor(high) + 1)):
        body.append(svg.line(x(tick), top, x(tick), bottom))
        body.append(svg.line(left, y(tick), right, y(tick)))
        body.append(svg.text(x(tick), bottom + 16, svg.short(tick), anchor="middle"))
        body.append(svg.text(left - 6, y(tick) + 4, svg.short(tick), anchor="end"))
    middle = (left + svg.WIDTH) / 2
    body.append(svg.text(middle, bottom + 36, f"measured {unit}", anchor="middle"))
    body.append(svg.text(left, top - 6, f"predicted {unit}"))
    for point in drawn:
        colour = colours.get(point.series, svg.MUTED)
        error = point.predicted / point.measured - 1
        label = f"{point.name}: {svg.short(point.measured)} measured, {error:+.1%} predicted"
        body.append(
            f'<circle cx="{svg.coordinate(x(point.measured))}" '
            f'cy="{svg.coordinate(y(point.predicted))}" r="3" fill="{colour}" '
            f'fill-opacity="0.75"><title>{svg.escape(label)}</title></circle>'
        )
    entries = [(name, colours[name]) for name in names if name in colours]
    if len(names) > len(colours):
        entries.append((f"{len(names) - len(colours)} others", svg.MUTED))
    keys, height = svg.legend(entries, left=left, top=bottom + 48)
    description = (
        f"{len(drawn)} runs, predicted over measured {unit} on logarithmic axes with the diagonal "
        "and a band of 10% around it."
    )
    return svg.figure("agreement", title, description, bottom + height + 56, [*body, keys])
