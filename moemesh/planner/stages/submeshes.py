"""Stages on meshes of different sizes: Alpa's inter-operator program with a choice of sub-mesh.

Every stage takes a run of layers and one of the meshes that tile a cluster; together they use all
devices. A stage that is s-th from the end holds min(m, s) microbatches (1F1B) and must keep its
state and their activations within a device's memory (arXiv:2201.12023, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moemesh.planner.operators.graph import FloatArray
from moemesh.planner.operators.pareto import MemoryCapError
from moemesh.planner.stages.division import (
    NoPartitionError,
    Partition,
    StageError,
    best_partition,
    smallest_bottleneck,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshCosts:
    """What runs of layers cost on each kind of mesh.

    All arrays are [kind, first, end] with layers first .. end - 1; bytes are those of one device,
    `saved_bytes` of one microbatch. `devices[kind]` is the number of devices of a mesh.
    """

    devices: tuple[int, ...]
    seconds: FloatArray
    state_bytes: FloatArray | None = None
    saved_bytes: FloatArray | None = None

    def __post_init__(self) -> None:
        if any(count < 1 for count in self.devices):
            raise StageError(f"meshes of {self.devices} devices: each has at least 1")
        for name in ("seconds", "state_bytes", "saved_bytes"):
            array: FloatArray | None = getattr(self, name)
            if array is None:
                continue
            square = array.ndim == 3 and array.shape[1] == array.shape[2]
            if not square or len(array) != len(self.devices) or array.shape[1] < 2:
                raise StageError(
                    f"{name} has shape {array.shape}; with {len(self.devices)} meshes it is "
                    f"({len(self.devices)}, layers + 1, layers + 1)"
                )

    @property
    def num_layers(self) -> int:
        return self.seconds.shape[1] - 1

    def table(self, num_stages: int, num_microbatches: int, cap_bytes: float) -> FloatArray:
        """Seconds [stage, kind, first, end], infinite where a stage does not fit."""
        stages = np.repeat(self.seconds[None], num_stages, axis=0).astype(float)
        for stage in range(num_stages):
            stages[stage][self.bytes(num_stages - stage, num_microbatches) > cap_bytes] = np.inf
        return stages

    def bytes(self, stages_left: int, num_microbatches: int) -> FloatArray:
        """Bytes [kind, first, end] of a stage that is `stages_left`-th from the end."""
        total = np.zeros(self.seconds.shape)
        if self.state_bytes is not None:
            total = total + self.state_bytes
        if self.saved_bytes is not None:
            total = total + min(num_microbatches, stages_left) * self.saved_bytes
        return total


def additive_costs(
    devices: Sequence[int],
    seconds: FloatArray,
    state_bytes: FloatArray | None = None,
    saved_bytes: FloatArray | None = None,
) -> MeshCosts:
    """Costs of runs as sums of layers; arrays are [kind, layer]."""

    def runs(values: FloatArray) -> FloatArray:
        sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
        return sums[:, None, :] - sums[:, :, None]

    return MeshCosts(
        devices=tuple(int(count) for count in devices),
        seconds=runs(np.asarray(seconds, dtype=float)),
        state_bytes=None if state_bytes is None else runs(np.asarray(state_bytes, dtype=float)),
        saved_bytes=None if saved_bytes is None else runs(np.asarray(saved_bytes, dtype=float)),
    )


def plan_submeshes(
    costs: MeshCosts,
    num_devices: int,
    num_microbatches: int,
    *,
    cap_bytes: float = np.inf,
    num_stages: int | None = None,
    tolerance: float = 0.0,
) -> Partition:
    """The best division over all numbers of stages (or the given one) and meshes.

    `Partition.submeshes` has each stage's kind. The lower bound holds over all that was tried.
    Raises MemoryCapError with the smallest cap that works, StageError when meshes cannot add up to
    `num_devices`.
    """
    most = min(costs.num_layers, num_devices // min(costs.devices))
    wanted = range(1, most + 1) if num_stages is None else [num_stages]
    usable = [count for count in wanted if _adds_up(costs.devices, count, num_devices)]
    if not usable:
        raise StageError(
            f"meshes of {costs.devices} devices cannot add up to {num_devices} in "
            f"{num_stages or f'1 to {most}'} stages"
        )
    best: Partition | None = None
    bound, evaluations = np.inf, 0
    for count in usable:
        table = costs.table(count, num_microbatches, cap_bytes)
        try:
            found = best_partition(
                table,
                num_microbatches,
                devices=costs.devices,
                num_devices=num_devices,
                tolerance=tolerance,
            )
        except NoPartitionError:
            continue
        bound, evaluations = min(bound, found.lower_bound), evaluations + found.evaluations
        if best is None or found.seconds < best.seconds:
            best = found
    if best is None:
        raise _why_none(costs, usable, num_devices, num_microbatches, cap_bytes)
    return Partition(
        seconds=best.seconds,
        first_layers=best.first_layers,
        num_layers=best.num_layers,
        stage_seconds=best.stage_seconds,
        submeshes=best.submeshes,
        lower_bound=float(bound),
        evaluations=evaluations,
    )


def _adds_up(devices: Sequence[int], num_stages: int, num_devices: int) -> bool:
    """Whether `num_stages` meshes can have `num_devices` devices together."""
    reached = {0}
    for _ in range(num_stages):
        reached = {total + count for total in reached for count in devices}
        reached = {total for total in reached if total <= num_devices}
    return num_devices in reached


def _why_none(
    costs: MeshCosts,
    counts: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    cap_bytes: float,
) -> Exception:
    """The smallest cap that works, or that no cap does."""
    smallest = np.inf
    for count in counts:
        loads = np.stack([costs.bytes(count - stage, num_microbatches) for stage in range(count)])
        first, end = np.indices(loads.shape[2:])
        loads[:, ~np.isfinite(costs.seconds) | (first >= end)] = np.inf
        found = smallest_bottleneck(loads, devices=costs.devices, num_devices=num_devices)
        smallest = min(smallest, found)
    if not np.isfinite(smallest):
        return StageError(f"no division onto {num_devices} devices has finite costs")
    return MemoryCapError(
        f"no division onto {num_devices} devices fits in {cap_bytes:.0f} bytes a device; the "
        f"smallest cap that works is {smallest:.0f} bytes",
        float(smallest),
    )
