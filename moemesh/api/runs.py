"""Configurations from Python: `moemesh.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moemesh.config.errors import check_kind, public
from moemesh.config.run import RunConfig
from moemesh.config.toml import format_value
from moemesh.sharding.load_run import load_run


@public
def load(
    path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> RunConfig:
    """The configuration of a run: defaults, preset, the TOML file at `path`, ``MOEMESH__``
    variables, `overrides`, the weakest first.

    `overrides`: texts as after ``--set`` (``["plan.tp=2"]``), or a dict by dotted keys or by
    sections (``{"plan.tp": 2}``, ``{"plan": {"tp": 2}}``). Raises ConfigError with every problem.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={format_value(value)}" for key, value in _leaves(overrides)]
    for override in overrides:
        check_kind("an override", override, str)
    return load_run([] if path is None else [Path(path)], list(overrides)).config


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
