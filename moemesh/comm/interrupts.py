"""Ctrl-C while ranks are at work: an answer at once, and an end at the second one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

#: Signals closer together than this are one key that bounced.
SAME_KEY_SECONDS = 0.2
STOPPING_SOON = "stopping; press Ctrl-C again to stop now"
STOPPING = "stopping after this step, and saving; press Ctrl-C again to stop now"
STOPPING_NOW = "stopping now, without saving"


class InterruptWatch:
    """While inside, answers the SIGINTs of this process: the first with a line on stderr, a second
    one with SIGKILL for every child process.

    Nothing else of the handling of signals changes. The main thread may be busy in another
    package's handler, so that a thread reads the numbers of arriving signals from a pipe
    (``signal.set_wakeup_fd``). Inside another thread than the main one it does nothing.
    """

    def __init__(self, answer: str = STOPPING_SOON) -> None:
        """`answer`: the line for the first one."""
        self._answer = answer
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._before = -1

    def __enter__(self) -> InterruptWatch:
        if threading.current_thread() is threading.main_thread():
            self._pipe = reading, writing = os.pipe()
            os.set_blocking(writing, False)
            self._before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, args=(reading,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pipe is None or self._thread is None:
            return
        reading, writing = self._pipe
        signal.set_wakeup_fd(self._before)
        os.close(writing)
        self._thread.join()
        os.close(reading)

    def _watch(self, reading: int) -> None:
        first: float | None = None
        while numbers := os.read(reading, 64):
            if signal.SIGINT not in numbers:
                continue
            now = time.monotonic()
            if first is None:
                first = now
                _say(self._answer)
            elif now - first > SAME_KEY_SECONDS:
                _say(STOPPING_NOW)
                kill_children()


def kill_children() -> None:
    """Send SIGKILL to every child of this process, where Linux tells which there are."""
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"\nmoemesh: {text}", file=sys.stderr, flush=True)
