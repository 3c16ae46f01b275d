"""``python -m tests.drill``: faults in tiny runs, in processes that start preloaded.

A trial then leaves out the seconds in which Python and torch are loaded (:mod:`tests.commands`).
"""

# No `from __future__ import annotations` in these files: typer reads the annotations.
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from moemesh.cli.application import AsJson, Overrides, Verbs, run
from moemesh.trace.machine import limit_spinning
from moemesh.trace.strict_json import strict_json
from tests import commands
from tests.drill import faults  # noqa: F401  # adds its rows
from tests.drill import soak as soaks
from tests.drill import trials as drills
from tests.drill.figures import HEADER as FIGURES
from tests.drill.figures import figures
from tests.drill.results import HEADER, ResultsFile, markdown

app = Verbs(add_completion=False)


@app.command()
def drill(
    trials: Annotated[int, typer.Option(min=1, help="Trials of each fault.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="FAULT", help="May be repeated.")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Only the faults of the tests.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add each trial to FILE as it ends (one JSON object a line); skip trials that "
            "FILE has already.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn ranks, steps and plans.")] = 0,
    soak: Annotated[
        float, typer.Option(metavar="SECONDS", help="Instead: one run of two ranks, this long.")
    ] = 0.0,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between the faults of a soak; 0: none.")
    ] = 300.0,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The new folder of a soak's run.")
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start every process cold, as a user's command does.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Inject each fault into a tiny run of 2 to 4 ranks, and print what came of it as two tables:
    the figures R1 to R12 of reliability, and for each fault whether verdict, rank and place were
    right, and whether the run recovered to the bits of a run without a fault. Exit code 1 where
    anything was wrong. The long form, an hour or two, is --trials 25: a hundred kills and 400
    faults. --soak is one run of `train` instead, with a kill, a stop, an endless loop or an
    exception --every 300 seconds, whose effective time and false alarms are counted.
    """
    limit_spinning(os.environ)
    python = sys.executable if cold else commands.python()
    if soak:
        _soak(soak, every, out, overrides or [], seed, results, python)
        return
    known = [name for name, one in drills.FAULTS.items() if one.is_short or not short]
    if unknown := [name for name in only or [] if name not in drills.FAULTS]:
        raise typer.BadParameter(f"no fault {unknown[0]!r}: {', '.join(drills.FAULTS)}")
    kept = ResultsFile(results)
    rows = drills.run(
        only or known,
        trials=trials,
        seed=seed,
        python=python,
        results=kept,
        log=lambda text: typer.echo(text, err=True),
    )
    measured = figures(rows, kept.soaks())
    if as_json:
        cells = [dict(zip(HEADER, row.cells(), strict=True)) for row in rows]
        reached = [dict(zip(FIGURES, one.cells(), strict=True)) for one in measured]
        typer.echo(strict_json({"rows": cells, "figures": reached}))
    else:
        typer.echo(markdown(FIGURES, [one.cells() for one in measured]))
        typer.echo("")
        typer.echo(markdown(HEADER, [row.cells() for row in rows]))
    if not all(one.is_good for row in rows for one in row.outcomes):
        raise typer.Exit(1)


def _soak(
    seconds: float,
    every: float,
    out: Path | None,
    overrides: list[str],
    seed: int,
    results: Path | None,
    python: str,
) -> None:
    """Carry out a soak and print its report as JSON."""
    if out is not None and out.exists():
        raise typer.BadParameter(f"--out: {out} exists; a soak begins a new run")
    if malformed := [one for one in overrides if "=" not in one]:
        raise typer.BadParameter(f"--set {malformed[0]}: not SECTION.KEY=VALUE")
    with tempfile.TemporaryDirectory(prefix="moemesh-soak-") as folder:
        report = soaks.soak(
            seconds,
            every=every,
            out=out or Path(folder) / "run",
            overrides=overrides,
            seed=seed,
            python=python,
            log=lambda text: typer.echo(text, err=True),
        )
    ResultsFile(results).add_soak(report)
    typer.echo(strict_json(report, indent=1))
    if not soaks.is_good(report):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app, "python -m tests.drill")
