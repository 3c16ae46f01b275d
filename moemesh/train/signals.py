"""Ctrl-C and SIGTERM as a request: the step in flight ends, the run is saved, then it exits."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Listens to SIGINT, SIGTERM, SIGHUP and SIGUSR1. The second request stops at once."""

    def __init__(self) -> None:
        self._signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number != signal.SIGUSR1:
            raise KeyboardInterrupt
        self._signal = number

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after a request to terminate (also when another rank got it)."""
        return 130 if self._signal == signal.SIGINT else 143
