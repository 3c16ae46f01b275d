"""Seconds, bytes and "does it fit" of published runs, and what a row left unprinted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.peak_memory import Allocation, PeakMemory, peak_memory
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.stage_cut import Stages
from moemesh.planner.timing.calibration import Calibration
from moemesh.planner.timing.columns import (
    HardwareColumns,
    LayoutColumns,
    ModelColumns,
    hardware_columns,
    layout_columns,
    model_columns,
)
from moemesh.planner.timing.constants import NAMES, Constants
from moemesh.planner.timing.step_time import StepTime, step_time

#: Microbatches that are tried where a table prints none.
_MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The planner's prediction of one run; times in seconds, memory in bytes."""

    run: PublishedRun
    seconds: float | None
    memory: PeakMemory | None
    fits: bool | None
    layout: PlannedLayout | None

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, minus one."""
        if self.seconds is None or not self.run.seconds:
            return None
        return self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, minus one."""
        if self.memory is None or not self.run.memory_bytes:
            return None
        return self.memory.allocated / self.run.memory_bytes - 1


def predict(runs: Sequence[PublishedRun], calibration: Calibration) -> list[Prediction]:
    """Every row, in order; a row without a layout predicts nothing."""
    filled = [fill_in(run, calibration) for run in runs if run.layout is not None]
    constants = [calibration.constants(run.cluster, run.release) for run in filled]
    seconds = run_seconds(filled, stacked(constants)).total if filled else ()
    found: dict[str, Prediction] = {}
    for run, value in zip(filled, seconds, strict=True):
        allocation = calibration.allocation(run.cluster)
        memory = run_memory(run, allocation)
        usable = _known(run.device).memory_bytes * allocation.usable_share
        # What is computed again without the table saying so is what makes the run fit.
        fits = memory.needed <= usable or run.software.recomputed_share > 0
        found[run.id] = Prediction(
            run=run, seconds=float(value), memory=memory, fits=fits, layout=run.layout
        )
    nothing = {"seconds": None, "memory": None, "fits": None, "layout": None}
    return [found.get(run.id) or Prediction(run=run, **nothing) for run in runs]


def stacked(constants: Sequence[Constants]) -> Constants:
    """Constants of several rows as columns."""
    return Constants(
        **{
            name: np.array([getattr(row, name) for row in constants], dtype=np.float64)
            for name in NAMES
        }
    )


def run_memory(run: PublishedRun, allocation: Allocation) -> PeakMemory:
    """The worst rank of a run."""
    if run.software.adapters:
        # Frozen weights have neither gradients nor optimizer states.
        allocation = replace(allocation, gradient_bytes=0, optimizer_bytes=0)
    return peak_memory(_known(run.shape), _known(run.layout), allocation)


def run_seconds(runs: Sequence[PublishedRun], constants: Constants) -> StepTime:
    """The step times of runs, one row each, their schedules simulated."""
    stages = [Stages.of(_known(run.shape), _known(run.layout)) for run in runs]
    return step_time(*run_columns(runs), constants, stages=stages)


def run_columns(
    runs: Sequence[PublishedRun],
) -> tuple[ModelColumns, LayoutColumns, HardwareColumns]:
    """Runs as what the formulas read, one row each."""
    layouts = [_known(run.layout) for run in runs]
    shapes = [_known(run.shape) for run in runs]
    return (
        model_columns(shapes),
        layout_columns(shapes, layouts, [run.software for run in runs]),
        hardware_columns([_known(run.device) for run in runs], layouts),
    )


T = TypeVar("T")


def _known(value: T | None) -> T:
    assert value is not None, "only rows with a layout are priced"
    return value


def fill_in(run: PublishedRun, calibration: Calibration) -> PublishedRun:
    """The run with what its table leaves out.

    Microbatch: one sequence for an MoE model, else the fastest that fits. Recomputation: as many
    layers as must be computed again for the rest to fit (frameworks offer it layer by layer).
    """
    allocation = calibration.allocation(run.cluster)
    if run.microbatch_printed or run.is_moe:
        return _recomputed(run, allocation)
    layout = _known(run.layout)
    share = layout.global_batch // layout.dp
    sizes = tuple(size for size in _MICROBATCHES if share % size == 0) or (1,)
    tried = [
        _recomputed(replace(run, layout=layout.changed(microbatch=size)), allocation)
        for size in sizes
    ]
    usable = _known(run.device).memory_bytes * allocation.usable_share
    fitting = [
        index
        for index, one in enumerate(tried)
        if one.software.recomputed_share > 0 or run_memory(one, allocation).needed <= usable
    ]
    constants = stacked([calibration.constants(run.cluster, run.release)] * len(tried))
    seconds: FloatArray = run_seconds(tried, constants).total
    return tried[min(fitting or [0], key=lambda index: seconds[index])]


def _recomputed(run: PublishedRun, allocation: Allocation) -> PublishedRun:
    """The run with so many recomputed layers as it needs, where its table does not say."""
    if run.recompute_printed or run.ended != "ok":
        return run
    memory = run_memory(run, allocation)
    usable = _known(run.device).memory_bytes * allocation.usable_share
    short = memory.needed - usable
    if short <= 0 or memory.activations <= 0:
        return run
    share = min(short / memory.activations, 1.0)
    return replace(run, software=replace(run.software, recomputed_share=share))
