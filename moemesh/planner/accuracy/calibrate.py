"""Fitting the constants of the time model to measured runs, and its errors on held-out sources.

All constants are positive, so their logarithms are fitted. The loss of a run is a pseudo-Huber
function of log(predicted / measured) in units of 2 %: quadratic near zero, linear for large errors,
so that a mislabelled row has bounded influence. Shared constants have a normal prior around their
default, deviations a normal prior around zero, each with a width of its own. So three rows move the
constants of a cluster little, and a hundred rows determine them. Every fit starts at the priors,
because the fit of all runs contains information on held-out ones.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.config.toml import format_value
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.accuracy.validate import (
    Prediction,
    allocation_of,
    fill_in,
    predict,
    run_columns,
    run_memory,
)
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.intervals import Intervals, MemoryErrors, SecondsErrors
from moemesh.planner.memory import Allocation
from moemesh.planner.timing.calibration import (
    CLUSTER_SHARE,
    NAMES,
    OWN,
    PRIORS,
    RELEASE,
    SPREADS,
    Calibration,
    Constants,
    prior_calibration,
    stack_of,
)
from moemesh.planner.timing.columns import HardwareColumns, LayoutColumns, ModelColumns, picked
from moemesh.planner.timing.compute import PricedStep
from moemesh.planner.timing.step_time import step_seconds

# The unknowns of a fit: logarithms of shared constants, and deviations by cluster, stack,
# release.
#
# A run's constants are the shared ones times the factors of its cluster, of that cluster's
# software stack (on any device) and of the release of that stack. Runs on one device thus improve
# the predictions for other devices, and runs of one model in a release those for other models.


Columns = tuple[ModelColumns, LayoutColumns, HardwareColumns]

#: Step of a numerical slope, and the slope below which it counts as zero.
_STEP = 1e-4
_NO_SLOPE = 1e-9
_NUM_PROBES = 3
#: Weight by tier: rows whose layout is partly guessed ("C") have less weight.
_WEIGHTS = {"C": 0.2}


class TimedRuns:
    """Measured runs as columns, and their step times as a function of `values` [constants, runs],
    the logarithms of the constants of each run. `weights` are 0 for held-out runs."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.columns: Columns = run_columns(runs)
        self.log_seconds: FloatArray = np.log([run.seconds or 1.0 for run in runs])
        self.weights: FloatArray = np.array([_WEIGHTS.get(run.tier, 1.0) for run in runs])
        # Mask of the constants that affect each run, from a few random points.
        random = np.random.default_rng(0)
        self._touch(np.ones((len(NAMES), len(runs)), dtype=bool))
        touched = np.zeros((len(runs), len(NAMES)), dtype=bool)
        for _ in range(_NUM_PROBES):
            logs = np.log(PRIORS) + random.normal(size=len(NAMES)) * SPREADS / 2
            values = np.repeat(logs[:, None], len(runs), axis=1)
            touched |= np.abs(self.slopes(values, self.errors(values))) > _NO_SLOPE
        self._touch(touched.T)

    def _touch(self, touched: NDArray[np.bool_]) -> None:
        """Set the (constant, run) pairs with nonzero slopes, and for each pair the columns of its
        run: one call then prices the runs of all pairs, each with one constant moved."""
        self._constant, self._run = np.nonzero(touched)
        self._moved: Columns = (
            picked(self.columns[0], self._run),
            picked(self.columns[1], self._run),
            picked(self.columns[2], self._run),
        )

    def errors(self, values: FloatArray) -> FloatArray:
        """log(predicted / measured) of every run."""
        return _log_seconds(self.columns, values) - self.log_seconds

    def slopes(self, values: FloatArray, errors: FloatArray) -> FloatArray:
        """d errors / d values [runs, constants] by finite differences; `errors` are those at
        `values`."""
        moved = values[:, self._run]
        moved[self._constant, np.arange(len(self._run))] += _STEP
        rise = _log_seconds(self._moved, moved) - (errors + self.log_seconds)[self._run]
        slopes = np.zeros(values.shape[::-1])
        slopes[self._run, self._constant] = rise / _STEP
        return slopes


def _log_seconds(columns: Columns, values: FloatArray) -> FloatArray:
    constants = Constants(**dict(zip(NAMES, np.exp(values), strict=True)))
    seconds: FloatArray = step_seconds(PricedStep(*columns, constants))
    return np.log(seconds)


class _Unknowns(TimedRuns):
    """The constants of runs as a function of one vector: logarithms of the shared constants, then
    of the factors of each cluster, stack and release. `width` is the standard deviation of each
    prior."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        super().__init__(runs)
        self.prior: FloatArray = np.log(PRIORS)
        self.width: FloatArray = SPREADS
        #: Per level (cluster, stack, release): name -> slice of its factors in the vector.
        self._levels: list[dict[str, slice]] = []
        #: Unknowns added to a constant: (runs, index of the unknown of each of them, constant).
        self._moves: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
        self._keys = [
            [run.cluster for run in runs],
            [stack_of(run.cluster) for run in runs],
            [run.release for run in runs],
        ]
        shares = {name: x * CLUSTER_SHARE for name, x in OWN.items()}
        for keys, widths in zip(self._keys, (shares, OWN, RELEASE), strict=True):
            places: dict[str, slice] = {}
            for member in sorted(set(keys) - {""}):
                start = len(self.width)
                places[member] = slice(start, start + len(widths))
                self.width = np.append(self.width, list(widths.values()))
            rows = np.array([row for row, key in enumerate(keys) if key], dtype=np.int64)
            first = np.array([places[keys[row]].start for row in rows], dtype=np.int64)
            for offset, name in enumerate(widths):
                self._moves.append((rows, first + offset, NAMES.index(name)))
            self._levels.append(places)
        self.prior = np.append(self.prior, np.zeros(len(self.width) - len(NAMES)))

    def values(self, unknown: FloatArray) -> FloatArray:
        """Logarithms of the constants [constants, runs]."""
        values = np.repeat(unknown[: len(NAMES), None], len(self.log_seconds), axis=1)
        for rows, place, constant in self._moves:
            values[constant, rows] += unknown[place]
        return values

    def fit(self) -> FloatArray:
        """The unknowns of least loss, from their priors: Gauss-Newton steps with reweighted runs. A
        step solves a system with one row for each run, and is halved if the loss rises."""
        rows = np.nonzero(self.weights > 0)[0]
        best, step, least = self.prior, np.zeros(len(self.prior)), np.inf
        for _ in range(_MOST_ITERATIONS):
            unknown = best + step
            values = self.values(unknown)
            every_error = self.errors(values)
            errors = every_error[rows]
            # Pseudo-Huber: about |error| / scale for large errors.
            bent = np.sqrt(1 + (errors / _SCALE) ** 2)
            loss = 2 * np.sum(self.weights[rows] * (bent - 1))
            loss += np.sum(((unknown - self.prior) / self.width) ** 2)
            if not loss < least:
                step = step / 2
                continue
            if least - loss < _LEAST_GAIN * loss:
                return unknown
            best, least = unknown, loss
            shared = self.slopes(values, every_error)[rows]
            # The logarithm of a factor has the same slope as that of the constant it multiplies.
            slopes = np.zeros((len(every_error), len(unknown)))
            slopes[rows, : len(NAMES)] = shared
            for moved, place, constant in self._moves:
                slopes[moved, place] = slopes[moved, constant]
            spread = (slopes := slopes[rows]) * self.width**2
            wanted = slopes @ (unknown - self.prior) - errors
            noise = np.diag(_SCALE**2 * bent / self.weights[rows])
            pull = spread.T @ np.linalg.solve(spread @ slopes.T + noise, wanted)
            step = np.clip(self.prior + pull - unknown, -_MOST_STEP, _MOST_STEP)
        return best

    def calibration(self, start: Calibration) -> Calibration:
        """`start` with its constants and factors replaced by the fitted ones; only groups that have
        a run with weight have factors."""
        unknown = self.fit()
        seen = np.nonzero(self.weights > 0)[0]
        clusters, stacks, releases = (
            {key: unknown[places[key]] for key in sorted({keys[row] for row in seen} - {""})}
            for keys, places in zip(self._keys, self._levels, strict=True)
        )
        summed = {key: logs + stacks[stack_of(key)] for key, logs in clusters.items()}
        return replace(
            start,
            shared=factors_of(NAMES, unknown[: len(NAMES)]),
            clusters={key: factors_of(OWN, logs) for key, logs in summed.items()},
            stacks={key: factors_of(OWN, logs) for key, logs in stacks.items()},
            releases={key: factors_of(RELEASE, logs) for key, logs in releases.items()},
        )


def factors_of(names: Iterable[str], logs: FloatArray) -> dict[str, float]:
    """Factors by the name of their constant."""
    return dict(zip(names, (float(x) for x in np.exp(logs)), strict=True))


#: Error of a good row: differences of 1 to 2 % inside one study are significant.
_SCALE = 0.02
#: Largest change of an unknown in a step, and largest number of steps.
_MOST_STEP = 0.7
_MOST_ITERATIONS = 80
#: A gain below this share of the loss ends the search.
_LEAST_GAIN = 1e-6
#: Largest number of fits with microbatches chosen by the fit before.
_ROUNDS = 2

#: Group that a cross-validation leaves out at once: a cluster's runs of one model on one number of
#: devices, all runs of a model, all runs of a software stack, or a study (:func:`study_of`).
LeftOut = Literal["group", "model", "stack", "source"]


#: Message of a fit without usable runs.
NO_RUN = (
    "no row of the table has a finished run with a layout and a step time; "
    "`moemesh validate` prints the reason for each row"
)


def measured_runs(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs that a fit can use: finished, priced, and timed."""
    return [run for run in runs if run.layout is not None and run.seconds and run.ended == "ok"]


def fit(runs: Sequence[PublishedRun], start: Calibration) -> Calibration:
    """The shared constants, and the deviations of every cluster, stack and release in `runs`.
    Microbatches that a table leaves out are chosen with the constants fitted so far, so the fit
    takes several rounds. Raises UserError without a usable run."""
    usable = measured_runs(runs)
    if not usable:
        raise UserError(NO_RUN)
    calibration = start
    chosen: list[PublishedRun] = []
    for _ in range(_ROUNDS):
        filled = [fill_in(run, calibration) for run in usable]
        if [run.layout for run in filled] == [run.layout for run in chosen]:
            break
        chosen = filled
        calibration = _Unknowns(filled).calibration(start)
    return calibration


def cross_validate(
    runs: Sequence[PublishedRun], start: Calibration, *, left_out: LeftOut = "group"
) -> list[Prediction]:
    """Prediction of each run by a fit without the runs of its group. Rows of one group are similar:
    a random split would underestimate the errors. All constants are refitted for each group."""
    usable = measured_runs(runs)
    fits = left_out_calibrations(runs, start, left_out=left_out)
    predictions: dict[str, Prediction] = {}
    for key, calibration in fits.items():
        unseen = [run for run in usable if _group(run, left_out) == key]
        predictions |= {
            prediction.run.id: prediction for prediction in predict(unseen, calibration)
        }
    return [predictions[run.id] for run in usable]


def left_out_calibrations(
    runs: Sequence[PublishedRun], start: Calibration, *, left_out: LeftOut
) -> dict[tuple[str, ...], Calibration]:
    """Group -> fit to all runs outside of it; `start` if there are none. Values that a table leaves
    out are chosen with `start`, once for all groups."""
    usable = measured_runs(runs)
    if not usable:
        return {}
    keys = [_group(run, left_out) for run in usable]
    unknowns = _Unknowns([fill_in(run, start) for run in usable])
    weights = unknowns.weights
    fits: dict[tuple[str, ...], Calibration] = {}
    for key in dict.fromkeys(keys):
        hidden = np.array([other == key for other in keys])
        unknowns.weights = np.where(hidden, 0.0, weights)
        fits[key] = start
        if not hidden.all():
            fits[key] = unknowns.calibration(start)
    return fits


def study_of(run: PublishedRun) -> str:
    """The study of a row: sources whose names begin with the same word are one study."""
    return (run.source or run.cluster).partition("_")[0]


def _group(run: PublishedRun, left_out: LeftOut) -> tuple[str, ...]:
    if left_out == "source":
        return (study_of(run),)
    if left_out == "stack":
        return (stack_of(run.cluster),)
    if left_out == "model":
        return (run.row.get("arch", "").partition("#")[0].lower(),)
    return (run.cluster, run.model, run.row["gpus"])


# Errors of predictions for held-out sources, from which intervals are computed.


#: Allocation without the bytes of single matrices, which were learned from published runs.
_NEUTRAL = Allocation(layer_gradient_bytes=0.0, head_gradient_bytes=0.0)
#: Decimal digits of the written errors.
_DIGITS = 4

_HEADING = """\
# Errors of the planner on published runs whose source the fit had not seen, by
# `moemesh validate RUNS.csv --intervals FILE`; moemesh/planner/intervals.py explains their use.
# [[seconds]]: log(measured / predicted) of step times, by source and generation of the device.
# [[memory]]: log(measured / predicted) bytes ("errors"), or the log of a device's memory over the
# predicted bytes, of runs that "ran" and that ran "out" of memory. These predictions have no
# calibrated allocation of the source's software; those of [[known_memory]] have one."""


def left_out_errors(runs: Sequence[PublishedRun], start: Calibration) -> Intervals:
    """Step-time errors of each study with a fit to all others, and memory errors, for which nothing
    is fitted. `start` gives the allocations, with which values left out are chosen."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for prediction in cross_validate(runs, start, left_out="source"):
        run = prediction.run
        if prediction.seconds and run.seconds and run.device:
            key = study_of(run), run.device.generation
            seconds[key].append(round(log(run.seconds / prediction.seconds), _DIGITS))
    known = [run for run in runs if stack_of(run.cluster) in start.allocations]
    return Intervals(
        seconds=tuple(
            SecondsErrors(source=source, generation=generation, errors=tuple(sorted(errors)))
            for (source, generation), errors in sorted(seconds.items())
        ),
        memory=_memory_errors(runs, lambda _: _NEUTRAL),
        known=_memory_errors(known, lambda run: allocation_of(run, start)),
    )


def _memory_errors(
    runs: Sequence[PublishedRun], allocation_of: Callable[[PublishedRun], Allocation]
) -> tuple[MemoryErrors, ...]:
    """Errors and labels of each source, with the allocation of each run's software."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    labels: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: {"ok": [], "OOM": []})
    untaught = replace(prior_calibration(), allocations={})
    for prediction in predict(runs, untaught):
        run = prediction.run
        if prediction.memory is None or run.device is None or run.fits_by_choice:
            continue
        memory = run_memory(run, allocation_of(run))
        if run.memory_bytes:
            error = log(run.memory_bytes / memory.allocated)
            errors[study_of(run)].append(round(error, _DIGITS))
        elif run.ended in ("ok", "OOM"):
            usable = run.device.memory_bytes * allocation_of(run).usable_share
            labels[study_of(run)][run.ended].append(round(log(usable / memory.needed), _DIGITS))
    measured = [
        MemoryErrors(source=source, errors=tuple(sorted(values)))
        for source, values in sorted(errors.items())
    ]
    # Sources without both kinds of runs bound the memory from one side only.
    bounded = [
        MemoryErrors(source=source, ran=tuple(sorted(logs["ok"])), out=tuple(sorted(logs["OOM"])))
        for source, logs in sorted(labels.items())
        if logs["OOM"] and logs["ok"]
    ]
    return (*measured, *bounded)


def intervals_toml(intervals: Intervals) -> str:
    """Text of the file for :func:`moemesh.planner.intervals.read_intervals`."""
    lines = [_HEADING]
    kinds = ("seconds", intervals.seconds), ("memory", intervals.memory)
    for kind, sources in (*kinds, ("known_memory", intervals.known)):
        for source in sources:
            lines += ["", f"[[{kind}]]"]
            for name, value in asdict(source).items():
                if value != ():
                    lines += textwrap.wrap(f"{name} = {format_value(value)}", 100)
    return "\n".join(lines) + "\n"
