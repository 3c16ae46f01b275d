"""Bars of bytes: traffic of all ranks by axis and phase, memory of each rank by what it holds."""

from __future__ import annotations

from collections.abc import Mapping

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
_MAX_TRAFFIC, _TRAFFIC_ROW = 24, 22
_MAX_RANKS, _RANK_ROW = 32, 24


def _grid(
    highest: float, count: int, left: float, right: float, top: float, bottom: float
) -> list[str]:
    """Lines at about `count` round numbers of bytes, in the unit that fits `highest`."""
    parts, unit = list[str](), 1.0
    while highest / unit >= 1024:
        unit *= 1024
    for value in (tick * unit for tick in svg.ticks(0, highest / unit, count)):
        x = left + value / highest * (right - left)
        label = svg.text(x, top - 6, format_bytes(value), anchor="middle", fill=svg.MUTED, size=11)
        parts += [svg.line(x, top, x, bottom, svg.GRID), label]
    return parts


def traffic_bars(
    ledgers: Mapping[int, Ledger], predicted: Mapping[int, Ledger] | None = None, *, steps: int = 1
) -> str:
    """A bar for each axis and phase: bytes sent by all ranks a step, coloured by axis, and a thin
    one under it for the prediction. "" when there is no traffic.
    """
    measured = by_axis_and_phase(ledgers, steps=steps)
    expected_by = by_axis_and_phase(predicted or {})
    sent = {
        key: max(measured.get(key, 0.0), expected_by.get(key, 0.0))
        for key in measured | expected_by
    }
    keys = sorted((key for key in sent if sent[key] > 0), key=lambda key: (-sent[key], key))
    if not keys:
        return ""
    shown = keys[:_MAX_TRAFFIC]
    axes = sorted({axis for axis, _ in keys})
    colours = {axis: svg.COLOURS[index % len(svg.COLOURS)] for index, axis in enumerate(axes)}
    entries = [*colours.items(), *([("predicted", svg.MUTED)] if expected_by else [])]
    key, used = svg.legend(entries, left=0, top=4)
    left, top, right = 170.0, used + 26, svg.WIDTH - 250.0
    highest = sent[shown[0]]
    bottom = top + len(shown) * _TRAFFIC_ROW
    body = [key, *_grid(highest, 4, left, right, top, bottom)]
    for index, (axis, phase) in enumerate(shown):
        y, name = top + index * _TRAFFIC_ROW, f"{axis} · {phase}"
        width = measured.get((axis, phase), 0.0) / highest * (right - left)
        values = format_bytes(measured.get((axis, phase), 0.0))
        expected = expected_by.get((axis, phase))
        end = width
        body.append(svg.text(left - 8, y + 15, svg.clip(name, 26), anchor="end"))
        if expected is not None:
            values += f", predicted {format_bytes(expected)}"
            thin = max(expected / highest * (right - left), 1)
            body.append(svg.rectangle(left, y + 15, thin, 3, svg.MUTED))
            end = max(width, thin)
        title = f"{name}: {values}"
        body += [
            svg.rectangle(left, y + 3, max(width, 1), 11, colours[axis], title=title),
            svg.text(left + end + 6, y + 15, values, fill=svg.MUTED, size=11),
        ]
    body.append(svg.line(left, top, left, bottom, svg.INK))
    rest = f" The {len(keys) - len(shown)} smallest are left out." if len(keys) > len(shown) else ""
    axis, phase = shown[0]
    description = (
        f"Bytes sent in one step by all ranks, by axis and phase; most: {axis} · {phase}, "
        f"{format_bytes(sent[shown[0]])}.{rest}"
    )
    return svg.figure("traffic", "Traffic of all ranks per step", description, bottom + 8, body)


def memory_bars(profiles: MemoryProfiles) -> str:
    """A stacked bar a rank; past 32 ranks, those with the highest peaks. "" without any rank."""
    if not profiles.ranks:
        return ""
    fullest = sorted(profiles.ranks, key=lambda profile: (-profile.peak, profile.rank))
    shown = sorted(fullest[:_MAX_RANKS], key=lambda profile: profile.rank)
    names = [(name.replace("_", " "), MEMORY_COLOURS[name]) for name in PARTS]
    key, used = svg.legend([*names, ("peak (line)", svg.INK)], left=0, top=4)
    left, top, right = 66.0, used + 26, svg.WIDTH - 130.0
    highest = max(max(profile.total, profile.peak) for profile in shown) or 1
    bottom = top + len(shown) * _RANK_ROW
    body = [key, *_grid(highest, 6, left, right, top, bottom)]
    for index, profile in enumerate(shown):
        y, x = top + index * _RANK_ROW, left
        body.append(svg.text(left - 8, y + 16, f"rank {profile.rank}", anchor="end"))
        for name, size in profile.parts().items():
            width = size / highest * (right - left)
            if width >= 0.05:
                title = f"rank {profile.rank}, {name.replace('_', ' ')}: {format_bytes(size)}"
                edge = f' stroke="{svg.INK}" stroke-width="0.5"'
                height = _RANK_ROW - 8
                body.append(
                    svg.rectangle(
                        x, y + 4, width, height, MEMORY_COLOURS[name], title=title, more=edge
                    )
                )
            x += width
        peak = left + profile.peak / highest * (right - left)
        body.append(svg.line(peak, y + 1, peak, y + _RANK_ROW - 1, svg.INK, 2.5))
        after = max(x, peak) + 8
        body.append(
            svg.text(after, y + 16, f"peak {format_bytes(profile.peak)}", fill=svg.MUTED, size=11)
        )
    body.append(svg.line(left, top, left, bottom, svg.INK))
    which = f"the {len(shown)} fullest of " if len(shown) < len(profiles.ranks) else ""
    description = (
        f"Memory of {which}{len(profiles.ranks)} ranks by what it holds; "
        f"highest peak {format_bytes(profiles.peak)} on rank {fullest[0].rank}."
    )
    return svg.figure("memory", "Memory per rank", description, bottom + 8, body)
