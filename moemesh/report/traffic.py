"""Which bytes crossed which axis: bars and table rows from the ranks' ledgers."""

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
from moemesh.trace.memory import format_bytes

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

    @property
    def name(self) -> str:
        return f"{self.axis} · {self.op} · {self.phase}"


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


def traffic_bars(ledgers: Mapping[int, Ledger], *, steps: int = 1) -> str:
    """A bar for each (axis, op, phase): bytes sent by the busiest rank a step, coloured by axis.

    "" when there is no traffic.
    """
    rows = [row for row in traffic_rows(ledgers, steps=steps) if row.sum_wire_bytes > 0]
    if not rows:
        return ""
    shown = rows[:_MAX_BARS]
    axes = sorted({row.axis for row in rows})
    colours = {axis: COLOURS[index % len(COLOURS)] for index, axis in enumerate(axes)}
    key, used = legend(colours.items(), left=0, top=4)
    left, top, right = 270.0, used + 26, WIDTH - 190.0
    highest = max(row.max_wire_bytes for row in shown)
    bottom = top + len(shown) * _ROW
    body = [key]
    for value in binary_ticks(highest):
        x = left + value / highest * (right - left)
        body += [
            line(x, top, x, bottom, GRID),
            text(x, top - 6, format_bytes(value), anchor="middle", fill=MUTED, size=11),
        ]
    for index, row in enumerate(shown):
        y = top + index * _ROW
        width = max(row.max_wire_bytes / highest * (right - left), 1)
        values = f"{format_bytes(row.max_wire_bytes)}, all {format_bytes(row.sum_wire_bytes)}"
        title = f"{row.name}: {values}"
        body += [
            text(left - 8, y + 15, clip(row.name, 40), anchor="end"),
            rectangle(left, y + 4, width, _ROW - 8, colours[row.axis], title=title),
            text(left + width + 6, y + 15, values, fill=MUTED, size=11),
        ]
    body.append(line(left, top, left, bottom, INK))
    rest = f" The {len(rows) - len(shown)} smallest are left out." if len(rows) > len(shown) else ""
    description = (
        f"Bytes sent in one step by the busiest rank, by axis, operation and phase; most: "
        f"{shown[0].name}, {format_bytes(shown[0].max_wire_bytes)}.{rest}"
    )
    return figure("traffic", "Traffic of the busiest rank per step", description, bottom + 8, body)


def binary_ticks(highest: float, count: int = 4) -> list[float]:
    """Round numbers of bytes, in the unit that fits `highest`."""
    unit = 1.0
    while highest / unit >= 1024:
        unit *= 1024
    return [value * unit for value in ticks(0, highest / unit, count)]
