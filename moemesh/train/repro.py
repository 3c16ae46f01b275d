"""`moemesh repro`: repeat the first steps of a run, and compare losses and norms bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemesh.config.changes import compare
from moemesh.config.errors import UserError
from moemesh.config.esft_table import KEPT_TABLE
from moemesh.config.python import python_command
from moemesh.config.sources import ENVIRONMENT_PREFIX, RUN_CONFIG
from moemesh.config.suggest import nearest_run
from moemesh.trace.provenance import ProvenancePart, differences, parts_of, read_starts
from moemesh.trace.run import MetricsRow, read_metrics
from moemesh.train.records.kept_schedules import SCHEDULE
from moemesh.train.records.run_folder import MARKS

#: Schedules whose order of operations depends on the arrival of messages.
_BY_ARRIVAL = ("ampnet",)
#: Compared keys of every step.
COMPARED = ("loss", "grad_norm", "aux_loss", "mtp_loss", "validation_loss")


class ReproError(UserError):
    """A run cannot be repeated; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of two runs in `steps` steps. `first_step`: the first that differs (None: all are
    equal), with the first `key` that differs and its values `before` and `after`; `num_different`:
    number of steps that differ; `largest`: largest difference of losses."""

    steps: int
    first_step: int | None = None
    key: str = ""
    before: float | None = None
    after: float | None = None
    num_different: int = 0
    largest: float = 0.0


def covering_parts(starts: Sequence[Mapping[str, Any]], last: int) -> list[ProvenancePart]:
    """The parts (:func:`parts_of`) of steps 1 to `last`. Raises ReproError for steps without a
    record."""
    parts = [part for part in parts_of(starts, last) if part.first <= last]
    ends = [0, *(part.last for part in parts)]
    if not parts or any(part.first != end + 1 for part, end in zip(parts, ends, strict=False)):
        raise ReproError("the records of the run's starts do not cover its first steps")
    return parts


def compare_rows(
    before: Mapping[int, MetricsRow], after: Mapping[int, MetricsRow], steps: int
) -> Comparison:
    """Compare the rows of steps 1 to `steps` of the first run, bit by bit: NaN equals NaN.

    Raises ReproError if the second run lacks one of them, or none can be compared.
    """
    compared = sorted(step for step in before if step <= steps)
    if not compared:
        raise ReproError(f"the run has no row of metrics for any of the steps 1 to {steps}")
    if missing := [step for step in compared if step not in after]:
        raise ReproError(f"the second run has not taken step {missing[0]}")
    different: list[tuple[int, str, float | None, float | None]] = []
    for step in compared:
        for key in COMPARED:
            old, new = getattr(before[step], key), getattr(after[step], key)
            if repr(old) != repr(new) and not (key == "validation_loss" and None in (old, new)):
                different.append((step, key, old, new))
    if not different:
        return Comparison(steps=len(compared))
    step, key, old, new = different[0]
    losses = [abs(a - b) for _, k, a, b in different if k == "loss" and None not in (a, b)]  # type: ignore[operator]
    return Comparison(
        steps=len(compared),
        first_step=step,
        key=key,
        before=old,
        after=new,
        num_different=len({difference[0] for difference in different}),
        largest=max(losses, default=0.0),
    )


def repro(
    run: Path,
    out: Path | None = None,
    steps: int = 20,
    log: Callable[[str], None] = print,
    *,
    shows_steps: bool = True,
    python: str | None = None,
) -> tuple[Comparison, list[str], Path]:
    """Repeat the first `steps` steps of `run` in the folder `out` (default: next to it).

    Each part of a resumed run is repeated under its own configuration. `shows_steps`: the second
    run prints to stdout. Returns the comparison, the differences between the two runs' records
    (packages, hardware, ...), and the folder of the second run. Raises ReproError if it is
    impossible.
    """
    rows = {row.step: row for row in read_metrics(run)}
    if not rows:
        fix = nearest_run(run) or "its metrics.jsonl has no row"
        raise ReproError(f"{run} holds no run with steps: {fix}")
    last = min(steps, max(rows))
    starts = read_starts(run)
    if not starts:
        try:
            text = (run / RUN_CONFIG).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ReproError(f"{run / RUN_CONFIG}: cannot be read ({error})") from error
        starts = [{"first_step": 1, "config": text}]
        log(f"note: {run} has no provenance.json; only its config.toml is repeated")
    parts = covering_parts(starts, last)
    out = _free_folder(run, out)
    directory = Path(str(parts[0].record.get("directory") or Path.cwd()))
    if not directory.is_dir():
        log(f"note: {directory}, where the run was started, is gone; paths count from here")
        directory = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="moemesh-repro-") as temporary:
        previous = ""  # configuration of the part before
        for number, part in enumerate(parts, start=1):
            file = Path(temporary) / f"part-{number}.toml"
            text = str(part.record["config"])
            file.write_text(text, encoding="utf-8")
            words = ("moemesh", "train", str(file), "--out", str(out))
            command = python_command(*words, python=python)
            for override in _overrides(run, part.record):
                command += ["--set", override]
            for change in compare(previous, text) if previous else []:
                command += ["--allow-change", change.key] if change.kind == "training" else []
            command += ["--stop-after", str(part.last)]
            log(f"steps {part.first} to {part.last}, as start {part.record.get('number', 1)} did:")
            output = None if shows_steps else subprocess.DEVNULL
            # The recorded configuration includes the overrides of the environment.
            environment = {
                k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)
            }
            code = subprocess.run(
                command, cwd=directory, env=environment, stdout=output, check=False
            ).returncode
            if code:
                raise ReproError(f"the second run ended with exit code {code}: see {out}")
            previous = text
    comparison = compare_rows(rows, {row.step: row for row in read_metrics(out)}, last)
    record, repeated = parts[0].record, read_starts(out)
    are_known = bool(repeated and record.get("packages"))
    return comparison, differences(record, repeated[0]) if are_known else [], out


def _free_folder(run: Path, out: Path | None) -> Path:
    """The absolute path of `out`, or of a new folder next to `run`. Raises ReproError if it holds a
    run."""
    if out is not None:
        if any((out / mark).exists() for mark in MARKS):
            raise ReproError(f"{out} holds a run already: choose another folder with --out")
        return out.resolve()
    run = run.resolve()
    for number in range(1, 1000):
        name = f"{run.name}-repro" + (f"-{number}" if number > 1 else "")
        if not (run.parent / name).exists():
            return run.parent / name
    raise ReproError(f"{run.parent} is full of repeated runs: choose a folder with --out")


def _overrides(run: Path, record: Mapping[str, Any]) -> list[str]:
    """Values of --set: no rule for the folder, files that the run folder has copies of, and node
    borders of the launcher. Raises ReproError for an order that no second run has."""
    overrides = ['train.resume="auto"']
    text = str(record["config"])
    if (run / SCHEDULE).exists():
        overrides.append(f"plan.schedule={json.dumps(str((run / SCHEDULE).resolve()))}")
    if (run / KEPT_TABLE).exists() and "\nesft = " in text:
        overrides.append(f"train.esft={json.dumps(str((run / KEPT_TABLE).resolve()))}")
    if len(record.get("hosts") or ()) > 1 and "\nranks_per_node = " not in text:
        overrides.append(f"plan.ranks_per_node={record['ranks_per_node']}")
    if any(f'\nschedule = "{name}"' in text for name in _BY_ARRIVAL) and "\nreplay = " not in text:
        raise ReproError(
            "the order of ampnet's operations depends on the arrival of messages: no second run "
            "has the same; to repeat the recorded orders, set plan.replay"
        )
    return overrides
