"""The course of a run: curves over its steps, and its alarms, warnings and decisions."""

from __future__ import annotations

from functools import partial

from moemesh.report import curves
from moemesh.report.section import MAX_TABLE_ROWS, Chapter, Table, figures, missing, spread
from moemesh.report.svg import clip, short
from moemesh.trace.run import Run

_HEADER = (
    "Step",
    "Loss",
    "Validation loss",
    "Auxiliary loss",
    "Gradient norm",
    "Learning rate",
    "Tokens/s",
)


def training(run: Run) -> Chapter:
    """Curves over all steps, and the numbers of some of them."""
    if not run.metrics:
        text = missing(run, "metrics.jsonl")
        if (run.folder / "metrics.jsonl").is_file():
            text = "No step is finished yet."
        return Chapter(identity="training", title="Training", missing=text)
    rows, unigram = run.metrics, run.summary.get("unigram_loss")
    known = unigram if isinstance(unigram, float) else None
    marks, unit = run.marks, run.loss_unit
    curve, speed = partial(curves.one_curve, rows, marks=marks), "tokens per second"
    drawn = [
        ("Loss", *curves.loss_curve(rows, unigram_loss=known, unit=unit, marks=marks)),
        ("Auxiliary loss", *curves.auxiliary_curve(rows, unit=unit, marks=marks)),
        ("Gradient norm", *curve("grad_norm", "Gradient norm")),
        ("Learning rate", *curve("lr", "Learning rate")),
        ("Throughput", *curve("tokens_per_second", "Throughput", y_label=speed)),
    ]
    return Chapter(
        identity="training", title="Training", figures=figures(*drawn), tables=[_some_steps(run)]
    )


def _some_steps(run: Run) -> Table:
    rows = run.metrics
    validated = [i for i, row in enumerate(rows) if row.validation_loss is not None]
    indices = {validated[i] for i in spread(len(validated), 8)}
    shown = [rows[i] for i in sorted(indices.union(spread(len(rows), 12)))]
    return Table(
        caption=f"Some steps, evenly spread, and those with a validation; losses in "
        f"{run.loss_unit}",
        header=_HEADER,
        rows=[
            (
                f"{row.step:,}",
                f"{row.loss:.5f}",
                "" if row.validation_loss is None else f"{row.validation_loss:.5f}",
                f"{row.aux_loss:.5f}",
                f"{row.grad_norm:.4g}",
                f"{row.lr:.4g}",
                short(row.tokens_per_second),
            )
            for row in shown
        ],
    )


#: Kinds that every run has; the others say that something was decided or went wrong.
_ORDINARY = ("start", "note", "saved", "finished")
_MAX_TEXT = 400


def events(run: Run) -> Chapter:
    """Events besides steps: alarms and decisions first, in the order of time."""
    identity, title = "events", "Events"
    if not run.events:
        text = missing(run, "events.jsonl")
        return Chapter(identity=identity, title=title, missing=text)
    special = [event for event in run.events if event.kind not in _ORDINARY]
    ordinary = [event for event in run.events if event.kind in _ORDINARY]
    tables: list[Table] = []
    for found, caption, folded in (
        (special, "Alarms, warnings and decisions", False),
        (ordinary, "Notes of the start and the end", True),
    ):
        if found:
            shown = found[-MAX_TABLE_ROWS:]
            more = f", the last {len(shown)} of {len(found):,}" if len(shown) < len(found) else ""
            rows = [
                (
                    clip(event.time.replace("T", " ").removesuffix("+00:00"), 30),
                    "" if event.step is None else f"{event.step:,}",
                    clip(event.kind, 30),
                    clip(event.text, _MAX_TEXT),
                )
                for event in shown
            ]
            header = ("Time (UTC)", "Step", "Kind", "Text")
            tables.append(
                Table(caption=caption + more, header=header, rows=rows, num_names=4, folded=folded)
            )
    note = "" if special else "No alarm and no warning."
    return Chapter(identity=identity, title=title, tables=tables, note=note)
