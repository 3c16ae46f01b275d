"""A timeline as text for terminals and tests: a row per rank, a column per tick."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from moemesh.report.timeline_picture import LONG_NAMES, boxes_of
from moemesh.trace.timeline import Timeline

#: Most columns; a common measure that needs more is an accident.
_MAX_COLUMNS = 4000
#: Columns if the times have no common measure.
_COARSE = 60


def draw(timeline: Timeline) -> str:
    """One line for each rank; each operation spans the columns from its start to its end.

    A forward of microbatch 3 is ``F3``, continued by ``-``, an idle tick ``.``. A block joins its
    operations with ``+``, a slice follows a point, and small letters are the second pipe or an odd
    chunk. A column is the greatest common measure of all times (without one, a 60th of the span).
    Records without a microbatch are left out.

    >>> from moemesh.trace.timeline import WorkRecord
    >>> records = [WorkRecord(rank=0, start=0, end=1, name="0F0", kind="F", stage=0, microbatch=0),
    ...            WorkRecord(rank=0, start=2, end=4, name="0B0", kind="B", stage=0, microbatch=0)]
    >>> print(draw(Timeline(ranks=(0,), records=tuple(records), source="simulated", unit="ticks")))
    rank 0: F0 .  B0---
    """
    rows = {
        rank: [box for box in boxes_of(records) if box.record.microbatch is not None]
        for rank, records in timeline.by_rank().items()
    }
    boxes = [box for row in rows.values() for box in row]
    if not boxes:
        return ""
    origin = min(box.record.start for box in boxes)
    times = {box.record.start - origin for box in boxes} | {
        box.record.end - origin for box in boxes
    }
    step = common_measure(times) or max(times) / _COARSE or 1.0
    # Rank -> (first column, column after the last, label) of each operation or block.
    cells: dict[int, list[tuple[int, int, str]]] = {}
    for rank, row in rows.items():
        labels_of: dict[tuple[int, int], list[str]] = {}
        for box in row:
            start = round((box.record.start - origin) / step)
            end = round((box.record.end - origin) / step)
            kind = box.record.kind.lower() if box.tinted else box.record.kind
            labels_of.setdefault((start, end), []).append(f"{kind}{box.label}")
        cells[rank] = [
            (*columns, "+".join(labels)) for columns, labels in sorted(labels_of.items())
        ]
    # Wide enough for every label and a blank after it.
    width = max(
        -(-(len(label) + 1) // max(end - start, 1))
        for row in cells.values()
        for start, end, label in row
    )
    head = len(f"rank {timeline.ranks[-1]}")
    lines: list[str] = []
    for rank, row in cells.items():
        line, column = f"{f'rank {rank}':{head}}: ", 0
        for start, end, label in row:
            line += ".".ljust(width) * (start - column)
            # Operations that start in the same column are placed side by side.
            room = width * max(end - max(start, column), 1) - 1
            line += label.ljust(room, "-") + " "
            column = max(end, column)
        lines.append(line.rstrip())
    return "\n".join(lines)


def legend(picture: str) -> str:
    """One line that explains the signs in `picture`."""
    letters = set(re.findall(r"\b([A-Za-z])\d", picture))
    kinds = [f"{key} {name}" for key, name in LONG_NAMES.items() if letters & {key, key.lower()}]
    signs = [". idle"] if re.search(r" \.( |$)", picture, re.MULTILINE) else []
    signs += ["+ in one block"] if "+" in picture else []
    small = ["small letters: the second pipe or an odd chunk"] if letters & set("fbiw") else []
    return "; ".join([", ".join([*kinds, *signs]), *small])


def common_measure(times: set[float]) -> float | None:
    """The largest common divisor of all times; None if there is none, or it needs too many
    columns."""
    longest, fractions = max(times, default=0.0), list[Fraction]()
    for time in times:
        fractions.append(Fraction(time).limit_denominator(10_000))
        if abs(fractions[-1] - Fraction(time)) > 1e-9 * max(longest, 1.0):
            return None
    denominator = math.lcm(*(time.denominator for time in fractions))
    measure = math.gcd(*(int(time * denominator) for time in fractions)) / denominator
    return measure if measure and longest / measure <= _MAX_COLUMNS else None
