"""A system that has nothing which only Linux has, such as macOS, played on Linux.

``python -m tests.without_linux MODULE ...`` runs a module, and the ranks that it starts, there.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULE = "tests.without_linux"
_FOLDERS = ("/proc", "/sys", "/dev/shm")
_CALLS = {
    os: ("sched_getaffinity", "pidfd_open", "posix_fadvise", "posix_fallocate"),
    signal: ("pidfd_send_signal",),
}
_OPEN = {io: ("open",), builtins: ("open",)}
_PATHS = {os: ("open", "stat", "access", "readlink", "listdir", "scandir")}


class _Library(ctypes.CDLL):
    """The C library of another system."""

    def __getattr__(self, name: str) -> Any:
        if name in ("mallopt", "malloc_trim", "prctl"):
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return super().__getattr__(name)


def _hiding(call: Callable[..., Any], answer: Callable[[Any], Any]) -> Callable[..., Any]:
    def hidden(path: Any = ".", *args: Any, **more: Any) -> Any:
        if isinstance(path, str | Path) and str(path).startswith(_FOLDERS):
            return answer(path)
        return call(path, *args, **more)

    return hidden


def _missing(path: Any) -> Any:
    raise FileNotFoundError(2, "No such file or directory", str(path))


def leave_linux(
    change: Callable[[Any, str, Any], None] = setattr,
    remove: Callable[[Any, str], None] = delattr,
) -> None:
    """Take it away from this process."""
    change(ctypes, "CDLL", _Library)
    for module, names in _CALLS.items():
        for name in names:
            if hasattr(module, name):
                remove(module, name)
    for module, names in (*_PATHS.items(), *_OPEN.items()):
        for name in names:
            answer = (lambda path: False) if name == "access" else _missing
            change(module, name, _hiding(getattr(module, name), answer))


def main() -> None:
    from moemesh.comm import launch

    command = launch.python_command
    launch.python_command = lambda *words: command(MODULE, *words)
    leave_linux()
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
