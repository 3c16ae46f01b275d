"""The verb repro: the first steps of a run once more, compared bit by bit."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, app
from moemesh.trace.strict_json import strict_json


@app.command(short_help="Repeat the first steps of a run and compare the losses bit by bit.")
def repro(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the second run; default: RUN-repro."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the first steps of a run again, from the files of its folder, and compare.

    Exit code 0: equal to the bit; 1: something differs, and what differs between the two runs is
    named; 2: the run cannot be repeated. Example:

        moemesh repro runs/first --steps 20
    """
    import sys

    from moemesh.train.repro import repro as repeat

    def say(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    found, causes, folder = repeat(run, out, steps, say, shows_steps=not as_json)
    if as_json:
        result = {**asdict(found), "differences": causes, "folder": str(folder)}
        typer.echo(strict_json(result, indent=1))
    else:
        typer.echo()
        if found.first_step is None:
            typer.echo(f"equal to the bit: losses and gradient norms of {found.steps} steps")
        else:
            typer.echo(
                f"different: step {found.first_step} is the first, {found.key} {found.before!r} "
                f"then, {found.after!r} now\n"
                f"{found.num_different} of {found.steps} steps differ, losses by at most "
                f"{found.largest:.3g}"
            )
        if causes:
            typer.echo("what differs between the two runs:")
            for cause in causes:
                typer.echo(f"  {cause}")
        elif found.first_step is not None:
            typer.echo(
                "no difference of packages, hardware, git, data or environment is recorded: "
                "another process on the machine cannot be the reason, a change of the library or "
                "of files in place can"
            )
        typer.echo(f"second run: {folder}")
    raise typer.Exit(0 if found.first_step is None else 1)
