"""Accuracy on a table of measured runs: errors, memory labels, selection regret."""

from __future__ import annotations

import json
import statistics as numbers
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moemesh.planner.accuracy.predict import Prediction, predict
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.timing.calibration import Calibration

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
    selections = select(predictions)
    return Validation(
        predictions=tuple(predictions),
        by_source={
            name: found
            for name, errors in sorted(sources.items())
            if (found := error_statistics(errors))
        },
        dense=error_statistics(one.error or 0.0 for one in judged if not one.run.is_moe),
        moe=error_statistics(one.error or 0.0 for one in judged if one.run.is_moe),
        memory=error_statistics(
            one.memory_error for one in predictions if one.memory_error is not None
        ),
        fit=_fit_statistics(predictions),
        selection=_selection_statistics(selections),
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


def _fit_statistics(predictions: Sequence[Prediction]) -> FitStatistics | None:
    labelled = [
        one for one in predictions if one.fits is not None and one.run.ended in ("ok", "OOM")
    ]
    if not labelled:
        return None
    right = sum(one.fits == (one.run.ended == "ok") for one in labelled)
    wrongly = sum(bool(one.fits) and one.run.ended == "OOM" for one in labelled)
    return FitStatistics(
        count=len(labelled), right=right / len(labelled), wrongly_fits=wrongly / len(labelled)
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
        picked = min(fitting, key=lambda one: (one.seconds or 0.0) / _sequences(one))
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
    return one.layout.global_batch if one.layout else 1


def _measured_time(one: Prediction) -> float:
    """Measured seconds a sequence."""
    return (one.run.seconds or 0.0) / _sequences(one)


def _selection_statistics(selections: Sequence[Selection]) -> SelectionStatistics | None:
    if not selections:
        return None
    regrets = [one.regret for one in selections if one.regret is not None]
    return SelectionStatistics(
        groups=len(selections),
        mean_regret=numbers.fmean(regrets) if regrets else 0.0,
        worst_regret=max(regrets, default=0.0),
        out_of_memory=len(selections) - len(regrets),
    )


def json_text(validation: Validation) -> str:
    """The rows and statistics as one JSON object."""
    return json.dumps(validation.to_json(), indent=1, allow_nan=False) + "\n"
