"""The verb replay: repeat a step that was not finite, from its bundle."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, Overrides, app


@app.command(short_help="Repeat a step whose numbers were not finite, and find the first of them.")
def replay(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="A folder of failures/ in a run, such as step-12."),
    ],
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Replay on one rank, whatever the plan of the run was."),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the forward and backward of one step again, from a replay bundle.

    A run writes a bundle when the loss or a gradient of a step is not finite. Example:

        moemesh replay runs/tiny/failures/step-12

    It prints where the first value that is not finite comes from: rank, microbatch, layer, expert,
    parameter and samples.
    """
    from moemesh.train.replay import replay as run

    raise typer.Exit(run(bundle, overrides or (), alone=alone, as_json=as_json))
