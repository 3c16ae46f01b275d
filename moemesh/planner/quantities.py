"""Quantities as users write them: memory to leave free ("10%", "6GiB")."""

from __future__ import annotations

import re

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.trace.memory_profile import format_bytes

_MEMORY_UNITS = {"%": 0.01, "mib": 2.0**20, "gib": 2.0**30, "mb": 1e6, "gb": 1e9}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|mib|gib|mb|gb)?", re.IGNORECASE)


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
