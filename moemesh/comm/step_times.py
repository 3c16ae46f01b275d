"""Seconds that steps took, as their supervisor sees them from outside."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from moemesh.trace.word_file import Word


class StepTimes:
    """Of the newest 100 steps. ``num_seen``: of all that passed."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=100)
        self._step: int | None = None
        self._at = 0.0
        self.num_seen = 0
        self.longest = 0.0
        self.median: float | None = None

    def look(self, now: float, words: Sequence[Word]) -> None:
        """Take the step of the rank that is behind."""
        step = min((word.step for word in words), default=0)
        if not step or step == self._step:
            return
        if self._step is not None and step > self._step:
            if self.num_seen:  # the first one may have begun long before
                seconds = (now - self._at) / (step - self._step)
                self._times.append(seconds)
                self.longest = max(self._times)
                self.median = statistics.median(self._times)
            self.num_seen += step - self._step
        self._step, self._at = step, now
