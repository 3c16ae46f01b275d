"""Verbs that look at runs: report, explain."""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import json
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, app

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


@app.command(short_help="What bounds a run, or why it failed.")
def explain(
    run: RunFolder,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="C", help="Cluster that the planner's price is for."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say in one paragraph what bounds the speed of a run, or why it failed, with the numbers of
    its files, and the command to run next. Examples:

        moemesh explain runs/first

        moemesh explain runs/first --cluster laptop_cpu --json
    """
    from moemesh.report.explain import Planned
    from moemesh.report.explain import explain as explain_run
    from moemesh.trace.run import Run

    found, planned = Run.load(run), None
    if cluster is not None:
        from moemesh.config.load import load_run
        from moemesh.planner.estimate import estimate_run

        price = estimate_run(load_run([run / "config.toml"], environ={}).config, cluster)
        parts = {name: value for name, value in price.seconds.items() if name != "total"}
        planned = Planned(cluster=cluster, seconds=price.seconds["total"], parts=parts)
    explanation = explain_run(found, planned)
    typer.echo(json.dumps(explanation.to_json(), indent=2) if as_json else explanation.text)
