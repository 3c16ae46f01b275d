"""Seconds and peak bytes of layouts on one cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf

import numpy as np

from moemesh.config.cluster import Cluster
from moemesh.config.devices import Accelerator
from moemesh.config.dispatcher_table import dispatcher_row
from moemesh.config.errors import ConfigError, Problem
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.suggest import nearest_choice
from moemesh.planner.arithmetic import Number
from moemesh.planner.intervals import Interval, own_width, shipped_intervals
from moemesh.planner.memory import Allocation, PeakMemory, peak_memory
from moemesh.planner.planned_layout import PlannedLayout, Precision
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.speed import accelerator_of_cluster
from moemesh.planner.stage_cut import Stages
from moemesh.planner.timing.calibration import EFFICIENCIES, NAMES, Constants, shipped_calibration
from moemesh.planner.timing.columns import (
    LayoutColumns,
    Software,
    hardware_row,
    layout_row,
    model_row,
    stacked,
)
from moemesh.planner.timing.compute import PricedStep
from moemesh.planner.timing.links import LinkTable
from moemesh.planner.timing.own_runs import OwnRuns
from moemesh.planner.timing.step_time import compute_floor, step_seconds, step_time
from moemesh.sharding.dispatchers import CAPACITY_FACTOR
from moemesh.trace.memory_profile import format_bytes

# Quantities as users write them: memory to leave free ("10%", "6GiB").


_MEMORY_UNITS = {"": 1.0, "%": 0.01, "mib": 2.0**20, "gib": 2.0**30, "mb": 1e6, "gb": 1e9}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|mib|gib|mb|gb)?", re.IGNORECASE)


def with_headroom(
    cluster: Cluster, headroom: str | float | None, price: float | None = None
) -> Cluster:
    """The cluster with another `headroom` and `price`; None keeps the cluster's. `headroom`: memory
    of every device to leave free, as a share ("10%", 0.1) or a size ("6GiB"); `price`: of an hour
    of a device, above 0. Raises ConfigError."""
    if price is not None:
        if not 0 < price < inf:
            message, fix = f"a GPU-hour costs more than 0, not {price:g}", "such as --price 2.5"
            raise ConfigError([Problem.of("out-of-range", "price", price, message, fix)])
        cluster = cluster.model_copy(update={"gpu_hour_price": price})
    if headroom is None:
        return cluster
    share = -1.0
    if match := _FORM.fullmatch(str(headroom).strip()):
        unit = (match[2] or "").lower()
        whole = 1 if unit in ("%", "") else cluster.memory_bytes
        share = float(match[1]) * _MEMORY_UNITS[unit] / whole
    if not 0 <= share < 1:
        whole = format_bytes(cluster.memory_bytes)
        message = (
            f"it is a share of a device's memory below 1, or a size below its {whole}, with a unit"
        )
        fix = "such as --headroom 10% or --headroom 6GiB"
        raise ConfigError([Problem.of("out-of-range", "headroom", headroom, message, fix)])
    return cluster.model_copy(update={"usable_share": 1 - share})


#: Software stack whose calibration is used for the user's clusters.
DEFAULT_STACK = "megatron"


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Inputs of predictions for a cluster: its device, constants of time, memory allocation,
    measured links and own runs."""

    device: Accelerator
    constants: Constants
    allocation: Allocation
    table: LinkTable = field(default_factory=LinkTable)
    own: OwnRuns = field(default_factory=OwnRuns)

    @property
    def usable_share(self) -> float:
        """Share of a device's memory that a job may use."""
        return self.allocation.usable_share

    def allocation_of(self, layout: PlannedLayout) -> Allocation:
        """The cluster's allocation with the layout's bytes of gradients and optimizer states."""
        return replace(
            self.allocation,
            gradient_bytes=layout.gradient_bytes,
            optimizer_bytes=layout.optimizer_bytes,
        )

    def memory(self, shape: ModelShape, layout: PlannedLayout) -> PeakMemory:
        """Peak memory of the worst rank."""
        return peak_memory(shape, layout, self.allocation_of(layout))

    def seconds(self, shape: ModelShape, layout: PlannedLayout) -> dict[str, float]:
        """Seconds of a step by part, with `total`."""
        return self.seconds_of_all(shape, [layout])[0]

    def seconds_of_all(
        self, shape: ModelShape, layouts: Sequence[PlannedLayout]
    ) -> list[dict[str, float]]:
        """:meth:`seconds` of many layouts of one precision, with the formulas in columns."""
        each = [layout_row(shape, layout, software_of(layout)) for layout in layouts]
        rows = stacked(each) if len(each) > 1 else each[0]
        work = self._work(shape, rows, layouts[0].precision)
        stages = [Stages.of(shape, layout) for layout in layouts]
        times = step_time(work, stages)
        factors = np.ones(len(layouts))
        if self.own.runs:
            factors = np.exp(np.ravel(self.own.correction(work.model, rows)))
        return [
            {name: seconds * float(factor) for name, seconds in times.row(number).items()}
            for number, factor in enumerate(factors)
        ]

    def _work(self, shape: ModelShape, rows: LayoutColumns, precision: Precision) -> PricedStep:
        hardware = hardware_row(self.device, precision)
        return PricedStep(model_row(shape), rows, hardware, self.constants, self.table)

    def own_runs(self, shape: ModelShape, layout: PlannedLayout) -> str:
        """Line on the correction of a layout by the cluster's own runs; "" without runs."""
        return self.own.describe(model_row(shape), layout_row(shape, layout, software_of(layout)))

    def seconds_interval(self, seconds: float) -> Interval:
        """80 % interval of predicted seconds of a step."""
        errors = [run.left_out for run in self.own.runs]
        published = shipped_intervals().seconds_width(self.device.generation)
        return Interval.around(seconds, own_width(errors, published))

    @property
    def memory_width(self) -> float:
        """Half the 80 % interval of memory in logarithms."""
        known = shipped_intervals()
        return known.known_width if self.device.generation else known.memory_width

    def memory_interval(self, needed: float) -> Interval:
        """80 % interval of the bytes that a device needs."""
        return Interval.around(needed, self.memory_width)

    def price(
        self, shape: ModelShape, layout: PlannedLayout
    ) -> tuple[PeakMemory, dict[str, float]]:
        """(peak memory of the worst rank, seconds of a step by part)."""
        return self.memory(shape, layout), self.seconds(shape, layout)

    def bound(self, shape: ModelShape, columns: LayoutColumns, precision: Precision) -> Number:
        """Lower bound of the seconds of a step, for every layout of `columns`."""
        work = self._work(shape, columns, precision)
        total = step_seconds(work)
        return total * np.exp(self.own.correction(work.model, columns)) if self.own.runs else total

    def compute_floor(
        self, shape: ModelShape, columns: LayoutColumns, precision: Precision
    ) -> float:
        """Lower bound of the seconds of a step, for all layouts with the columns' devices."""
        floor = float(compute_floor(self._work(shape, columns, precision)))
        return floor * exp(self.own.least)


def software_of(layout: PlannedLayout) -> Software:
    """Software properties of `moemesh train` with a layout."""
    has_blocks = layout.pp > 1 and SCHEDULES[layout.schedule].has_blocks
    dispatcher = dispatcher_row(layout.dispatcher)
    return Software(
        fsdp=layout.zero == 3,
        sums_each=layout.zero == 2,
        deduplicated=dispatcher.is_node_aware,
        gathered=dispatcher.is_gathered,
        slots=CAPACITY_FACTOR if dispatcher.has_slots else 0.0,
        # tests/device/test_overlap.py checks that chunks and blocks hide the assumed share.
        overlapped_exchange=layout.dispatch_chunks > 1 or has_blocks,
    )


def pricing(cluster: Cluster) -> Pricing:
    """The pricing of a cluster; its own constants override the shipped ones of its device. Raises
    ConfigError for unknown constants, and for efficiencies above 1."""
    problems: list[Problem] = []
    for name, value in cluster.constants.items():
        if name not in NAMES:
            key, message = f"cluster.constants.{name}", f"the time model has no constant `{name}`"
            fix = nearest_choice(name, NAMES)
            problems.append(Problem.of("unknown-key", key, value, message, fix))
        elif name in EFFICIENCIES and value > 1:
            key, peak = f"cluster.constants.{name}", EFFICIENCIES[name]
            message = f"{name} is a share of {peak}: at most 1, not {value:g}"
            fix = f"{name} = 1.0, and {value:.4g} times {peak} if that was measured"
            problems.append(Problem.of("out-of-range", key, value, message, fix))
    if problems:
        raise ConfigError(problems)
    device = accelerator_of_cluster(cluster)
    calibrated = shipped_calibration()
    key = f"{DEFAULT_STACK}/{device.name}"
    allocation = calibrated.allocation(key)
    if not device.generation:
        # The calibration has no data on the libraries of other devices, such as CPUs.
        allocation = replace(allocation, workspace_bytes=0.0, usable_share=1.0)
    if cluster.usable_share is not None:
        allocation = replace(allocation, usable_share=cluster.usable_share)
    return Pricing(
        device=device,
        constants=replace(calibrated.constants(key), **cluster.constants),
        allocation=allocation,
        table=LinkTable(cluster.links),
        own=OwnRuns(cluster.own_runs),
    )
