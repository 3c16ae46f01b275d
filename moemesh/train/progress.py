"""Progress of a run: when a line is due where there is no terminal, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A line at most once in so many seconds ...
MOST_OFTEN_SECONDS = 60.0
#: ... but at least once in so many steps, and in this share of all.
LEAST_OFTEN_STEPS, LEAST_OFTEN_SHARE = 50, 0.25
#: Share of the newest step in the mean time of a step.
_NEWEST = 0.1


class Progress:
    """Of `total` steps of which `done` were taken by earlier calls.

    `log_every`: steps between lines; 0 goes by time and steps, as the constants say. Steps are
    timed from one call of :meth:`finished` to the next, so with validation and saving.
    """

    def __init__(
        self, done: int, total: int, log_every: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._log_every, self._clock = total, log_every, clock
        self._finished_at: float | None = None
        self._mean: float | None = None
        self._first = done + 1
        self._line_step, self._line_at = done, clock()
        self.step = done

    def finished(self, step: int) -> bool:
        """Step `step` is over; returns whether a line is due."""
        now = self._clock()
        if self._finished_at is not None:
            seconds = (now - self._finished_at) / max(step - self.step, 1)
            mean = seconds if self._mean is None else self._mean
            self._mean = mean + _NEWEST * (seconds - mean)
        self._finished_at, self.step = now, step
        if not self._is_due(step, now):
            return False
        self._line_step, self._line_at = step, now
        return True

    def _is_due(self, step: int, now: float) -> bool:
        if step in (self._first, self._total):
            return True
        if self._log_every:
            return step % self._log_every == 0
        most = min(LEAST_OFTEN_STEPS, LEAST_OFTEN_SHARE * self._total)
        return step - self._line_step >= most or now - self._line_at >= MOST_OFTEN_SECONDS

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds to the last step; None before there are two steps to go by."""
        return None if self._mean is None else self._mean * (self._total - self.step)
