"""Correction of a cluster's step times that constants do not explain, learned from similar runs.

A Gaussian process on log(measured / predicted): the correlation of two runs is exp(-d²/2), with the
distance d of their features, each times its :data:`SCALES`. Far from every run the factor is one.
Scales were chosen once, by leaving published software stacks out one by one: a user's dozen runs
are too few to fit them. The amplitude is the usual one; the `weight` of a run includes the fitted
multiple of it (:mod:`moemesh.planner.accuracy.own`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp

import numpy as np

from moemesh.config.cluster import OwnRun
from moemesh.planner.arithmetic import FloatArray, Number, maximum, where
from moemesh.planner.timing.columns import LayoutColumns, ModelColumns

#: Standard deviations of the logarithm of a correction, and of a measured run around it.
AMPLITUDE = 0.03
NOISE = 0.03
#: Distance between two runs that differ by one unit of a feature, by the feature's name in cluster
#: files. The unit of sizes and degrees is a doubling.
SCALES: dict[str, float] = {
    "layers": 1.6, "experts": 0.4, "top_k": 0.3, "tp": 1.6, "pp": 1.6, "cp": 0.3, "ep": 0.3,
    "microbatch": 0.3, "seq_len": 0.4, "sequence_parallel": 0.3, "zero": 0.3, "fsdp": 1.6,
    "precision": 1.6, "again_full": 1.6, "again": 0.3, "kernel": 0.4, "fused_norm": 0.3,
    "deduplicated": 1.6, "graphs": 1.6, "token_drop": 0.3,
}  # fmt: skip
_DOUBLINGS = frozenset({"layers", "experts", "top_k", "tp", "pp", "cp", "ep", "microbatch",
                        "seq_len"})  # fmt: skip
_RECOMPUTED = ("recompute_full", "recompute_attention", "recompute_norm", "recompute_moe",
               "recompute_experts", "recompute_shared")  # fmt: skip
#: Largest distance of similar runs: they share half of the unexplained variance.
ALIKE = 1.2


def features(model: ModelColumns, layout: LayoutColumns) -> dict[str, Number]:
    """Features in which runs are compared: name -> number, or column of numbers."""
    values: dict[str, Number] = {}
    for name in SCALES:
        source = model if hasattr(model, name) else layout
        values[name] = getattr(source, name, 0.0)
    values["experts"], values["top_k"] = maximum(model.experts, 1), maximum(model.top_k, 1)
    values["zero"] = where(layout.zero > 0, 1.0, 0.0)
    values["again_full"] = layout.recompute_full
    values["again"] = where(sum(getattr(layout, name) for name in _RECOMPUTED) > 0, 1.0, 0.0)
    return values


def places(values: dict[str, Number]) -> FloatArray:
    """Points [rows, features] of features, scaled so that distances compare runs."""
    columns = [
        (np.log2(values[name]) if name in _DOUBLINGS else values[name]) * scale
        for name, scale in SCALES.items()
    ]
    return np.stack([np.ravel(column) for column in np.broadcast_arrays(*columns)], axis=1)


def distances(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """Distances [rows, columns] between points [rows, features] and [columns, features]."""
    squares = (rows**2).sum(1)[:, None] + (columns**2).sum(1) - 2 * rows @ columns.T
    return np.sqrt(np.maximum(squares, 0.0))


def covariance(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """Covariance [rows, columns] of the corrections of two sets of points."""
    return AMPLITUDE**2 * np.exp(-(distances(rows, columns) ** 2) / 2)


@dataclass(frozen=True)
class OwnRuns:
    """The runs of a cluster file as a correction of its step times."""

    runs: tuple[OwnRun, ...] = ()

    @cached_property
    def _places(self) -> FloatArray:
        rows = [run.features for run in self.runs]
        # Features that a file does not name: sizes and degrees of 1, others off.
        defaults = {name: float(name in _DOUBLINGS) for name in SCALES}
        return places({n: np.array([row.get(n, x) for row in rows]) for n, x in defaults.items()})

    def correction(self, model: ModelColumns, layout: LayoutColumns) -> Number:
        """Expected log(measured / predicted), in the broadcast shape of the columns."""
        if not self.runs:
            return 0.0
        weights = np.array([run.weight for run in self.runs])
        columns = features(model, layout)
        shape = np.broadcast_shapes(*(np.shape(values) for values in columns.values()))
        logs = covariance(places(columns), self._places) @ weights
        return logs.reshape(shape) if logs.size > 1 else float(logs[0])

    @property
    def least(self) -> float:
        """Lower bound of all corrections, in logarithms."""
        return AMPLITUDE**2 * sum(min(run.weight, 0.0) for run in self.runs)

    def describe(self, model: ModelColumns, layout: LayoutColumns) -> str:
        """Line on the correction of one layout: its factor, the number of similar runs, the nearest
        run with its distance and the features that differ; "" without runs."""
        if not self.runs:
            return ""
        row = features(model, layout)
        run_distances = distances(places(row), self._places)[0]
        number = int(np.argmin(run_distances))
        nearest, steps = self.runs[number], np.abs(places(row)[0] - self._places[number])
        order = sorted(zip(steps, SCALES, strict=True), reverse=True)[:3]
        differs = ", ".join(
            f"{name} {nearest.features.get(name, 0.0):g} there, {float(row[name]):g} here"
            for step, name in order
            if step > 0
        )
        distance = f"{run_distances[number]:.1f} away"
        away = f"the nearest, {nearest.run}, is {distance}: {differs or 'none differs'}"
        if not (num_alike := int((run_distances <= ALIKE).sum())):
            return f"seconds: none of your {len(self.runs)} runs is like this one ({away})"
        factor = exp(float(self.correction(model, layout)))
        runs = f"{num_alike} of your {len(self.runs)} runs"
        return f"seconds: x {factor:.3f} from {runs} like this one (within {ALIKE}; {away})"
