"""Memory of every rank, predicted beside measured."""

from __future__ import annotations

from moemesh.report import beside
from moemesh.report.section import MAX_TABLE_ROWS, Chapter, Table, figures, left_out, missing
from moemesh.report.svg import GRID, INK, MUTED, WIDTH, figure, legend, line, rectangle, text
from moemesh.report.traffic import binary_ticks
from moemesh.trace.memory_profile import (
    MEASURED_HELD,
    PARTS,
    PREDICTED_HELD,
    MemoryProfiles,
    format_bytes,
)
from moemesh.trace.run import Run

# Pictures of each rank's memory: stacked bars with the measured peak.


#: Neighbours differ in lightness, so that they stay apart in a grey print.
COLOURS: dict[str, str] = {
    "dense_weights": "#1f5fa8",
    "expert_weights": "#9cc4ee",
    "gathered_weights": "#5b3fa0",
    "weight_versions": "#c9d6df",
    "gradients": "#16704a",
    "optimizer": "#cfb0e2",
    "activations": "#b34700",
    "buffers": "#f3cd83",
    "snapshots": "#7a7f85",
}
_MAX_BARS = 32
_ROW = 24


def memory_bars(profiles: MemoryProfiles) -> str:
    """A stacked bar a rank; past 32 ranks, those with the highest peaks. "" without any rank."""
    if not profiles.ranks:
        return ""
    fullest = sorted(profiles.ranks, key=lambda profile: (-profile.peak, profile.rank))
    shown = sorted(fullest[:_MAX_BARS], key=lambda profile: profile.rank)
    names = [(name.replace("_", " "), COLOURS[name]) for name in PARTS]
    key, used = legend([*names, ("peak (line)", INK)], left=0, top=4)
    left, top, right = 66.0, used + 26, WIDTH - 130.0
    highest = max(max(profile.total, profile.peak) for profile in shown) or 1
    bottom = top + len(shown) * _ROW
    body = [key]
    for value in binary_ticks(highest, 6):
        x = left + value / highest * (right - left)
        body += [
            line(x, top, x, bottom, GRID),
            text(x, top - 6, format_bytes(value), anchor="middle", fill=MUTED, size=11),
        ]
    for index, profile in enumerate(shown):
        y, x = top + index * _ROW, left
        body.append(text(left - 8, y + 16, f"rank {profile.rank}", anchor="end"))
        for name, size in profile.parts().items():
            width = size / highest * (right - left)
            if width >= 0.05:
                title = f"rank {profile.rank}, {name.replace('_', ' ')}: {format_bytes(size)}"
                edge = f' stroke="{INK}" stroke-width="0.5"'
                height = _ROW - 8
                body.append(
                    rectangle(x, y + 4, width, height, COLOURS[name], title=title, more=edge)
                )
            x += width
        peak = left + profile.peak / highest * (right - left)
        body.append(line(peak, y + 1, peak, y + _ROW - 1, INK, 2.5))
        after = max(x, peak) + 8
        body.append(text(after, y + 16, f"peak {format_bytes(profile.peak)}", fill=MUTED, size=11))
    body.append(line(left, top, left, bottom, INK))
    which = f"the {len(shown)} fullest of " if len(shown) < len(profiles.ranks) else ""
    description = (
        f"Memory of {which}{len(profiles.ranks)} ranks by what it holds; "
        f"highest peak {format_bytes(profiles.peak)} on rank {fullest[0].rank}."
    )
    return figure("memory", "Memory per rank", description, bottom + 8, body)


_IDENTITY, _TITLE = "memory-section", "Memory"
#: As long as those of the classes of as many ranks.
_MAX_COMPARED_ROWS = 512


def memory(run: Run) -> Chapter:
    """From `memory.json`."""
    if run.memory is None or not run.memory.ranks:
        return Chapter(identity=_IDENTITY, title=_TITLE, missing=missing(run, "memory.json"))
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
    return Chapter(
        identity=_IDENTITY,
        title=_TITLE,
        figures=figures(("Memory by what it holds", memory_bars(run.memory))),
        tables=tables,
        note=f"{run.memory.peak_words.capitalize()}: {format_bytes(run.memory.peak)} on the "
        "fullest rank. On a CPU it is that of the whole process, torch itself included; on a GPU "
        "that of torch's allocator." + left_out(len(ranks), "ranks"),
    )
