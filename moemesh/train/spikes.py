"""Loss spikes: a robust z-score of each loss against those of the last steps.

The centre is the median of the last :data:`CENTRE` losses. The spread is that of the differences of
neighbouring losses, so that the slope of a loss that falls does not count: for independent losses
of standard deviation s differences have s times the square root of two, and the median of their
absolute values, times 1.4826, estimates it whatever a few outliers are (the median absolute
deviation of a normal distribution is 0.6745 s). Only a loss above the centre is a spike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

#: Losses that the spread is taken of, and the newest of them, that the centre is taken of.
WINDOW, CENTRE = 128, 32
#: No verdict before so many losses.
LEAST = 32
_TO_DEVIATION = 1.4826 / math.sqrt(2.0)
#: Losses that hardly differ (a plateau in low precision) have no spread to measure by.
_LEAST_SPREAD = 1e-6


class Spikes:
    """Judges one loss after the other, alike wherever it is told the same losses."""

    def __init__(self, sigma: float) -> None:
        """`sigma`: the z-score from which on a loss is a spike; 0: none is."""
        self.sigma = sigma
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def score(self, loss: float) -> float:
        """The robust z-score of `loss`, which is then one of the last; 0.0 while there are too few
        of them. A loss that is not finite has none and is not kept."""
        if not math.isfinite(loss):
            return 0.0
        losses = list(self._losses)
        self._losses.append(loss)
        if len(losses) < LEAST:
            return 0.0
        centre = median(losses[-CENTRE:])
        steps = [abs(b - a) for a, b in pairwise(losses)]
        spread = max(_TO_DEVIATION * median(steps), _LEAST_SPREAD * abs(centre), 1e-300)
        return (loss - centre) / spread

    def is_spike(self, score: float) -> bool:
        """Whether a loss of this score is one."""
        return self.sigma > 0 and score >= self.sigma

    def state(self) -> dict[str, Any]:
        """The state in a checkpoint: a resumed run raises the same alarms."""
        return {"losses": list(self._losses)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Be as when :meth:`state` was taken."""
        self._losses = deque(map(float, state.get("losses", ())), maxlen=WINDOW)
