"""The chapters of a report: each makes its figures and tables from one part of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup

from moemesh.report import beside, curves, loads, memory, svg, timeline, traffic
from moemesh.report.boxes import KINDS, LONG_NAMES
from moemesh.trace.memory import PARTS, format_bytes
from moemesh.trace.run import Run
from moemesh.trace.timeline import MICROSECONDS, Timeline

#: Longer tables are cut, so that the page keeps its size whatever the run.
MAX_TABLE_ROWS = 64
#: As long as those of the classes of as many ranks.
MAX_COMPARED_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts; the first `num_names` columns are names, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1


class Figure(NamedTuple):
    """A picture and the line of text above it."""

    caption: str
    svg: Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    """A chapter of the page; `missing` says why it is empty."""

    identity: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    missing: str = ""


def _training(run: Run) -> Section:
    if not run.metrics:
        return Section(identity="training", title="Training", missing="No metrics.jsonl.")
    unigram = run.summary.get("unigram_loss")
    known = unigram if isinstance(unigram, float) else None
    figures = [
        ("Loss", curves.loss_curve(run.metrics, unigram_loss=known)),
        ("Throughput", curves.throughput_curve(run.metrics)),
        ("Gradient norm", curves.gradient_norm_curve(run.metrics)),
    ]
    validated = [i for i, row in enumerate(run.metrics) if row.validation_loss is not None]
    indices = {validated[i] for i in _spread(len(validated), 8)}
    shown = [run.metrics[i] for i in sorted(indices.union(_spread(len(run.metrics), 12)))]
    table = Table(
        caption="Some steps, evenly spread, and those with a validation",
        header=(
            "Step",
            "Loss",
            "Validation loss",
            "Auxiliary loss",
            "Gradient norm",
            "Learning rate",
            "Tokens/s",
        ),
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
    return Section(identity="training", title="Training", figures=_figures(figures), tables=[table])


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
                *(svg.clip(name, 40) for name in (row.axis, row.op, row.phase)),
                f"{row.max_count:,.10g}",
                format_bytes(row.max_payload_bytes),
                format_bytes(row.max_wire_bytes),
                format_bytes(row.max_received_bytes),
                format_bytes(row.sum_wire_bytes),
                f"{row.sum_wire_bytes:,.0f}",
            )
            for row in rows[:MAX_TABLE_ROWS]
        ],
        num_names=3,
    )
    covered = f", averaged over {run.ledger_steps} steps" if run.ledger_steps > 1 else ""
    bars = traffic.traffic_bars(run.ledgers, steps=run.ledger_steps)
    return Section(
        identity="traffic-section",
        title=title,
        figures=_figures([("Bytes sent in one step by the busiest rank", bars)]),
        tables=[table, *_traffic_beside(run)],
        note=f"From the ledgers of {len(run.ledgers)} ranks{covered}."
        + _left_out(len(rows), "rows"),
    )


def _traffic_beside(run: Run) -> list[Table]:
    rows = beside.traffic_beside(run.predicted_ledgers, run.ledgers, steps=run.ledger_steps)
    if not rows:
        return []
    names = ("Axis", "Operation", "Phase", "Predicted", "Measured", "Difference")
    return [
        Table(
            caption="Bytes sent in one step by all ranks, predicted before it (for uniform "
            "routing) and measured",
            header=names,
            rows=rows[:MAX_TABLE_ROWS],
            num_names=3,
        )
    ]


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
            "Fullest expert / mean, average of the steps",
            "Fullest expert / mean, last step",
            "Fullest rank / mean, last step",
            "Entropy, last step",
            "Experts without a token, last step",
            "Dropped, over the run",
        ),
        rows=numbers[:MAX_TABLE_ROWS],
    )
    figures = [
        ("Load imbalance", loads.imbalance_curve(run.loads)),
        ("Load of each expert over its layer's mean, by step", loads.layer_heat_maps(run.loads)),
    ]
    if len(layers) > 1:
        caption = "Load of each expert over its layer's mean, whole run"
        figures.append((caption, loads.mean_heat_map(run.loads)))
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
            for p in ranks[:MAX_TABLE_ROWS]
        ],
    )
    rows = beside.memory_rows(run.memory.predicted, ranks)
    tables = [table]
    if rows:
        caption = "Memory of each rank, predicted before the run (for uniform routing) and measured"
        header = ("Rank", "Class", "Predicted", "Measured", "Difference")
        tables.append(
            Table(caption=caption, header=header, rows=rows[:MAX_COMPARED_ROWS], num_names=2)
        )
    return Section(
        identity="memory-section",
        title="Memory",
        figures=_figures([("Memory by what it holds", memory.memory_bars(run.memory))]),
        tables=tables,
        note=f"Highest peak {format_bytes(run.memory.peak)}: on a CPU of the whole process, torch "
        "included; with CUDA of its tensors." + _left_out(len(ranks), "ranks"),
    )


def _timeline(run: Run) -> Section:
    title = "Timeline of the last step"
    if run.timeline is None or not run.timeline.records:
        return Section(identity="timeline-section", title=title, missing="No timeline.json.")
    last = run.timeline.last_step()
    unit = "ticks" if last.unit == "ticks" else "milliseconds"
    factor = MICROSECONDS[last.unit] / MICROSECONDS[unit]
    ranks = last.statistics()
    longest = last.span or 1.0
    table = Table(
        caption=f"Time of each rank, in {unit}",
        header=("Rank", "Span", "Busy", "Idle", "Waiting for inputs", "Busy, of the longest span"),
        rows=[
            (
                str(rank.rank),
                *(
                    f"{value * factor:,.3f}"
                    for value in (rank.span, rank.busy, rank.idle, rank.wait)
                ),
                f"{rank.busy / longest:.1%}",
            )
            for rank in ranks[:MAX_TABLE_ROWS]
        ],
    )
    return Section(
        identity="timeline-section",
        title=title,
        figures=_figures(
            [
                ("What each rank did", timeline.timeline_rows(last)),
                ("Simulated above measured", _beside(run.simulated, last)),
            ]
        ),
        tables=[table, _step_parts(run, last), _time_by_name(last, factor, unit)],
        note=f"{last.source.capitalize()}; {last.bubble_rate:.1%} of ranks × span without work."
        + _left_out(len(ranks), "ranks"),
    )


def _step_parts(run: Run, last: Timeline) -> Table:
    return Table(
        caption="Parts of the step, mean rank, in milliseconds: the pipeline simulated with the "
        "median time of each operation, and measured",
        header=("Part", "Simulated", "Measured", "Difference"),
        rows=beside.time_rows(run.simulated, last),
    )


def _beside(simulated: Timeline | None, last: Timeline) -> str:
    """The pipeline operations of the simulated ranks, simulated above measured."""
    if simulated is None:
        return ""
    records = tuple(
        record for record in last.records if record.rank in simulated.ranks and record.kind in KINDS
    )
    measured = replace(last, ranks=simulated.ranks, records=records)
    return timeline.timelines_stacked(
        [simulated, measured],
        title="Pipeline, simulated above measured",
        identity="timeline-simulated",
    )


def _time_by_name(last: Timeline, factor: float, unit: str) -> Table:
    of_name: dict[str, dict[int, float]] = {}
    counts: Counter[str] = Counter()
    for record in last.records:
        name = LONG_NAMES.get(record.kind, record.name)
        of_rank = of_name.setdefault(name, {})
        of_rank[record.rank] = of_rank.get(record.rank, 0.0) + record.duration * factor
        counts[name] += 1
    totals = {name: sum(of_rank.values()) for name, of_rank in of_name.items()}
    names = sorted(totals, key=lambda name: (-totals[name], name))[:MAX_TABLE_ROWS]
    return Table(
        caption=f"Time by what was done, in {unit} (what is done inside another counts in both)",
        header=("What", "Times, all ranks", "Mean rank", "Longest rank"),
        rows=[
            (
                svg.clip(name, 60),
                f"{counts[name]:,}",
                f"{totals[name] / len(last.ranks):,.3f}",
                f"{max(of_name[name].values()):,.3f}",
            )
            for name in names
        ],
    )


SECTIONS: tuple[Callable[[Run], Section], ...] = (_training, _traffic, _loads, _memory, _timeline)


def _left_out(number: int, what: str) -> str:
    if number <= MAX_TABLE_ROWS:
        return ""
    return f" The table shows the first {MAX_TABLE_ROWS} of {number:,} {what}."


def _spread(number: int, most: int) -> list[int]:
    """At most `most` indices below `number`, evenly spread, first and last included."""
    if number <= most:
        return list(range(number))
    return [index * (number - 1) // (most - 1) for index in range(most)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _figures(figures: Sequence[tuple[str, str]]) -> list[Figure]:
    """Figures that show something, as trusted markup: their makers escape what comes from files."""
    return [Figure(caption, Markup(picture)) for caption, picture in figures if picture]
