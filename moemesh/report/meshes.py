"""The two meshes of a plan as a picture: which rank sits where, beside which others."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from moemesh.config.layout import Layout, shard_range
from moemesh.report import svg

#: Rows of ranks that are drawn; a larger world is cut, and the picture says so.
MOST_ROWS = 64
#: Ranks of a row, unless the innermost axis alone has more.
MOST_COLUMNS = 16
_ROW, _LABEL, _NODE, _GAP = 20, 84, 66, 20
_PANEL = (svg.WIDTH - _GAP) / 2


#: The meshes: name in :data:`moemesh.config.layout.VIEWS`, title, axis of the colours, left edge.
_VIEWS = (
    ("dense", "attention and dense MLPs: pp, dp, cp, tp", "dp", 0.0),
    ("expert", "routed experts: pp, edp, ep, etp", "ep", _PANEL + _GAP),
)


def draw(layout: Layout, num_experts: int = 0) -> str:
    """An SVG of both meshes side by side, ranks in their order. On the left ranks of one colour
    have the same sequences, on the right the same experts, named where `num_experts` is known."""
    nodes = layout.ranks_per_node or layout.world_size
    parts: list[str] = []
    height = max(_panel(parts, layout, *view, nodes) for view in _VIEWS) + 10
    for size, name in ((layout.dp, "dp"), (layout.ep, "ep")):
        drawn, used = svg.legend(_names(size, name, num_experts), left=0, top=height)
        parts.append(drawn)
        height += used + 6
    title = f"The meshes of {layout.world_size} ranks"
    description = (
        f"Left pp {layout.pp}, dp {layout.dp}, cp {layout.cp}, tp {layout.tp}; right edp "
        f"{layout.edp}, ep {layout.ep}, etp {layout.etp}. Each box is a rank."
    )
    return svg.figure("meshes", title, description, height, parts)


def _names(size: int, axis: str, num_experts: int) -> Iterator[tuple[str, str]]:
    """The legend of an axis: colours repeat where it is long."""
    for index in range(min(size, len(svg.COLOURS))):
        colour = _colour(index, axis)
        if axis == "dp":
            name = f"dp {index}"
        else:
            own = shard_range(num_experts, size, index)
            name = f"ep {index}" + (f": experts {own[0]}-{own[-1]}" if own else "")
        yield name, colour
    if size > len(svg.COLOURS):
        yield f"... {axis} {size - 1}, colours again", "#ffffff"


def _colour(index: int, axis: str) -> str:
    colour = svg.COLOURS[index % len(svg.COLOURS)]
    return svg.tint(colour, 0.6) if axis == "dp" else colour


def _panel(
    parts: list[str], layout: Layout, view: str, title: str, colour: str, left: float, nodes: int
) -> float:
    """Add one mesh to `parts`; returns where it ends."""
    degrees = layout.dimensions(view)
    # The innermost axes make a row: as many as MOST_COLUMNS allows, at least one.
    inner: list[str] = []
    for axis in reversed(degrees):
        columns = prod(degrees[known] for known in (*inner, axis))
        if axis == "pp" or (inner and columns > MOST_COLUMNS):
            break
        inner.insert(0, axis)
    columns = prod(degrees[axis] for axis in inner)
    named = [axis for axis in degrees if axis not in inner and degrees[axis] > 1]
    num_rows = layout.world_size // columns
    shown = min(num_rows, MOST_ROWS)
    width = min(56.0, (_PANEL - _LABEL - _NODE) / columns)
    parts.append(svg.text(left, 14, title, weight="bold"))
    heads = [axis for axis in inner if degrees[axis] > 1]
    parts.append(svg.text(left, 34, " ".join(heads), fill=svg.MUTED, size=10))
    for column in range(columns):
        at = layout.coordinates(column)
        x = left + _LABEL + (column + 0.5) * width - 1
        head = ".".join(str(at[axis]) for axis in heads)
        if heads and width >= 6 * len(head):
            parts.append(svg.text(x, 34, head, anchor="middle", fill=svg.MUTED, size=10))
    y = 40.0
    for row in range(shown):
        first = row * columns
        at = layout.coordinates(first)
        if row and at["pp"] != layout.coordinates(first - 1)["pp"]:
            y += 8
        label = " ".join(f"{axis} {at[axis]}" for axis in named)
        parts.append(svg.text(left, y + 14, label, size=10))
        for column in range(columns):
            rank = first + column
            x = left + _LABEL + column * width
            fill = _colour(layout.coordinates(rank)[colour], colour)
            hint = f"rank {rank}, node {rank // nodes}"
            parts.append(svg.rectangle(x, y, width - 2, _ROW - 2, fill, title=hint))
            if width >= svg.text_width(str(rank), 9) + 2:
                middle, ink = x + width / 2 - 1, svg.ink_on(fill)
                parts.append(svg.text(middle, y + 13, rank, anchor="middle", fill=ink, size=9))
        if nodes < layout.world_size and (row == 0 or first // nodes != (first - 1) // nodes):
            x = left + _LABEL + columns * width + 6
            last = (first + columns - 1) // nodes
            label = f"node {first // nodes}" + (f"-{last}" if last > first // nodes else "")
            parts.append(svg.text(x, y + 14, label, size=10))
        y += _ROW
    if num_rows > shown:
        rest = f"... ranks {shown * columns} to {layout.world_size - 1}"
        parts.append(svg.text(left, y + 14, rest))
        y += 18
    return y
