"""Locked files: whether a process at work holds one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock of `file`; not of one that cannot be opened.

    It is asked for by a shared lock, for a moment, which others that ask do not take for an owner.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
