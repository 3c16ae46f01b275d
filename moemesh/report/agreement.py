"""Predicted against measured: one dot a run on logarithmic axes, the diagonal, a band of error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moemesh.report import svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 48
_SIDE = 520


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One run: a name for the pointer, the series it belongs to, both values (above 0)."""

    name: str
    series: str
    measured: float
    predicted: float


def agreement_chart(
    identity: str, title: str, points: Sequence[Agreement], *, unit: str, band: float = 0.1
) -> str:
    """Dots of predicted over measured values; the shaded band is ± `band` around equality.

    Series are coloured by size, the smallest ones share a grey. "" when there is nothing to draw.
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

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * (svg.WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + _SIDE - (math.log10(value) - low) / (high - low) * _SIDE

    counts = Counter(point.series for point in drawn)
    names = sorted(counts, key=lambda name: (-counts[name], name))
    colours = {name: svg.COLOURS[place] for place, name in enumerate(names[: len(svg.COLOURS) - 1])}
    first, last = 10**low, 10**high
    corners = [
        (x(first), y(first * (1 + band))),
        (x(last), y(last * (1 + band))),
        (x(last), y(last * (1 - band))),
        (x(first), y(first * (1 - band))),
    ]
    path = " ".join(f"{svg.coordinate(px)},{svg.coordinate(py)}" for px, py in corners)
    bottom = _TOP + _SIDE
    axes = [svg.line(x(10**low), y(10**low), x(10**high), y(10**high), stroke=svg.INK)]
    for power in range(math.ceil(low), math.floor(high) + 1):
        tick = 10.0**power
        axes.append(svg.line(x(tick), _TOP, x(tick), bottom))
        axes.append(svg.line(_LEFT, y(tick), svg.WIDTH - _RIGHT, y(tick)))
        axes.append(svg.text(x(tick), bottom + 16, svg.short(tick), anchor="middle"))
        axes.append(svg.text(_LEFT - 6, y(tick) + 4, svg.short(tick), anchor="end"))
    axes.append(svg.text((_LEFT + svg.WIDTH) / 2, bottom + 36, f"measured {unit}", anchor="middle"))
    axes.append(svg.text(_LEFT, _TOP - 6, f"predicted {unit}"))
    body = [f'<polygon points="{path}" fill="{svg.GRID}" fill-opacity="0.6"/>', *axes]
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
    keys, height = svg.legend(entries, left=_LEFT, top=_TOP + _SIDE + _BOTTOM)
    body.append(keys)
    description = (
        f"{len(drawn)} runs, predicted over measured {unit} on logarithmic axes with the diagonal "
        f"and a band of {band:.0%} around it."
    )
    return svg.figure(identity, title, description, _TOP + _SIDE + _BOTTOM + height + 8, body)
