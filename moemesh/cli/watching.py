"""The verb watch: a run as it goes, from its files."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moemesh.cli.application import app

if TYPE_CHECKING:
    from moemesh.report.watch import Watched

#: Seconds between looks on a terminal, and between lines elsewhere.
_TERMINAL_SECONDS, _PIPE_SECONDS = 2.0, 30.0
_POLL_SECONDS = 1.0


@app.command(short_help="Watch a run: steps, loss, speed, memory, waits, experts, events.")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between looks; default 2, in a pipe 30.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for a run to begin.")
    ] = 60.0,
) -> None:
    """Show a run from the files of its folder, here or on a shared disk, until it has ended.

    On a terminal a panel is drawn again and again; elsewhere lines follow one another. Nothing is
    written, and the run does not notice. Exit code 1: the run has failed, or is gone. Example:

        moemesh watch runs/first
    """
    from moemesh.config.errors import UserError
    from moemesh.report.watch import Watched

    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file: watch takes the folder of a run")
    if not run.parent.is_dir() and not run.parent.parent.is_dir():  # `train` makes one folder
        raise UserError(f"{run}: there is no folder {run.parent}, so no run can begin in it")
    watched = Watched(run)
    until = time.monotonic() + wait
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
    """Events as they come, and the newest step at most once in `every` seconds."""
    seconds, shown, step = _PIPE_SECONDS if every is None else every, -float("inf"), None
    while True:
        for event in watched.look():
            for line in event.text.splitlines():
                typer.echo(f"{event.time}  {event.kind}: {line.rstrip()}")
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
    """A panel that is drawn anew every `every` seconds."""
    from rich.console import Console
    from rich.live import Live

    seconds, console = _TERMINAL_SECONDS if every is None else every, Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            watched.look()
            live.update(watched.view.panel(console.width), refresh=True)
            if (end := watched.end()) is not None:
                return end
            time.sleep(seconds)
