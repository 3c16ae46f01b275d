"""The state of a run as its folder tells it: finished, running, stopped, failed, interrupted."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Literal

from moemesh.trace.run import Run

# Locked files: whether a process at work holds one.


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


#: interrupted: it ended without a word (killed, or the machine went down).
State = Literal["finished", "running", "stopped", "failed", "interrupted"]
LEASE = "lease"


def state_of(run: Run) -> State:
    """State by failure.json, summary.json, the newest step, and the lock of a run at work."""
    if run.failure is not None:
        return "failed"
    last = run.metrics[-1].step if run.metrics else None
    ended = run.summary.get("steps")
    # A run writes its summary while it still holds the lock, and a resumed run keeps an older one.
    if ended is not None and (last is None or ended == last):
        wanted = run.num_steps
        return "stopped" if wanted is not None and ended < wanted else "finished"
    return "running" if is_locked(run.folder / LEASE) else "interrupted"
