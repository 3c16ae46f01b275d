"""Predictions of published runs, and their accuracy: errors, memory labels, selection regret."""

from __future__ import annotations

import json
import statistics as numbers
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Any

from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.memory import Allocation, PeakMemory, peak_memory
from moemesh.planner.stage_cut import Stages
from moemesh.planner.timing.calibration import Calibration, Constants
from moemesh.planner.timing.columns import (
    HardwareColumns,
    LayoutColumns,
    ModelColumns,
    hardware_row,
    layout_row,
    model_row,
    precision_of,
    stacked,
)
from moemesh.planner.timing.step_time import step_time

# Seconds, bytes and "does it fit" of published runs, and what a row left unprinted.


#: Microbatches that are tried where a table prints none.
_MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The planner's prediction of one run; times in seconds, memory in bytes."""

    #: The run, with what its table leaves out filled in.
    run: PublishedRun
    seconds: float | None = None
    memory: PeakMemory | None = None
    fits: bool | None = None

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
    seconds = _run_seconds(filled, constants) if filled else ()
    found: dict[str, Prediction] = {}
    for run, value in zip(filled, seconds, strict=True):
        if own := calibration.own.get(run.cluster):
            value *= exp(own.correction(model_row(run.priced[0]), _layout_row(run)))
        allocation = calibration.allocation(run.cluster)
        memory = run_memory(run, allocation)
        fits = _fits(run, memory, allocation)
        found[run.id] = Prediction(run=run, seconds=float(value), memory=memory, fits=fits)
    return [found.get(run.id) or Prediction(run=run) for run in runs]


def run_memory(run: PublishedRun, allocation: Allocation) -> PeakMemory:
    """The worst rank of a run."""
    if run.software.adapters:
        # Frozen weights have neither gradients nor optimizer states.
        allocation = replace(allocation, gradient_bytes=0, optimizer_bytes=0)
    shape, layout, _ = run.priced
    return peak_memory(shape, layout, allocation)


def _fits(run: PublishedRun, memory: PeakMemory, allocation: Allocation) -> bool:
    # What is computed again without the table saying so is what makes the run fit.
    is_made_to_fit = run.software.recomputed_share > 0
    return is_made_to_fit or memory.fits(run.priced[2].memory_bytes, allocation.usable_share)


def _run_seconds(runs: Sequence[PublishedRun], constants: Sequence[Constants]) -> FloatArray:
    """The step times of runs, one row each, their schedules simulated."""
    stages = [Stages.of(*run.priced[:2]) for run in runs]
    return step_time(*run_columns(runs), stacked(constants), stages=stages).total


def run_columns(
    runs: Sequence[PublishedRun],
) -> tuple[ModelColumns, LayoutColumns, HardwareColumns]:
    """Runs as what the formulas read, one row each."""
    models: list[ModelColumns] = []
    layouts: list[LayoutColumns] = []
    devices: list[HardwareColumns] = []
    for run in runs:
        shape, layout, device = run.priced
        models.append(model_row(shape))
        layouts.append(_layout_row(run))
        devices.append(hardware_row(device, precision_of(layout)))
    return stacked(models), stacked(layouts), stacked(devices)


def _layout_row(run: PublishedRun) -> LayoutColumns:
    shape, layout, _ = run.priced
    return layout_row(shape, layout, run.software)


def fill_in(run: PublishedRun, calibration: Calibration) -> PublishedRun:
    """The run with what its table leaves out.

    Microbatch: one sequence for an MoE model, else the fastest that fits. Recomputation: as many
    layers as must be computed again for the rest to fit (frameworks offer it layer by layer).
    """
    allocation = calibration.allocation(run.cluster)
    if run.microbatch_printed or run.is_moe:
        return _recomputed(run, allocation)
    layout = run.priced[1]
    share = layout.global_batch // layout.dp
    sizes = tuple(size for size in _MICROBATCHES if share % size == 0) or (1,)
    tried = [
        _recomputed(replace(run, layout=layout.changed(microbatch=size)), allocation)
        for size in sizes
    ]
    fitting = [
        index
        for index, one in enumerate(tried)
        if _fits(one, run_memory(one, allocation), allocation)
    ]
    constants = calibration.constants(run.cluster, run.release)
    seconds = _run_seconds(tried, [constants] * len(tried))
    return tried[min(fitting or [0], key=lambda index: seconds[index])]


def _recomputed(run: PublishedRun, allocation: Allocation) -> PublishedRun:
    """The run with so many recomputed layers as it needs, where its table does not say."""
    if run.recompute_printed or run.ended != "ok":
        return run
    memory = run_memory(run, allocation)
    short = memory.needed - run.priced[2].memory_bytes * allocation.usable_share
    if short <= 0 or memory.activations <= 0:
        return run
    share = min(short / memory.activations, 1.0)
    return replace(run, software=replace(run.software, recomputed_share=share))


#: Runs with too little of a layout to be judged by.
_SANITY_TIERS = frozenset({"C"})
#: Alternatives below which "which one would it pick" says nothing.
_FEWEST_CHOICES = 2


@dataclass(frozen=True, kw_only=True)
class ErrorStatistics:
    """Relative errors of some rows: median, 95th percentile and worst size, signed median."""

    count: int
    median: float
    p95: float
    worst: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class FitStatistics:
    """ "Fits" against how runs ended: share right, and share said to fit that ran out of memory."""

    count: int
    right: float
    wrongly_fits: float


@dataclass(frozen=True, kw_only=True)
class SelectionStatistics:
    """The fastest predicted layout of each group that is predicted to fit, against the best one
    measured: time of the pick over the best, minus one."""

    groups: int
    mean_regret: float
    worst_regret: float
    out_of_memory: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """One group: what was picked and what would have been best, by id."""

    group: str
    choices: int
    picked: str
    best: str
    #: None when the pick ran out of memory.
    regret: float | None


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Every prediction and what they amount to."""

    predictions: tuple[Prediction, ...]
    by_source: dict[str, ErrorStatistics]
    dense: ErrorStatistics | None
    moe: ErrorStatistics | None
    memory: ErrorStatistics | None
    fit: FitStatistics | None
    selection: SelectionStatistics | None
    selections: tuple[Selection, ...]

    def to_json(self) -> dict[str, Any]:
        """{"rows": one object a row of the table, "statistics": ...}; seconds and bytes."""
        rows: list[dict[str, Any]] = []
        for one in self.predictions:
            row = {
                "id": int(one.run.id) if one.run.id.isdecimal() else one.run.id,
                "seconds": one.seconds,
                "memory_bytes": one.memory.allocated if one.memory else None,
                "fits": one.fits,
            }
            rows.append(row | ({"reason": one.run.reason} if one.run.reason else {}))
        return {
            "rows": rows,
            "statistics": {
                "step_time_by_source": {
                    name: asdict(found) for name, found in self.by_source.items()
                },
                "step_time_dense": _plain(self.dense),
                "step_time_moe": _plain(self.moe),
                "memory": _plain(self.memory),
                "fits": _plain(self.fit),
                "selection": _plain(self.selection),
            },
        }


def _plain(found: Any) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def validate(runs: Sequence[PublishedRun], calibration: Calibration) -> Validation:
    """Predict every row and compare with what was measured."""
    return summarize(predict(runs, calibration))


def summarize(predictions: Sequence[Prediction]) -> Validation:
    """The statistics of predictions that are already made."""
    timed = [one for one in predictions if one.error is not None and one.run.ended == "ok"]
    judged = [one for one in timed if one.run.tier not in _SANITY_TIERS]
    sources: dict[str, list[float]] = defaultdict(list)
    for one in timed:
        sources[one.run.source or one.run.cluster].append(one.error or 0.0)
    errors = {name: error_statistics(found) for name, found in sorted(sources.items())}
    labelled = [
        one for one in predictions if one.fits is not None and one.run.ended in ("ok", "OOM")
    ]
    fit = None
    if labelled:
        right = sum(one.fits == (one.run.ended == "ok") for one in labelled)
        wrongly = sum(bool(one.fits) and one.run.ended == "OOM" for one in labelled)
        number = len(labelled)
        fit = FitStatistics(count=number, right=right / number, wrongly_fits=wrongly / number)
    selections = select(predictions)
    selection = None
    if selections:
        regrets = [one.regret for one in selections if one.regret is not None]
        selection = SelectionStatistics(
            groups=len(selections),
            mean_regret=numbers.fmean(regrets) if regrets else 0.0,
            worst_regret=max(regrets, default=0.0),
            out_of_memory=len(selections) - len(regrets),
        )
    return Validation(
        predictions=tuple(predictions),
        by_source={name: found for name, found in errors.items() if found},
        dense=error_statistics(one.error or 0.0 for one in judged if not one.run.is_moe),
        moe=error_statistics(one.error or 0.0 for one in judged if one.run.is_moe),
        memory=error_statistics(
            one.memory_error for one in predictions if one.memory_error is not None
        ),
        fit=fit,
        selection=selection,
        selections=tuple(selections),
    )


def error_statistics(errors: Iterable[float]) -> ErrorStatistics | None:
    """Statistics of relative errors; None without any."""
    found = list(errors)
    if not found:
        return None
    sizes = sorted(abs(error) for error in found)
    # Between the neighbours of rank share (n - 1), linearly.
    place = 0.95 * (len(sizes) - 1)
    below = int(place)
    above = min(below + 1, len(sizes) - 1)
    return ErrorStatistics(
        count=len(found),
        median=numbers.median(sizes),
        p95=sizes[below] + (place - below) * (sizes[above] - sizes[below]),
        worst=sizes[-1],
        bias=numbers.median(found),
    )


def select(predictions: Sequence[Prediction]) -> list[Selection]:
    """The planner's choice in each group of runs that are alternatives to one another."""
    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for one in predictions:
        if one.seconds is not None and one.run.ended in ("ok", "OOM"):
            groups[one.run.group].append(one)
    found: list[Selection] = []
    for key, members in sorted(groups.items()):
        measured = [one for one in members if one.run.seconds]
        if len(members) < _FEWEST_CHOICES or not measured:
            continue
        fitting = [one for one in members if one.fits] or members
        # Equal layouts are equal, whatever the rounding of their columns.
        picked = min(
            fitting, key=lambda one: float(f"{(one.seconds or 0.0) / _sequences(one):.9g}")
        )
        best = min(measured, key=_measured_time)
        regret = None
        if picked.run.seconds:
            regret = _measured_time(picked) / _measured_time(best) - 1
        found.append(
            Selection(
                group=", ".join(part for part in key if part),
                choices=len(members),
                picked=picked.run.id,
                best=best.run.id,
                regret=regret,
            )
        )
    return found


def _sequences(one: Prediction) -> int:
    """Sequences of a step: runs of one group may differ in their batch."""
    return one.run.layout.global_batch if one.run.layout else 1


def _measured_time(one: Prediction) -> float:
    """Measured seconds a sequence."""
    return (one.run.seconds or 0.0) / _sequences(one)


def json_text(validation: Validation) -> str:
    """The rows and statistics as one JSON object."""
    return json.dumps(validation.to_json(), indent=1, allow_nan=False) + "\n"
