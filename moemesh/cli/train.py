"""The verb that trains."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import ConfigFile, Overrides, app, load


@app.command(short_help="Train a model on the ranks of a plan.")
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change", metavar="KEY", help="Accept another value of this key on resume."
        ),
    ] = None,
    auto_layout: Annotated[
        bool,
        typer.Option(
            "--auto-layout", help="Choose another plan where the plan's ranks are not available."
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="Ranks to start here with --auto-layout; by default one for each GPU.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and say what would be done; write and start nothing.",
        ),
    ] = False,
    stop_after: Annotated[
        int | None,
        typer.Option(
            "--stop-after",
            metavar="STEP",
            min=1,
            help="Save and end behind this step; the same command without it goes on.",
        ),
    ] = None,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            help="Take run folder and train.checkpoint_folder from a run at work there.",
        ),
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option(
            "--profile",
            metavar="N",
            min=1,
            help="Profile N steps behind four without it on every rank into DIR/profile, and end.",
        ),
    ] = None,
) -> None:
    """Train a model: starts the ranks itself, or joins those that torchrun started.

    Without a file it trains the preset "tiny" on Python's own library sources. The folder of a run
    in place of a file goes on with that run; with --out it starts a new one of its configuration.
    Examples:

        moemesh train --set plan.dp=2 --set plan.ep=2 --out runs/first

        moemesh train runs/first --set train.steps=400
    """
    from moemesh.comm.slurm import ranks_of_slurm

    # Checked first: a mistake must be told before torch, which takes seconds, is imported. Ranks
    # that were started already check what they share when they meet.
    resolved = load(config, overrides)
    if ranks is not None and not auto_layout:
        raise typer.BadParameter("goes with --auto-layout", param_hint="--ranks")
    if auto_layout:
        from moemesh.train.auto_layout import fit_here

        fitted = fit_here(resolved.config, ranks, os.environ)
        if fitted.overrides():
            keys = {one.partition("=")[0] for one in fitted.overrides()}
            given = [one for one in overrides or [] if one.partition("=")[0] not in keys]
            overrides = [*given, *fitted.overrides()]
            resolved = load(config, overrides)
            if fitted.is_told:
                typer.echo(fitted.text())
    from moemesh.train.preparation import RunRequest, finished, prepare

    request = RunRequest(
        resolved=resolved,
        config_file=config,
        overrides=overrides or [],
        out=out,
        allowed_changes=allow_change or [],
        takeover=takeover,
        stop_after=stop_after,
        profile_steps=profile,
    )
    prepared = None
    if dry_run or not ("RANK" in os.environ or ranks_of_slurm(os.environ)):
        quiet = dry_run or allow_change or profile is not None
        if not quiet and (text := finished(request)) is not None:
            typer.echo(text)
            return
        prepared = prepare(request, (lambda text: None) if dry_run else _say)
    if dry_run:
        from moemesh.cli.preparation_text import preparation_text

        assert prepared is not None
        typer.echo(preparation_text(prepared))
        return
    if profile is not None:  # torch's profiler says on the terminal that it starts
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from moemesh.train import command

    code = command.train(request, prepared)
    raise typer.Exit(code)


def _say(text: str) -> None:
    """Print at once; a console that is gone stops no run."""
    with suppress(OSError, ValueError):
        print(text, flush=True)
