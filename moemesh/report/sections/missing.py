"""The reason for an empty section."""

from __future__ import annotations

from moemesh.trace.run import Run
from moemesh.trace.state import state_of


def missing(run: Run, name: str) -> str:
    """Of a run that is at work: the file comes with its end."""
    if (run.folder / name).is_file():
        return f"{name} could not be read."
    if state_of(run) == "running":
        return f"{name} is written at the end of the run, which is at work."
    return f"No {name}."
