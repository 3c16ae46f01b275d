"""Tokens of every expert, layer by layer, over the steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

from moemesh.report.curves import Marks, Pictures, Series, line_charts
from moemesh.report.section import (
    MAX_TABLE_ROWS,
    Chapter,
    Table,
    figures,
    left_out,
    missing,
    plural,
)
from moemesh.report.svg import (
    FONT_SIZE,
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
from moemesh.trace.loads import LayerLoads
from moemesh.trace.run import Run

# Pictures of expert loads: heat maps, and imbalance over the steps.


#: Colours of load over mean load, up to each limit. Lightness falls with load; a dead expert is
# red.
DEAD = "#b3261e"
CLASSES: tuple[HeatClass, ...] = (
    (0.5, "#ffffd0", "below 0.5"),
    (0.8, "#c7e9b4", "0.5 to 0.8"),
    (1.25, "#7fcdbb", "0.8 to 1.25 (balanced)"),
    (2.0, "#2c8fbd", "1.25 to 2"),
    (4.0, "#225ea8", "2 to 4"),
    (float("inf"), "#0c1d5c", "above 4"),
)
#: All cells of all panels of one figure: bounds the size of the page.
_MAX_CELLS = 20_000
_MAX_PANELS = 12
_MAX_ROWS = 64
_MAX_COLUMNS = 120


def by_layer(loads: Sequence[LayerLoads]) -> dict[int, list[LayerLoads]]:
    """Loads of each layer, ascending by layer and step."""
    found: defaultdict[int, list[LayerLoads]] = defaultdict(list)
    for load in sorted(loads, key=lambda load: (load.layer, load.step)):
        found[load.layer].append(load)
    return dict(found)


def mean_loads(loads: Sequence[LayerLoads]) -> list[float]:
    """Mean tokens of each expert over some loads; shorter ones are padded with zeros."""
    columns = zip_longest(*(load.tokens_per_expert for load in loads), fillvalue=0)
    return [sum(column) / len(loads) for column in columns]


def layer_heat_maps(loads: Sequence[LayerLoads]) -> str:
    """One panel a layer: steps to the right, experts downwards, load over the mean as colour.

    Neighbouring steps and, past 64, neighbouring experts are averaged into one cell. With more than
    12 layers the most unbalanced ones are drawn. "" when there are no loads.
    """
    layers = {
        layer: items
        for layer, items in by_layer(loads).items()
        if any(any(load.tokens_per_expert) for load in items)
    }
    if not layers:
        return ""

    ranked = sorted(layers, key=lambda layer: (-_mean_imbalance(layers[layer]), layer))
    shown = sorted(ranked[:_MAX_PANELS])
    num_experts = {
        layer: max(len(load.tokens_per_expert) for load in layers[layer]) for layer in shown
    }
    num_rows = max(min(number, _MAX_ROWS) for number in num_experts.values())
    columns = min(max(_MAX_CELLS // (len(shown) * num_rows), 16), _MAX_COLUMNS)
    key, used = legend(_legend_entries(), left=0, top=4)
    body, top = [key], used + 22
    panel = (WIDTH - 100) / 2 if len(shown) > 1 else WIDTH - 50.0
    cell = min(max(140 / num_rows, 2.5), 16)
    for index, layer in enumerate(shown):
        matrix = _step_matrix(layers[layer], columns)
        left = 50 + (index % 2) * (panel + 50)
        steps = layers[layer][0].step, layers[layer][-1].step
        names = ("expert 0", str(num_experts[layer] - 1))
        body.append(_panel(f"layer {layer}", matrix, left, top, panel, cell, steps, "step", names))
        if index % 2 or layer == shown[-1]:
            top += num_rows * cell + 52
    left_out = "" if len(shown) == len(layers) else f", the most unbalanced of {len(layers)}"
    description = (
        f"Load of each expert (rows, downwards) over steps (to the right) for {len(shown)} "
        f"layers{left_out}, as a ratio to the layer's mean."
    )
    return figure("expert-loads", "Expert load, layer by layer", description, top - 10, body)


def mean_heat_map(loads: Sequence[LayerLoads]) -> str:
    """All layers (rows) by all experts (columns), mean over all steps. "" without any load."""
    layers = by_layer(loads)
    means = [mean_loads(items) for items in layers.values()]
    rows = [over_mean(values) for values in means if any(values)]
    if not rows:
        return ""
    if len(rows) > 128:
        width = max(map(len, rows))
        columns = [[row[c] if c < len(row) else 0.0 for row in rows] for c in range(width)]
        rows = [list(row) for row in zip(*(_squeeze(c, 128) for c in columns), strict=True)]
    matrix = [_squeeze(row, 256) for row in rows]
    key, used = legend(_legend_entries(), left=0, top=4)
    cell = min(max(200 / len(matrix), 3), 18)
    top = used + 22
    names = tuple(f"layer {layer}" for layer in sorted({min(layers), max(layers)}))
    span = 0, max(map(len, means)) - 1
    body = [key, _panel("all layers", matrix, 50, top, WIDTH - 50, cell, span, "expert", names)]
    description = (
        f"Mean load of each expert (columns) in each of {len(layers)} layers (rows, "
        f"from layer {min(layers)} at the top to layer {max(layers)}), as a ratio to the mean."
    )
    height = top + len(matrix) * cell + 36
    return figure("mean-loads", "Mean expert load over the run", description, height, body)


def imbalance_curve(loads: Sequence[LayerLoads], marks: Marks = ()) -> Pictures:
    """Max over mean of experts and of ranks: worst layer and mean of the layers, over the steps."""
    of_step: defaultdict[int, list[LayerLoads]] = defaultdict(list)
    for load in loads:
        of_step[load.step].append(load)
    steps = sorted(of_step)

    def over_layers(measure: Callable[[LayerLoads], float]) -> tuple[list[float], list[float]]:
        values = [[measure(load) for load in of_step[step]] for step in steps]
        return [max(row) for row in values], [sum(row) / len(row) for row in values]

    worst, mean = over_layers(lambda load: load.expert_max_over_mean)
    series = [
        Series(name="experts, worst layer", points=list(zip(steps, worst, strict=True)), colour=1),
        Series(name="experts, mean", points=list(zip(steps, mean, strict=True)), colour=0),
    ]
    if any(load.tokens_per_rank for load in loads):
        rank_worst, _ = over_layers(lambda load: load.rank_max_over_mean)
        points = list(zip(steps, rank_worst, strict=True))
        series.append(Series(name="ranks, worst layer", points=points, colour=2))
    description = "No loads."
    if steps:
        description = (
            f"Fullest expert over the mean, worst layer: {worst[0]:.2f} at step {steps[0]}, "
            f"{worst[-1]:.2f} at step {steps[-1]}, highest {max(worst):.2f}. 1 is balanced."
        )
    return line_charts(
        "imbalance",
        "Load imbalance over steps",
        series,
        y_label="fullest / mean (1 = balanced)",
        description=description,
        marks=marks,
    )


def _mean_imbalance(loads: Sequence[LayerLoads]) -> float:
    return sum(load.expert_max_over_mean for load in loads) / len(loads)


def _legend_entries() -> list[tuple[str, str]]:
    return [("no token", DEAD), *legend_entries(CLASSES)]


def _step_matrix(loads: Sequence[LayerLoads], columns: int) -> Matrix:
    """Rows are experts, columns buckets of steps, values load over mean."""
    columns = min(columns, len(loads))
    buckets = [
        loads[c * len(loads) // columns : (c + 1) * len(loads) // columns] for c in range(columns)
    ]
    num_experts = max(len(load.tokens_per_expert) for load in loads)
    squeezed: Matrix = []
    for bucket in buckets:
        means = mean_loads(bucket)
        padded = means + [0.0] * (num_experts - len(means))
        squeezed.append(_squeeze(over_mean(padded), _MAX_ROWS))
    return [list(row) for row in zip(*squeezed, strict=True)]


def _squeeze(values: Sequence[float], length: int) -> list[float]:
    """At most `length` values, neighbours averaged."""
    if len(values) <= length:
        return list(values)
    cuts = [index * len(values) // length for index in range(length + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def _panel(
    name: str,
    matrix: Matrix,
    left: float,
    top: float,
    width: float,
    cell: float,
    ends: tuple[int, int],
    across: str,
    rows: tuple[str, ...],
) -> str:
    num_columns = max(map(len, matrix))
    height = len(matrix) * cell
    scale = f"scale({width / num_columns:.4f} {cell:.4f})"
    parts = [
        text(left, top - 6, name, weight="bold"),
        f'<g transform="translate({left} {top:.2f}) {scale}" shape-rendering="crispEdges">',
        heat_cells(matrix, colour_of),
        "</g>",
        f'<rect x="{left}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" fill="none" '
        f'stroke="{INK}" stroke-width="0.5"/>',
        text(left, top + height + 16, f"{across} {short(ends[0])}", fill=MUTED),
        text(left + width, top + height + 16, short(ends[1]), anchor="end", fill=MUTED),
    ]
    for label, y in zip(rows, (top + FONT_SIZE - 2, top + height), strict=False):
        parts.append(text(left - 4, y, label, anchor="end", fill=MUTED, size=10))
    return "".join(parts)


def colour_of(ratio: float) -> str:
    """The heat map's colour of load over mean."""
    if ratio <= 0:
        return DEAD
    return class_colour(CLASSES, ratio)


_HEADER = (
    "Layer",
    "Experts",
    "Fullest expert / mean, average of the steps",
    "Fullest expert / mean, last steps",
    "Fullest rank / mean, last steps",
    "Entropy, last steps",
    "Experts without a token, last steps",
    "Dropped, over the run",
)


def loads(run: Run) -> Chapter:
    """From `loads.jsonl`."""
    if not run.loads:
        text = missing(run, "loads.jsonl")
        return Chapter(identity="loads", title="Expert load", missing=text)
    layers = by_layer(run.loads)
    rows = [
        (
            f"{layer}",
            f"{len(items[-1].tokens_per_expert)}",
            f"{_mean_imbalance(items):.3f}",
            f"{items[-1].expert_max_over_mean:.3f}",
            f"{items[-1].rank_max_over_mean:.3f}",
            f"{items[-1].entropy:.4f}",
            f"{items[-1].dead_experts}",
            f"{sum(load.dropped for load in items):,}",
        )
        for layer, items in layers.items()
    ]
    table = Table(
        caption="Balance of each layer (1 = balanced; entropy 1 = uniform)",
        header=_HEADER,
        rows=rows[:MAX_TABLE_ROWS],
    )
    drawn: list[tuple[str, str] | tuple[str, str, str]] = [
        ("Load imbalance", *imbalance_curve(run.loads, run.marks)),
        ("Load of each expert over its layer's mean, by step", layer_heat_maps(run.loads)),
    ]
    if len(layers) > 1:
        caption = "Load of each expert over its layer's mean, whole run"
        drawn.append((caption, mean_heat_map(run.loads)))
    return Chapter(
        identity="loads",
        title="Expert load",
        figures=figures(*drawn),
        tables=[table],
        note=f"{plural(len(layers), 'layer')} with experts." + left_out(len(rows), "layers"),
    )
