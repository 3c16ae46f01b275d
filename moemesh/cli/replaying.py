"""Verbs that repeat steps: replay one that was not finite, repro the first ones of a run."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, Overrides, app
from moemesh.trace.strict_json import strict_json


@app.command(short_help="Repeat a step whose numbers were not finite, and find the first of them.")
def replay(
    bundle: Annotated[Path, "A folder of failures/ in a run, such as step-12.", "<BUNDLE>"],
    alone: Annotated[bool, "Replay on one rank, whatever the plan of the run was."] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the forward and backward of one step again, from a replay bundle.

    A run writes a bundle when the loss or a gradient of a step is not finite. Example:

        moemesh replay runs/tiny/failures/step-12

    It prints where the first value that is not finite comes from: rank, microbatch, layer, expert,
    parameter and samples.
    """
    from moemesh.train.numerics.repro_bundle import replay as run

    raise typer.Exit(run(bundle, overrides or (), alone=alone, as_json=as_json))


@app.command(short_help="Repeat the first steps of a run and compare the losses bit by bit.")
def repro(
    run: Annotated[Path, "Folder of a run.", "<RUN>"],
    steps: Annotated[int, "Number of steps.", {"min": 1}] = 20,
    out: Annotated[Path | None, "Folder of the second run; default: RUN-repro.", "DIR"] = None,
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
        lines = ["", f"equal to the bit: losses and gradient norms of {found.steps} steps"]
        if found.first_step is not None:
            lines[1:] = [
                f"different: step {found.first_step} is the first, {found.key} {found.before!r} "
                f"then, {found.after!r} now",
                f"{found.num_different} of {found.steps} steps differ, losses by at most "
                f"{found.largest:.3g}",
            ]
        if causes:
            lines += ["what differs between the two runs:", *(f"  {cause}" for cause in causes)]
        elif found.first_step is not None:
            lines.append(
                "no difference of packages, hardware, git, data or environment is recorded: "
                "another process on the machine cannot be the reason, a change of the library or "
                "of files in place can"
            )
        typer.echo("\n".join([*lines, f"second run: {folder}"]))
    raise typer.Exit(0 if found.first_step is None else 1)
