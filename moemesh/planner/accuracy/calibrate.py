"""Fitting the constants of the time model to measured runs: shared ones and each cluster's own.

All constants are positive, so their logarithms are fitted. The loss of a run is that of its
log-ratio, predicted over measured, in units of 3 %, square near zero and linear beyond (pseudo-
Huber): a mislabelled row pulls no harder than a 3 % error. Each shared constant is held at its
prior, each deviation at zero, by a normal prior of its own width: a cluster with three rows moves
little, one with a hundred finds its values. A cluster deviates as its software stack does and, half
as widely, by itself: what one table shows on one device helps to predict its other devices.
Levenberg-Marquardt with iterated weights; a deviation moves its rows exactly as the shared constant
does, so one evaluation per constant gives the whole Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.planner.accuracy.calibration import Calibration
from moemesh.planner.accuracy.predict import Prediction, fill_in, predict, run_columns
from moemesh.planner.accuracy.published import PublishedRun
from moemesh.planner.timing.arithmetic import FloatArray
from moemesh.planner.timing.columns import HardwareColumns, LayoutColumns, ModelColumns
from moemesh.planner.timing.constants import NAMES, OWN, PRIORS, SPREADS, Constants
from moemesh.planner.timing.step_time import step_time

#: The error of a good row: differences below it between software versions mean nothing.
_SCALE = 0.03
_STEP = 1e-4
_MOST_STEP = 0.7
#: Rows whose layout is partly guessed ("tier C") count less.
_WEIGHTS = {"C": 0.2}
_ROUNDS = 2
#: Width of a cluster's own deviation over that of its stack; width of what is held fixed.
_CLUSTER_SHARE = 0.5
_FIXED = 1e-6

_OWN_NAMES: tuple[str, ...] = tuple(OWN)
_OWN_PLACES = np.array([NAMES.index(name) for name in _OWN_NAMES])
_OWN_SPREADS: FloatArray = np.array([OWN[name] for name in _OWN_NAMES], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Runs as columns, with their clusters by number."""

    columns: tuple[ModelColumns, LayoutColumns, HardwareColumns]
    #: Per row the number of its cluster, and of its stack after all clusters.
    cluster: NDArray[np.int64]
    stack: NDArray[np.int64]
    log_seconds: FloatArray
    weights: FloatArray
    #: Clusters and stacks together: the groups that deviate.
    num_groups: int


def measured_runs(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs that a fit can use: finished, priced, and timed."""
    return [run for run in runs if run.layout is not None and run.seconds and run.ended == "ok"]


def fit(
    runs: Sequence[PublishedRun], start: Calibration, *, share: bool = True, rounds: int = _ROUNDS
) -> Calibration:
    """A calibration with the deviations of every cluster in `runs`, and with the shared constants
    where `share` is set. Microbatches that a table leaves out are chosen with what was fitted so
    far, so the fit runs in rounds. Raises UserError without a usable run."""
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
        found = _fit_once(filled, start, share=share)
    return found


def cross_validate(runs: Sequence[PublishedRun], start: Calibration) -> list[Prediction]:
    """Each run predicted by a fit that saw no run of its group (cluster, model, number of devices):
    rows of one group are close relatives, and a random split would flatter."""
    usable = measured_runs(runs)
    groups = sorted({_relatives(run) for run in usable})
    found: dict[str, Prediction] = {}
    for group in groups:
        left_out = [run for run in usable if _relatives(run) == group]
        others = [run for run in usable if _relatives(run) != group]
        calibration = fit(others, start, rounds=1) if others else start
        found |= {one.run.id: one for one in predict(left_out, calibration)}
    return [found[run.id] for run in usable]


def _relatives(run: PublishedRun) -> tuple[str, str, str]:
    return (run.cluster, run.row.get("model", ""), run.row["gpus"])


def _fit_once(runs: Sequence[PublishedRun], start: Calibration, *, share: bool) -> Calibration:
    clusters = sorted({run.cluster for run in runs})
    stacks = sorted({_stack_of(cluster) for cluster in clusters})
    groups = [*clusters, *stacks]
    place = {name: index for index, name in enumerate(clusters)}
    data = _Data(
        columns=run_columns(runs),
        cluster=np.array([place[run.cluster] for run in runs], dtype=np.int64),
        stack=np.array(
            [len(clusters) + stacks.index(_stack_of(run.cluster)) for run in runs], dtype=np.int64
        ),
        log_seconds=np.log([run.seconds or 1.0 for run in runs]),
        weights=np.array([_WEIGHTS.get(run.tier, 1.0) for run in runs], dtype=np.float64),
        num_groups=len(groups),
    )
    own = np.zeros((len(groups), len(_OWN_NAMES)))
    widths = np.concatenate(
        [
            np.tile(_OWN_SPREADS * _CLUSTER_SHARE, len(clusters)),
            np.tile(_OWN_SPREADS, len(stacks)),
        ]
    )
    if share:
        mean, spread = np.log(PRIORS), SPREADS
    else:
        # The shared constants stay; clusters move from where their relatives put them.
        mean = np.log([start.shared[name] for name in NAMES])
        spread = np.full(len(NAMES), _FIXED)
        widths[:] = np.concatenate(
            [np.tile(_OWN_SPREADS, len(clusters)), np.full(len(stacks) * len(_OWN_NAMES), _FIXED)]
        )
        for index, cluster in enumerate(clusters):
            known = start.deviations(cluster)
            own[index] = np.log([known.get(name, 1.0) for name in _OWN_NAMES])
    solution = _minimize(
        data, np.concatenate([mean, own.ravel()]), np.concatenate([spread, widths])
    )
    shared = np.exp(solution[: len(NAMES)])
    logs = solution[len(NAMES) :].reshape(own.shape)
    return Calibration(
        shared=dict(zip(NAMES, (float(value) for value in shared), strict=True)),
        stacks={stack: _factors(logs[len(clusters) + index]) for index, stack in enumerate(stacks)}
        if share
        else start.stacks,
        clusters={
            cluster: _factors(logs[index] + logs[len(clusters) + stacks.index(_stack_of(cluster))])
            for index, cluster in enumerate(clusters)
        },
        allocations=start.allocations,
    )


def _stack_of(cluster: str) -> str:
    return cluster.rpartition("/")[0]


def _factors(logs: FloatArray) -> dict[str, float]:
    return dict(zip(_OWN_NAMES, (float(x) for x in np.exp(logs)), strict=True))


def _residuals(data: _Data) -> Callable[[FloatArray], FloatArray]:
    """log(predicted / measured) as a function of all unknowns."""

    def residuals(unknown: FloatArray) -> FloatArray:
        shared = unknown[: len(NAMES)]
        own = unknown[len(NAMES) :].reshape(data.num_groups, len(_OWN_NAMES))
        values = np.repeat(shared[:, None], len(data.cluster), axis=1)
        values[_OWN_PLACES] += (own[data.cluster] + own[data.stack]).T
        constants = Constants(**dict(zip(NAMES, np.exp(values), strict=True)))
        total: FloatArray = step_time(*data.columns, constants).total
        return np.log(total) - data.log_seconds

    return residuals


def _minimize(
    data: _Data, prior: FloatArray, width: FloatArray, most_iterations: int = 40
) -> FloatArray:
    residuals = _residuals(data)

    def cost(errors: FloatArray, unknown: FloatArray) -> float:
        scaled = errors / _SCALE
        fitted = 2 * np.sum(data.weights * (np.sqrt(1 + scaled**2) - 1))
        return float(fitted + np.sum(((unknown - prior) / width) ** 2))

    unknown, damping = prior.copy(), 1e-3
    errors = residuals(unknown)
    least = cost(errors, unknown)
    for _ in range(most_iterations):
        slopes = _jacobian(data, residuals, unknown, errors)
        weights = data.weights / np.sqrt(1 + (errors / _SCALE) ** 2) / _SCALE**2
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(1 / width**2)
        gradient = slopes.T @ (weights * errors) + (unknown - prior) / width**2
        better = None
        for _ in range(8):
            matrix = normal + damping * np.diag(np.diag(normal))
            step = np.clip(np.linalg.solve(matrix, -gradient), -_MOST_STEP, _MOST_STEP)
            tried = unknown + step
            tried_errors = residuals(tried)
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
        if gained < 1e-3 * least:
            break
    return unknown


def _jacobian(
    data: _Data,
    residuals: Callable[[FloatArray], FloatArray],
    unknown: FloatArray,
    errors: FloatArray,
) -> FloatArray:
    slopes = np.zeros((len(errors), len(unknown)))
    num_shared, num_own = len(NAMES), len(_OWN_NAMES)
    for place in range(num_shared):
        moved = unknown.copy()
        moved[place] += _STEP
        slopes[:, place] = (residuals(moved) - errors) / _STEP
    rows = np.arange(len(errors))
    for place in range(num_own):
        for group in (data.cluster, data.stack):
            slopes[rows, num_shared + group * num_own + place] = slopes[:, _OWN_PLACES[place]]
    return slopes
