"""The report of a run: one HTML file that needs nothing else, no network and no script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moemesh.report import boxes, svg, timeline_picture
from moemesh.report.chapters import CHAPTERS
from moemesh.report.files import replace_file
from moemesh.report.section import MAX_TABLE_ROWS, Chapter
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.run import Run, State, median_of, state_of

NAME = "report.html"

#: What is longer is cut, so that the page keeps its size whatever the run.
_MAX_TEXT = 64_000
_MAX_VALUE = 300
_DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")
_HERE = Path(__file__).parent
_NO_STEP: dict[State, str] = {
    "running": "The run is at work and has finished no step so far.",
    "failed": "The run failed before its first step was finished.",
    "stopped": "The run was stopped before its first step was finished.",
    "finished": "The run holds no step.",
    "interrupted": "The run ended before its first step was finished.",
}


def write(run: Run | Path | str, out: Path | None = None) -> Path:
    """Write `report.html` into the folder of `run`, or the page to `out`, and return its path.

    Raises RunError (a ValueError) when the folder holds no run. An older report stays until the new
    one is complete.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    return replace_file(out or run.folder / NAME, render(run))


def render(run: Run) -> str:
    """The page as a text, the same bytes for the same run."""
    state = state_of(run)
    sections = [make(run) for make in CHAPTERS]
    # When, where and by which command the run was started, as far as its folder tells.
    starts = [str(start.get("started", "")) for start in run.starts]
    starts = starts or [event.time for event in run.events if event.kind == "start"]
    last: Mapping[str, Any] = run.starts[-1] if run.starts else {}
    lines: list[str] = []
    if starts:
        again = f", again {starts[-1][:16].replace('T', ' ')} UTC" if len(starts) > 1 else ""
        lines.append(f"Started {_cut(starts[0][:19].replace('T', ' '), 40)} UTC{again}.")
    hosts = last.get("hosts")
    if isinstance(hosts, list):
        hosts_named = ", ".join(
            str(cast("dict[str, object]", host).get("host", "unknown"))
            if isinstance(host, dict)
            else "unknown"
            for host in cast("list[object]", hosts)
        )
        lines.append(f"On {_cut(hosts_named, _MAX_VALUE)}.")
    if command := command_of(run):
        lines.append(f"Command: {_cut(command, 4 * _MAX_VALUE)}")
    # The numbers that one looks for first.
    facts: list[tuple[str, str]] = [("State", state)]
    rows, unit = run.metrics, run.loss_unit
    if rows:
        wanted = f" of {run.num_steps:,}" if run.num_steps is not None else ""
        facts.append(("Steps", f"{rows[-1].step:,}{wanted}"))
        facts.append((f"Last training loss, {unit}", f"{rows[-1].loss:.4f}"))
        validated = [row.validation_loss for row in rows if row.validation_loss is not None]
        if validated:
            facts.append((f"Last validation loss, {unit}", f"{validated[-1]:.4f}"))
        median = f"median{run.of_steps}"
        if (speed := median_of(run.current, "tokens_per_second")) is not None:
            facts.append((f"Tokens per second, {median}", svg.short(speed)))
        if (mfu := median_of(run.current, "mfu")) is not None:
            facts.append((f"MFU, {median}", f"{mfu:.1%}"))
        if (rate := median_of(run.current, "tflops_per_rank")) is not None:
            facts.append((f"Model FLOP/s of a rank, {median}", svg.short(rate * 1e12)))
        facts.append(("Tokens", svg.short(sum(row.tokens for row in rows))))
        facts.append(("Time in steps", _clock(sum(row.seconds for row in rows))))
    if run.memory is not None and run.memory.ranks:
        facts.append((f"Memory: {run.memory.peak_words}", format_bytes(run.memory.peak)))
    if run.loads:
        newest = max(load.step for load in run.loads)
        worst = max(load.expert_max_over_mean for load in run.loads if load.step == newest)
        facts.append(("Fullest expert / mean, last step", f"{worst:.2f}"))
    failure = None
    if run.failure is not None:  # texts are cut to a readable length
        items = list(run.failure.items())[:MAX_TABLE_ROWS]
        failure = [(_cut(str(key), 60), _cut(str(value), _MAX_VALUE)) for key, value in items]
    return from_template(
        "page.html",
        name=run.folder.resolve().name,
        origin=lines,
        degrees=_degrees(run),
        facts=facts,
        failure=failure,
        warnings=run.warnings,
        has_no_step=_NO_STEP[state] if not run.metrics else "",
        links=[*links_to(sections), ("file", "config.toml")],
        sections=sections,
        config_text=_cut(run.config_text, _MAX_TEXT),
    )


def links_to(sections: Sequence[Chapter]) -> list[tuple[str, str]]:
    """(identity, title) of each section, for the contents of a page."""
    return [(section.identity, section.title) for section in sections]


def from_template(template: str, **values: Any) -> str:
    """A page of the report from one of its templates, in both colour schemes."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = {**svg.DARK, **boxes.DARK, **timeline_picture.DARK}
    values |= {"ground": svg.DARK_GROUND, "colours": colours.items()}
    return environment.get_template(template).render(**values)


def command_of(run: Run) -> str:
    """The command of the newest start; "" where the folder does not tell."""
    argv = run.starts[-1].get("argv") if run.starts else None
    return shlex.join(map(str, cast("list[object]", argv))) if isinstance(argv, list) else ""


def _degrees(run: Run) -> list[tuple[str, str]]:
    """Parallel degrees, those that are not said being 1, and the number of ranks."""
    plan = run.plan or run.section("plan")
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
