"""Verb `schedule`: simulates, draws and checks a pipeline."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli import options
from moemesh.cli.application import AsJson, app
from moemesh.cli.terminal import WIDTH, progress, table, wrapped
from moemesh.report.files import write_texts
from moemesh.schedule.request import ScheduleRequest
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.schedule.answer import ScheduleAnswer
    from moemesh.schedule.build import ClosedForm

#: Most columns of a picture that is printed with its numbers.
MOST_COLUMNS = 160
_LEGEND = """\
bubble rate: idle share of the longest span of a rank. activation: most of a
rank, in microbatches on its layers. weights: copies that a rank keeps. sent:
activations and gradients that the busiest rank sends, in microbatches.
Asynchronous schedules drain at the end of a run only, which here is these
microbatches long."""


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(ScheduleRequest):
    """The schedule, its files, and the output."""

    svg: Annotated[Path | None, "Draw it.", "FILE"] = None
    trace: Annotated[Path | None, "Trace for Perfetto.", "FILE"] = None
    save: Annotated[Path | None, "Save it: text, or .csv.", "FILE"] = None
    everything: Annotated[
        bool, "Compare all schedules, in place of a name.", {"names": ("--all",)}
    ] = False
    text: Annotated[bool, "Print only the picture."] = False


@app.command(
    "schedule",
    short_help="Simulate, draw and check a pipeline.",
    completions={"name": options.schedules},
)
def show_schedule(request: ScheduleOptions, as_json: AsJson = False) -> None:
    """Simulate a pipeline schedule, draw it, and compare it with its formulas.

    Activation counts microbatches on one rank's layers. Example:

        moemesh schedule zb_h2 --ranks 4 --microbatches 8 --svg zb_h2.svg

        moemesh schedule --all --ranks 4 --microbatches 8
    """
    svg, trace, save = request.svg, request.trace, request.save
    if request.everything == bool(request.name):
        example = "moemesh schedule 1f1b --ranks 4 --microbatches 8"
        fix = "leave out --all" if request.everything else example
        raise typer.BadParameter(f"give the NAME of a schedule, or --all; fix: {fix}")
    if request.text and as_json:
        raise typer.BadParameter("--text and --json are two forms of one answer: give one of them")
    if request.everything:
        if svg is not None or trace is not None or save is not None or request.text:
            raise typer.BadParameter("--all prints a table: --svg and the like take one schedule")
        if request.relaxed:
            raise typer.BadParameter("--all compares schedules that can run: leave out --relaxed")
        from moemesh.schedule.answer import compare, comparison_rows

        with progress("comparing schedules", quiet=as_json):
            compared = compare(request)
        if as_json:
            typer.echo(strict_json(compared))
            return
        header = (
            "schedule", "makespan", "bubble rate", "activation", "weights", "sent", "gradients are"
        )  # fmt: skip
        typer.echo(f"{table(header, comparison_rows(compared))}\n\n{_LEGEND}")
        for row in compared:
            if "refused" in row:
                typer.echo("\n".join(wrapped(f"{row['name']}: {row['refused']}")))
        return
    from moemesh.report import timeline_text
    from moemesh.report.timeline_picture import timeline_rows, to_perfetto
    from moemesh.schedule.answer import answer, saved
    from moemesh.schedule.text import content_of
    from moemesh.trace.pipeline import activations

    with progress(f"schedule {request.name}", quiet=as_json):
        result = answer(request)
    timeline = result.simulation.timeline
    texts: list[tuple[Path, str]] = []
    if svg is not None:
        memory = activations(timeline, held=result.held)
        texts.append((svg, timeline_rows(timeline, memory=memory, title=result.title) + "\n"))
    if trace is not None:
        texts.append((trace, strict_json(to_perfetto(timeline, held=result.held)) + "\n"))
    if save is not None:
        texts.append((save, content_of(result.schedule, save)))
    write_texts(texts)
    if as_json:
        typer.echo(strict_json(result.to_json()))
    elif request.text:
        typer.echo(timeline_text.draw(timeline))
    else:
        typer.echo(schedule_text(result, timeline_text.draw(timeline)))
        if save is not None:
            typer.echo(saved(result.schedule, save))


def schedule_text(result: "ScheduleAnswer", picture: str = "") -> str:
    """The answer as text: the picture (or the options to draw it, if a line is too long), totals
    with their formulas, then one row per rank."""
    from moemesh.report.timeline_text import legend
    from moemesh.schedule.answer import short

    simulation, closed, schedule = result.simulation, result.closed, result.schedule
    parts = [f"{schedule.num_ranks} ranks", f"{schedule.num_stages} stages"]
    parts += [f"{schedule.num_pipes} pipes"] if schedule.num_pipes > 1 else []
    parts += [f"{schedule.num_slices} slices"] if schedule.num_slices > 1 else []
    parts.append(f"{schedule.total_microbatches} microbatches")
    rows = [
        ("makespan", short(simulation.makespan), ""),
        ("longest span", short(simulation.span), ""),
        ("span bubble", short(simulation.span_bubble), _formula(closed, "span")),
        ("bubble rate", f"{simulation.bubble_rate:.4f}", ""),
        ("rank idle", short(simulation.rank_idle), _formula(closed, "rank_idle")),
    ]
    if result.bound is not None:
        rows.append(("lower bound of the span", short(result.bound), ""))
    lines = [
        f"{schedule.name}: {', '.join(parts)}",
        f"costs: {result.costs}",
        *(line for note in result.notes for line in wrapped(note)),
        "",
    ]
    columns = max(map(len, picture.splitlines()), default=0)
    if 0 < columns <= MOST_COLUMNS:
        lines += [picture, *wrapped(legend(picture)), ""]
    elif picture:
        note = f"the picture is {columns:,} columns wide: --text prints it, --svg FILE draws it"
        lines += [note, ""]
    column = max(len(name) for name, _, _ in rows)
    for name, value, formula in rows:
        line = f"{name:{column}}  {value:>10}  {formula}".rstrip()
        # A formula with its conditions may be too long for the line of its value.
        lines += (
            [line]
            if len(line) <= WIDTH
            else [line.removesuffix(formula).rstrip(), f"    {formula}"]
        )
    formulas = None if closed is None else closed.peak_activation
    ranks = [
        (
            *(str(rank), short(simulation.spans[rank]), short(simulation.busy[rank]), short(peak)),
            "-" if formulas is None else short(formulas[rank]),
            str(result.copies[rank]),
        )
        for rank, peak in enumerate(simulation.peak_activation)
    ]
    header = ("rank", "span", "busy", "peak activation", "by formula", "weight copies")
    return "\n".join([*lines, "", table(header, ranks, left=0)])


def _formula(closed: "ClosedForm | None", metric: str) -> str:
    if closed is None or closed.row.metric != metric:
        return ""
    from moemesh.schedule.answer import short

    value = "" if closed.bubble is None else f" = {short(closed.bubble)}"
    holds = "" if closed.bubble is not None else "not here: "
    return f"{closed.row.bubble}{value}   ({holds}{closed.row.bubble_where})"
