"""The report of a run: one HTML file that needs nothing else, no network and no script."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moemesh.report import curves, loads, memory, svg, timeline, traffic
from moemesh.trace.memory import PARTS, format_bytes
from moemesh.trace.run import Run

NAME = "report.html"

#: What is longer is cut, so that the page keeps its size whatever the run.
_MAX_TABLE_ROWS = 64
_MAX_TEXT = 64_000
_MAX_VALUE = 300
_DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts; the first `num_names` columns are names, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1


@dataclass(frozen=True, kw_only=True)
class Section:
    """A chapter of the page; `missing` says why it is empty."""

    identity: str
    title: str
    figures: Sequence[Markup] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    missing: str = ""


def write(run_folder: Path | str) -> Path:
    """Write `report.html` into the run's folder and return its path.

    Raises RunError (a ValueError) when the folder holds no run. An older report stays until the new
    one is complete.
    """
    run = Run.load(run_folder)
    path = run.folder / NAME
    unfinished = path.with_name(f".{NAME}.{os.getpid()}")
    # A lone surrogate (legal in JSON, not in UTF-8) must not lose the report.
    unfinished.write_bytes(render(run).encode("utf-8", errors="replace"))
    unfinished.replace(path)
    return path


def render(run: Run) -> str:
    """The page as a text, the same bytes for the same run."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plan = _plan(run)
    return environment.get_template("page.html").render(
        name=run.folder.resolve().name,
        degrees=_degrees(run, plan),
        facts=_facts(run),
        failure=_pairs(run.failure) if run.failure is not None else None,
        warnings=run.warnings,
        tables=[
            Table(caption=caption, header=("Key", "Value"), rows=_pairs(values), num_names=2)
            for caption, values in (
                ("Model", _part(run.config, "model")),
                ("Plan", plan),
                ("Data", _part(run.config, "data")),
                ("Training", _part(run.config, "train")),
                ("Summary", run.summary),
            )
            if values
        ],
        sections=[make(run) for make in _SECTIONS],
        config_text=_cut(run.config_text, _MAX_TEXT),
    )


def _training(run: Run) -> Section:
    if not run.metrics:
        return Section(identity="training", title="Training", missing="No metrics.jsonl.")
    unigram = run.summary.get("unigram_loss")
    known = float(unigram) if isinstance(unigram, int | float) else None
    figures = (
        curves.loss_curve(run.metrics, unigram_loss=known),
        curves.throughput_curve(run.metrics),
        curves.gradient_norm_curve(run.metrics),
    )
    shown = [run.metrics[index] for index in _spread(len(run.metrics), 12)]
    table = Table(
        caption="Some steps, evenly spread",
        header=("Step", "Loss", "Validation loss", "Auxiliary loss", "Gradient norm", "Learning rate", "Tokens/s"),
        rows=[
            (
                f"{row.step:,}",
                f"{row.loss:.5f}",
                "" if row.validation_loss is None else f"{row.validation_loss:.5f}",
                f"{row.aux_loss:.5f}",
                f"{row.grad_norm:.4g}",
                f"{row.lr:.4g}",
                svg.short(row.tokens_per_second),
            )
            for row in shown
        ],
    )
    return Section(
        identity="training", title="Training", figures=_figures(figures), tables=[table]
    )


def _traffic(run: Run) -> Section:
    title = "Traffic"
    if not run.ledgers:
        return Section(identity="traffic-section", title=title, missing="No ledger.json.")
    rows = traffic.traffic_rows(run.ledgers, steps=run.ledger_steps)
    if not rows:
        note = "No rank sent anything to another."
        return Section(identity="traffic-section", title=title, missing=note)
    table = Table(
        caption="Bytes in one step, by axis, operation and phase",
        header=(
            "Axis",
            "Operation",
            "Phase",
            "Operations, busiest rank",
            "Payload, busiest rank",
            "Sent, busiest rank",
            "Received, busiest rank",
            "Sent, all ranks",
            "Sent, all ranks (bytes)",
        ),
        rows=[
            (
                row.axis,
                row.op,
                row.phase,
                f"{row.max_count:,.10g}",
                format_bytes(row.max_payload_bytes),
                format_bytes(row.max_wire_bytes),
                format_bytes(row.max_received_bytes),
                format_bytes(row.sum_wire_bytes),
                f"{row.sum_wire_bytes:,.20g}" if run.ledger_steps == 1 else f"{row.sum_wire_bytes:,.1f}",
            )
            for row in rows[:_MAX_TABLE_ROWS]
        ],
        num_names=3,
    )
    covered = f", averaged over {run.ledger_steps} steps" if run.ledger_steps > 1 else ""
    return Section(
        identity="traffic-section",
        title=title,
        figures=_figures([traffic.traffic_bars(run.ledgers, steps=run.ledger_steps)]),
        tables=[table],
        note=f"From the ledgers of {len(run.ledgers)} ranks{covered}."
        + _left_out(len(rows), "rows"),
    )


def _loads(run: Run) -> Section:
    if not run.loads:
        return Section(identity="loads", title="Expert load", missing="No loads.jsonl.")
    layers = loads.by_layer(run.loads)
    numbers = [
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
        header=(
            "Layer",
            "Experts",
            "Fullest expert / mean, over the run",
            "Fullest expert / mean, last step",
            "Fullest rank / mean, last step",
            "Entropy, last step",
            "Experts without a token, last step",
            "Dropped, over the run",
        ),
        rows=numbers[:_MAX_TABLE_ROWS],
    )
    figures = [loads.imbalance_curve(run.loads), loads.layer_heat_maps(run.loads)]
    if len(layers) > 1:
        figures.append(loads.mean_heat_map(run.loads))
    return Section(
        identity="loads",
        title="Expert load",
        figures=_figures(figures),
        tables=[table],
        note=f"{len(layers)} layers with experts." + _left_out(len(numbers), "layers"),
    )


def _memory(run: Run) -> Section:
    if run.memory is None or not run.memory.ranks:
        return Section(identity="memory-section", title="Memory", missing="No memory.json.")
    ranks = run.memory.ranks
    table = Table(
        caption="Memory of each rank",
        header=("Rank", *(name.replace("_", " ").capitalize() for name in PARTS), "Total", "Peak"),
        rows=[
            (str(p.rank), *map(format_bytes, (*p.parts().values(), p.total, p.peak)))
            for p in ranks[:_MAX_TABLE_ROWS]
        ],
    )
    return Section(
        identity="memory-section",
        title="Memory",
        figures=_figures([memory.memory_bars(run.memory)]),
        tables=[table],
        note=f"Highest peak {format_bytes(run.memory.peak)}." + _left_out(len(ranks), "ranks"),
    )


def _timeline(run: Run) -> Section:
    title = "Timeline of the last step"
    if run.timeline is None or not run.timeline.records:
        return Section(identity="timeline-section", title=title, missing="No timeline.json.")
    last = run.timeline.last_step()
    factor = {"seconds": 1e3, "milliseconds": 1.0, "microseconds": 1e-3, "ticks": 1.0}[last.unit]
    unit = "ticks" if last.unit == "ticks" else "ms"
    ranks = last.statistics()
    span = last.span or 1.0
    table = Table(
        caption=f"Time of each rank, in {unit}",
        header=("Rank", "Span", "Busy", "Idle", "Waiting for inputs", "Busy, of the longest span"),
        rows=[
            (
                str(rank.rank),
                *(f"{value * factor:,.3f}" for value in (rank.span, rank.busy, rank.idle, rank.wait)),
                f"{rank.busy / span:.1%}",
            )
            for rank in ranks[:_MAX_TABLE_ROWS]
        ],
    )
    return Section(
        identity="timeline-section",
        title=title,
        figures=_figures([timeline.timeline_rows(last)]),
        tables=[table],
        note=f"{last.source.capitalize()}; {last.bubble_rate:.1%} of ranks × span without work."
        + _left_out(len(ranks), "ranks"),
    )


_SECTIONS: tuple[Callable[[Run], Section], ...] = (_training, _traffic, _loads, _memory, _timeline)


def _facts(run: Run) -> list[tuple[str, str]]:
    """The numbers one looks for first."""
    facts: list[tuple[str, str]] = []
    rows = run.metrics
    if rows:
        facts.append(("Steps", f"{rows[-1].step:,}"))
        facts.append(("Last training loss", f"{rows[-1].loss:.4f}"))
        validated = [row.validation_loss for row in rows if row.validation_loss is not None]
        if validated:
            facts.append(("Last validation loss", f"{validated[-1]:.4f}"))
        speed = statistics.median(row.tokens_per_second for row in rows)
        facts.append(("Tokens per second, median", svg.short(speed)))
        facts.append(("Tokens", svg.short(sum(row.tokens for row in rows))))
        facts.append(("Time in steps", _clock(sum(row.seconds for row in rows))))
    if run.memory is not None and run.memory.ranks:
        facts.append(("Highest memory peak", format_bytes(run.memory.peak)))
    if run.loads:
        last = max(load.step for load in run.loads)
        worst = max(load.expert_max_over_mean for load in run.loads if load.step == last)
        facts.append(("Fullest expert / mean", f"{worst:.2f}"))
    return facts


def _plan(run: Run) -> dict[str, Any]:
    """The plan from plan.json (itself or under "plan"), else from the configuration."""
    return _part(run.plan, "plan") or run.plan or _part(run.config, "plan")


def _degrees(run: Run, plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Parallel degrees, those that are not said being 1, and the number of ranks."""
    if not plan:
        return []
    degrees = [(name, plan.get(name, 1)) for name in _DEGREES]
    shown = [(name, _cut(str(value), 20)) for name, value in degrees]
    world = 1
    for name, value in degrees[:4]:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**9:
            return shown
        world *= value
    return [("ranks", str(world)), *shown]


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = values.get(name)
    return cast(dict[str, Any], part) if isinstance(part, dict) else {}


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and values as texts, both cut to a readable length."""
    items = list(values.items())[:_MAX_TABLE_ROWS]
    return [(_cut(str(key), 60), _cut(str(value), _MAX_VALUE)) for key, value in items]


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else f"{value[:length]} … ({len(value):,} characters)"


def _left_out(number: int, what: str) -> str:
    if number <= _MAX_TABLE_ROWS:
        return ""
    return f" The table shows the first {_MAX_TABLE_ROWS} of {number:,} {what}."


def _spread(number: int, most: int) -> list[int]:
    """At most `most` indices below `number`, evenly spread, first and last included."""
    if number <= most:
        return list(range(number))
    return [index * (number - 1) // (most - 1) for index in range(most)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _clock(seconds: float) -> str:
    """Seconds for people: 12.3 s, 4 min 5 s, 3 h 12 min."""
    if not seconds >= 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _figures(figures: Sequence[str]) -> list[Markup]:
    """Figures are trusted markup: their makers escape what comes from files."""
    return [Markup(figure) for figure in figures if figure]
