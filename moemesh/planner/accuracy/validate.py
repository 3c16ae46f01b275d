"""Predictions of published runs, and their accuracy: errors, memory labels, selection regret."""

from __future__ import annotations

import json
import statistics as numbers
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import exp
from typing import Any

import numpy as np

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
    stacked,
)
from moemesh.planner.timing.compute import PricedStep
from moemesh.planner.timing.step_time import step_time
from moemesh.schedule.build import is_defined

# Seconds, bytes and "does it fit" of published runs, and values that a row leaves out.


_WHOLE_LAYERS = frozenset({"full"})
#: Share of layers that is recomputed in addition, so that rounding leaves no run too large.
_ROUNDING = 1e-9
#: Ratio of predicted and measured seconds from which on a row has another unit.
OTHER_UNIT = 50.0
#: Microbatches that are tried for a row without one.
_MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The planner's prediction of one run; times in seconds, memory in bytes."""

    #: The run, with values that its table leaves out filled in.
    run: PublishedRun
    seconds: float | None = None
    memory: PeakMemory | None = None
    fits: bool | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the predicted step time."""
        if self.seconds is None or not self.run.seconds:
            return None
        return self.seconds / self.run.seconds - 1

    @property
    def is_in_another_unit(self) -> bool:
        """Whether measured and predicted seconds differ by a factor of 50 (milliseconds do)."""
        error = self.error
        return error is not None and not 1 / OTHER_UNIT < 1 + error < OTHER_UNIT

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory."""
        if self.memory is None or not self.run.memory_bytes:
            return None
        return self.memory.allocated / self.run.memory_bytes - 1


def predict(runs: Sequence[PublishedRun], calibration: Calibration) -> list[Prediction]:
    """Predictions of all rows, in order; that of a row without a layout is empty."""
    filled = [fill_in(run, calibration) for run in runs if run.layout is not None]
    constants = [calibration.constants(run.cluster, run.release) for run in filled]
    seconds = _run_seconds(filled, constants) if filled else ()
    predictions: dict[str, Prediction] = {}
    for run, value in zip(filled, seconds, strict=True):
        if own := calibration.own.get(run.cluster):
            value *= exp(own.correction(model_row(run.priced[0]), _layout_row(run)))
        allocation = allocation_of(run, calibration)
        memory = run_memory(run, allocation)
        fits = _fits(run, memory, allocation)
        predictions[run.id] = Prediction(run=run, seconds=float(value), memory=memory, fits=fits)
    return [predictions.get(run.id) or Prediction(run=run) for run in runs]


def allocation_of(run: PublishedRun, calibration: Calibration) -> Allocation:
    """Constants of the memory that the software of a run allocates. Its buffer of gradients holds
    at most the bytes a weight that are sent."""
    known = calibration.allocation(run.cluster)
    size = min(known.gradient_bytes, int(run.software.wire_gradient_bytes))
    return replace(known, gradient_bytes=size)


def run_memory(run: PublishedRun, allocation: Allocation) -> PeakMemory:
    """Peak memory of a run's worst rank."""
    shape, layout, _ = run.priced
    peak = peak_memory(shape, layout, allocation)
    if not (share := run.software.recomputed_share):
        return peak
    full = peak_memory(shape, layout.changed(recompute=_WHOLE_LAYERS), allocation)
    parts = ("allocated", "needed", "activations", "logits", "working")
    mixed = {
        name: (1 - share) * getattr(peak, name) + share * getattr(full, name) for name in parts
    }
    return replace(full, **mixed)


def _fits(run: PublishedRun, memory: PeakMemory, allocation: Allocation) -> bool:
    return memory.fits(run.priced[2].memory_bytes, allocation.usable_share)


def _run_seconds(runs: Sequence[PublishedRun], constants: Sequence[Constants]) -> FloatArray:
    """The step times of runs, with simulated schedules."""
    stages = [Stages.of(*run.priced[:2]) for run in runs]
    return step_time(PricedStep(*run_columns(runs), stacked(constants)), stages=stages).total


def run_columns(
    runs: Sequence[PublishedRun],
) -> tuple[ModelColumns, LayoutColumns, HardwareColumns]:
    """Runs as columns for the formulas, one row each."""
    priced = [run.priced for run in runs]
    return (
        stacked([model_row(shape) for shape, _, _ in priced]),
        stacked([_layout_row(run) for run in runs]),
        stacked([hardware_row(device, layout.precision) for _, layout, device in priced]),
    )


def _layout_row(run: PublishedRun) -> LayoutColumns:
    return layout_row(*run.priced[:2], run.software)


def fill_in(run: PublishedRun, calibration: Calibration) -> PublishedRun:
    """The run with values that its table leaves out.

    States are sharded (ZeRO) as far as they would not fit otherwise. The microbatch is one
    sequence for an MoE model and if none fits, else the fastest that fits. Recomputation covers the
    fewest layers with which the run fits, or all of them under FSDP, whose trainers have one switch
    for it.
    """
    allocation = allocation_of(run, calibration)
    run = _sharded(run, allocation)
    if run.microbatch_printed or run.is_moe:
        return _recomputed(run, allocation)
    layout = run.priced[1]
    share = layout.global_batch // layout.dp
    sized = [layout.changed(microbatch=size) for size in _MICROBATCHES if share % size == 0]
    tried = [
        _recomputed(replace(run, layout=candidate), allocation)
        for candidate in sized
        if candidate.pp == 1
        or is_defined(
            candidate.schedule, candidate.pp, candidate.microbatches, candidate.stages_per_rank
        )
    ]
    fitting = [
        index
        for index, candidate in enumerate(tried)
        if _fits(candidate, run_memory(candidate, allocation), allocation)
    ]
    constants = calibration.constants(run.cluster, run.release)
    seconds = _run_seconds(tried, [constants] * len(tried))
    return tried[min(fitting or [0], key=lambda index: seconds[index])]


def _sharded(run: PublishedRun, allocation: Allocation) -> PublishedRun:
    """The run with the sequence parallelism and the lowest stage of ZeRO that it needs to fit: of a
    row without a stage, of a table without a column `sp` (on recent devices with tensor parallelism
    sequence parallelism is assumed). Recomputation that is not printed comes after both. Without a
    printed microbatch one sequence at a time must fit."""
    layout, row = run.priced[1], run.row
    size = layout.microbatch if run.microbatch_printed else 1
    # ZeRO-3 beside a pipeline would gather the weights for every microbatch; trainers that combine
    # it with tensor parallelism name it.
    known = (0, 1) if max(layout.pp, layout.tp) > 1 else (0, 1, 3)
    stages = known if not row.get("zero") and layout.dp * layout.cp > 1 else (layout.zero,)
    cuts = (layout.sequence_parallel,)
    if "sp" not in row and layout.tp > 1:
        cuts = (False, True) if run.is_before_sequence_parallelism else (True,)
    for zero, cut in product(stages, cuts):
        chosen = layout.changed(zero=zero, sequence_parallel=cut)
        software = replace(run.software, fsdp=run.software.fsdp or zero == 3)
        tried = replace(run, layout=chosen.changed(microbatch=size), software=software)
        run = replace(tried, layout=chosen)
        if _fits(tried, run_memory(tried, allocation), allocation):
            break
    return run


def _recomputed(run: PublishedRun, allocation: Allocation) -> PublishedRun:
    """The run with the share of recomputed layers that it needs, if its table leaves it out: the
    mean of that share and of all layers where the table states that some are."""
    if run.recompute_printed:
        return run

    def recomputing(share: float) -> PublishedRun:
        return replace(run, software=replace(run.software, recomputed_share=share))

    most, least = run_memory(run, allocation).needed, run_memory(recomputing(1), allocation).needed
    short = most - run.priced[2].memory_bytes * allocation.usable_share
    share = 0.0
    if short > 0 and most > least:
        share = min(short / (most - least) + _ROUNDING, 1.0)
    if run.row.get("rest") == "blocks":
        share = (share + 1) / 2
    elif share and run.software.fsdp:
        share = 1.0
    return recomputing(share)


#: Tiers of runs whose layout is too incomplete for the statistics of dense and of MoE models.
_SANITY_TIERS = frozenset({"C"})
#: Minimum number of alternatives in a group for which the planner's choice is evaluated.
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
    """Predicted "fits" against the outcome of runs: share of correct predictions, and share of all
    runs that were predicted to fit and ran out of memory."""

    count: int
    right: float
    wrongly_fits: float


@dataclass(frozen=True, kw_only=True)
class SelectionStatistics:
    """Regret of the planner's choice in each group: measured time of the layout that is predicted
    to be the fastest of those that fit, over that of the fastest measured one, minus one. Choices
    that ran out of memory are counted, and have no regret."""

    groups: int
    mean_regret: float
    worst_regret: float
    out_of_memory: int


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Predictions of all runs with their statistics."""

    predictions: tuple[Prediction, ...]
    by_source: dict[str, ErrorStatistics]
    dense: ErrorStatistics | None
    moe: ErrorStatistics | None
    memory: ErrorStatistics | None
    fit: FitStatistics | None
    selection: SelectionStatistics | None

    def json_text(self) -> str:
        """{"rows": one object a row of the table, "statistics": ...}; seconds and bytes."""
        rows: list[dict[str, Any]] = []
        for prediction in self.predictions:
            name = prediction.run.id
            row = {
                "id": int(name) if name.isdecimal() else name,
                "seconds": prediction.seconds,
                "memory_bytes": prediction.memory.allocated if prediction.memory else None,
                "fits": prediction.fits,
            }
            rows.append(row | ({"reason": prediction.run.reason} if prediction.run.reason else {}))
        statistics = {
            "step_time_by_source": self.by_source,
            "step_time_dense": self.dense,
            "step_time_moe": self.moe,
            "memory": self.memory,
            "fits": self.fit,
            "selection": self.selection,
        }
        document = {"rows": rows, "statistics": statistics}
        return json.dumps(document, indent=1, allow_nan=False, default=asdict) + "\n"


def summarize(predictions: Sequence[Prediction]) -> Validation:
    """The statistics of predictions."""
    timed = [
        prediction
        for prediction in predictions
        if prediction.error is not None and prediction.run.ended == "ok"
    ]
    judged = [prediction for prediction in timed if prediction.run.tier not in _SANITY_TIERS]
    sources: dict[str, list[float | None]] = defaultdict(list)
    for prediction in timed:
        sources[prediction.run.source or prediction.run.cluster].append(prediction.error)
    by_source = {name: error_statistics(errors) for name, errors in sorted(sources.items())}
    fit = selection = None
    # A row that fits by a choice of its recomputation or sharding has no label.
    labels = [
        (prediction.fits, prediction.run.ended == "ok")
        for prediction in predictions
        if prediction.fits is not None
        and prediction.run.ended in ("ok", "OOM")
        and not (prediction.fits and prediction.run.fits_by_choice)
    ]
    if number := len(labels):
        right = sum(fits == ran for fits, ran in labels) / number
        wrongly = labels.count((True, False)) / number
        fit = FitStatistics(count=number, right=right, wrongly_fits=wrongly)
    if choices := _regrets(predictions):
        regrets = [regret for regret in choices if regret is not None]
        selection = SelectionStatistics(
            groups=len(choices),
            mean_regret=numbers.fmean(regrets) if regrets else 0.0,
            worst_regret=max(regrets, default=0.0),
            out_of_memory=len(choices) - len(regrets),
        )
    return Validation(
        predictions=tuple(predictions),
        by_source={name: errors for name, errors in by_source.items() if errors},
        dense=error_statistics(
            [prediction.error for prediction in judged if not prediction.run.is_moe]
        ),
        moe=error_statistics([prediction.error for prediction in judged if prediction.run.is_moe]),
        memory=error_statistics([prediction.memory_error for prediction in predictions]),
        fit=fit,
        selection=selection,
    )


def error_statistics(errors: Sequence[float | None]) -> ErrorStatistics | None:
    """Statistics of the relative errors that are not None; None without any."""
    known = [error for error in errors if error is not None]
    if not known:
        return None
    sizes = np.abs(known)
    return ErrorStatistics(
        count=len(known),
        median=float(np.median(sizes)),
        p95=float(np.quantile(sizes, 0.95)),
        worst=float(np.max(sizes)),
        bias=float(np.median(known)),
    )


def _regrets(predictions: Sequence[Prediction]) -> list[float | None]:
    """Regret of the planner's choice in each group of alternative runs; None for a choice that ran
    out of memory. Runs of a group may differ in their batch, so seconds per sequence are
    compared."""

    def each(prediction: Prediction, seconds: float | None) -> float:
        return (seconds or 0.0) / prediction.run.priced[1].global_batch

    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        run = prediction.run
        # The regret of a finished run needs its time.
        is_judged = run.ended == "OOM" or (run.ended == "ok" and run.seconds is not None)
        if prediction.seconds is not None and is_judged:
            groups[prediction.run.group].append(prediction)
    regrets: list[float | None] = []
    for members in groups.values():
        measured = {
            prediction.run.id: each(prediction, prediction.run.seconds)
            for prediction in members
            if prediction.run.seconds
        }
        if len(members) < _FEWEST_CHOICES or not measured:
            continue
        fitting = [prediction for prediction in members if prediction.fits] or members
        # Equal layouts are ties, despite rounding of their columns.
        picked = min(
            fitting, key=lambda prediction: float(f"{each(prediction, prediction.seconds):.9g}")
        ).run.id
        best = min(measured.values())
        regrets.append(measured[picked] / best - 1 if picked in measured else None)
    return regrets
