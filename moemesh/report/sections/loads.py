"""Tokens of every expert, layer by layer, over the steps."""

from __future__ import annotations

from collections.abc import Sequence

from moemesh.report import loads as pictures
from moemesh.report.section import MAX_TABLE_ROWS, Section, Table, figures, left_out, plural
from moemesh.report.sections.missing import missing
from moemesh.trace.run import Run

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


def loads(run: Run) -> Section:
    """From `loads.jsonl`."""
    if not run.loads:
        text = missing(run, "loads.jsonl")
        return Section(identity="loads", title="Expert load", missing=text)
    layers = pictures.by_layer(run.loads)
    rows = [
        (
            f"{layer}",
            f"{len(items[-1].tokens_per_expert)}",
            f"{_mean([load.expert_max_over_mean for load in items]):.3f}",
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
        ("Load imbalance", *pictures.imbalance_curve(run.loads, run.marks)),
        ("Load of each expert over its layer's mean, by step", pictures.layer_heat_maps(run.loads)),
    ]
    if len(layers) > 1:
        caption = "Load of each expert over its layer's mean, whole run"
        drawn.append((caption, pictures.mean_heat_map(run.loads)))
    return Section(
        identity="loads",
        title="Expert load",
        figures=figures(*drawn),
        tables=[table],
        note=f"{plural(len(layers), 'layer')} with experts." + left_out(len(rows), "layers"),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
