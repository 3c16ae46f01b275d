"""Verbs that look at runs: report."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import app

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


@app.command(short_help="Write the HTML page of a run, or of two.")
def report(
    run: RunFolder,
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="Folder of a run to compare with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page, in place of RUN's own.")
    ] = None,
) -> None:
    """Write report.html into the folder of a run and print its path; of two runs, comparison.html:
    the keys that differ, curves over each other, speed, memory, traffic. Examples:

        moemesh report runs/first

        moemesh report runs/first runs/second --out both.html
    """
    from moemesh.config.errors import UserError
    from moemesh.report import comparison, page

    if out is not None and not out.parent.is_dir():
        raise UserError(f"{out} cannot be written: there is no folder {out.parent}")
    if out is not None and out.is_dir():
        raise UserError(f"{out} cannot be written: it is a folder")
    try:
        if other is None:
            path = page.write(run, out)
        else:
            path = comparison.write(run, other, out)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
    typer.echo(str(path))
