"""Heat maps: a matrix of values as boxes of a few colours, whatever its size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

#: A colour for values up to a limit, and its name in the legend: (limit, colour, name).
HeatClass = tuple[float, str, str]
Matrix = list[list[float]]


def class_colour(classes: Sequence[HeatClass], value: float) -> str:
    """The colour of the first class whose limit `value` does not exceed."""
    return next(colour for limit, colour, _ in classes if value <= limit)


def legend_entries(classes: Sequence[HeatClass]) -> list[tuple[str, str]]:
    """(name, colour) of every class, for a legend."""
    return [(name, colour) for _, colour, name in classes]


def cells(matrix: Matrix, colour_of: Callable[[float], str]) -> str:
    """One SVG path a colour, a cell being 1 x 1: runs of equal colour in a row are one box."""
    boxes: defaultdict[str, list[str]] = defaultdict(list)
    for y, row in enumerate(matrix):
        colours = [colour_of(value) for value in row]
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or colours[x] != colours[start]:
                boxes[colours[start]].append(f"M{start} {y}h{x - start}v1h{start - x}z")
                start = x
    return "".join(f'<path fill="{c}" d="{"".join(boxes[c])}"/>' for c in sorted(boxes))
