"""Quantities as users write them: memory to leave free ("10%", "6GiB"), tokens ("4k", "14.8T")."""

from __future__ import annotations

import re
from math import isfinite

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.trace.memory_profile import format_bytes

_MEMORY_UNITS = {"%": 0.01, "mib": 2.0**20, "gib": 2.0**30, "mb": 1e6, "gb": 1e9}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|mib|gib|mb|gb)?", re.IGNORECASE)
#: Letters behind a number of tokens, as powers of a thousand.
_UNITS = {"k": 1, "m": 2, "b": 3, "t": 4}


def with_headroom(cluster: Cluster, headroom: str | float | None) -> Cluster:
    """The cluster whose jobs leave `headroom` of every device's memory free: a share ("10%", 0.1)
    or a size ("6GiB"). None keeps the share that was calibrated. Raises ConfigError."""
    if headroom is None:
        return cluster
    share = _share(str(headroom), cluster.memory_bytes)
    if share is None or not 0 <= share < 1:
        whole = format_bytes(cluster.memory_bytes)
        message = (
            f"it is a share of a device's memory below 1, or a size below its {whole}, with a unit"
        )
        fix = "such as --headroom 10% or --headroom 6GiB"
        raise ConfigError([Problem.of("out-of-range", "headroom", headroom, message, fix)])
    return cluster.model_copy(update={"usable_share": 1 - share})


def _share(text: str, memory_bytes: int) -> float | None:
    """The part of the memory; None for what is neither a share nor a size."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        return None
    number, unit = float(found[1]), (found[2] or "").lower()
    if unit == "%" or not unit:
        return number * _MEMORY_UNITS.get(unit, 1.0)
    return number * _MEMORY_UNITS[unit] / memory_bytes


def read_tokens(text: str, thousand: int = 1000) -> float:
    """A number of tokens: "14.8T", "300B", "1e12", "2_000_000"; of sequences and batches, which are
    counted in 1024 (`thousand`), "4k" is 4,096. Raises ConfigError."""
    folded = text.strip().lower().replace("_", "").replace(",", "")
    unit = thousand ** _UNITS.get(folded[-1:], 0)
    try:
        found = float(folded[:-1] if folded[-1:] in _UNITS else folded) * unit
    except ValueError:
        found = 0.0
    if not (isfinite(found) and found >= 1):
        message = "a number of tokens is at least 1, with K, M, B or T behind it or without"
        fix = "such as --tokens 14.8T, --tokens 300B or --tokens 1e12"
        if thousand == 1024:
            fix = "such as 4096, or 4k for as many"
        raise ConfigError([Problem.of("out-of-range", "tokens", text, message, fix)])
    return found
