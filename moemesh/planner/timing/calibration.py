"""The constants that ship with the package: shared ones, and the deviations of known clusters."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any, cast

from moemesh.config.errors import UserError
from moemesh.planner.peak_memory import Allocation
from moemesh.planner.timing.constants import NAMES, OWN, PRIORS, Constants
from moemesh.planner.timing.hardware import ACCELERATORS

#: A cluster that is not known gets the mean deviation of its relatives, drawn towards none as if
#: one more cluster had none.
_PULL = 1.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shared constants, deviations of clusters ("stack/device" -> name -> factor), and how
    software stacks allocate memory (stack, or "stack/device" -> settings)."""

    shared: Mapping[str, float]
    #: Deviations of a software stack on whatever device, for devices it was not seen on; and of
    #: its releases ("stack release") from the stack.
    stacks: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    releases: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    clusters: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])
    allocations: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Any])

    def constants(self, cluster: str, release: str = "") -> Constants:
        """The constants of a cluster, known or not, with a release of its software."""
        values = dict(self.shared)
        for factors in (self.deviations(cluster), self.release_factors(release)):
            for name, factor in factors.items():
                values[name] = values[name] * factor
        return Constants(**values)

    def release_factors(self, release: str) -> dict[str, float]:
        """Factors of a release ("stack 26.02"); one that is not known has those of the last known
        one before it, or of the first."""
        if release in self.releases or not release:
            return dict(self.releases.get(release, {}))
        stack = release.rpartition(" ")[0]
        known = sorted(name for name in self.releases if name.rpartition(" ")[0] == stack)
        before = [name for name in known if name <= release]
        return dict(self.releases[(before or known[:1])[-1]]) if known else {}

    def deviations(self, cluster: str) -> dict[str, float]:
        """Factors on the shared constants: the cluster's own, else its software stack's, else the
        mean of clusters with devices of its generation (an H800 computes like an H100)."""
        if cluster in self.clusters:
            return dict(self.clusters[cluster])
        stack, _, device = cluster.rpartition("/")
        if stack in self.stacks:
            return dict(self.stacks[stack])
        generation = _generation(device)
        relatives = [
            key
            for key in self.clusters
            if (other := key.rpartition("/")[2]) == device or _generation(other) == generation
        ]
        found: dict[str, float] = {}
        for name in OWN:
            logs = [math.log(self.clusters[key].get(name, 1.0)) for key in relatives]
            if logs:
                found[name] = math.exp(sum(logs) / (len(logs) + _PULL))
        return found

    def allocation(self, cluster: str) -> Allocation:
        """Memory habits of the software of a cluster."""
        stack = stack_of(cluster)
        settings = {**self.allocations.get(stack, {}), **self.allocations.get(cluster, {})}
        return Allocation(**cast("dict[str, Any]", settings))


def stack_of(cluster: str) -> str:
    """The software stack of a cluster, "stack/device"."""
    return cluster.rpartition("/")[0]


def _generation(device: str) -> str:
    """The generation of a device; an unknown device is a generation of its own."""
    known = ACCELERATORS.get(device)
    return known.generation if known else device


@cache
def shipped_calibration() -> Calibration:
    """The constants that were fitted to published runs and are part of the package."""
    home = files("moemesh.config") / "presets" / "calibration"
    table = tomllib.loads((home / "published.toml").read_text(encoding="utf-8"))
    return read_calibration(table, "the packaged calibration")


def prior_calibration() -> Calibration:
    """Nothing fitted: the priors of every constant."""
    return Calibration(shared=dict(zip(NAMES, (float(value) for value in PRIORS), strict=True)))


def read_calibration(table: Mapping[str, Any], origin: str) -> Calibration:
    """A calibration from parsed TOML. Raises UserError for unknown names and values below zero."""
    shared = table.get("shared", {})
    levels = {level: table.get(level, {}) for level in ("stack", "release", "cluster")}
    groups = [("shared", shared), *(one for level in levels.values() for one in level.items())]
    for place, values in groups:
        for name, value in values.items():
            if name not in NAMES:
                raise UserError(f"{origin}: [{place}] names `{name}`, no constant of the model")
            if not value > 0:
                raise UserError(f"{origin}: [{place}] {name} must be above 0, not {value}")
    defaults = prior_calibration().shared
    settings = {item.name for item in fields(Allocation)}
    allocations = cast("dict[str, dict[str, float]]", table.get("memory", {}))
    for key, values in allocations.items():
        if unknown := set(values) - settings:
            raise UserError(f"{origin}: [memory.{key}] names {', '.join(sorted(unknown))}")
    return Calibration(
        shared={**defaults, **shared},
        stacks=levels["stack"],
        releases=levels["release"],
        clusters=levels["cluster"],
        allocations=allocations,
    )
