"""Relevance of every expert to a task: a heat map of layers and experts, the chosen ones framed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moemesh.report.svg import (
    INK,
    MUTED,
    WIDTH,
    HeatClass,
    class_colour,
    coordinate,
    figure,
    heat_cells,
    legend,
    legend_entries,
    text,
)

#: Colours of an expert's share of its layer over an equal share, up to each limit.
CLASSES: tuple[HeatClass, ...] = (
    (0.25, "#ffffd0", "below a quarter of an equal share"),
    (0.75, "#d5eeb3", "to 0.75"),
    (1.5, "#8ed1bd", "to 1.5"),
    (3.0, "#41a5c2", "to 3"),
    (6.0, "#2272b2", "to 6"),
    (float("inf"), "#0c1d5c", "above 6"),
)
_LEFT = 64.0


def relevance_map(
    shares: Mapping[int, Sequence[float]], chosen: Mapping[int, Sequence[int]]
) -> str:
    """A figure of ``shares[layer][expert]``, which add up to 1 in a layer; `chosen` are framed."""
    layers = sorted(shares)
    num_experts = len(shares[layers[0]])
    matrix = [[share * num_experts for share in shares[layer]] for layer in layers]
    key, top = legend(legend_entries(CLASSES), left=0, top=4)
    top += 14
    cell = min(max(320 / len(layers), 4.0), 18.0)
    width, height = WIDTH - _LEFT, len(layers) * cell
    scale = f"scale({width / num_experts:.4f} {cell:.4f})"
    # Not in the scaled group: strokes would be scaled, too, by drawers that know no other way.
    column, inset = width / num_experts, 1.0
    frames = "".join(
        f'<rect x="{coordinate(_LEFT + expert * column + inset)}" '
        f'y="{coordinate(top + row * cell + inset)}" '
        f'width="{coordinate(max(column - 2 * inset, 0.5))}" '
        f'height="{coordinate(max(cell - 2 * inset, 0.5))}"/>'
        for row, layer in enumerate(layers)
        for expert in chosen.get(layer, ())
    )
    body = [
        key,
        f'<g transform="translate({_LEFT:g} {top:.2f}) {scale}">',
        heat_cells(matrix, lambda value: class_colour(CLASSES, value)),
        "</g>",
        f'<g fill="none" stroke="#b3245e" stroke-width="2">{frames}</g>',
        f'<rect x="{_LEFT:g}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" fill="none" '
        f'stroke="{INK}" stroke-width="0.5"/>',
        text(_LEFT, top + height + 16, "expert 0", fill=MUTED),
        text(WIDTH, top + height + 16, str(num_experts - 1), anchor="end", fill=MUTED),
        _row_name(top + min(10.0, cell), f"layer {layers[0]}"),
        _row_name(top + height, str(layers[-1])),
    ]
    number = sum(map(len, chosen.values()))
    description = (
        f"Relevance of each of {num_experts} experts (columns) in each of {len(layers)} layers "
        f"(rows, downwards) over an equal share; {number} chosen experts are framed."
    )
    title = "Relevance of experts to a task"
    return figure("esft-relevance", title, description, top + height + 24, body)


def _row_name(y: float, name: str) -> str:
    return text(_LEFT - 4, y, name, anchor="end", fill=MUTED, size=10)
