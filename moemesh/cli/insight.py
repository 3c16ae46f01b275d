"""Verbs that read runs: `report`, `explain`, `profile`, `watch`."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import gc
import os
import shutil
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import AsJson, ConfigFile, Overrides, app, load, print_answer
from moemesh.config.errors import UserError
from moemesh.config.limits import drawn_on, one_line
from moemesh.config.suggest import nearest_run
from moemesh.trace.strict_json import strict_json

if TYPE_CHECKING:
    from moemesh.report.watch import Watched
    from moemesh.trace.run import Run

Cluster = Annotated[
    str | None, "Cluster that the planner's price is for; default train.cluster.", "C"
]
#: Seconds between updates on a terminal, and between lines elsewhere.
_TERMINAL_SECONDS, _PIPE_SECONDS = 2.0, 30.0
#: Most seconds between two reads of a run's files without a terminal.
_POLL_SECONDS = 1.0
RunFolder = Annotated[Path, "Folder of a run.", "<RUN>"]


@app.command(short_help="Write the HTML page of a run, or of several.")
def report(
    run: RunFolder,
    others: Annotated[list[Path] | None, "Folders of runs to compare with.", "<OTHER>"] = None,
    out: Annotated[Path | None, "The page, in place of RUN's own.", "FILE"] = None,
    cluster: Cluster = None,
) -> None:
    """Write report.html into the folder of a run and print its path; of several, comparison.html:
    the keys that differ, curves over each other, speed, memory, traffic. With a cluster the page of
    one run has the communication that the planner expects not to be hidden. Examples:

        moemesh report runs/first

        moemesh report runs/first runs/second --out both.html
    """
    from moemesh.report import page

    if others and cluster is not None:
        raise UserError("--cluster is for the page of one run: leave it out, or the other runs")
    if out is not None:
        from moemesh.report.files import check_target

        check_target(out, "<!DOCTYPE")
    gc.disable()  # saves a tenth of the time; the process exits after the page
    try:
        if others:
            path = page.write_comparison(run, *others, out=out)
        else:
            path = page.write(_read(run, cluster), out)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
    typer.echo(str(path))


@app.command(short_help="Explain what bounds a run, or why it failed.")
def explain(run: RunFolder, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Explain in one paragraph the state of a run, what bounds its speed or why it failed, and
    print the command to run next; below, on a line each: failures it survived, skipped steps,
    alarms, losses, time, speed, memory. The cluster is train.cluster, if no other is named.
    Examples:

        moemesh explain runs/first

        moemesh explain runs/first --cluster laptop_cpu --json
    """
    from moemesh.report.explain import explain as explain_run

    explanation = explain_run(_read(run, cluster))
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 100), 40)
    print_answer(as_json, explanation.to_json, lambda: explanation.wrapped(width), indent=2)


def _read(folder: Path, cluster: str | None) -> "Run":
    """The run, with the planned step on `cluster`, by default train.cluster."""
    from moemesh.sharding.load_run import load_run
    from moemesh.trace.run import Run

    run = Run.load(folder)
    named = cluster or run.section("train").get("cluster")
    if not isinstance(named, str):
        return run
    # The configured cluster may be a file of another machine: then no step is planned.
    with suppress(UserError) if cluster is None else nullcontext():
        from moemesh.planner.estimate import planned_step

        config = load_run([folder / "config.toml"], environ={}).config
        run = replace(run, planned=planned_step(config, named))
    return run


@app.command(short_help="Show where the time of a step goes, from a trace of all ranks.")
def profile(
    config: ConfigFile = None,
    overrides: Overrides = None,
    steps: Annotated[int, "Steps to profile.", {"min": 1, "max": 100}] = 3,
    out: Annotated[Path | None, "Folder of the short run.", "DIR"] = None,
) -> None:
    """Take a few steps with torch's profiler on all ranks, write their traces as one file for
    Perfetto, on one clock, and print a verdict, whose shares of a step are those of steps without
    the profiler. The run is a new one, without checkpoints.

    Example:

        moemesh profile first.toml --steps 3 --out profiles/first
    """
    from moemesh.report.verdict import verdict
    from moemesh.trace.profile import FOLDER, PLAIN, WARM_UP, read_profile

    short = [f"train.steps={steps + WARM_UP + PLAIN + 1}", "train.validate_every=0"]
    short += ["train.checkpoint_every=0", "train.resume=never"]
    chosen = [*(overrides or []), *short]
    name = config.stem if config is not None else "default"
    path, number = out or Path("profiles") / name, 1
    while out is None and path.exists():  # the first unused number
        number += 1
        path = path.with_name(f"{name}-{number}")
    from moemesh.train.preparation import RunRequest, prepare

    request = RunRequest(
        resolved=load(config, chosen),
        config_file=config,
        overrides=chosen,
        out=path,
        profile_steps=steps,
    )
    prepared = prepare(request)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from moemesh.train import command

    if code := command.train(request, prepared):
        raise typer.Exit(code)
    merged = read_profile(path / FOLDER)
    trace = path / "profile.json"
    trace.write_text(strict_json(merged.to_json()), encoding="utf-8")
    typer.echo("\n".join([*verdict(merged), f"trace       {trace}  (open it in ui.perfetto.dev)"]))


@app.command(short_help="Watch a run: steps, loss, speed, memory, waits, experts, events.")
def watch(
    run: RunFolder,
    every: Annotated[
        float | None, "Seconds between updates; default 2, in a pipe 30.", {"min": 0.1}
    ] = None,
    wait: Annotated[float, "Seconds to wait for a run to begin.", {"min": 0.0}] = 60.0,
) -> None:
    """Show a run from the files of its folder, here or on a shared disk, until it has ended.

    On a terminal a panel is redrawn; elsewhere lines are printed. Nothing is written, and the run
    is not affected. Exit code 1: the run has failed, or is gone. Example:

        moemesh watch runs/first
    """
    from moemesh.report.watch import Watched

    if run.exists() and not run.is_dir():
        near = nearest_run(run)
        near = f" ({near})" if near else ""
        raise UserError(f"{run} is a file: watch takes the folder of a run{near}")
    if not run.parent.is_dir() and not run.parent.parent.is_dir():  # `train` makes one folder
        raise UserError(f"{run}: the folder {run.parent} must exist before a run begins in it")
    watched = Watched(run)
    until = time.monotonic() + wait
    if not watched.is_run and (near := nearest_run(run)):
        raise UserError(f"{run} holds no run: {near}")
    if not watched.is_run and wait:
        print(f"waiting {wait:g} s for a run in {run}", file=sys.stderr, flush=True)
    while not watched.is_run:
        if time.monotonic() >= until:
            raise UserError(f"{run} holds no run: give the folder that `moemesh train` prints")
        time.sleep(min(_POLL_SECONDS, wait))
    show = _redraw if sys.stdout.isatty() else _print_lines
    is_well, how = show(watched, every)
    typer.echo(how)
    raise typer.Exit(0 if is_well else 1)


def _print_lines(watched: "Watched", every: float | None) -> tuple[bool, str]:
    """Print events as they occur, and the newest step at most every `every` seconds."""
    seconds, shown, step = _PIPE_SECONDS if every is None else every, -float("inf"), None
    while True:
        for event in watched.look():
            for line in event.text.splitlines():
                typer.echo(one_line(f"{event.time}  {event.kind}: {line.rstrip()}"))
        end, row, now = watched.end(), watched.view.row, time.monotonic()
        is_new = row is not None and row.step != step
        if is_new and (end is not None or now - shown >= seconds):
            typer.echo(watched.view.line())
            assert row is not None
            step, shown = row.step, now
        sys.stdout.flush()
        if end is not None:
            return end
        time.sleep(min(seconds, _POLL_SECONDS))


def _redraw(watched: "Watched", every: float | None) -> tuple[bool, str]:
    """Redraw a panel every `every` seconds."""
    from rich.console import Console
    from rich.live import Live

    seconds = _TERMINAL_SECONDS if every is None else every
    console = Console(highlight=False, file=drawn_on(sys.stdout))
    with Live(console=console, auto_refresh=False) as live:
        while True:
            watched.look()
            live.update(watched.view.panel(console.width), refresh=True)
            if (end := watched.end()) is not None:
                return end
            time.sleep(seconds)
