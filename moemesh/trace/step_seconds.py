"""Seconds of a step by part, measured on every rank and predicted (`seconds.json`); times and rates
as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Parts of forward and backward passes, without the exchanges inside of them.
ATTENTION, EXPERTS, DENSE_MLPS, HEAD = "attention", "experts", "dense MLPs", "head and loss"
PASSES: tuple[str, ...] = (ATTENTION, EXPERTS, DENSE_MLPS, HEAD)
#: All passes together, if their parts cannot be measured separately.
TOGETHER = "forward and backward"
#: Sums of gradients without their communication, and the update.
OPTIMIZER = "optimizer"
DATA = "waiting for data"
#: The rest of a step: norms, residuals, embedding, Python.
REST = "norms and the rest"
_COMMUNICATION = "communication over "


def communication(axis: str) -> str:
    """The part in which a rank waits for other ranks of `axis`."""
    return f"{_COMMUNICATION}{axis}"


def is_communication(part: str) -> bool:
    return part.startswith(_COMMUNICATION)


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Mean seconds of each part over `steps` steps: rank -> part -> seconds. `predicted` has the
    same form, or is empty; `rates` are measurements of the machine from which it was computed
    (name -> number, in FLOP/s, bytes/s or seconds)."""

    steps: int
    ranks: Mapping[int, Mapping[str, float]]
    predicted: Mapping[int, Mapping[str, float]] = field(
        default_factory=dict[int, Mapping[str, float]]
    )
    rates: Mapping[str, float] = field(default_factory=dict[str, float])

    def mean(self) -> dict[str, float]:
        """Measured seconds of the mean rank by part, in the order of a page."""
        return _mean(list(self.ranks.values()))

    def mean_predicted(self) -> dict[str, float]:
        """Predicted seconds of the mean rank by part. If passes are measured together, their
        predictions are summed, too."""
        predicted, measured = _mean(list(self.predicted.values())), self.mean()
        if TOGETHER in measured and predicted:
            passes = sum(predicted.pop(part, 0.0) for part in PASSES)
            return {TOGETHER: passes, **predicted} if passes else predicted
        return predicted

    def to_json(self) -> dict[str, Any]:
        forms = {"ranks": self.ranks, "predicted": self.predicted}
        rows = {
            name: [{"rank": rank, "parts": dict(parts)} for rank, parts in sorted(by_rank.items())]
            for name, by_rank in forms.items()
        }
        return {"steps": self.steps, **rows, "rates": dict(self.rates)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepSeconds:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError, ValueError, AttributeError or
        OverflowError on other data."""
        forms = [
            {
                int(row["rank"]): {str(part): float(s) for part, s in row["parts"].items()}
                for row in data[name]
            }
            for name in ("ranks", "predicted")
        ]
        rates = {str(name): float(rate) for name, rate in data.get("rates", {}).items()}
        return cls(steps=int(data["steps"]), ranks=forms[0], predicted=forms[1], rates=rates)


def _mean(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for parts in ranks:
        for part, seconds in parts.items():
            sums[part] += seconds / len(ranks)
    order = (TOGETHER, *PASSES, REST, "", OPTIMIZER, DATA)  # "": communication
    places = {part: place for place, part in enumerate(order)}
    return dict(sorted(sums.items(), key=lambda item: (places.get(item[0], places[""]), -item[1])))


def duration(seconds: float) -> str:
    """A time as text: ``7.6 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``.

    >>> duration(7.6), duration(200), duration(12_000), duration(187_000)
    ('7.6 s', '3 min', '3 h 20 min', '2 d 3 h')
    """
    if not seconds >= 60:  # also NaN
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def flop_rate(tflops: float) -> str:
    """A rate, given in 10^12 operations per second, as text: ``3.2 GFLOP/s``, ``412.0 TFLOP/s``.

    >>> flop_rate(0.00317), flop_rate(412)
    ('3.2 GFLOP/s', '412.0 TFLOP/s')
    """
    return f"{tflops:,.1f} TFLOP/s" if tflops >= 1 else f"{1000 * tflops:,.1f} GFLOP/s"
