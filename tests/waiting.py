"""Waiting in tests, however busy the machine is: no test fails because its process came late."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

#: Seconds; pytest ends a test after 300. A hang is found either way; slowness does not fail a test.
PATIENCE = 240.0


def until(is_so: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Return when `is_so()` is true; fail after `PATIENCE`, or when `process` ends before it."""
    __tracebackhide__ = True
    end = time.monotonic() + PATIENCE
    while not is_so():
        if process is not None and process.poll() is not None and not is_so():
            raise AssertionError(f"the process ended: {process.communicate()}")
        assert time.monotonic() < end, f"it did not come in {PATIENCE:g} s"
        time.sleep(0.02)
