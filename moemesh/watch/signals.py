"""Stop requests: after Ctrl-C or SIGTERM the current step ends, the run is saved and exits."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

# Words and times of Ctrl-C: an answer at once, and an end at the second one.


#: Signals closer together than this are one key that bounced.
SAME_KEY_SECONDS = 0.2
STOPPING_SOON = "stopping; press Ctrl-C again to stop now"
STOPPING = "stopping after this step, and saving; press Ctrl-C again to stop now"
STOPPING_NOW = "stopping now, without saving"


def say(text: str) -> None:
    """One line on stderr, below the terminal's own ``^C``."""
    with suppress(OSError, ValueError):
        print(f"\nmoemesh: {text}", file=sys.stderr, flush=True)


#: Signals closer together than this are one request that came by two ways.
SAME_REQUEST_SECONDS = 2.0


class StopRequest:
    """Set by SIGINT, SIGTERM, SIGHUP and SIGUSR1. Only a second Ctrl-C stops at once.

    A signal to a whole job reaches a rank twice, directly and through its launcher, and must not
    interrupt the save that the first one has requested. A process that is `alone` has no launcher:
    it answers on stderr itself.
    """

    def __init__(self, *, alone: bool = False, after: int | None = None) -> None:
        """`after`: the step behind which the run stops in any case; None: the last one."""
        self._alone, self.after = alone, after
        self._same_seconds = SAME_KEY_SECONDS if alone else SAME_REQUEST_SECONDS
        self._signal: int | None = None
        self._since = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = number, now
            if number == signal.SIGINT:
                self._answer(STOPPING)
        elif number == signal.SIGINT and now - self._since > self._same_seconds:
            self._answer(STOPPING_NOW)
            raise KeyboardInterrupt

    def _answer(self, text: str) -> None:
        # Not print: the signal may have come in the middle of one.
        if self._alone:
            with suppress(OSError):
                os.write(2, f"\nmoemesh: {text}\n".encode())

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after a request to terminate (also when another rank got it)."""
        return 130 if self._signal == signal.SIGINT else 143
