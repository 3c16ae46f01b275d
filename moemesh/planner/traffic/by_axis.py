"""Traffic of one rank by axis: how many transfers, how large one is, and its share of all bytes."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from moemesh.trace.ledger import Ledger


class AxisTraffic(NamedTuple):
    """Transfers of one operation and size over one axis in a step. `bytes_each` are those that the
    rank sends in one, `share` is of all bytes that it sends."""

    axis: str
    op: str
    transfers: int
    bytes_each: float
    total_bytes: int
    share: float


def by_axis(ledger: Ledger) -> list[AxisTraffic]:
    """The lines of a ledger summed over phases and callers: axes with most bytes first, and the
    operations and sizes of an axis in the order of their bytes."""
    sums: defaultdict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for entry in ledger.entries():
        if entry.wire_bytes:
            key = entry.axis, entry.op, round(entry.wire_bytes / entry.count)
            sums[key][0] += entry.count
            sums[key][1] += entry.wire_bytes
    whole = sum(total for _, total in sums.values()) or 1
    rows = [
        AxisTraffic(axis, op, count, total / count, total, total / whole)
        for (axis, op, _), (count, total) in sums.items()
    ]
    axes: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        axes[row.axis] += row.total_bytes
    return sorted(rows, key=lambda row: (-axes[row.axis], row.axis, -row.total_bytes, row.op))
