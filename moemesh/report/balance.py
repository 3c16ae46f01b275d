"""Load of each GPU before and after balancing, layer by layer: two heat maps."""

from __future__ import annotations

from collections.abc import Sequence

from moemesh.report.svg import (
    INK,
    MUTED,
    WIDTH,
    HeatClass,
    Matrix,
    class_colour,
    figure,
    heat_cells,
    legend,
    legend_entries,
    over_mean,
    short,
    text,
)

#: Colours of a GPU's load over its layer's mean, up to each limit. Lightness falls with load. Finer
#: around 1 than for experts: every percent of the most loaded GPU is a percent of the layer's time.
CLASSES: tuple[HeatClass, ...] = (
    (0.5, "#ffffd0", "below 0.5"),
    (0.95, "#d5eeb3", "0.5 to 0.95"),
    (1.02, "#8ed1bd", "0.95 to 1.02 (balanced)"),
    (1.1, "#41a5c2", "1.02 to 1.1"),
    (1.5, "#2272b2", "1.1 to 1.5"),
    (2.0, "#233f93", "1.5 to 2"),
    (float("inf"), "#0c1d5c", "above 2"),
)
#: More layers or GPUs than this are drawn as the maximum of neighbours: a hot GPU must not vanish.
_MAX_ROWS = 96
_MAX_COLUMNS = 256
_LEFT = 64.0


def balance_heat_maps(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> str:
    """A figure of loads [layers][GPUs] before and after; both in the same unit."""
    key, used = legend(legend_entries(CLASSES), left=0, top=4)
    body, top = [key], used + 26
    worst: list[float] = []
    for name, loads in (("before", before), ("after", after)):
        matrix = [over_mean(row) for row in loads]
        worst.append(max(max(row) for row in matrix))
        # A squeezed cell is the maximum of the cells that it stands for.
        rows, columns = len(matrix), len(matrix[0])
        height, width = min(rows, _MAX_ROWS), min(columns, _MAX_COLUMNS)
        drawn: Matrix = []
        for y in range(height):
            part = matrix[y * rows // height : (y + 1) * rows // height]
            drawn.append(
                [
                    max(max(row[x * columns // width : (x + 1) * columns // width]) for row in part)
                    for x in range(width)
                ]
            )
        cell = min(max(220 / len(drawn), 3.0), 18.0)
        mean = sum(max(row) for row in matrix) / len(matrix)
        title = (
            f"{name}: most loaded GPU over the mean GPU, {short(round(mean, 3))} "
            f"as a mean over layers, {short(round(worst[-1], 3))} in the worst"
        )
        body.append(_panel(title, drawn, top, cell, len(matrix), len(matrix[0])))
        top += len(drawn) * cell + 56
    description = (
        f"Load of each GPU (columns) in each of {len(before)} layers (rows, downwards) over the "
        f"layer's mean. Worst layer: {worst[0]:.3f} before, {worst[1]:.3f} after."
    )
    return figure("gpu-loads", "Load of each GPU before and after", description, top - 20, body)


def colour_of(ratio: float) -> str:
    """The colour of load over mean."""
    return class_colour(CLASSES, ratio)


def _panel(title: str, matrix: Matrix, top: float, cell: float, layers: int, gpus: int) -> str:
    width = WIDTH - _LEFT
    height = len(matrix) * cell
    scale = f"scale({width / len(matrix[0]):.4f} {cell:.4f})"
    parts = [
        text(_LEFT, top - 6, title, weight="bold"),
        f'<g transform="translate({_LEFT:g} {top:.2f}) {scale}" shape-rendering="crispEdges">',
        heat_cells(matrix, colour_of),
        "</g>",
        f'<rect x="{_LEFT:g}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" fill="none" '
        f'stroke="{INK}" stroke-width="0.5"/>',
        text(_LEFT, top + height + 16, "GPU 0", fill=MUTED),
        text(WIDTH, top + height + 16, str(gpus - 1), anchor="end", fill=MUTED),
        text(_LEFT - 4, top + min(10.0, height), "layer 0", anchor="end", fill=MUTED, size=10),
    ]
    if layers > 1 and height >= 20:
        last = text(_LEFT - 4, top + height, str(layers - 1), anchor="end", fill=MUTED, size=10)
        parts.append(last)
    return "".join(parts)
