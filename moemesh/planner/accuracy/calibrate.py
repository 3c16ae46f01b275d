"""Fitting the constants of the time model to measured runs, and its errors on unseen sources.

All constants are positive, so their logarithms are fitted. The loss of a run is that of its
log-ratio, predicted over measured, in units of 2 %, square near zero and linear beyond (pseudo-
Huber): a mislabelled row pulls no harder than a 2 % error. Each shared constant is held at its
prior, each deviation at zero, by a normal prior of its own width: a cluster with three rows moves
little, one with a hundred finds its values. A fit always starts at the priors: a start at the fit
of all runs would know those that are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.config.toml import format_value
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.accuracy.validate import Prediction, fill_in, predict, run_columns, run_memory
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
from moemesh.planner.timing.step_time import step_time

# The unknowns of a fit: logarithms of shared constants, and deviations by cluster, stack,
# release.
#
# A run's constants are the shared ones times the factors of its cluster, of that cluster's
# software stack (on whatever device) and of the release of that stack. What one table shows on
# one device so helps to predict its other devices, and what one release did to one model helps
# with the others.


Columns = tuple[ModelColumns, LayoutColumns, HardwareColumns]

#: Step of a numerical slope, slopes below which there is none.
_STEP = 1e-4
_NO_SLOPE = 1e-9
_NUM_PROBES = 3
#: Rows whose layout is partly guessed ("tier C") count less.
_WEIGHTS = {"C": 0.2}


class TimedRuns:
    """Measured runs as columns, and their step times as a function of the logarithms of their
    constants, `values` [constants, runs]. `weights` are 0 for runs that a fit must not see."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.columns: Columns = run_columns(runs)
        self.log_seconds: FloatArray = np.log([run.seconds or 1.0 for run in runs])
        self.weights: FloatArray = np.array([_WEIGHTS.get(run.tier, 1.0) for run in runs])
        # The runs that each constant can move, from a few random points.
        random = np.random.default_rng(0)
        self._touch(np.ones((len(NAMES), len(runs)), dtype=bool))
        touched = np.zeros((len(runs), len(NAMES)), dtype=bool)
        for _ in range(_NUM_PROBES):
            logs = np.log(PRIORS) + random.normal(size=len(NAMES)) * SPREADS / 2
            values = np.repeat(logs[:, None], len(runs), axis=1)
            touched |= np.abs(self.slopes(values, self.errors(values))) > _NO_SLOPE
        self._touch(touched.T)

    def _touch(self, touched: NDArray[np.bool_]) -> None:
        """Constants and runs whose slopes are not zero, all in one set of columns."""
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
        """d errors / d values [runs, constants], where they are `errors`."""
        moved = values[:, self._run]
        moved[self._constant, np.arange(len(self._run))] += _STEP
        rise = _log_seconds(self._moved, moved) - (errors + self.log_seconds)[self._run]
        found = np.zeros(values.shape[::-1])
        found[self._run, self._constant] = rise / _STEP
        return found


def _log_seconds(columns: Columns, values: FloatArray) -> FloatArray:
    constants = Constants(**dict(zip(NAMES, np.exp(values), strict=True)))
    total: FloatArray = step_time(*columns, constants).total
    return np.log(total)


class _Unknowns(TimedRuns):
    """The constants of runs as a function of one vector: logarithms of the shared constants, then
    those of the factors of each cluster, stack and release. `width` is that of the normal prior of
    each."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        super().__init__(runs)
        self.prior: FloatArray = np.log(PRIORS)
        self.width: FloatArray = SPREADS
        #: Of each level the place among the unknowns of each member's factors.
        self._levels: list[dict[str, slice]] = []
        #: (runs, the unknown that moves each, place of the constant that it moves).
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
        """The unknowns of least loss, from their priors: Gauss-Newton steps with iterated weights,
        solved between runs, and halved where the loss rises."""
        rows = np.nonzero(self.weights > 0)[0]
        best, step, least = self.prior, np.zeros(len(self.prior)), np.inf
        for _ in range(_MOST_ITERATIONS):
            unknown = best + step
            values = self.values(unknown)
            found = self.errors(values)
            errors = found[rows]
            bent = np.sqrt(1 + (errors / _SCALE) ** 2)
            loss = 2 * np.sum(self.weights[rows] * (bent - 1))
            loss += np.sum(((unknown - self.prior) / self.width) ** 2)
            if not loss < least:
                step = step / 2
                continue
            if least - loss < _LEAST_GAIN * loss:
                return unknown
            best, least = unknown, loss
            shared = self.slopes(values, found)[rows]
            # A deviation moves its runs exactly as the shared constant does.
            slopes = np.zeros((len(found), len(unknown)))
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
        """The fitted constants of groups that have a run with weight; `start` knows the rest."""
        unknown = self.fit()
        seen = np.nonzero(self.weights > 0)[0]
        clusters, stacks, releases = (
            {key: unknown[places[key]] for key in sorted({keys[row] for row in seen} - {""})}
            for keys, places in zip(self._keys, self._levels, strict=True)
        )
        own = {key: logs + stacks[stack_of(key)] for key, logs in clusters.items()}
        return replace(
            start,
            shared=factors_of(NAMES, unknown[: len(NAMES)]),
            clusters={key: factors_of(OWN, logs) for key, logs in own.items()},
            stacks={key: factors_of(OWN, logs) for key, logs in stacks.items()},
            releases={key: factors_of(RELEASE, logs) for key, logs in releases.items()},
        )


def factors_of(names: Iterable[str], logs: FloatArray) -> dict[str, float]:
    """Factors by the name of their constant."""
    return dict(zip(names, (float(x) for x in np.exp(logs)), strict=True))


#: The error of a good row: inside one study 1 to 2 % mean something.
_SCALE = 0.02
_MOST_STEP = 0.7
_MOST_ITERATIONS = 80
#: A gain below this share of the loss ends the search.
_LEAST_GAIN = 1e-4
_ROUNDS = 2

#: What a cross-validation leaves out at once: a cluster's runs of one model on one number of
#: devices, a model wherever it ran, all that one software stack measured, or a source of the table.
LeftOut = Literal["group", "model", "stack", "source"]


#: The message of a fit that has nothing to fit.
NO_RUN = (
    "no row of the table has a finished run with a layout and a step time; "
    "`moemesh validate` says why for each row"
)


def measured_runs(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs that a fit can use: finished, priced, and timed."""
    return [run for run in runs if run.layout is not None and run.seconds and run.ended == "ok"]


def fit(runs: Sequence[PublishedRun], start: Calibration) -> Calibration:
    """The shared constants, and the deviations of every cluster, stack and release in `runs`.
    Microbatches that a table leaves out are chosen with what was fitted so far, so the fit runs in
    rounds. Raises UserError without a usable run."""
    usable = measured_runs(runs)
    if not usable:
        raise UserError(NO_RUN)
    found = start
    chosen: list[PublishedRun] = []
    for _ in range(_ROUNDS):
        filled = [fill_in(run, found) for run in usable]
        if [run.layout for run in filled] == [run.layout for run in chosen]:
            break
        chosen = filled
        found = _Unknowns(filled).calibration(start)
    return found


def cross_validate(
    runs: Sequence[PublishedRun], start: Calibration, *, left_out: LeftOut = "group"
) -> list[Prediction]:
    """Each run predicted by a fit that saw no run of its group: rows of one group are close
    relatives, and a random split would flatter. Everything is fitted again for each group."""
    usable = measured_runs(runs)
    fits = left_out_calibrations(runs, start, left_out=left_out)
    found: dict[str, Prediction] = {}
    for key, calibration in fits.items():
        unseen = [run for run in usable if _group(run, left_out) == key]
        found |= {one.run.id: one for one in predict(unseen, calibration)}
    return [found[run.id] for run in usable]


def left_out_calibrations(
    runs: Sequence[PublishedRun], start: Calibration, *, left_out: LeftOut
) -> dict[tuple[str, ...], Calibration]:
    """For each group the fit to all runs but its own."""
    usable = measured_runs(runs)
    if not usable:
        return {}
    keys = [_group(run, left_out) for run in usable]
    unknowns = _Unknowns([fill_in(run, start) for run in usable])
    weights = unknowns.weights
    found: dict[tuple[str, ...], Calibration] = {}
    for key in dict.fromkeys(keys):
        hidden = np.array([other == key for other in keys])
        unknowns.weights = np.where(hidden, 0.0, weights)
        found[key] = start
        if not hidden.all():
            found[key] = unknowns.calibration(start)
    return found


def study_of(run: PublishedRun) -> str:
    """The study that a row comes from: sources whose names begin with the same word are one."""
    return (run.source or run.cluster).partition("_")[0]


def _group(run: PublishedRun, left_out: LeftOut) -> tuple[str, ...]:
    if left_out == "source":
        return (study_of(run),)
    if left_out == "stack":
        return (stack_of(run.cluster),)
    if left_out == "model":
        return (run.row.get("arch", "").partition("#")[0].lower(),)
    return (run.cluster, run.row.get("model", ""), run.row["gpus"])


# Errors of predictions for sources that the fit had not seen: what intervals are made of.


#: Memory before anybody looked at a run: the byte counts of single matrices that published runs
#: have shown are left out.
_NEUTRAL = Allocation(layer_gradient_bytes=0.0, head_gradient_bytes=0.0)
#: Four digits: an interval needs no more.
_DIGITS = 4

_HEADING = """\
# Errors of the planner on published runs whose source the fit had not seen, by
# `moemesh validate RUNS.csv --intervals FILE`; moemesh/planner/intervals.py says what they become.
# [[seconds]]: log(measured / predicted) of step times, by source and generation of the device.
# [[memory]]: log(measured / predicted) bytes ("errors"), or the log of a device's memory over the
# predicted bytes, of runs that "ran" and that ran "out" of memory. Habits of the source's software
# are not known to these predictions; to those of [[known_memory]] they are."""


def left_out_errors(runs: Sequence[PublishedRun], start: Calibration) -> Intervals:
    """Predict each source by what all others taught. `start` is what a fit begins with."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in cross_validate(runs, start, left_out="source"):
        if one.seconds and one.run.seconds and one.run.device:
            key = study_of(one.run), one.run.device.generation
            seconds[key].append(round(log(one.run.seconds / one.seconds), _DIGITS))
    known = [run for run in runs if stack_of(run.cluster) in start.allocations]
    return Intervals(
        seconds=tuple(
            SecondsErrors(source=source, generation=generation, errors=tuple(sorted(errors)))
            for (source, generation), errors in sorted(seconds.items())
        ),
        memory=_memory_errors(runs, lambda _: _NEUTRAL),
        known=_memory_errors(known, lambda run: start.allocation(run.cluster)),
    )


def _memory_errors(
    runs: Sequence[PublishedRun], habits: Callable[[PublishedRun], Allocation]
) -> tuple[MemoryErrors, ...]:
    """Errors and labels of each source, when the habits of a run's software are these."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    labels: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: {"ok": [], "OOM": []})
    untaught = replace(prior_calibration(), allocations={})
    for one in predict(runs, untaught):
        run = one.run
        if one.memory is None or run.device is None or run.software.recomputed_share > 0:
            continue
        memory = run_memory(run, habits(run))
        if run.memory_bytes:
            found = log(run.memory_bytes / memory.allocated)
            errors[study_of(run)].append(round(found, _DIGITS))
        elif run.ended in ("ok", "OOM"):
            usable = run.device.memory_bytes * habits(run).usable_share
            labels[study_of(run)][run.ended].append(round(log(usable / memory.needed), _DIGITS))
    measured = [
        MemoryErrors(source=source, errors=tuple(sorted(found)))
        for source, found in sorted(errors.items())
    ]
    # Runs that all ended well bound the need from one side only.
    bounded = [
        MemoryErrors(source=source, ran=tuple(sorted(found["ok"])), out=tuple(sorted(found["OOM"])))
        for source, found in sorted(labels.items())
        if found["OOM"] and found["ok"]
    ]
    return (*measured, *bounded)


def intervals_toml(intervals: Intervals) -> str:
    """The file that :func:`moemesh.planner.intervals.read_intervals` reads."""
    lines = [_HEADING]
    for one in intervals.seconds:
        lines += ["", "[[seconds]]", f'source = "{one.source}"', f'generation = "{one.generation}"']
        lines += _numbers("errors", one.errors)
    for kind, sources in (("memory", intervals.memory), ("known_memory", intervals.known)):
        for one in sources:
            lines += ["", f"[[{kind}]]", f'source = "{one.source}"']
            for name in ("errors", "ran", "out"):
                if values := getattr(one, name):
                    lines += _numbers(name, values)
    return "\n".join(lines) + "\n"


def _numbers(name: str, values: Sequence[float]) -> list[str]:
    texts = [format_value(value) for value in values]
    rows = [", ".join(texts[start : start + 12]) for start in range(0, len(texts), 12)]
    return [f"{name} = [", *(f"    {row}," for row in rows), "]"]
