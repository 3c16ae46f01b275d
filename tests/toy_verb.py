"""The module of a verb that is added from outside of the package."""

import typer

from moemesh.cli.application import app


@app.command("toy", short_help="Play.")
def play(times: int = 1) -> None:
    """Play some times."""
    typer.echo(f"played {times} times")
