"""The part of a cluster's step times that constants cannot say, learned from runs like a layout.

A Gaussian process on log(measured / predicted): runs are alike by exp(-d²/2), d the distance of
their features in units of :data:`SCALES`. Far from every run the correction is one. Scales were
chosen once, on published software stacks that were left out one by one: a user's dozen runs is too
few to choose them by. The amplitude is the usual one, of which runs take a multiple (`weight` has
it, :mod:`moemesh.planner.accuracy.own`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp

import numpy as np

from moemesh.config.cluster import OwnRun
from moemesh.planner.arithmetic import FloatArray, Number, maximum, where
from moemesh.planner.timing.columns import LayoutColumns, ModelColumns

#: Standard deviations of the logarithm: of a correction, and of a measured run around it.
AMPLITUDE = 0.03
NOISE = 0.03
#: How far one unit of a feature sets two runs apart; of sizes and degrees one doubling.
SCALES: dict[str, float] = {
    "layers": 1.6, "experts": 0.4, "top_k": 0.3, "tp": 1.6, "pp": 1.6, "cp": 0.3, "ep": 0.3,
    "microbatch": 0.3, "seq_len": 0.4, "sequence_parallel": 0.3, "zero": 0.3, "fsdp": 1.6,
    "precision": 1.6, "again_full": 1.6, "again": 0.3, "kernel": 0.4, "fused_norm": 0.3,
    "deduplicated": 1.6, "graphs": 1.6, "token_drop": 0.3,
}  # fmt: skip
_DOUBLINGS = frozenset({"layers", "experts", "top_k", "tp", "pp", "cp", "ep", "microbatch",
                        "seq_len"})  # fmt: skip
_AGAIN = ("again_full", "again_attention", "again_norm", "again_moe", "again_experts",
          "again_shared")  # fmt: skip
#: A run is like a layout within this distance: the two then share half of what is not known.
ALIKE = 1.2


def features(model: ModelColumns, layout: LayoutColumns) -> dict[str, Number]:
    """The numbers in which runs are compared, one or a column of each."""
    found: dict[str, Number] = {}
    for name in SCALES:
        source = model if hasattr(model, name) else layout
        found[name] = getattr(source, name, 0.0)
    found["experts"], found["top_k"] = maximum(model.experts, 1), maximum(model.top_k, 1)
    found["zero"] = where(layout.zero > 0, 1.0, 0.0)
    found["again"] = where(sum(getattr(layout, name) for name in _AGAIN) > 0, 1.0, 0.0)
    return found


def places(found: dict[str, Number]) -> FloatArray:
    """Points [rows, features] whose distance says how much runs differ."""
    columns = [
        (np.log2(found[name]) if name in _DOUBLINGS else found[name]) * scale
        for name, scale in SCALES.items()
    ]
    return np.stack([np.ravel(one) for one in np.broadcast_arrays(*columns)], axis=1)


def distances(one: FloatArray, other: FloatArray) -> FloatArray:
    """Distances between points [rows, features] and [columns, features]."""
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
    return np.sqrt(np.maximum(squares, 0.0))


def covariance(one: FloatArray, other: FloatArray) -> FloatArray:
    """Covariance of the corrections of two sets of points."""
    return AMPLITUDE**2 * np.exp(-(distances(one, other) ** 2) / 2)


@dataclass(frozen=True)
class OwnRuns:
    """The runs of a cluster file as a correction of its step times."""

    runs: tuple[OwnRun, ...] = ()

    @cached_property
    def _places(self) -> FloatArray:
        rows = [one.features for one in self.runs]
        usual = {name: float(name in _DOUBLINGS) for name in SCALES}
        return places({n: np.array([row.get(n, x) for row in rows]) for n, x in usual.items()})

    def correction(self, model: ModelColumns, layout: LayoutColumns) -> Number:
        """log(measured / predicted) to expect, in the shape of the columns together."""
        if not self.runs:
            return 0.0
        weights = np.array([one.weight for one in self.runs])
        here = features(model, layout)
        shape = np.broadcast_shapes(*(np.shape(values) for values in here.values()))
        found = covariance(places(here), self._places) @ weights
        return found.reshape(shape) if found.size > 1 else float(found[0])

    @property
    def least(self) -> float:
        """No correction is below this."""
        return AMPLITUDE**2 * sum(min(one.weight, 0.0) for one in self.runs)

    def told(self, model: ModelColumns, layout: LayoutColumns) -> str:
        """How many runs are like one layout, which is nearest, how far away and in what, and by
        which factor they correct its seconds; "" without runs."""
        if not self.runs:
            return ""
        here = features(model, layout)
        far = distances(places(here), self._places)[0]
        number = int(np.argmin(far))
        nearest, steps = self.runs[number], np.abs(places(here)[0] - self._places[number])
        order = sorted(zip(steps, SCALES, strict=True), reverse=True)[:3]
        differs = ", ".join(
            f"{name} {nearest.features.get(name, 0.0):g} there, {float(here[name]):g} here"
            for step, name in order
            if step > 0
        )
        away = f"the nearest, {nearest.run}, is {far[number]:.1f} away: {differs or 'none differs'}"
        if not (alike := int((far <= ALIKE).sum())):
            return f"seconds: none of your {len(far)} runs is like this one ({away})"
        factor = exp(float(self.correction(model, layout)))
        runs = f"{alike} of your {len(far)} runs"
        return f"seconds: x {factor:.3f} from {runs} like this one (within {ALIKE}; {away})"
