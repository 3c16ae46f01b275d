"""Training from Python: `moemesh.train`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from moemesh.config import dispatcher_table, learning_rate, optimizer_table, schedule_table
from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.errors import ConfigError, Problem, public
from moemesh.config.load import FOLLOWING, config_values
from moemesh.config.optimizer_table import OPTIMIZERS
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value
from moemesh.sharding.load_run import load_run
from moemesh.trace.machine import limit_spinning
from moemesh.trace.run import Run, read_failure


class TrainingError(RuntimeError):
    """Raised for a run that failed; `exit_code`: the exit code of ``moemesh train``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@public
def train(
    config: RunConfig, out: str | Path | None = None, *, allow_change: str | Sequence[str] = ()
) -> Run:
    """Train as ``moemesh train`` does, and return the finished run.

    In a plain program, the call starts the ranks of ``config.plan`` as new processes (``python -m
    moemesh``, so a script needs no ``if __name__ == "__main__"``) and waits for them; this process
    trains nothing. In a process that torchrun started, the call runs its rank; it must come before
    a process group is initialized. `out`: the folder of the run (default ``runs/<preset>``, or
    ``runs/<name of the model's folder>``); an earlier run in it is resumed. `allow_change`: keys
    that may differ from those of that run.

    Raises ConfigError for what cannot be trained, other ValueErrors for data and folders, and
    TrainingError when a rank fails; KeyboardInterrupt when the run was stopped by Ctrl-C.
    """
    if not isinstance(config, RunConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"config must be a RunConfig, not {type(config).__name__}: "
            "moemesh.train(moemesh.load('run.toml'))"
        )
    limit_spinning(os.environ)  # the ranks inherit it
    from moemesh.comm import launch
    from moemesh.train import command
    from moemesh.train.preparation import RunRequest

    if not launch.joined() and (problems := _added_rows(config)):
        raise ConfigError(problems)
    overrides = needed(overrides_of(config))
    request = RunRequest(
        resolved=load_run([], overrides),
        overrides=overrides,
        out=Path(out) if out is not None else None,
        allowed_changes=(allow_change,) if isinstance(allow_change, str) else tuple(allow_change),
    )
    folder = request.path
    code = command.train(request, in_this_process=False)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        reason, report = "the run did not come to its end", read_failure(folder)
        if {"rank", "message"} <= report.keys():
            reason = f"rank {report['rank']} failed: {report['message']}"
        raise TrainingError(f"{folder}: {reason} (exit code {code})", code)
    return Run.load(folder)


def _added_rows(config: RunConfig) -> list[Problem]:
    """The keys that name a row which this program has added to a table: the processes that
    :func:`train` starts do not have it."""
    plan, run = config.plan, config.train
    program = shlex.quote(sys.argv[0] or "PROGRAM.py")
    return [
        Problem.of(
            "conflict",
            key,
            value,
            "this program has added this row, and ranks that moemesh.train starts do not have it",
            f"torchrun --nproc-per-node {config.plan.world_size} {program}",
        )
        for key, value, table, packaged in (
            ("plan.dispatcher", plan.dispatcher, DISPATCHERS, dispatcher_table.PACKAGED),
            ("plan.schedule", plan.schedule, schedule_table.SCHEDULES, schedule_table.PACKAGED),
            ("train.optimizer", run.optimizer, OPTIMIZERS, optimizer_table.PACKAGED),
            ("train.lr_schedule", run.lr_schedule, learning_rate.SCHEDULES, learning_rate.PACKAGED),
        )
        if value in table and value not in packaged
    ]


def needed(overrides: Sequence[str]) -> list[str]:
    """Those of `overrides` that give the same configuration without the others, in messages and
    records shorter by the defaults; all of them if that cannot be shown."""
    whole = load_run([], overrides).config
    sources = [text for text in overrides if text.startswith(("model.preset=", "model.path="))]
    follow = tuple(f"{key}=" for key in FOLLOWING)
    try:
        defaults = set(overrides_of(load_run([], sources).config))
        changes = [
            text
            for text in overrides
            if text not in defaults or text in sources or text.startswith(follow)
        ]
        if load_run([], changes).config == whole:
            return changes
    except ConfigError:  # a source with the defaults: a vocabulary too small for bytes
        pass
    return list(overrides)


def overrides_of(config: RunConfig) -> list[str]:
    """Returns ``section.key=value`` for every key of `config` that has a value, except for unset
    keys whose value follows from others."""
    return [
        f"{section}.{key}={format_value(value)}"
        for section, fields in config_values(config).items()
        for key, value in fields.items()
        if value is not None
        and (f"{section}.{key}" not in FOLLOWING or key in config.train.model_fields_set)
    ]
