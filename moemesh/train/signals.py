"""Stop requests: after Ctrl-C or SIGTERM the current step ends, the run is saved and exits."""

from __future__ import annotations

import signal
import time
from types import FrameType

#: Signals closer together than this are one request that came by two ways.
SAME_REQUEST_SECONDS = 2.0


class StopRequest:
    """Set by SIGINT, SIGTERM, SIGHUP and SIGUSR1. Only a second Ctrl-C stops at once.

    A signal to a whole job reaches a rank twice, directly and through its launcher, and must not
    interrupt the save that the first one has requested.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._since = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = number, now
        elif number == signal.SIGINT and now - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after a request to terminate (also when another rank got it)."""
        return 130 if self._signal == signal.SIGINT else 143
