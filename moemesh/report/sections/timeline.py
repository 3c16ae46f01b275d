"""Time of a step: its parts, predicted beside measured, and the operations of every rank."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

from moemesh.report import beside
from moemesh.report import timeline_picture as pictures
from moemesh.report.boxes import KINDS, LONG_NAMES
from moemesh.report.section import MAX_TABLE_ROWS, Chapter, Table, figures, left_out, missing
from moemesh.report.svg import clip
from moemesh.trace.run import Run
from moemesh.trace.timeline import MICROSECONDS, Timeline

_IDENTITY, _TITLE = "timeline-section", "Time of a step"


def timeline(run: Run) -> Chapter:
    """From `timeline.json` (the last step), and the medians of `metrics.jsonl`."""
    tables = _medians(run)
    if run.timeline is None or not run.timeline.records:
        text = missing(run, "timeline.json")
        return Chapter(identity=_IDENTITY, title=_TITLE, tables=tables, missing=text)
    last = run.timeline.last_step()
    unit = "ticks" if last.unit == "ticks" else "milliseconds"
    factor = MICROSECONDS[last.unit] / MICROSECONDS[unit]
    ranks = last.statistics()
    longest = last.span or 1.0
    note = f"{last.source.capitalize()}; {last.bubble_rate:.1%} of ranks × span without work."
    if run.simulated is not None and run.simulated.records:
        bubble = beside.pipeline_bubble(last, run.simulated.ranks)
        note += (
            f" Bubble of the pipeline: {run.simulated.bubble_rate:.1%} simulated, "
            f"{bubble:.1%} measured."
        )
    pipeline = ""
    if (simulated := run.simulated) is not None:
        # The operations of the simulated ranks, simulated above measured.
        records = tuple(
            one for one in last.records if one.rank in simulated.ranks and one.kind in KINDS
        )
        pipeline = pictures.timelines_stacked(
            [simulated, replace(last, ranks=simulated.ranks, records=records)],
            title="Pipeline, simulated above measured",
            identity="timeline-simulated",
        )
    return Chapter(
        identity=_IDENTITY,
        title=_TITLE,
        figures=figures(
            ("Last step of each rank", pictures.timeline_rows(last)),
            ("Pipeline of the last step, simulated above measured", pipeline),
        ),
        tables=[
            Table(
                caption="Parts of the last step, mean rank, in milliseconds: the pipeline "
                "simulated with the median time of each operation, and measured",
                header=("Part", "Simulated", "Measured", "Difference", "Share, measured"),
                rows=beside.time_rows(run.simulated, last),
            ),
            *tables,
            Table(
                caption=f"Time of each rank in the last step, in {unit}",
                header=(
                    "Rank",
                    "Span",
                    "Busy",
                    "Idle",
                    "Waiting for inputs",
                    "Busy, of the longest span",
                ),
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
            ),
            _by_name(last, factor, unit),
        ],
        note=note + left_out(len(ranks), "ranks"),
    )


def _medians(run: Run) -> list[Table]:
    """Of all steps but the first, which builds caches; rank 0."""
    if not (rows := run.current):
        return []
    step = statistics.median(row.seconds for row in rows)
    waits: dict[str, float | None] = {}
    for name, label in (
        ("data_seconds", "waiting for data"),
        ("communication_seconds", "exposed communication"),
    ):
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        waits[label] = statistics.median(values) if values else None
    found = {"step": step} | {label: wait for label, wait in waits.items() if wait is not None}
    tables = [
        Table(
            caption=f"Median over all steps but the first{run.of_steps}, in milliseconds, rank 0",
            header=("Part", "Time", "Share of the step"),
            rows=[
                (name, f"{seconds * 1e3:,.3f}", f"{seconds / step:.1%}" if step else "")
                for name, seconds in found.items()
            ],
        )
    ]
    if run.planned is not None:
        tables.append(
            Table(
                caption="Communication that no computation hides, in milliseconds a step: as "
                f"planned on {clip(run.planned.cluster, 60)}, and the median of rank 0",
                header=("Part", "Planned", "Share, planned", "Measured", "Share, measured"),
                rows=beside.exposed_rows(run.planned, waits["exposed communication"], step),
            )
        )
    return tables


def _by_name(last: Timeline, factor: float, unit: str) -> Table:
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
        caption=f"Time by operation, in {unit} (one inside another counts in both)",
        header=("Operation", "Times, all ranks", "Mean rank", "Longest rank"),
        rows=[
            (
                clip(name, 60),
                f"{counts[name]:,}",
                f"{totals[name] / len(last.ranks):,.3f}",
                f"{max(of_name[name].values()):,.3f}",
            )
            for name in names
        ],
        folded=True,
    )
