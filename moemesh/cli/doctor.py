"""The verb doctor: what of this machine stands in the way of a run."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, app
from moemesh.trace.strict_json import strict_json


@app.command(short_help="Check this machine for what stands in the way of a run.")
def doctor(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder that runs will be written to.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Look at versions, devices, disk, locks, shared memory, limits, host name, ports, clock,
    environment and links of this machine; each passes, warns or fails, with the fix.

    Takes at most half a minute. Exit code 0 without a failure, 1 with one. On a cluster, once on
    every node: srun --ntasks-per-node=1 moemesh doctor --out /shared/runs
    """
    from moemesh.bench.examination import Diagnosis, examine

    found: list[Diagnosis] = []
    for one in examine(out, os.environ):
        found.append(one)
        if not as_json:
            typer.echo(f"{one.verdict}  {one.name:13}  {one.text}")
            if one.fix:
                typer.echo(f"{'':21}fix: {one.fix}")
    verdicts = [one.verdict for one in found]
    if as_json:
        typer.echo(strict_json([one._asdict() for one in found]))
    else:
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("pass", "warn", "fail"))
        typer.echo(counts)
    raise typer.Exit(1 if "fail" in verdicts else 0)
