"""Alarms, warnings and decisions of a run."""

from __future__ import annotations

from moemesh.report.section import MAX_TABLE_ROWS, Chapter, Table
from moemesh.report.sections.missing import missing
from moemesh.report.svg import clip
from moemesh.trace.run import Run

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
