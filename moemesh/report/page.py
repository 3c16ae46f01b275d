"""The report of a run: one HTML file that needs nothing else, no network and no script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

from moemesh.report import svg
from moemesh.report.chapters import CHAPTERS
from moemesh.report.document import MAX_TABLE_ROWS, Box, Chapter, Document
from moemesh.report.files import replace_file
from moemesh.trace.memory_profile import format_bytes
from moemesh.trace.run import Run, State, median_of, state_of

NAME = "report.html"

#: What is longer is cut, so that the page keeps its size whatever the run.
_MAX_TEXT = 64_000
_MAX_VALUE = 300
_DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")
#: A run that has not finished a step.
NO_STEP: dict[State, str] = {
    "finished": "The run finished without a step.",
    "running": "The run is at work and has finished no step so far.",
    "stopped": "The run was stopped before its first step was finished.",
    "interrupted": "The run ended before its first step was finished, without a word: it was "
    "killed, or the machine went down; logs/ holds what its ranks wrote.",
    "failed": "The run failed before its first step was finished.",
}


def write(run: Run | Path | str, out: Path | None = None) -> Path:
    """Write `report.html` into the folder of `run`, or the page to `out`, and return its path.

    Raises RunError (a ValueError) when the folder holds no run. An older report stays until the new
    one is complete.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    return replace_file(out or run.folder / NAME, document(run).to_html())


def document(run: Run) -> Document:
    """Everything that the folder of `run` tells."""
    state = state_of(run)
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
    # Degrees that are not said are 1; the number of ranks follows where they are numbers.
    plan = run.plan or run.section("plan")
    values = [plan.get(name, 1) for name in _DEGREES] if plan else []
    degrees = [(name, _cut(str(n), 20)) for name, n in zip(_DEGREES, values, strict=False)]
    ranks = [n for n in values[:4] if isinstance(n, int) and n is not True and 0 < n < 10**9]
    if len(ranks) == 4:
        degrees.insert(0, ("ranks", str(prod(ranks))))
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
    failure = list((run.failure or {}).items())[:MAX_TABLE_ROWS]  # texts are cut, too
    told = [(_cut(str(key), 60), _cut(str(value), _MAX_VALUE)) for key, value in failure]
    unread = "Not everything could be read"
    text = _cut(run.config_text, _MAX_TEXT)
    configuration = Chapter(
        identity="file",
        title="config.toml",
        missing="" if text else "No config.toml.",
        code=("The configuration as resolved", text) if text else ("", ""),
    )
    return Document(
        kind="moemesh run",
        title=run.folder.resolve().name,
        lines=lines,
        cards=[("Parallel degrees", degrees), ("Results", facts)],
        boxes=[
            Box("failure", "This run failed", told or [("", "")] * (run.failure is not None), True),
            Box("warnings", unread, [("", warning) for warning in run.warnings]),
            Box("no-step", "No step yet", [] if run.metrics else [("", NO_STEP[state])]),
        ],
        chapters=[
            *(replace(make(run), identity=name, title=title) for name, title, make in CHAPTERS),
            configuration,
        ],
    )


def command_of(run: Run) -> str:
    """The command of the newest start; "" where the folder does not tell."""
    argv = run.starts[-1].get("argv") if run.starts else None
    return shlex.join(map(str, cast("list[object]", argv))) if isinstance(argv, list) else ""


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
