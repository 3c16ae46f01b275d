"""Configurations from Python: `moemesh.load`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moemesh.config.changes import flat
from moemesh.config.errors import ConfigError, check_kind, public
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value
from moemesh.sharding.load_run import load_run


@public
def load(
    path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> RunConfig:
    """The configuration of a run from defaults, preset, the TOML file at `path`, ``MOEMESH__``
    variables and `overrides`, in ascending priority.

    `overrides`: texts as after ``--set`` (``["plan.tp=2"]``), or a dict by dotted keys or by
    sections (``{"plan.tp": 2}``, ``{"plan": {"tp": 2}}``). Raises ConfigError with every problem.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={format_value(value)}" for key, value in flat(overrides).items()]
    for override in overrides:
        check_kind("an override", override, str)
    from moemesh.data.sources import with_vocabulary  # late: it imports numpy

    with naming("overrides"):
        resolved = load_run([] if path is None else [Path(path)], list(overrides))
        return with_vocabulary(resolved).config


@contextmanager
def naming(argument: str) -> Iterator[None]:
    """Context in which ConfigErrors have the name `argument` in place of ``--set``."""
    try:
        yield
    except ConfigError as error:
        problems = [
            replace(
                problem,
                key=problem.key.replace("--set", argument),
                origin=problem.origin.replace("--set ", f"{argument}: "),
                message=problem.message.replace("--set", argument),
                fix=re.sub(r"--set (?=\S+=)", f"{argument}: ", problem.fix),
            )
            for problem in error.problems
        ]
        raise ConfigError(problems, error.where) from None
