"""The report of a run: one HTML file that needs nothing else, no network and no script."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moemesh.report import svg
from moemesh.report.sections import MAX_TABLE_ROWS, SECTIONS, Table
from moemesh.trace.memory import format_bytes
from moemesh.trace.run import Run

NAME = "report.html"

#: What is longer is cut, so that the page keeps its size whatever the run.
_MAX_TEXT = 64_000
_MAX_VALUE = 300
_DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")
_HERE = Path(__file__).parent


def write(run_folder: Path | str) -> Path:
    """Write `report.html` into the run's folder and return its path.

    Raises RunError (a ValueError) when the folder holds no run. An older report stays until the new
    one is complete.
    """
    run = Run.load(run_folder)
    path = run.folder / NAME
    unfinished = path.with_name(f".{NAME}.{os.getpid()}")
    # A lone surrogate (legal in JSON, not in UTF-8) must not lose the report.
    unfinished.write_bytes(render(run).encode("utf-8", errors="replace"))
    unfinished.replace(path)
    return path


def render(run: Run) -> str:
    """The page as a text, the same bytes for the same run."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plan = _plan(run)
    return environment.get_template("page.html").render(
        name=run.folder.resolve().name,
        degrees=_degrees(run, plan),
        facts=_facts(run),
        failure=_pairs(run.failure) if run.failure is not None else None,
        warnings=run.warnings,
        tables=[
            Table(caption=caption, header=("Key", "Value"), rows=_pairs(values), num_names=2)
            for caption, values in (
                ("Model", _part(run.config, "model")),
                ("Plan", plan),
                ("Data", _part(run.config, "data")),
                ("Training", _part(run.config, "train")),
                ("Summary", run.summary),
            )
            if values
        ],
        sections=[make(run) for make in SECTIONS],
        config_text=_cut(run.config_text, _MAX_TEXT),
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    """The numbers one looks for first."""
    facts: list[tuple[str, str]] = []
    rows = run.metrics
    if rows:
        facts.append(("Steps", f"{rows[-1].step:,}"))
        facts.append(("Last training loss", f"{rows[-1].loss:.4f}"))
        validated = [row.validation_loss for row in rows if row.validation_loss is not None]
        if validated:
            facts.append(("Last validation loss", f"{validated[-1]:.4f}"))
        speed = statistics.median(row.tokens_per_second for row in rows)
        facts.append(("Tokens per second, median", svg.short(speed)))
        facts.append(("Tokens", svg.short(sum(row.tokens for row in rows))))
        facts.append(("Time in steps", _clock(sum(row.seconds for row in rows))))
    if run.memory is not None and run.memory.ranks:
        facts.append(("Highest memory peak", format_bytes(run.memory.peak)))
    if run.loads:
        last = max(load.step for load in run.loads)
        worst = max(load.expert_max_over_mean for load in run.loads if load.step == last)
        facts.append(("Fullest expert / mean, last step", f"{worst:.2f}"))
    return facts


def _plan(run: Run) -> dict[str, Any]:
    """The plan from plan.json (itself or under "plan"), else from the configuration."""
    return _part(run.plan, "plan") or run.plan or _part(run.config, "plan")


def _degrees(run: Run, plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Parallel degrees, those that are not said being 1, and the number of ranks."""
    if not plan:
        return []
    degrees = [(name, plan.get(name, 1)) for name in _DEGREES]
    shown = [(name, _cut(str(value), 20)) for name, value in degrees]
    world = 1
    for _, value in degrees[:4]:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**9:
            return shown
        world *= value
    return [("ranks", str(world)), *shown]


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = values.get(name)
    return cast(dict[str, Any], part) if isinstance(part, dict) else {}


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and values as texts, both cut to a readable length."""
    items = list(values.items())[:MAX_TABLE_ROWS]
    return [(_cut(str(key), 60), _cut(str(value), _MAX_VALUE)) for key, value in items]


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else f"{value[:length]} … ({len(value):,} characters)"


def _clock(seconds: float) -> str:
    """Seconds for people: 12.3 s, 4 min 5 s, 3 h 12 min."""
    if not seconds >= 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
