"""Fit of a cluster to its own runs: constants, corrections, doubtful runs, and learning curves.

Deviations of the constants (normal, with their widths, drifting between releases) and corrections
shared by similar runs (:mod:`moemesh.planner.timing.own_runs`) are one Gaussian model of
log(measured / predicted). Both come from one linear solve, which is repeated as the constants move.
Their prior scales are averaged over a grid, weighted by the leave-one-out likelihood. The weight of
a run falls with its residual (Student's t), so that one wrong row has little influence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moemesh.config.cluster import Cluster, OwnRun
from moemesh.config.errors import UserError
from moemesh.config.sources import RUN_CONFIG
from moemesh.planner.accuracy.calibrate import (
    NO_RUN,
    TimedRuns,
    left_out_calibrations,
    measured_runs,
)
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.accuracy.validate import OTHER_UNIT, Prediction, predict
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.intervals import own_width, shipped_intervals
from moemesh.planner.layout_sources import from_plan, trained_shares
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.speed import accelerator_of_cluster
from moemesh.planner.timing.calibration import NAMES, SPREADS, Calibration, release_years, stack_of
from moemesh.planner.timing.own_runs import NOISE, OwnRuns, covariance, distances, features, places
from moemesh.planner.timing.price import DEFAULT_STACK, software_of
from moemesh.sharding.load_run import load_recorded
from moemesh.trace.run import Run, RunError, median_of

_ROUNDS = 5
#: Grid of prior scales: widths of the constants relative to those of their priors, and amplitudes
#: of corrections relative to the usual one.
_SHARES = (0.25, 0.5, 1.0, 2.0)
_AMPLITUDES = (1 / 3, 1.0, 8 / 3)
#: Factor on the widths for a cluster with calibrated constants.
_KNOWN_SHARE = 0.4
#: Clip of a constant's shift, in standard deviations.
_FARTHEST = 3.0
#: Drift of the constants between releases, relative to the width, and its correlation time.
_DRIFT = 0.7
_DRIFT_YEARS = 1 / 3
#: Minimum number of runs for which single runs are doubted.
_FEWEST_TO_DOUBT = 4
#: Degrees of freedom of Student's t, and the weight below which a run is reported.
_FREEDOM = 2.0
_DOUBTED = 0.1
#: Ratio of the times of equal layouts from which on they contradict each other.
_CONTRADICTS = 1.25


@dataclass(frozen=True)
class Learned:
    """A calibration with the cluster's own runs, and warnings on some of them."""

    calibration: Calibration
    runs: tuple[OwnRun, ...]
    doubts: tuple[str, ...]


def learn(runs: Sequence[PublishedRun], start: Calibration) -> Learned:
    """Fit the constants and corrections of the cluster of `runs`. Raises UserError without a usable
    run, or if the median time shows that the table is in another unit."""
    usable = measured_runs(runs)
    if not usable:
        raise UserError(NO_RUN)
    before = predict(usable, start)
    filled = [prediction.run for prediction in before]
    cluster, timed = filled[0].cluster, TimedRuns(filled)
    constants = [start.constants(cluster, run.release) for run in filled]
    logs = np.log([[getattr(of_run, name) for of_run in constants] for name in NAMES])
    # Schedules are simulated once: the relative waiting time hardly depends on the constants.
    simulated = np.log([prediction.seconds or 1.0 for prediction in before]) - timed.log_seconds
    waiting = simulated - timed.errors(logs)
    _check_units(filled, -simulated)
    columns = features(*timed.columns[:2])
    points = places(columns)
    alike = covariance(points, points)
    newest = max(run.release for run in filled)
    years = np.array([release_years(run.release or newest) for run in filled])

    def together(year: FloatArray) -> FloatArray:
        """Covariance [times, runs] of the constants at times `year` and of the runs', over the
        square of the width."""
        return 1 + (_DRIFT * np.exp(-(((year[:, None] - years) / _DRIFT_YEARS) ** 2) / 2)) ** 2

    width = SPREADS * (_KNOWN_SHARE if cluster in start.clusters else 1.0)
    shift, trust = np.zeros((len(filled), len(NAMES))), np.ones(len(filled))
    slopes, moved = shift, np.zeros(len(filled))
    weights = left_out = moved
    for _ in range(_ROUNDS):
        errors = timed.errors(logs + shift.T)
        slopes = timed.slopes(logs + shift.T, errors)
        by_constants = (slopes * width**2) @ slopes.T * together(years)
        wanted = (slopes * shift).sum(1) - errors - waiting
        noise = NOISE**2 / (timed.weights * trust)
        moved, weights, left_out, rest = _weighed(by_constants, alike, wanted, noise)
        shift = _shift(together(years), moved, slopes, width)
        if len(filled) >= _FEWEST_TO_DOUBT:
            trust = np.minimum((_FREEDOM + 1) / (_FREEDOM + (rest / NOISE) ** 2), 1.0)
    if cluster in start.clusters and _size(simulated) < _size(left_out):
        # On average the calibrated constants predict a run better than a fit to the others does.
        moved, weights, left_out = 0 * moved, 0 * weights, -simulated

    def factors(release: str) -> FloatArray:
        return _shift(together(np.array([release_years(release)])), moved, slopes, width)[0]

    shifts = factors(newest)
    deviations, stack = start.deviations(cluster), stack_of(cluster)
    known = {name for name in start.releases if stack_of(name, " ") == stack}
    releases = {
        release: _scaled(start.release_factors(release), factors(release) - shifts)
        for release in known | {run.release for run in filled} - {""}
    }
    calibration = replace(
        start,
        clusters={**start.clusters, cluster: _scaled(deviations, shifts)},
        releases={**start.releases, **releases},
    )
    own_runs = tuple(
        OwnRun(
            run=prediction.run.id,
            seconds=float(f"{prediction.run.seconds:.6g}"),
            predicted=float(f"{prediction.seconds:.6g}"),
            left_out=round(float(left_out[row]), 4),
            weight=float(f"{weights[row]:.5g}"),
            release=prediction.run.release,
            features={name: float(np.ravel(values)[row]) for name, values in columns.items()},
        )
        for row, prediction in enumerate(predict(filled, replace(calibration, own={})))
    )
    calibration = replace(calibration, own={cluster: OwnRuns(own_runs)})
    return Learned(
        calibration, own_runs, tuple(_doubts(filled, trust, left_out, distances(points, points)))
    )


def _weighed(
    by_constants: FloatArray, alike: FloatArray, wanted: FloatArray, noise: FloatArray
) -> FloatArray:
    """Rows [4, runs]: weights of runs for the shift of constants, weights for corrections,
    leave-one-out errors, and residuals. They are means over the grid of scales, weighted by the
    leave-one-out likelihood."""
    averaged: list[FloatArray] = []
    scores: list[float] = []
    for share, size in product(_SHARES, _AMPLITUDES):
        known = share**2 * by_constants + size**2 * alike
        inverse = np.linalg.inv(known + np.diag(noise))
        weights, precision = inverse @ wanted, np.diag(inverse)
        left_out = weights / precision
        averaged.append(np.array(
            [share**2 * weights, size**2 * weights, left_out, wanted - known @ weights]
        ))  # fmt: skip
        # Errors in units of their own size, so that only the ratio of the two scales matters.
        standard = np.abs(left_out) * np.sqrt(precision)
        most = 2.5 * np.median(standard)
        unit = max(float(np.sqrt(np.mean(np.minimum(standard, most) ** 2))), 0.3)
        density = np.log(precision) / 2 - log(unit) - 2.5 * np.log1p((standard / unit) ** 2 / 4)
        scores.append(float(density.sum() - (log(share) ** 2 + log(size) ** 2) / 2.25) / 2)
    chances = np.exp(np.array(scores) - max(scores))
    mean: FloatArray = np.average(np.array(averaged), axis=0, weights=chances)
    return mean


def _shift(
    together: FloatArray, moved: FloatArray, slopes: FloatArray, width: FloatArray
) -> FloatArray:
    """Shift of the constants at each time [times, constants], in logarithms."""
    most = _FARTHEST * width
    shift: FloatArray = np.clip((together * moved) @ slopes * width**2, -most, most)
    return shift


def _scaled(factors: dict[str, float], logs: FloatArray) -> dict[str, float]:
    """`factors` times exp(`logs`), by name of the constant."""
    return {
        name: factors.get(name, 1.0) * exp(x) for name, x in zip(NAMES, logs.tolist(), strict=True)
    }


def _size(errors: FloatArray) -> float:
    """Mean absolute error, with each error clipped to 0.5."""
    return float(np.mean(np.minimum(np.abs(errors), 0.5)))


def _check_units(runs: Sequence[PublishedRun], ratios: FloatArray) -> None:
    """Raise UserError if the median time differs from the prediction by a factor of 50."""
    middle = exp(float(np.median(ratios)))
    if 1 / OTHER_UNIT < middle < OTHER_UNIT:
        return
    off = ", ".join(run.id for run, ratio in zip(runs, ratios, strict=True)
                    if abs(ratio) > log(OTHER_UNIT))  # fmt: skip
    raise UserError(
        f"runs {off} take {middle:,.3g} times the seconds that such a device needs: times are in "
        "seconds a step (step_time_s; are these milliseconds?), rates of one device"
    )


def _doubts(
    runs: Sequence[PublishedRun], trust: FloatArray, left_out: FloatArray, far: FloatArray
) -> list[str]:
    """Warnings on runs that contradict the others, and on pairs with one layout but different
    times."""
    warnings: list[str] = []
    for row, run in enumerate(runs):
        if trust[row] < _DOUBTED:
            warnings.append(
                f"run {run.id}: it takes {exp(left_out[row]):.3g} times what the other runs imply; "
                f"it counts {trust[row]:.1%} of a run"
            )
    for row, run in enumerate(runs):
        for other in range(row):
            twin = runs[other]
            ratio = (run.seconds or 1.0) / (twin.seconds or 1.0)
            is_same_size = all(run.row.get(key) == twin.row.get(key) for key in ("gpus", "gbs"))
            is_twin = far[row, other] < 1e-3 and is_same_size
            if is_twin and not 1 / _CONTRADICTS < ratio < _CONTRADICTS:
                warnings.append(
                    f"runs {twin.id} and {run.id} are one layout and take {twin.seconds:.4g} and "
                    f"{run.seconds:.4g} s"
                )
    return warnings


def run_of_folder(folder: Path, cluster: Cluster) -> PublishedRun:
    """A run of `moemesh train` on `cluster`: its last plan and the median of the plan's steps after
    the first. `reason` is set for a run that cannot be priced. Raises UserError for a folder that
    has no run."""
    try:
        recorded = Run.load(folder)
    except RunError as error:
        raise UserError(str(error)) from None
    config, device = load_recorded(folder / RUN_CONFIG), accelerator_of_cluster(cluster)
    seconds = median_of(recorded.current, "seconds")
    plan, data = config.plan, config.data
    run = PublishedRun(
        id=str(folder), source="moemesh", cluster=f"{DEFAULT_STACK}/{device.name}", tier="A",
        ended="ok", device=device, seconds=seconds,
        row={"model": folder.name, "gpus": str(plan.world_size), "seq": str(data.seq_len),
             "gbs": str(data.global_batch)},
    )  # fmt: skip
    if seconds is None:
        return replace(run, reason="metrics.jsonl has no step")
    try:
        layout = from_plan(
            plan, config.model, seq_len=data.seq_len, global_batch=data.global_batch,
            dtype=config.train.dtype,
        ).changed(**trained_shares(config))  # fmt: skip
    except (UserError, ValueError) as error:
        return replace(run, reason=str(error))
    shape = load_model(config.model).shape
    return replace(run, shape=shape, layout=layout, software=software_of(layout))


def unused(runs: Sequence[PublishedRun]) -> list[str]:
    """Sentences on finished rows that a fit cannot use, with their reason."""
    sentences: list[str] = []
    for run in runs:
        if run.ended != "ok" or (run.layout is not None and run.seconds):
            continue
        cells = ("step_time_s", "tokens_s_gpu", "tflops_gpu", "mfu_pct")
        times = [f"{name} is `{run.row[name]}`" for name in cells if run.row.get(name)]
        reason = run.reason or f"{', '.join(times) or 'it prints no time'}, no number above 0"
        sentences.append(f"run {run.id} is left out: {reason}")
    return sentences


class Lesson(NamedTuple):
    """Errors of a cluster's other runs after a fit to `own` runs: means over draws of the median,
    the 95th percentile, and the share inside the stated 80 % interval."""

    cluster: str
    runs: int
    own: int
    median: float
    p95: float
    within: float
    #: The other runs of the first draw.
    others: tuple[Prediction, ...]


def lessons(
    runs: Sequence[PublishedRun],
    start: Calibration,
    counts: Sequence[int],
    *,
    draws: int = 10,
    unseen: Calibration | None = None,
) -> list[Lesson]:
    """Learning curves of every cluster of a table: fit to drawn runs, predict the others. With
    `unseen`, the start of a fit, all other runs of the cluster's software are held out, too."""
    clusters: defaultdict[str, list[PublishedRun]] = defaultdict(list)
    for run in measured_runs(runs):
        clusters[run.cluster].append(run)
    known = {} if unseen is None else left_out_calibrations(runs, unseen, left_out="stack")
    curves: list[Lesson] = []
    for cluster, members in sorted(clusters.items()):
        calibration = known.get((cluster.rpartition("/")[0],), start)
        for count in counts:
            errors: list[tuple[float, float, float]] = []
            first: tuple[Prediction, ...] = ()
            for draw in range(draws if count else 1):
                order: list[int] = np.random.default_rng(draw).permutation(len(members)).tolist()
                drawn = [members[place] for place in order[:count]]
                rest = [members[place] for place in order[count:]]
                if len(rest) < _FEWEST:
                    break
                fitted, left_out = calibration, ()
                if drawn:
                    learned = learn(drawn, calibration)
                    fitted = learned.calibration
                    left_out = tuple(run.left_out for run in learned.runs)
                device = members[0].device
                width = own_width(
                    left_out, shipped_intervals().seconds_width(device.generation if device else "")
                )
                others = predict(rest, fitted)
                first = first or tuple(others)
                off = np.array([prediction.error or 0.0 for prediction in others])
                within = float(np.mean(np.abs(np.log1p(off)) <= width))
                sizes = np.abs(off)
                errors.append((float(np.median(sizes)), float(np.quantile(sizes, 0.95)), within))
            if errors:
                median, p95, within = (float(x) for x in np.mean(errors, axis=0))
                curves.append(Lesson(cluster, len(members), count, median, p95, within, first))
    return curves


#: Minimum number of predicted runs.
_FEWEST = 5
