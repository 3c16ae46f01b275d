"""Curves over the steps of a run: loss, throughput, gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moemesh.report.svg import (
    COLOURS,
    DASHES,
    INK,
    MUTED,
    WIDTH,
    clip,
    coordinate,
    figure,
    line,
    short,
    text,
    text_width,
    ticks,
)
from moemesh.trace.run import MetricsRow

Point = tuple[float, float]

#: A curve is at most four points a bucket: more would not be seen, and would weigh.
_NUM_BUCKETS = 300
_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 62, 16, 34, 40, 290


@dataclass(frozen=True, kw_only=True)
class Series:
    """One named curve; `colour` is an index into the palette, `dots` marks every point."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False


class Frame(NamedTuple):
    """The data range that fills the plotting area."""

    left: float
    right: float
    low: float
    high: float
    log: bool

    def x(self, value: float) -> float:
        share = (value - self.left) / ((self.right - self.left) or 1)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        share = (value - low) / ((high - low) or 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def downsample(points: Sequence[Point], num_buckets: int = _NUM_BUCKETS) -> list[Point]:
    """First, lowest, highest and last point of each bucket, so that no spike gets lost.

    Points whose value is not finite stand for themselves: they break the line.
    """
    if len(points) <= 4 * num_buckets:
        return list(points)
    kept: list[Point] = []
    for bucket in range(num_buckets):
        start = bucket * len(points) // num_buckets
        end = (bucket + 1) * len(points) // num_buckets
        indices = [index for index in range(start, end) if math.isfinite(points[index][1])]
        broken = next((i for i in range(start, end) if not math.isfinite(points[i][1])), None)
        chosen = {} if broken is None else {broken: None}
        if indices:
            lowest = min(indices, key=lambda index: points[index][1])
            highest = max(indices, key=lambda index: points[index][1])
            chosen |= dict.fromkeys((indices[0], lowest, highest, indices[-1]))
        kept += [points[index] for index in sorted(chosen)]
    return kept


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
) -> str:
    """Curves over steps; `levels` are named horizontal lines. "" when there is nothing to draw."""
    drawn = [item for item in series if any(math.isfinite(y) for _, y in item.points)]
    if not drawn:
        return ""
    levels = [(name, value) for name, value in levels if math.isfinite(value)]
    frame = _frame(drawn, [value for _, value in levels], from_zero=from_zero, log=log)
    body = [_axes(frame, x_label, y_label)]
    body += [_curve(item, index, frame) for index, item in enumerate(drawn)]
    names = [(item.name, item.colour) for item in drawn]
    for index, (name, value) in enumerate(levels):
        colour = len(COLOURS) - 1 - index % len(COLOURS)
        ends = [(frame.left, value), (frame.right, value)]
        body.append(_path(ends, colour, len(names), frame))
        names.append((f"{clip(name, 40)} {value:.4g}", colour))
    if len(names) > 1:
        body.append(_legend(names))
    return figure(identity, title, description, _HEIGHT, body)


def _frame(series: Sequence[Series], levels: list[float], *, from_zero: bool, log: bool) -> Frame:
    xs = [x for item in series for x, _ in item.points]
    ys = [y for item in series for _, y in item.points if math.isfinite(y)] + levels
    if log and min(ys) <= 0:
        log = False
    low, high = min(ys), max(ys)
    if log:
        return Frame(min(xs), max(xs), low / 1.1, high * 1.1, True)
    if from_zero:
        low = min(low, 0.0)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Frame(
        min(xs), max(xs), low if low == 0 and from_zero else low - room, high + room, False
    )


def _axes(frame: Frame, x_label: str, y_label: str) -> str:
    bottom, right = _HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [text(_LEFT, _TOP - 20, y_label, fill=MUTED)]
    for value in _log_ticks(frame) if frame.log else ticks(frame.low, frame.high):
        y = frame.y(value)
        parts += [
            line(_LEFT, y, right, y),
            text(_LEFT - 8, y + 4, short(value), anchor="end", fill=MUTED),
        ]
    parts.append(line(_LEFT, bottom, right, bottom, INK))
    for value in (tick for tick in ticks(frame.left, frame.right, 8) if tick == int(tick)):
        x = frame.x(value)
        anchor = "end" if x > right - 24 else "middle"
        parts += [
            line(x, bottom, x, bottom + 4, INK),
            text(x, bottom + 18, f"{int(value):,}", anchor=anchor, fill=MUTED),
        ]
    parts.append(text(right, _HEIGHT - 6, x_label, anchor="end", fill=MUTED))
    return "".join(parts)


def _log_ticks(frame: Frame) -> list[float]:
    low, high = math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    every = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
    return [value for value in every if frame.low <= value <= frame.high]


def _curve(series: Series, dash: int, frame: Frame) -> str:
    points = downsample(series.points)
    drawn = _path(points, series.colour, dash, frame)
    if series.dots and len(points) <= _NUM_BUCKETS:
        fill = COLOURS[series.colour % len(COLOURS)]
        drawn += "".join(
            f'<circle cx="{coordinate(frame.x(x))}" cy="{coordinate(frame.y(y))}" r="3" '
            f'fill="{fill}"/>'
            for x, y in points
            if math.isfinite(y)
        )
    return drawn


def _path(points: Sequence[Point], colour: int, dash: int, frame: Frame) -> str:
    commands: list[str] = []
    pen = "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        commands.append(f"{pen}{coordinate(frame.x(x))} {coordinate(frame.y(y))}")
        pen = "L"
    # A single point shows as a dot: a zero-length line with round caps.
    if len(commands) == 1:
        commands.append("h0")
    return f'<path d="{"".join(commands)}" fill="none" {_stroke(colour, dash)}/>'


def _stroke(colour: int, dash: int) -> str:
    dashes = DASHES[dash % len(DASHES)]
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    look = f'stroke="{COLOURS[colour % len(COLOURS)]}" stroke-width="1.8"'
    return f'{look} stroke-linejoin="round" stroke-linecap="round"{pattern}'


def _legend(names: Sequence[tuple[str, int]]) -> str:
    parts: list[str] = []
    x = float(WIDTH - _RIGHT)
    for dash, (name, colour) in reversed(list(enumerate(names))):
        x -= text_width(name)
        parts.append(text(x, _TOP - 20, name))
        parts.append(f'<path d="M{coordinate(x - 32)} {_TOP - 24}h26" {_stroke(colour, dash)}/>')
        x -= 48
    return "".join(parts)


def loss_curve(rows: Sequence[MetricsRow], *, unigram_loss: float | None = None) -> str:
    """Training and validation loss, and the loss of a model that knows only token frequencies."""
    series = [Series(name="training", points=[(row.step, row.loss) for row in rows])]
    validation = [(r.step, r.validation_loss) for r in rows if r.validation_loss is not None]
    if validation:
        series.append(Series(name="validation", points=validation, colour=1, dots=True))
    levels = [] if unigram_loss is None else [("unigram", unigram_loss)]
    finite = [row for row in rows if math.isfinite(row.loss)]
    description = "No finite loss."
    if finite:
        lowest = min(finite, key=lambda row: row.loss)
        description = (
            f"Training loss {finite[0].loss:.4f} at step {finite[0].step}, "
            f"{finite[-1].loss:.4f} at step {finite[-1].step}; "
            f"lowest {lowest.loss:.4f} at step {lowest.step}."
        )
    return line_chart(
        "loss",
        "Loss over steps",
        series,
        y_label="nats per token",
        description=description,
        levels=levels,
    )


def throughput_curve(rows: Sequence[MetricsRow]) -> str:
    """Tokens per second over the steps, from zero."""
    points = [(row.step, row.tokens_per_second) for row in rows]
    return line_chart(
        "throughput",
        "Throughput over steps",
        [Series(name="all ranks", points=points, colour=2)],
        y_label="tokens per second",
        description=_range_text("Tokens per second", points),
        from_zero=True,
    )


def gradient_norm_curve(rows: Sequence[MetricsRow]) -> str:
    """Gradient norm over the steps; on a log scale when it spans more than a factor of 30."""
    points = [(row.step, row.grad_norm) for row in rows]
    finite = [value for _, value in points if math.isfinite(value)]
    log = bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)
    return line_chart(
        "gradient-norm",
        "Gradient norm over steps",
        [Series(name="all parameters", points=points, colour=3)],
        y_label="gradient norm" + (", log scale" if log else ""),
        description=_range_text("Gradient norm", points),
        log=log,
        from_zero=not log,
    )


def _range_text(what: str, points: Sequence[Point]) -> str:
    finite = [value for _, value in points if math.isfinite(value)]
    if not finite:
        return f"{what}: no finite value."
    middle = sorted(finite)[len(finite) // 2]
    ends = f"from {short(min(finite))} to {short(max(finite))}"
    return f"{what} {ends}, median {short(middle)}, over {len(points)} steps."
