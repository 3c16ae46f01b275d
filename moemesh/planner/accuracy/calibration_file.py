"""Writing calibrations: the table that ships with the package, and Cluster files of users."""

from __future__ import annotations

from collections.abc import Mapping

from moemesh.config.cluster import Cluster
from moemesh.config.toml import format_key, format_value
from moemesh.planner.timing.calibration import Calibration

#: A factor nearer to one than this is no deviation.
_NO_DEVIATION = 0.01


def calibration_toml(calibration: Calibration, heading: str) -> str:
    """The calibration as TOML, as :func:`read_calibration` reads it."""
    lines = [f"# {line}" for line in heading.splitlines()]
    lines += _table("shared", calibration.shared)
    for kind, levels in (
        ("stack", calibration.stacks),
        ("release", calibration.releases),
        ("cluster", calibration.clusters),
    ):
        for key, factors in sorted(levels.items()):
            moved = {name: x for name, x in factors.items() if abs(x - 1) >= _NO_DEVIATION}
            lines += _table(f"{kind}.{format_key(key)}", moved)
    for stack, settings in sorted(calibration.allocations.items()):
        lines += _table(f"memory.{format_key(stack)}", settings)
    return "\n".join(lines) + "\n"


def cluster_toml(cluster: Cluster, heading: str) -> str:
    """A Cluster file with its data-sheet numbers and its calibrated constants."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for name, value in cluster.model_dump(exclude={"peak_flops", "constants"}).items():
        if value != "":
            lines.append(f"{name} = {format_value(value)}")
    lines += _table("peak_flops", cluster.peak_flops)
    if cluster.constants:
        lines += _table("constants", cluster.constants)
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, object]) -> list[str]:
    return ["", f"[{name}]", *(f"{format_key(key)} = {_value(x)}" for key, x in values.items())]


def _value(value: object) -> str:
    """Four significant digits for what was fitted; everything else as it is."""
    if isinstance(value, float) and 0 < abs(value) < 1e5:
        return f"{value:.4g}" if "." in f"{value:.4g}" or "e" in f"{value:.4g}" else f"{value:.1f}"
    return format_value(value)
