"""Rows of every pair of ranks as matrices: who sends how much to whom."""

from __future__ import annotations

from collections.abc import Sequence

from moemesh.report.svg import COLOURS, INK, MUTED, WIDTH, figure, ink_on, rectangle, text, tint

#: Name of the dispatcher, what is exchanged, rows [from][to].
Panel = tuple[str, str, Sequence[Sequence[int]]]
#: Classes of colour between no rows and the most of any pair.
_SHADES = tuple(tint(COLOURS[0], share) for share in (0.85, 0.65, 0.45, 0.25, 0.0))
_TOP, _LEFT, _GAP = 40, 44, 40


def draw(panels: Sequence[Panel]) -> str:
    """An SVG with one matrix for each of `panels`, senders as lines and receivers as columns; what
    a rank keeps has a frame instead of a colour."""
    most = max((n for *_, rows in panels for line in rows for n in line), default=0)
    ranks = max((len(rows) for *_, rows in panels), default=1)
    cell = max(12.0, min(30.0, (WIDTH / 2 - _LEFT - _GAP) / ranks))
    width = max(_LEFT + ranks * cell + _GAP, WIDTH / 2)
    columns = max(1, int(WIDTH // width))
    height = _TOP + ranks * cell + _GAP
    parts: list[str] = []
    for number, (name, title, rows) in enumerate(panels):
        left, top = number % columns * width, number // columns * height
        parts += [
            text(left, top + 14, name, weight="bold"),
            text(left, top + 28, title, fill=MUTED, size=10),
            *_matrix(rows, left + _LEFT, top + _TOP, cell, most),
        ]
    lines = -(-len(panels) // columns)
    description = f"Rows that each rank (line) sends to each rank (column); at most {most}."
    title = "Rows between ranks"
    return figure("pairs", title, description, lines * height, parts)


def _matrix(
    rows: Sequence[Sequence[int]], left: float, top: float, cell: float, most: int
) -> list[str]:
    parts: list[str] = []
    for sender, line in enumerate(rows):
        y = top + sender * cell
        middle = y + cell / 2 + 4
        parts.append(text(left - 6, middle, f"from {sender}", anchor="end", size=9, fill=MUTED))
        for receiver, count in enumerate(line):
            x = left + receiver * cell
            shade = (count - 1) * len(_SHADES) // max(most, 1)
            fill = _SHADES[min(len(_SHADES) - 1, shade)] if count else "#f4f6f8"
            fill = "#ffffff" if receiver == sender else fill
            frame = f' stroke="{INK}" stroke-width="0.7"' if receiver == sender else ""
            hint = f"{count} rows from {sender} to {receiver}"
            parts.append(rectangle(x + 1, y + 1, cell - 2, cell - 2, fill, title=hint, more=frame))
            if cell >= 8 + 5 * len(str(count)):
                place = x + cell / 2
                ink = ink_on(fill)
                parts.append(text(place, middle, count, anchor="middle", size=10, fill=ink))
    for receiver in range(len(rows)):
        if cell >= 16 or receiver in (0, len(rows) - 1):
            x = left + (receiver + 0.5) * cell
            below = top + len(rows) * cell + 12
            parts.append(text(x, below, receiver, anchor="middle", size=9, fill=MUTED))
    return parts
