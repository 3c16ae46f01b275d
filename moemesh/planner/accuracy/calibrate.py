"""Fitting the constants of the time model to measured runs: shared ones and each cluster's own.

All constants are positive, so their logarithms are fitted. The loss of a run is that of its
log-ratio, predicted over measured, in units of 2 %, square near zero and linear beyond (pseudo-
Huber): a mislabelled row pulls no harder than a 2 % error. Each shared constant is held at its
prior, each deviation (see `unknowns`) at zero, by a normal prior of its own width: a cluster with
three rows moves little, one with a hundred finds its values. Levenberg-Marquardt with iterated
weights, always from the priors: a start at the fit of all runs would know those that are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from moemesh.config.errors import UserError
from moemesh.planner.accuracy.predict import Prediction, fill_in, predict
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.accuracy.unknowns import Unknowns
from moemesh.planner.arithmetic import FloatArray
from moemesh.planner.timing.calibration import Calibration, stack_of

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


def measured_runs(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs that a fit can use: finished, priced, and timed."""
    return [run for run in runs if run.layout is not None and run.seconds and run.ended == "ok"]


def fit(
    runs: Sequence[PublishedRun], start: Calibration, *, share: bool = True, rounds: int = _ROUNDS
) -> Calibration:
    """A calibration with the deviations of every cluster in `runs`, and with the shared constants,
    stacks and releases where `share` is set. Microbatches that a table leaves out are chosen with
    what was fitted so far, so the fit runs in rounds. Raises UserError without a usable run."""
    usable = measured_runs(runs)
    if not usable:
        raise UserError(
            "no row of the table has a finished run with a layout and a step time; "
            "`moemesh validate` says why for each row"
        )
    found = start
    chosen: list[PublishedRun] = []
    for _ in range(rounds):
        filled = [fill_in(run, found) for run in usable]
        if [run.layout for run in filled] == [run.layout for run in chosen]:
            break
        chosen = filled
        unknowns = Unknowns(filled)
        if not share:
            unknowns.hold_shared(start)
        found = unknowns.calibration(_minimize(unknowns), start, share=share)
    return found


def cross_validate(
    runs: Sequence[PublishedRun], start: Calibration, *, left_out: LeftOut = "group"
) -> list[Prediction]:
    """Each run predicted by a fit that saw no run of its group: rows of one group are close
    relatives, and a random split would flatter. Everything is fitted again for each group."""
    usable = measured_runs(runs)
    if not usable:
        return []
    keys = [_group(run, left_out) for run in usable]
    unknowns = Unknowns([fill_in(run, start) for run in usable])
    weights = unknowns.weights
    found: dict[str, Prediction] = {}
    for key in dict.fromkeys(keys):
        hidden = np.array([other == key for other in keys])
        unknowns.weights = np.where(hidden, 0.0, weights)
        calibration = start
        if not hidden.all():
            calibration = unknowns.calibration(_minimize(unknowns), start, share=True)
        unseen = [run for run, other in zip(usable, keys, strict=True) if other == key]
        found |= {one.run.id: one for one in predict(unseen, calibration)}
    return [found[run.id] for run in usable]


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
