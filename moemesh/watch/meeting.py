"""The folder in which ranks of one machine meet whoever watches them: words, exceptions, stacks."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moemesh.trace.machine import SHARED_MEMORY
from moemesh.trace.state import is_locked
from moemesh.watch.signs import Told

WORDS, STORE, LOCK = "words", "store", "lock"
#: A rank writes the stacks of its threads when it gets this signal.
STACK_SIGNAL = signal.SIGUSR2
PREFIX = "moemesh-"
#: For exceptions, stacks, and the store in which ranks find one another.
_ROOM_BYTES = 1 << 20


@contextmanager
def meeting_place(num_bytes: int = 0) -> Iterator[Path]:
    """A private folder in shared memory, or in the folder for temporary files where that has no
    room for `num_bytes`; removed at the end.

    One that a killed supervisor has left is removed by the next: its lock is free.
    """
    parent = shared_memory()
    _sweep(parent)
    if shutil.disk_usage(parent).free < num_bytes + _ROOM_BYTES:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    handle = lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def shared_memory() -> Path:
    """The parent of ranks' folders: in memory, or among temporary files."""
    is_there = os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if is_there else Path(tempfile.gettempdir())


def lock(folder: Path) -> int:
    """Lock a new folder; it stays so until the handle that is returned is closed."""
    handle = os.open(folder / "locking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / "locking", folder / LOCK)  # others see it only when it is locked
    return handle


def has_supervisor(folder: Path) -> bool:
    """Whether the supervisor of a folder lives."""
    return is_locked(folder / LOCK)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            if (folder / LOCK).exists() and not has_supervisor(folder):
                shutil.rmtree(folder, ignore_errors=True)


def told_file(folder: Path, rank: int) -> Path:
    """The file in which a rank tells of its exception."""
    return folder / f"told-{rank}.json"


def stack_file(folder: Path, rank: int) -> Path:
    """The file into which a rank writes its stacks."""
    return folder / f"stacks-{rank}"


def torchrun_file(folder: Path, rank: int) -> Path:
    """The file in which a rank says which file torchrun shows as its error."""
    return folder / f"torchrun-{rank}"


def write_told(folder: Path, rank: int, told: dict[str, Any]) -> None:
    """Tell of an exception, once; the supervisor may look while this is written."""
    file = told_file(folder, rank)
    if file.exists():
        return
    temporary = file.with_suffix(".tmp")
    with suppress(OSError):
        temporary.write_text(json.dumps(told, default=str))
        os.replace(temporary, file)


def read_told(folder: Path, rank: int) -> Told | None:
    """The exception that a rank has told of, if it has."""
    try:
        return Told(**json.loads(told_file(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None
