"""Fitting the constants of the time model to measured runs, and its errors on unseen sources.

All constants are positive, so their logarithms are fitted. The loss of a run is that of its
log-ratio, predicted over measured, in units of 2 %, square near zero and linear beyond (pseudo-
Huber): a mislabelled row pulls no harder than a 2 % error. Each shared constant is held at its
prior, each deviation (see `unknowns`) at zero, by a normal prior of its own width: a cluster with
three rows moves little, one with a hundred finds its values. Levenberg-Marquardt with iterated
weights, always from the priors: a start at the fit of all runs would know those that are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

#: Width of what is held fixed, step of a numerical slope, slopes below which there is none.
_FIXED = 1e-6
_STEP = 1e-4
_NO_SLOPE = 1e-9
_NUM_PROBES = 3
#: How far a cluster that is known may move, of how far one may that is not.
_KNOWN_SHARE = 0.4
#: Rows whose layout is partly guessed ("tier C") count less.
_WEIGHTS = {"C": 0.2}


@dataclass(frozen=True, kw_only=True)
class Level:
    """One kind of group that deviates: its members, the constants it may move, whose run is whose
    (`members[place]`; -1 for none), and where its unknowns begin."""

    members: tuple[str, ...]
    names: tuple[str, ...]
    place: NDArray[np.int64]
    start: int

    def places(self) -> list[tuple[str, slice]]:
        """Each member with its place among the unknowns."""
        width, start = len(self.names), self.start
        return [
            (member, slice(start + index * width, start + (index + 1) * width))
            for index, member in enumerate(self.members)
        ]

    def logs(self, unknown: FloatArray, seen: NDArray[np.bool_]) -> dict[str, FloatArray]:
        """Logarithms of the factors of members that have a run of those `seen`."""
        known = {self.members[int(place)] for place in np.unique(self.place[seen]) if place >= 0}
        return {member: unknown[place] for member, place in self.places() if member in known}


class Unknowns:
    """Runs as columns, and their constants as a function of one vector of unknowns.

    The first unknowns are the shared constants, in the order of NAMES. `prior` and `width` are the
    normal prior of each. `weights` may be set to 0 for runs that a fit must not see.
    """

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.columns: Columns = run_columns(runs)
        self.log_seconds: FloatArray = np.log([run.seconds or 1.0 for run in runs])
        self.weights: FloatArray = np.array([_WEIGHTS.get(run.tier, 1.0) for run in runs])
        spreads: list[float] = [float(value) for value in SPREADS]
        levels: list[Level] = []
        for keys, own in (
            ([run.cluster for run in runs], {name: x * CLUSTER_SHARE for name, x in OWN.items()}),
            ([stack_of(run.cluster) for run in runs], OWN),
            ([run.release for run in runs], RELEASE),
        ):
            members = tuple(sorted(set(keys) - {""}))
            place = np.array([members.index(key) if key else -1 for key in keys], dtype=np.int64)
            levels.append(Level(members=members, names=tuple(own), place=place, start=len(spreads)))
            spreads += [own[name] for _ in levels[-1].members for name in levels[-1].names]
        self.clusters, self.stacks, self.releases = levels
        #: (runs, the unknown that moves each, place of the constant that it moves).
        self._moves: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
        for level in levels:
            rows = np.nonzero(level.place >= 0)[0]
            first = level.start + level.place[rows] * len(level.names)
            for offset, name in enumerate(level.names):
                self._moves.append((rows, first + offset, NAMES.index(name)))
        self.width: FloatArray = np.array(spreads, dtype=np.float64)
        self.prior: FloatArray = np.zeros(len(spreads))
        self.prior[: len(NAMES)] = np.log(PRIORS)
        every = np.arange(len(runs))
        self._touched = _Touched(self.columns, [every] * len(NAMES))
        # The runs that each constant can move, from a few random points.
        random = np.random.default_rng(0)
        moved = np.zeros((len(self.log_seconds), len(NAMES)), dtype=bool)
        for _ in range(_NUM_PROBES):
            point = self.prior + random.normal(size=len(self.prior)) * self.width / 2
            values = self._values(point)
            found = self._touched.slopes(values, _log_seconds(self.columns, values))
            moved |= np.abs(found) > _NO_SLOPE
        self._touched = _Touched(
            self.columns, [np.nonzero(moved[:, place])[0] for place in range(len(NAMES))]
        )

    def hold_shared(self, known: Calibration) -> None:
        """Keep shared constants, stacks and releases where `known` has them; clusters move from
        where their relatives put them, as far as a stack may."""
        self.prior[: len(NAMES)] = np.log([known.shared[name] for name in NAMES])
        self.width[: len(NAMES)] = _FIXED
        self.width[self.stacks.start :] = _FIXED
        names = self.clusters.names
        for member, place in self.clusters.places():
            factors = known.deviations(member)
            self.prior[place] = np.log([factors.get(name, 1.0) for name in names])
            share = _KNOWN_SHARE if member in known.clusters else 1.0
            self.width[place] = [OWN[name] * share for name in names]
        for member, place in self.releases.places():
            factors = known.release_factors(member)
            self.prior[place] = np.log([factors.get(x, 1.0) for x in self.releases.names])

    def errors(self, unknown: FloatArray) -> FloatArray:
        """log(predicted / measured) of every run."""
        return _log_seconds(self.columns, self._values(unknown)) - self.log_seconds

    def slopes(self, unknown: FloatArray, errors: FloatArray) -> FloatArray:
        """d errors / d unknown [runs, unknowns]. A deviation moves its runs exactly as the shared
        constant does, so one evaluation per constant and run gives all."""
        shared = self._touched.slopes(self._values(unknown), errors + self.log_seconds)
        found = np.zeros((len(errors), len(unknown)))
        found[:, : len(NAMES)] = shared
        for rows, place, constant in self._moves:
            found[rows, place] = shared[rows, constant]
        return found

    def _values(self, unknown: FloatArray) -> FloatArray:
        """Logarithms of the constants [constants, runs]."""
        values = np.repeat(unknown[: len(NAMES), None], len(self.log_seconds), axis=1)
        for rows, place, constant in self._moves:
            values[constant, rows] += unknown[place]
        return values

    def calibration(self, unknown: FloatArray, start: Calibration, *, share: bool) -> Calibration:
        """The fitted constants of groups that have a run with weight; `start` knows the rest."""
        seen = self.weights > 0
        clusters, stacks, releases = (
            level.logs(unknown, seen) for level in (self.clusters, self.stacks, self.releases)
        )
        found = replace(
            start,
            shared=_factors(NAMES, unknown[: len(NAMES)]),
            clusters={
                member: _factors(tuple(OWN), logs + stacks[stack_of(member)])
                for member, logs in clusters.items()
            },
        )
        if not share:
            return found
        return replace(
            found,
            stacks={member: _factors(tuple(OWN), logs) for member, logs in stacks.items()},
            releases={member: _factors(tuple(RELEASE), logs) for member, logs in releases.items()},
        )


class _Touched:
    """The runs that each constant moves, all in one set of columns."""

    def __init__(self, columns: Columns, rows: Sequence[NDArray[np.int64]]) -> None:
        self.runs = np.concatenate(rows)
        self.constant = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
        self.columns: Columns = (
            picked(columns[0], self.runs),
            picked(columns[1], self.runs),
            picked(columns[2], self.runs),
        )

    def slopes(self, values: FloatArray, logs: FloatArray) -> FloatArray:
        """d log seconds / d constant [runs, constants] at `values`, where it is `logs`."""
        moved = values[:, self.runs]
        moved[self.constant, np.arange(len(self.runs))] += _STEP
        found = np.zeros((values.shape[1], values.shape[0]))
        rise = _log_seconds(self.columns, moved) - logs[self.runs]
        found[self.runs, self.constant] = rise / _STEP
        return found


def _log_seconds(columns: Columns, values: FloatArray) -> FloatArray:
    constants = Constants(**dict(zip(NAMES, np.exp(values), strict=True)))
    total: FloatArray = step_time(*columns, constants).total
    return np.log(total)


def _factors(names: Sequence[str], logs: FloatArray) -> dict[str, float]:
    return dict(zip(names, (float(x) for x in np.exp(logs)), strict=True))


#: The error of a good row: inside one study 1 to 2 % mean something.
_SCALE = 0.02
_MOST_STEP = 0.7
_MOST_ITERATIONS = 40
_MOST_TRIES = 8
_ROUNDS = 2
#: A gain below this share of the loss ends the search.
_LEAST_GAIN = 1e-3

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
        unknowns = Unknowns(filled)
        found = unknowns.calibration(_minimize(unknowns), start, share=True)
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
    unknowns = Unknowns([fill_in(run, start) for run in usable])
    weights = unknowns.weights
    found: dict[tuple[str, ...], Calibration] = {}
    for key in dict.fromkeys(keys):
        hidden = np.array([other == key for other in keys])
        unknowns.weights = np.where(hidden, 0.0, weights)
        found[key] = start
        if not hidden.all():
            found[key] = unknowns.calibration(_minimize(unknowns), start, share=True)
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


def _minimize(unknowns: Unknowns) -> FloatArray:
    """The unknowns of least loss, from their priors."""
    prior, width, row_weights = unknowns.prior, unknowns.width, unknowns.weights

    def cost(errors: FloatArray, unknown: FloatArray) -> float:
        scaled = errors / _SCALE
        fitted = 2 * np.sum(row_weights * (np.sqrt(1 + scaled**2) - 1))
        return float(fitted + np.sum(((unknown - prior) / width) ** 2))

    unknown, damping = prior.copy(), 1e-3
    diagonal = np.diag_indices(len(prior))
    rows = np.nonzero(row_weights > 0)[0]
    errors = unknowns.errors(unknown)
    least = cost(errors, unknown)
    for _ in range(_MOST_ITERATIONS):
        slopes = unknowns.slopes(unknown, errors)[rows]
        weights = (row_weights / np.sqrt(1 + (errors / _SCALE) ** 2) / _SCALE**2)[rows]
        normal = slopes.T @ (slopes * weights[:, None])
        normal[diagonal] += 1 / width**2
        gradient = slopes.T @ (weights * errors[rows]) + (unknown - prior) / width**2
        better = None
        for _ in range(_MOST_TRIES):
            matrix = normal.copy()
            matrix[diagonal] *= 1 + damping
            step = np.clip(np.linalg.solve(matrix, -gradient), -_MOST_STEP, _MOST_STEP)
            tried = unknown + step
            tried_errors = unknowns.errors(tried)
            tried_cost = cost(tried_errors, tried)
            if tried_cost < least:
                better = (tried, tried_errors, tried_cost)
                break
            damping *= 5
        if better is None:
            break
        gained = least - better[2]
        unknown, errors, least = better
        damping = max(damping / 5, 1e-6)
        if gained < _LEAST_GAIN * least:
            break
    return unknown


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
