"""Heat maps of expert loads over layers and steps, of GPU loads, and of expert relevance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from moemesh.report import svg
from moemesh.trace.loads import LayerLoads

#: Class of values: upper limit, colour, and name in the legend.
HeatClass = tuple[float, str, str]
Matrix = list[list[float]]


def _classes(limits: Sequence[float], colours: str, balanced: int) -> tuple[HeatClass, ...]:
    """Classes up to each of `limits`, and one above; the name of class `balanced` gets a note."""
    first, last = f"below {limits[0]:g}", f"above {limits[-1]:g}"
    names = [first, *(f"{low:g} to {high:g}" for low, high in pairwise(limits)), last]
    names[balanced] += " (balanced)"
    return tuple(zip((*limits, float("inf")), colours.split(), names, strict=True))


#: Load of an expert over its layer's mean. Lightness falls with load; a dead expert is red.
DEAD = "#b3261e"
EXPERT_CLASSES = _classes(
    (0.5, 0.8, 1.25, 2.0, 4.0), "#ffffd0 #c7e9b4 #7fcdbb #2c8fbd #225ea8 #0c1d5c", 2
)
#: Load of a GPU over its layer's mean. Classes are finer around 1 than for experts: the load of the
#: fullest GPU determines the layer's time.
GPU_CLASSES = _classes(
    (0.5, 0.95, 1.02, 1.1, 1.5, 2.0),
    "#ffffd0 #d5eeb3 #8ed1bd #41a5c2 #2272b2 #233f93 #0c1d5c",
    2,
)
#: Share of an expert in its layer over an equal share.
RELEVANCE_CLASSES: tuple[HeatClass, ...] = (
    (0.25, "#ffffd0", "below a quarter of an equal share"),
    (0.75, "#d5eeb3", "to 0.75"),
    (1.5, "#8ed1bd", "to 1.5"),
    (3.0, "#41a5c2", "to 3"),
    (6.0, "#2272b2", "to 6"),
    (float("inf"), "#0c1d5c", "above 6"),
)
#: Most cells, panels, rows and columns of a figure of steps; they bound the size of the page.
_MAX_CELLS, _MAX_PANELS, _MAX_ROWS, _MAX_COLUMNS = 12_000, 12, 64, 120
#: Most rows and columns of a figure of GPUs; a cell of several shows their maximum, so that a hot
#: GPU stays visible.
_MAX_LAYERS, _MAX_GPUS = 96, 256
_LEFT = 64.0


def heat_colour(classes: Sequence[HeatClass], value: float) -> str:
    """Colour of the first class whose limit is at least `value`; red for an expert without load."""
    if classes is EXPERT_CLASSES and value <= 0:
        return DEAD
    return next(colour for limit, colour, _ in classes if value <= limit)


def over_mean(values: Sequence[float]) -> list[float]:
    """Each value over the mean of all; 1 if the mean is 0."""
    mean = sum(values) / len(values) if len(values) else 0.0
    return [float(value / mean) if mean else 1.0 for value in values]


def _legend(classes: Sequence[HeatClass]) -> tuple[str, float]:
    dead = [("no token", DEAD)] if classes is EXPERT_CLASSES else []
    return svg.legend([*dead, *((name, colour) for _, colour, name in classes)], left=0, top=4)


def _panel(
    matrix: Matrix,
    classes: Sequence[HeatClass],
    *,
    left: float,
    top: float,
    width: float,
    cell: float,
    title: str = "",
    below: tuple[str, str],
    rows: Iterable[tuple[float, str]],
    frames: str = "",
) -> str:
    """A matrix as boxes of height `cell`; neighbours of one colour in a row are one box. `below`:
    names of the first and last column; `rows`: (y, name) of labels to the left; `frames`: SVG
    drawn over the boxes. Sizes in pixels."""
    boxes: defaultdict[str, list[str]] = defaultdict(list)
    for y, row in enumerate(matrix):
        colours, start = [heat_colour(classes, value) for value in row], 0
        for x in range(1, len(row) + 1):
            if x == len(row) or colours[x] != colours[start]:
                boxes[colours[start]].append(f"M{start} {y}h{x - start}v1h{start - x}z")
                start = x
    height = len(matrix) * cell
    scale = f"scale({width / max(map(len, matrix)):.4f} {cell:.4f})"
    corner = f'<rect x="{left:g}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return "".join(
        [
            svg.text(left, top - 6, title, weight="bold") if title else "",
            f'<g transform="translate({left:g} {top:.2f}) {scale}" shape-rendering="crispEdges">',
            *(f'<path fill="{c}" d="{"".join(boxes[c])}"/>' for c in sorted(boxes)),
            f"</g>{frames}",
            f'{corner} fill="none" stroke="{svg.INK}" stroke-width="0.5"/>',
            svg.text(left, top + height + 16, below[0], fill=svg.MUTED),
            svg.text(left + width, top + height + 16, below[1], anchor="end", fill=svg.MUTED),
            *(
                svg.text(left - 4, y, name, anchor="end", fill=svg.MUTED, size=11)
                for y, name in rows
            ),
        ]
    )


def by_layer(loads: Sequence[LayerLoads]) -> dict[int, list[LayerLoads]]:
    """Loads of each layer, ascending by layer and step."""
    loads_of: defaultdict[int, list[LayerLoads]] = defaultdict(list)
    for load in sorted(loads, key=lambda load: (load.layer, load.step)):
        loads_of[load.layer].append(load)
    return dict(loads_of)


def mean_imbalance(loads: Sequence[LayerLoads]) -> float:
    """Fullest expert over the mean, averaged over some loads."""
    return sum(load.expert_max_over_mean for load in loads) / len(loads)


def _mean_loads(loads: Sequence[LayerLoads]) -> list[float]:
    """Mean tokens of each expert over `loads`; shorter ones are padded with zeros."""
    columns = zip_longest(*(load.tokens_per_expert for load in loads), fillvalue=0)
    return [sum(column) / len(loads) for column in columns]


def layer_heat_maps(loads: Sequence[LayerLoads]) -> str:
    """One panel for each layer: steps to the right, experts downwards, load over mean as colour.
    The legend and each panel are separate figures, so that a page wraps them to its width.

    Neighbouring steps, and neighbouring experts beyond 64, are averaged into one cell. Of more than
    12 layers the most unbalanced ones are drawn. "" without loads.
    """
    layers = {
        layer: items
        for layer, items in by_layer(loads).items()
        if any(any(load.tokens_per_expert) for load in items)
    }
    if not layers:
        return ""
    ranked = sorted(layers, key=lambda layer: (-mean_imbalance(layers[layer]), layer))
    shown = sorted(ranked[:_MAX_PANELS])
    num_experts = {
        layer: max(len(load.tokens_per_expert) for load in layers[layer]) for layer in shown
    }
    num_rows = max(min(number, _MAX_ROWS) for number in num_experts.values())
    most = min(max(_MAX_CELLS // (len(shown) * num_rows), 16), _MAX_COLUMNS)
    legend, legend_height = _legend(EXPERT_CLASSES)
    panel = svg.WIDTH / 2 if len(shown) > 1 else svg.WIDTH
    cell, top = min(max(140 / num_rows, 2.5), 16), 20.0
    left_out = "" if len(shown) == len(layers) else f", the most unbalanced of {len(layers)}"
    description = (
        f"Load of each expert (rows, downwards) over steps (to the right) for {len(shown)} "
        f"layers{left_out}, as a ratio to the layer's mean."
    )
    title, height = "Expert load, layer by layer", legend_height + 6
    pictures = [svg.figure("expert-loads", title, description, height, [legend])]
    for layer in shown:
        items = layers[layer]
        columns, squeezed = min(most, len(items)), Matrix()  # a row for each column of the panel
        for c in range(columns):
            means = _mean_loads(items[c * len(items) // columns : (c + 1) * len(items) // columns])
            padded = means + [0.0] * (num_experts[layer] - len(means))
            squeezed.append(squeeze(over_mean(padded), _MAX_ROWS))
        matrix = [list(row) for row in zip(*squeezed, strict=True)]
        last = top + len(matrix) * cell, str(num_experts[layer] - 1)
        drawn = _panel(
            matrix,
            EXPERT_CLASSES,
            left=50,
            top=top,
            width=panel - 50,
            cell=cell,
            title=f"layer {layer}",
            below=(f"step {svg.short(items[0].step)}", svg.short(items[-1].step)),
            rows=[(top + svg.FONT_SIZE - 2, "expert 0"), last],
        )
        height = top + len(matrix) * cell + 24
        title = f"Expert load of layer {layer}"
        identity = f"expert-loads-{layer}"
        pictures.append(svg.figure(identity, title, description, height, [drawn], panel))
    return f'<div class="panels">{"".join(pictures)}</div>'


def _layers_figure(
    identity: str,
    title: str,
    description: str,
    classes: Sequence[HeatClass],
    column: str,
    panels: Sequence[tuple[str, Sequence[int], Matrix, int]],
    framed: Mapping[int, Sequence[int]] | None = None,
) -> str:
    """A figure of panels (title, layers, matrix with a row for each, number of columns), under one
    another; `framed` columns of layers have a frame."""
    legend, legend_height = _legend(classes)
    body, top, width = [legend], legend_height + 26, svg.WIDTH - _LEFT
    for name, layers, matrix, columns in panels:
        # Frames need larger cells.
        cell = min(max((320 if framed else 220) / len(matrix), 3.0), 18.0)
        each, inset = width / columns, 1.0
        height = len(matrix) * cell
        rows = [(top + min(10.0, height), f"layer {layers[0]}")]
        rows += [(top + height, str(layers[-1]))] if len(layers) > 1 and height >= 20 else []
        # Outside of the scaled group: some renderers scale strokes with it.
        frames = "".join(
            f'<rect x="{svg.coordinate(_LEFT + index * each + inset)}" '
            f'y="{svg.coordinate(top + row * cell + inset)}" '
            f'width="{svg.coordinate(max(each - 2 * inset, 0.5))}" '
            f'height="{svg.coordinate(max(cell - 2 * inset, 0.5))}"/>'
            for row, layer in enumerate(layers)
            for index in (framed or {}).get(layer, ())
        )
        look = f'<g fill="none" stroke="#b3245e" stroke-width="2">{frames}</g>' if framed else ""
        below = (f"{column} 0", str(columns - 1))
        size: dict[str, Any] = {"left": _LEFT, "top": top, "width": width, "cell": cell}
        body.append(
            _panel(matrix, classes, **size, title=name, below=below, rows=rows, frames=look)
        )
        top += height + 56
    return svg.figure(identity, title, description, top - 20, body)


def mean_heat_map(loads: Sequence[LayerLoads]) -> str:
    """All layers (rows) by all experts (columns), mean over all steps. "" without any load."""
    layers = by_layer(loads)
    means = [_mean_loads(items) for items in layers.values()]
    rows = [over_mean(values) for values in means if any(values)]
    if not rows:
        return ""
    if len(rows) > 128:
        columns = zip_longest(*rows, fillvalue=0.0)
        rows = [list(row) for row in zip(*(squeeze(c, 128) for c in columns), strict=True)]
    matrix = [squeeze(row, 256) for row in rows]
    description = (
        f"Mean load of each expert (columns) in each of {len(layers)} layers (rows, "
        f"from layer {min(layers)} at the top to layer {max(layers)}), as a ratio to the mean."
    )
    title = "Mean expert load over the run"
    panels = [("all layers", list(layers), matrix, max(map(len, means)))]
    return _layers_figure("mean-loads", title, description, EXPERT_CLASSES, "expert", panels)


def squeeze(values: Sequence[float], length: int) -> list[float]:
    """At most `length` values, neighbours averaged."""
    if len(values) <= length:
        return list(values)
    cuts = [index * len(values) // length for index in range(length + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def balance_heat_maps(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> str:
    """A figure of loads [layers][GPUs] before and after balancing; both in the same unit."""
    panels: list[tuple[str, Sequence[int], Matrix, int]] = []
    worst: list[float] = []
    for name, loads in (("before", before), ("after", after)):
        matrix = [over_mean(row) for row in loads]
        layers, gpus = len(matrix), len(matrix[0])
        cuts: list[list[tuple[int, int]]] = []
        for number, most in ((layers, _MAX_LAYERS), (gpus, _MAX_GPUS)):
            parts = min(number, most)
            cuts.append([(i * number // parts, (i + 1) * number // parts) for i in range(parts)])
        drawn = [
            [max(max(row[left:right]) for row in matrix[a:b]) for left, right in cuts[1]]
            for a, b in cuts[0]
        ]
        mean = sum(max(row) for row in matrix) / layers
        worst.append(max(max(row) for row in matrix))
        title = (
            f"{name}: most loaded GPU over the mean GPU, {svg.short(round(mean, 3))} "
            f"as a mean over layers, {svg.short(round(worst[-1], 3))} in the worst"
        )
        panels.append((title, range(layers), drawn, gpus))
    description = (
        f"Load of each GPU (columns) in each of {len(before)} layers (rows, downwards) over the "
        f"layer's mean. Worst layer: {worst[0]:.3f} before, {worst[1]:.3f} after."
    )
    title = "Load of each GPU before and after"
    return _layers_figure("gpu-loads", title, description, GPU_CLASSES, "GPU", panels)


def relevance_map(
    shares: Mapping[int, Sequence[float]], chosen: Mapping[int, Sequence[int]]
) -> str:
    """A figure of ``shares[layer][expert]`` of a task's tokens, which add up to 1 in a layer;
    `chosen` are framed."""
    layers = sorted(shares)
    num_experts = len(shares[layers[0]])
    matrix = [[share * num_experts for share in shares[layer]] for layer in layers]
    description = (
        f"Relevance of each of {num_experts} experts (columns) in each of {len(layers)} layers "
        f"(rows, downwards) over an equal share; {sum(map(len, chosen.values()))} chosen experts "
        "are framed."
    )
    names = "esft-relevance", "Relevance of experts to a task", description
    panels = [("", layers, matrix, num_experts)]
    return _layers_figure(*names, RELEVANCE_CLASSES, "expert", panels, chosen)
