"""The state of a run as its folder tells it: finished, running, stopped, failed, interrupted."""

from __future__ import annotations

from typing import Literal

from moemesh.trace.lock import is_locked
from moemesh.trace.run import Run

#: interrupted: it ended without a word (killed, or the machine went down).
State = Literal["finished", "running", "stopped", "failed", "interrupted"]
LEASE = "lease"


def state_of(run: Run) -> State:
    """From failure.json, summary.json, the newest step, and the lock that a run at work holds."""
    if run.failure is not None:
        return "failed"
    last = run.metrics[-1].step if run.metrics else None
    ended = run.summary.get("steps")
    # A run writes its summary while it still holds the lock, and a resumed run keeps an older one.
    if ended is not None and (last is None or ended == last):
        wanted = run.num_steps
        return "stopped" if wanted is not None and ended < wanted else "finished"
    return "running" if is_locked(run.folder / LEASE) else "interrupted"
