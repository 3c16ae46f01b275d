"""Traffic by axis: bars and table rows from the ranks' ledgers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from moemesh.report.svg import (
    COLOURS,
    GRID,
    INK,
    MUTED,
    WIDTH,
    clip,
    figure,
    legend,
    line,
    rectangle,
    text,
    ticks,
)
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.run import Run

_MAX_BARS = 24
_ROW = 22


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One (axis, op, phase), per step: over all ranks, and on the rank with most of it.

    Bytes as in `moemesh.trace.ledger`; an average over several steps need not be whole.
    """

    axis: str
    op: str
    phase: str
    max_count: float
    max_payload_bytes: float
    max_wire_bytes: float
    sum_wire_bytes: float
    max_received_bytes: float


def traffic_rows(ledgers: Mapping[int, Ledger], *, steps: int = 1) -> list[Traffic]:
    """Traffic of all ranks by (axis, op, phase) a step, the most bytes sent first."""
    totals: defaultdict[tuple[str, str, str], dict[int, list[int]]] = defaultdict(dict)
    for rank, ledger in ledgers.items():
        for entry in ledger.entries():
            of_rank = totals[entry.axis, entry.op, entry.phase].setdefault(rank, [0, 0, 0, 0])
            amounts = (entry.count, entry.payload_bytes, entry.wire_bytes, entry.received_bytes)
            for index, amount in enumerate(amounts):
                of_rank[index] += amount
    rows: list[Traffic] = []
    for (axis, op, phase), ranks in totals.items():
        count, payload, wire, received = (
            max(amounts[index] for amounts in ranks.values()) / steps for index in range(4)
        )
        rows.append(
            Traffic(
                axis=axis,
                op=op,
                phase=phase,
                max_count=count,
                max_payload_bytes=payload,
                max_wire_bytes=wire,
                sum_wire_bytes=sum(amounts[2] for amounts in ranks.values()) / steps,
                max_received_bytes=received,
            )
        )
    return sorted(rows, key=lambda row: (-row.sum_wire_bytes, row.axis, row.op, row.phase))


def by_axis_and_phase(
    ledgers: Mapping[int, Ledger], *, steps: int = 1
) -> dict[tuple[str, str], float]:
    """(axis, phase) -> bytes sent by all ranks in a step."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in traffic_rows(ledgers, steps=steps):
        found[row.axis, row.phase] += row.sum_wire_bytes
    return dict(found)


def sent_in_training(run: Run) -> dict[tuple[str, str], float]:
    """(axis, phase) -> bytes sent by all ranks in a step, by its training alone."""
    found = by_axis_and_phase(run.ledgers, steps=run.ledger_steps)
    return {key: size for key, size in found.items() if key[1] not in ("evaluate", "control")}


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
    shown = keys[:_MAX_BARS]
    axes = sorted({axis for axis, _ in keys})
    colours = {axis: COLOURS[index % len(COLOURS)] for index, axis in enumerate(axes)}
    entries = [*colours.items(), *([("predicted", MUTED)] if expected_by else [])]
    key, used = legend(entries, left=0, top=4)
    left, top, right = 170.0, used + 26, WIDTH - 250.0
    highest = sent[shown[0]]
    bottom = top + len(shown) * _ROW
    body = [key]
    for value in binary_ticks(highest):
        x = left + value / highest * (right - left)
        body += [
            line(x, top, x, bottom, GRID),
            text(x, top - 6, format_bytes(value), anchor="middle", fill=MUTED, size=11),
        ]
    for index, (axis, phase) in enumerate(shown):
        y, name = top + index * _ROW, f"{axis} · {phase}"
        width = measured.get((axis, phase), 0.0) / highest * (right - left)
        values = format_bytes(measured.get((axis, phase), 0.0))
        expected = expected_by.get((axis, phase))
        end = width
        body.append(text(left - 8, y + 15, clip(name, 26), anchor="end"))
        if expected is not None:
            values += f", predicted {format_bytes(expected)}"
            thin = max(expected / highest * (right - left), 1)
            body.append(rectangle(left, y + 15, thin, 3, MUTED))
            end = max(width, thin)
        title = f"{name}: {values}"
        body += [
            rectangle(left, y + 3, max(width, 1), 11, colours[axis], title=title),
            text(left + end + 6, y + 15, values, fill=MUTED, size=11),
        ]
    body.append(line(left, top, left, bottom, INK))
    rest = f" The {len(keys) - len(shown)} smallest are left out." if len(keys) > len(shown) else ""
    axis, phase = shown[0]
    description = (
        f"Bytes sent in one step by all ranks, by axis and phase; most: {axis} · {phase}, "
        f"{format_bytes(sent[shown[0]])}.{rest}"
    )
    return figure("traffic", "Traffic of all ranks per step", description, bottom + 8, body)


def binary_ticks(highest: float, count: int = 4) -> list[float]:
    """Round numbers of bytes, in the unit that fits `highest`."""
    unit = 1.0
    while highest / unit >= 1024:
        unit *= 1024
    return [value * unit for value in ticks(0, highest / unit, count)]
