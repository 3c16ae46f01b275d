"""Compiles the inner loops with numba where it is installed; without it the same Python runs.

An inner loop is a plain Python function over numpy arrays, marked with :func:`inner_loop`. The
compiled form is made from the same source and does the same IEEE operations in the same order (no
fast math, no library sums, stable sorts), so that both give equal results, bit for bit.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Generator, Iterator
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

_marked: dict[str, types.FunctionType] = {}
_entries: set[str] = set()
_compiled: dict[str, Callable[..., Any]] = {}
_lock = threading.Lock()
_plain: ContextVar[bool] = ContextVar("plain inner loops", default=False)


def inner_loop(function: Function) -> Function:
    """Mark a function as an inner loop. It may call numpy and other inner loops only."""
    assert isinstance(function, types.FunctionType)
    assert function.__name__ not in _marked, function.__name__
    _marked[function.__name__] = function
    return function  # pyright: ignore[reportReturnType]


def entry(function: Function) -> Function:
    """Mark an inner loop that Python calls, through :func:`fast`."""
    _entries.add(function.__name__)
    return inner_loop(function)


@contextmanager
def plain_loops() -> Generator[None]:
    """Run inner loops as plain Python here: for small problems that are not worth a compiler."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def fast(function: Function) -> Function:
    """The form of an inner loop to call: compiled, or itself where that cannot be had.

    The first call in a process loads the compiled code from the user's cache folder, or compiles it
    (seconds, once a machine and version).
    """
    assert function.__name__ in _entries, function.__name__
    if _plain.get():
        return function
    with _lock:
        if not _compiled:
            _compiled.update(_compile_all() or _marked)
    return _compiled[function.__name__]  # type: ignore[return-value]


def is_compiled() -> bool:
    """Whether :func:`fast` gives compiled code here."""
    return fast(_probe) is not _probe


@entry
def _probe(value: int) -> int:
    return value + 1


def _compile_all() -> dict[str, Callable[..., Any]] | None:
    """Every marked function, compiled when it is first called; None where numba does not work."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    reason = None
    for folder in (*_cache_folders(numba), None):
        try:
            loops = _jit(numba, folder)
            assert loops["_probe"](1) == 2  # compiles, and writes to the cache
        except Exception as error:
            reason = error
            continue
        return loops
    warnings.warn(f"numba cannot compile here ({reason!r}): plain Python instead", stacklevel=4)
    return None


def _jit(numba: Any, cache: Path | None) -> dict[str, Callable[..., Any]]:
    """Compiled copies of all marked functions that call each other, not the plain ones."""
    previous = numba.config.CACHE_DIR
    compiled: dict[str, Callable[..., Any]] = {}
    names: list[dict[str, Any]] = []
    try:
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            numba.config.CACHE_DIR = str(cache)
        for name, function in _marked.items():
            own = dict(function.__globals__)
            names.append(own)
            copy = types.FunctionType(function.__code__, own, name, function.__defaults__)
            copy.__module__ = function.__module__
            options: dict[str, Any] = {"cache": cache is not None, "error_model": "numpy"}
            if name in _entries:
                options["nogil"] = True
            else:
                # Only compiled code calls it: no way in from Python is needed (compiles faster).
                options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
            compiled[name] = numba.njit(copy, **options)
    finally:
        numba.config.CACHE_DIR = previous
    # Only now, when all exist: whoever calls a marked function calls its compiled form.
    for own in names:
        own.update((name, loop) for name, loop in compiled.items() if name in own)
    return compiled


def _cache_folders(numba: Any) -> Iterator[Path]:
    """Where compiled code may be kept, best first.

    The folder's name holds a hash of all sources: numba itself looks only at the file of the
    function, and would keep calling an old version of what that calls.
    """
    files = {function.__code__.co_filename for function in _marked.values()}
    text = b"".join(Path(file).read_bytes() for file in sorted(files))
    version = f"{numba.__version__} {np.__version__} {sys.version}".encode()
    name = f"moemesh-{hashlib.sha256(text + version).hexdigest()[:16]}"
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR) / name
    with suppress(RuntimeError):
        yield Path.home() / ".cache" / "moemesh" / name
    owner = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"moemesh-{owner}"
    # Code of another user must not be run: in a shared folder anyone may have made this one.
    if not folder.exists() or (not hasattr(os, "getuid") or folder.stat().st_uid == owner):
        yield folder / name
