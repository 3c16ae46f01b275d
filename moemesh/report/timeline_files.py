"""A pipeline's timeline written to files: an SVG picture, a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from moemesh.report.files import write_texts
from moemesh.report.timeline import timeline_rows
from moemesh.trace.perfetto import to_perfetto
from moemesh.trace.pipeline import activations
from moemesh.trace.timeline import Timeline


def write(
    timeline: Timeline, *, svg: Path | None, trace: Path | None, title: str, held: float = 1.0
) -> None:
    """Draw `timeline` with the memory of each rank, and write its trace, where a path is given.

    `held` is the share of activations that a weight gradient needs. Raises UserError, with nothing
    written, when a file cannot be.
    """
    contents: list[tuple[Path, str]] = []
    if svg is not None:
        memory = activations(timeline, held=held)
        contents.append((svg, timeline_rows(timeline, memory=memory, title=title) + "\n"))
    if trace is not None:
        contents.append((trace, json.dumps(to_perfetto(timeline, held=held)) + "\n"))
    write_texts(contents)
