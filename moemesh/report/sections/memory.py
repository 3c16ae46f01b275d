"""Memory of every rank, predicted beside measured."""

from __future__ import annotations

from moemesh.report import beside
from moemesh.report import memory as pictures
from moemesh.report.section import MAX_TABLE_ROWS, Section, Table, figures, left_out
from moemesh.report.sections.missing import missing
from moemesh.trace.memory import MEASURED_HELD, PARTS, PREDICTED_HELD, format_bytes
from moemesh.trace.run import Run

_IDENTITY, _TITLE = "memory-section", "Memory"
#: As long as those of the classes of as many ranks.
_MAX_COMPARED_ROWS = 512


def memory(run: Run) -> Section:
    """From `memory.json`."""
    if run.memory is None or not run.memory.ranks:
        return Section(identity=_IDENTITY, title=_TITLE, missing=missing(run, "memory.json"))
    ranks, predicted = run.memory.ranks, run.memory.predicted
    tables: list[Table] = []
    header = ("Rank", "Class", "Predicted", "Measured", "Difference")
    fullest = max(ranks, key=lambda profile: (profile.total, -profile.rank))
    if rows := beside.memory_rows(predicted, [fullest]):
        caption = (
            f"Memory of rank {fullest.rank}, which holds most: {PREDICTED_HELD} before the run "
            f"for uniform routing, and {MEASURED_HELD}"
        )
        tables.append(Table(caption=caption, header=header, rows=rows, num_names=2))
    if len(ranks) > 1 and (rows := beside.memory_rows(predicted, ranks)):
        rows = rows[:_MAX_COMPARED_ROWS]
        caption = f"Memory of each rank: {PREDICTED_HELD}, and {MEASURED_HELD}"
        tables.append(Table(caption=caption, header=header, rows=rows, num_names=2, folded=True))
    names = (name.replace("_", " ").capitalize() for name in PARTS)
    tables.append(
        Table(
            caption=f"Memory of each rank: {MEASURED_HELD}, and {run.memory.peak_words}",
            header=("Rank", *names, "Total", "Peak"),
            rows=[
                (str(p.rank), *map(format_bytes, (*p.parts().values(), p.total, p.peak)))
                for p in ranks[:MAX_TABLE_ROWS]
            ],
            folded=bool(tables),
        )
    )
    return Section(
        identity=_IDENTITY,
        title=_TITLE,
        figures=figures(("Memory by what it holds", pictures.memory_bars(run.memory))),
        tables=tables,
        note=f"{run.memory.peak_words.capitalize()}: {format_bytes(run.memory.peak)} on the "
        "fullest rank. On a CPU it is that of the whole process, torch itself included; on a GPU "
        "that of torch's allocator." + left_out(len(ranks), "ranks"),
    )
