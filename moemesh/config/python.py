"""The command that starts Python: every process of ours is started by it."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """`python`, or this interpreter, running `module` with `arguments`. It imports nothing from the
    current directory (-P), whatever the files there are called; PYTHONPATH counts."""
    return [python or sys.executable, "-P", "-m", module, *arguments]
