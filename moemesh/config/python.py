"""The Python of all processes: the command that starts it, and versions of its packages."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Command that runs `module` with `arguments` in `python` (None: this interpreter). With -P it
    imports nothing from the current directory; PYTHONPATH is respected."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def installed_version(package: str) -> str | None:
    """The installed version of a package; None: it is missing."""
    from importlib.metadata import PackageNotFoundError, version  # late: it takes milliseconds

    try:
        return version(package)
    except PackageNotFoundError:
        return None
