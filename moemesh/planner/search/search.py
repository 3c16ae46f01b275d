"""The best layouts of a model on a cluster, with a certificate of what was left out and why.

Every legal layout of the :class:`Space` is enumerated in columns. A lower bound of its memory cuts
what cannot fit, the time model prices the rest, and layouts are then looked at in the order of
their time: the exact memory model decides which of them fit. So nothing that was cut could have
been better, under the model: the certificate names the bound, the rules and their counts. The one
rule that is an assumption (tensor groups stay inside a node) is listed and can be switched off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.config.errors import ConfigError, Problem
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.measured_links import measured_pricing
from moemesh.planner.peak_memory import PeakMemory, peak_memory
from moemesh.planner.search.bounds import memory_floor, time_columns
from moemesh.planner.search.space import Family, IntArray, Space, families
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.arithmetic import FloatArray
from moemesh.planner.timing.columns import (
    Software,
    hardware_row,
    layout_row,
    model_row,
    precision_of,
)
from moemesh.planner.timing.price import exit_share
from moemesh.planner.timing.step_time import compute_floor

#: Layouts whose exact memory is looked at before the search gives up on finding more that fit.
_MOST_CHECKS = 20_000
#: Layouts whose bound of memory is compared in one go.
_LOOKED_AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with its price."""

    layout: PlannedLayout
    seconds: float
    breakdown: dict[str, float]
    memory: PeakMemory


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What the search proves. `lower_bound_seconds`: no layout of the space that fits is faster
    under the model; `compute_floor_seconds`: no layout at all is, with the same operations.

    `examined` layouts were priced or cut by a bound; `rejected` counts by reason, legal layouts
    that do not fit in memory among them; `assumptions` are rules that no bound proves.
    """

    lower_bound_seconds: float
    compute_floor_seconds: float
    examined: int
    rejected: dict[str, int]
    assumptions: tuple[str, ...]


class Found:
    """All layouts of a space that may fit, ordered by time; exact memory is looked at on demand."""

    def __init__(self, shape: ModelShape, cluster: Cluster, space: Space) -> None:
        self.shape, self.cluster, self.space = shape, cluster, space
        self.pricing = measured_pricing(cluster)
        self.rejected: Counter[str] = Counter()
        self.examined = 0
        self._families: list[Family] = []
        self._seconds: FloatArray = np.empty(0)
        self._floors: FloatArray = np.empty(0)
        self._family_of: IntArray = np.empty(0, dtype=np.int64)
        self._row_of: IntArray = np.empty(0, dtype=np.int64)
        self._memories: dict[int, PeakMemory] = {}
        self._enumerate()

    def _enumerate(self) -> None:
        seconds: list[FloatArray] = []
        floors: list[FloatArray] = []
        for family in families(self.shape, self.space, self.rejected):
            self.examined += len(family.columns)
            allocation = self.pricing.allocation_of(family.layout(self.space, 0))
            floor = memory_floor(self.shape, family, self.space, allocation)
            floors.append(np.asarray(floor, dtype=np.float64))
            seconds.append(self._times(family))
            self._families.append(family)
        if not seconds:
            raise ConfigError([self._nothing_legal()])
        self._seconds, self._floors = np.concatenate(seconds), np.concatenate(floors)
        sizes = [len(part) for part in seconds]
        self._family_of = np.repeat(np.arange(len(sizes)), sizes)
        self._row_of = np.concatenate([np.arange(size) for size in sizes])

    def _times(self, family: Family) -> FloatArray:
        layout = family.layout(self.space, 0)
        columns = time_columns(family, self.space, family.columns)
        hardware = hardware_row(self.pricing.device, precision_of(layout))
        share = exit_share(self.shape, family.attention_exit, columns.tp)
        total = self.pricing.total(model_row(self.shape), columns, hardware, share)
        return np.broadcast_to(np.asarray(total, dtype=np.float64), (len(family.columns),))

    def _nothing_legal(self) -> Problem:
        space = self.space
        told = ", ".join(f"{name}: {count}" for name, count in self.rejected.most_common(3))
        return Problem(
            code="no-plan",
            key="global_batch",
            value=space.global_batch,
            message=f"no layout of {space.num_devices} devices is legal for this model and batch "
            f"({told})",
            fix=f"global_batch = {_next_multiple(space.global_batch, space.num_devices)}",
        )

    @property
    def capacity(self) -> float:
        """Bytes of a device that a job may use."""
        return self.cluster.memory_bytes * self.pricing.usable_share

    @cached_property
    def order(self) -> IntArray:
        """All layouts by time, then by place: deterministic."""
        return np.argsort(self._seconds, kind="stable")

    def layout(self, index: int) -> PlannedLayout:
        """Layout number `index` of the enumeration."""
        family = self._families[int(self._family_of[index])]
        return family.layout(self.space, int(self._row_of[index]))

    def memory(self, index: int) -> PeakMemory:
        """Its exact peak, on the worst rank."""
        if index not in self._memories:
            layout = self.layout(index)
            allocation = self.pricing.allocation_of(layout)
            self._memories[index] = peak_memory(self.shape, layout, allocation)
        return self._memories[index]

    def seconds(self, index: int) -> float:
        return float(self._seconds[index])

    def fitting(self, capacity: float, count: int) -> list[int]:
        """The `count` fastest layouts that need at most `capacity` bytes, fastest first.

        Layouts of equal time under the model follow by memory, smallest first.
        """
        found: list[int] = []
        for index in islice(self._may_fit(capacity), _MOST_CHECKS):
            if found and len(found) >= count and self.seconds(index) > self.seconds(found[-1]):
                break
            if self.memory(index).needed <= capacity:
                found.append(index)
        found.sort(key=lambda index: (self.seconds(index), self.memory(index).needed, index))
        return found[:count]

    def _may_fit(self, capacity: float) -> Iterator[int]:
        """Layouts whose bound is within `capacity`, fastest first; looked at as far as needed."""
        for start in range(0, len(self.order), _LOOKED_AT_ONCE):
            part = self.order[start : start + _LOOKED_AT_ONCE]
            yield from map(int, part[self._floors[part] <= capacity])

    def faster_that_do_not_fit(self, than: float, count: int) -> list[int]:
        """Layouts with less than `than` seconds, the one that misses its memory by least first."""
        faster = self.order[: int(np.searchsorted(self._seconds[self.order], than))]
        faster = faster[np.argsort(self._floors[faster], kind="stable")][: 50 * count]
        missing = [int(index) for index in faster if self.memory(int(index)).needed > self.capacity]
        missing.sort(key=lambda index: (self.memory(index).needed, self.seconds(index)))
        return missing[:count]

    def smallest(self) -> int:
        """A layout that needs least memory: what is nearest when nothing fits."""
        near = np.argsort(self._floors, kind="stable")[:200]
        return min((int(index) for index in near), key=lambda index: self.memory(index).needed)

    def num_too_large(self) -> int:
        """Layouts that even the bound shows not to fit."""
        return int((self._floors > self.capacity).sum())

    def candidate(self, index: int) -> Candidate:
        """Price one layout in full."""
        layout = self.layout(index)
        return self.price(layout)

    def price(self, layout: PlannedLayout) -> Candidate:
        """Price any layout of this model on this cluster."""
        memory, breakdown = self.pricing.price(self.shape, layout)
        return Candidate(
            layout=layout, seconds=breakdown["total"], breakdown=breakdown, memory=memory
        )

    def certificate(self, best: float) -> Certificate:
        """What is proved of an incumbent of `best` seconds."""
        rejected = {name: count for name, count in sorted(self.rejected.items()) if count}
        if too_large := self.num_too_large():
            rejected["does not fit in memory"] = too_large
        refused = sum(memory.needed > self.capacity for memory in self._memories.values())
        if refused:
            rejected["does not fit in memory, by the exact model"] = refused
        layout = PlannedLayout(
            dp=self.space.num_devices,
            seq_len=self.space.seq_len,
            global_batch=self.space.num_devices,
            precision=self.space.precision,
        )
        row = replace(
            layout_row(layout, Software()),
            microbatches=self.space.global_batch / self.space.num_devices,
        )
        hardware = hardware_row(self.pricing.device, precision_of(layout))
        floor = compute_floor(model_row(self.shape), row, hardware, self.pricing.constants)
        assumptions = ["ZeRO-2 and ZeRO-3 are not combined with a pipeline"]
        if self.space.tensor_inside_node:
            assumptions.insert(0, "tensor and expert-tensor groups stay inside a node")
        return Certificate(
            lower_bound_seconds=best,
            compute_floor_seconds=float(floor),
            examined=self.examined,
            rejected=rejected,
            assumptions=tuple(assumptions),
        )


def _next_multiple(number: int, of: int) -> int:
    return max(-(-number // of), 1) * of
