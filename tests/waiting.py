"""Waiting in tests, however busy the machine is: no test fails because its process came late."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Seconds; pytest ends a test after 300. A hang is found either way; slowness does not fail a test.
PATIENCE = 240.0


def ended(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """The process of `command` after its end, whatever its exit code, with its output as text."""
    usual: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE}
    return subprocess.run(command, **usual | {"check": False} | options)


def until(is_so: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Return when `is_so()` is true; fail after `PATIENCE`, or when `process` ends before it."""
    __tracebackhide__ = True
    end = time.monotonic() + PATIENCE
    while not is_so():
        if process is not None and process.poll() is not None and not is_so():
            raise AssertionError(f"the process ended: {process.communicate()}")
        assert time.monotonic() < end, f"it did not come in {PATIENCE:g} s"
        time.sleep(0.02)
