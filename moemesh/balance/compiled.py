"""Numba compilation of the numeric loops, on first use; without numba the same Python runs."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.Lock()
#: Whether loops run as plain Python, see :func:`plain_loops`.
_plain: ContextVar[bool] = ContextVar("plain loops", default=False)


class _Loop:
    """A function over numpy arrays that numba compiles when it is first called.

    Compiled code calls the compiled form, which numba reads from the attribute `_numba_type_` of a
    global. Python calls it too, except under :func:`plain_loops` and if numba does not work. The
    plain function does the same IEEE operations in the same order (no fast math, no library sums,
    stable sorts), so both return bitwise equal results.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        function = self.plain if _plain.get() else self.compiled
        return function(*arguments)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        with _lock:
            return _compiler()(self.plain)

    @property
    def _numba_type_(self) -> Any:
        return getattr(self.compiled, "_numba_type_")  # noqa: B009 (pyright: not a known member)


def compiled(function: Function) -> Function:
    """Mark a loop for compilation. It may call numpy and other marked functions only."""
    return _Loop(function)  # pyright: ignore[reportReturnType]


@contextmanager
def plain_loops() -> Generator[None]:
    """Context in which the loops run as plain Python, for problems too small for compilation."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


_log = logging.getLogger(__name__)
_COMPILING = (
    "the balancer compiles its loops with numba, once on this machine: that takes tens of seconds"
)


@functools.cache
def _compiler() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with a cache on disk, or the identity if numba does not work."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return _unchanged
    # The folder for compiled code, if it is writable. Its name holds a hash of all sources of this
    # package: numba checks only the file of a function, and would keep an old version of the
    # functions that it calls.
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    version = f"{numba.__version__} {np.__version__} {sys.version}".encode()
    name = f"moemesh-{hashlib.sha256(sources + version).hexdigest()[:16]}"
    folder = None
    with suppress(OSError, RuntimeError):
        place = Path(numba.config.CACHE_DIR or Path.home() / ".cache" / "moemesh") / name
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = place if os.access(place, os.W_OK) else None
    options = {"cache": folder is not None, "nogil": True, "error_model": "numpy"}
    # Logged before the first compilation of a loop, and then removed.
    warning = [_COMPILING] if folder is None or not any(folder.rglob("*.nbi")) else []

    def compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
        if warning and function is not _unchanged:
            _log.warning(warning.pop())
        previous = numba.config.CACHE_DIR  # `njit` reads it; other users of numba keep theirs
        numba.config.CACHE_DIR = str(folder or "")
        try:
            return numba.njit(**options)(function)
        finally:
            numba.config.CACHE_DIR = previous

    try:
        assert compile_loop(_unchanged)(1) == 1
    except Exception as error:
        message = f"numba cannot compile on this machine: {error!r}; using plain Python instead"
        warnings.warn(message, stacklevel=4)
        return _unchanged
    return compile_loop


def _unchanged(value: Any) -> Any:
    return value
