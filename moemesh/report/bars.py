"""Bars of bytes: traffic of all ranks by axis and phase, memory of each rank by what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moemesh.report import svg
from moemesh.report.beside import by_axis_and_phase
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import PARTS, MemoryProfiles, format_bytes

#: Neighbours differ in lightness, so that they stay apart in a grey print.
MEMORY_COLOURS: dict[str, str] = {
    "dense_weights": "#1f5fa8",
    "expert_weights": "#9cc4ee",
    "gathered_weights": "#5b3fa0",
    "weight_versions": "#c9d6df",
    "gradients": "#16704a",
    "optimizer": "#cfb0e2",
    "activations": "#b34700",
    "buffers": "#f3cd83",
    "snapshots": "#7a7f85",
}
#: Bars that are drawn, and their distance.
_MAX_TRAFFIC, _MAX_RANKS, _STACKED_ROW = 24, 32, 24


class StackedBar(NamedTuple):
    """A row of a figure: its name, pieces (part, size, text of the size), what stands behind them,
    and the place of a line across it (None: no line)."""

    name: str
    pieces: Sequence[tuple[str, float, str]]
    text: str
    mark: float | None = None


def stacked_bars(
    identity: str,
    title: str,
    description: str,
    bars: Sequence[StackedBar],
    *,
    colours: Mapping[str, str] | None = None,
    mark: str = "",
    unit: str = "bytes",
) -> str:
    """A figure of rows on one scale, a piece of each in the colour of its part (by default the next
    of the palette); `mark` is what the lines across them are called."""
    if colours is None:
        parts = dict.fromkeys(part for bar in bars for part, _, _ in bar.pieces)
        colours = dict(zip(parts, svg.COLOURS, strict=False))
    marks = [(f"{mark} (line)", svg.INK)] if mark else []
    key, used = svg.legend([*colours.items(), *marks], left=0, top=4)
    left = max(66.0, *(svg.text_width(bar.name) + 16 for bar in bars))
    behind = max(svg.text_width(bar.text, 11) for bar in bars) + 16
    top, right = used + 26, svg.WIDTH - max(130.0, behind)
    highest = max(
        max(sum(size for _, size, _ in bar.pieces), bar.mark or 0.0) for bar in bars
    ) or 1.0  # fmt: skip
    bottom = top + len(bars) * _STACKED_ROW
    body, scale = [key], 1.0
    while unit == "bytes" and highest / scale >= 1024:
        scale *= 1024
    for value in (tick * scale for tick in svg.ticks(0, highest / scale, 6)):
        x = left + value / highest * (right - left)
        name = format_bytes(value) if unit == "bytes" else f"{svg.short(value)} {unit}"
        body.append(svg.line(x, top, x, bottom, svg.GRID))
        body.append(svg.text(x, top - 6, name, anchor="middle", fill=svg.MUTED, size=11))
    for index, bar in enumerate(bars):
        y, x = top + index * _STACKED_ROW, left
        body.append(svg.text(left - 8, y + 16, bar.name, anchor="end"))
        for part, size, said in bar.pieces:
            width = size / highest * (right - left)
            if width >= 0.05:
                hint = f"{bar.name}, {part}: {said}"
                edge = f' stroke="{svg.INK}" stroke-width="0.5"'
                height, fill = _STACKED_ROW - 8, colours[part]
                body.append(svg.rectangle(x, y + 4, width, height, fill, title=hint, more=edge))
            x += width
        if bar.mark is not None:
            place = left + bar.mark / highest * (right - left)
            body.append(svg.line(place, y + 1, place, y + _STACKED_ROW - 1, svg.INK, 2.5))
            x = max(x, place)
        body.append(svg.text(x + 8, y + 16, bar.text, fill=svg.MUTED, size=11))
    body.append(svg.line(left, top, left, bottom, svg.INK))
    return svg.figure(identity, title, description, bottom + 8, body)


def traffic_bars(
    ledgers: Mapping[int, Ledger], predicted: Mapping[int, Ledger] | None = None, *, steps: int = 1
) -> str:
    """A bar for each axis and phase: bytes sent by all ranks a step, coloured by axis, with a line
    where the prediction is. "" when there is no traffic."""
    measured = by_axis_and_phase(ledgers, steps=steps)
    expected = by_axis_and_phase(predicted or {})
    sent = {key: max(measured.get(key, 0.0), expected.get(key, 0.0)) for key in measured | expected}
    keys = sorted((key for key in sent if sent[key] > 0), key=lambda key: (-sent[key], key))
    if not keys:
        return ""
    shown = keys[:_MAX_TRAFFIC]
    bars: list[StackedBar] = []
    for axis, phase in shown:
        size, before = measured.get((axis, phase), 0.0), expected.get((axis, phase))
        text = format_bytes(size)
        text += "" if before is None else f", predicted {format_bytes(before)}"
        name = svg.clip(f"{axis} · {phase}", 26)
        bars.append(StackedBar(name, [(axis, size, format_bytes(size))], text, before))
    rest = f" The {len(keys) - len(shown)} smallest are left out." if len(keys) > len(shown) else ""
    axis, phase = shown[0]
    description = (
        f"Bytes sent in one step by all ranks, by axis and phase; most: {axis} · {phase}, "
        f"{format_bytes(sent[shown[0]])}.{rest}"
    )
    axes = sorted({axis for axis, _ in keys})
    colours = {axis: svg.COLOURS[index % len(svg.COLOURS)] for index, axis in enumerate(axes)}
    mark = "predicted" if expected else ""
    title = "Traffic of all ranks per step"
    return stacked_bars("traffic", title, description, bars, colours=colours, mark=mark)


def memory_bars(profiles: MemoryProfiles) -> str:
    """A stacked bar a rank; past 32 ranks, those with the highest peaks. "" without any rank."""
    if not profiles.ranks:
        return ""
    fullest = sorted(profiles.ranks, key=lambda profile: (-profile.peak, profile.rank))
    shown = sorted(fullest[:_MAX_RANKS], key=lambda profile: profile.rank)
    which = f"the {len(shown)} fullest of " if len(shown) < len(profiles.ranks) else ""
    description = (
        f"Memory of {which}{len(profiles.ranks)} ranks by what it holds; "
        f"highest peak {format_bytes(profiles.peak)} on rank {fullest[0].rank}."
    )
    names = {name: name.replace("_", " ") for name in PARTS}
    bars = [
        StackedBar(
            f"rank {one.rank}",
            [(names[part], size, format_bytes(size)) for part, size in one.parts().items()],
            f"peak {format_bytes(one.peak)}",
            one.peak,
        )
        for one in shown
    ]
    colours = {names[part]: MEMORY_COLOURS[part] for part in PARTS}
    return stacked_bars(
        "memory", "Memory per rank", description, bars, colours=colours, mark="peak"
    )
