"""Pictures of ranks: their places in the meshes of a plan, and the rows between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from moemesh.config.layout import Layout, shard_range
from moemesh.report import svg

#: Most rows of ranks; a larger world is cut, with a note in the picture.
MOST_ROWS = 64
#: Most ranks of a row, unless the innermost axis has more.
MOST_COLUMNS = 16
#: Height of a row, widths of its label and of the name of its node, gap of the panels, in pixels.
_ROW, _LABEL, _NODE, _GAP = 20, 84, 66, 20
#: Width of a panel in pixels.
_PANEL = (svg.WIDTH - _GAP) / 2
#: The meshes: name in :data:`moemesh.config.layout.VIEWS`, title, axis of the colours, left edge.
_VIEWS = (
    ("dense", "attention and dense MLPs: pp, dp, cp, tp", "dp", 0.0),
    ("expert", "routed experts: pp, edp, ep, etp", "ep", _PANEL + _GAP),
)


def draw_meshes(layout: Layout, num_experts: int = 0) -> str:
    """An SVG of both meshes side by side, ranks in order. On the left ranks of one colour have the
    same sequences, on the right the same experts, which are listed if `num_experts` is given."""
    parts: list[str] = []
    height = max(_panel(parts, layout, *view) for view in _VIEWS) + 10
    for size, axis in ((layout.dp, "dp"), (layout.ep, "ep")):
        names: list[tuple[str, str]] = []
        for index in range(min(size, len(svg.COLOURS))):
            experts = shard_range(num_experts, size, index) if axis == "ep" else range(0)
            note = f": experts {experts[0]}-{experts[-1]}" if experts else ""
            names.append((f"{axis} {index}{note}", _colour(index, axis)))
        if size > len(svg.COLOURS):  # colours repeat
            names.append((f"... {axis} {size - 1}, colours repeat", "#ffffff"))
        drawn, used = svg.legend(names, left=0, top=height)
        parts.append(drawn)
        height += used + 6
    title = f"The meshes of {layout.world_size} ranks"
    description = (
        f"Left pp {layout.pp}, dp {layout.dp}, cp {layout.cp}, tp {layout.tp}; right edp "
        f"{layout.edp}, ep {layout.ep}, etp {layout.etp}. Each box is a rank."
    )
    return svg.figure("meshes", title, description, height, parts)


def _colour(index: int, axis: str) -> str:
    colour = svg.COLOURS[index % len(svg.COLOURS)]
    return svg.tint(colour, 0.6) if axis == "dp" else colour


def _panel(
    parts: list[str], layout: Layout, view: str, title: str, colour_axis: str, left: float
) -> float:
    """Add the mesh `view` to `parts`; returns its lower edge. The index of a rank on `colour_axis`
    gives its colour."""
    degrees = layout.dimensions(view)
    ranks_per_node = layout.ranks_per_node or layout.world_size
    # A row consists of the innermost axis, and of further axes (but pp) up to MOST_COLUMNS ranks.
    inner: list[str] = []
    for axis in reversed(degrees):
        columns = prod(degrees[name] for name in (*inner, axis))
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
        position = layout.coordinates(column)
        x = left + _LABEL + (column + 0.5) * width - 1
        head = ".".join(str(position[axis]) for axis in heads)
        if heads and width >= 6 * len(head):
            parts.append(svg.text(x, 34, head, anchor="middle", fill=svg.MUTED, size=10))
    y = 40.0
    for row in range(shown):
        first = row * columns
        position = layout.coordinates(first)
        if row and position["pp"] != layout.coordinates(first - 1)["pp"]:
            y += 8
        label = " ".join(f"{axis} {position[axis]}" for axis in named)
        parts.append(svg.text(left, y + 14, label, size=10))
        for column in range(columns):
            rank = first + column
            x = left + _LABEL + column * width
            fill = _colour(layout.coordinates(rank)[colour_axis], colour_axis)
            hint = f"rank {rank}, node {rank // ranks_per_node}"
            parts.append(svg.rectangle(x, y, width - 2, _ROW - 2, fill, title=hint))
            if width >= svg.text_width(str(rank), 9) + 2:
                middle, ink = x + width / 2 - 1, svg.ink_on(fill)
                parts.append(svg.text(middle, y + 13, rank, anchor="middle", fill=ink, size=9))
        node = first // ranks_per_node
        begins_node = row == 0 or node != (first - 1) // ranks_per_node
        if ranks_per_node < layout.world_size and begins_node:
            x = left + _LABEL + columns * width + 6
            last = (first + columns - 1) // ranks_per_node
            label = f"node {node}" + (f"-{last}" if last > node else "")
            parts.append(svg.text(x, y + 14, label, size=10))
        y += _ROW
    if num_rows > shown:
        note = f"... ranks {shown * columns} to {layout.world_size - 1}"
        parts.append(svg.text(left, y + 14, note))
        y += 18
    return y


#: Name of the dispatcher, content of the exchange, number of rows [from][to].
Pairs = tuple[str, str, Sequence[Sequence[int]]]
#: Colours from few rows to the maximum of all pairs.
_SHADES = tuple(svg.tint(svg.COLOURS[0], share) for share in (0.85, 0.65, 0.45, 0.25, 0.0))


def draw_pairs(panels: Sequence[Pairs]) -> str:
    """An SVG with one matrix for each of `panels`, senders as lines and receivers as columns; rows
    that stay on their rank have a frame instead of a colour."""
    above, before, gap = 40, 44, 40  # pixels above a matrix, to its left, and after it
    most = max((n for *_, rows in panels for line in rows for n in line), default=0)
    ranks = max((len(rows) for *_, rows in panels), default=1)
    cell = max(12.0, min(30.0, (svg.WIDTH / 2 - before - gap) / ranks))
    width = max(before + ranks * cell + gap, svg.WIDTH / 2)
    columns = max(1, int(svg.WIDTH // width))
    height = above + ranks * cell + gap
    parts: list[str] = []
    for number, (name, title, rows) in enumerate(panels):
        left, top = number % columns * width, number // columns * height
        parts.append(svg.text(left, top + 14, name, weight="bold"))
        parts.append(svg.text(left, top + 28, title, fill=svg.MUTED, size=10))
        left, top = left + before, top + above
        for sender, line in enumerate(rows):
            y = top + sender * cell
            middle, label = y + cell / 2 + 4, f"from {sender}"
            parts.append(svg.text(left - 6, middle, label, anchor="end", size=9, fill=svg.MUTED))
            for receiver, count in enumerate(line):
                x = left + receiver * cell
                shade = (count - 1) * len(_SHADES) // max(most, 1)
                fill = _SHADES[min(len(_SHADES) - 1, shade)] if count else "#f4f6f8"
                fill = "#ffffff" if receiver == sender else fill
                frame = f' stroke="{svg.INK}" stroke-width="0.7"' if receiver == sender else ""
                hint, side = f"{count} rows from {sender} to {receiver}", cell - 2
                parts.append(svg.rectangle(x + 1, y + 1, side, side, fill, title=hint, more=frame))
                if cell >= 8 + 5 * len(str(count)):
                    ink, centre = svg.ink_on(fill), x + cell / 2
                    parts.append(
                        svg.text(centre, middle, count, anchor="middle", size=10, fill=ink)
                    )
        for receiver in range(len(rows)):
            if cell >= 16 or receiver in (0, len(rows) - 1):
                x, below = left + (receiver + 0.5) * cell, top + len(rows) * cell + 12
                parts.append(svg.text(x, below, receiver, anchor="middle", size=9, fill=svg.MUTED))
    lines = -(-len(panels) // columns)
    description = f"Rows that each rank (line) sends to each rank (column); at most {most}."
    title = "Rows between ranks"
    return svg.figure("pairs", title, description, lines * height, parts)
