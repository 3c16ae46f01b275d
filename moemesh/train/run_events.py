"""Events of a run: what the console says besides steps, kept in ``events.jsonl``."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime

from moemesh.train.run_folder import RunFolder
from moemesh.watch.slow_rank import SlowRank

FILE = "events.jsonl"


class Events:
    """Appends an event a line; those that a full disk does not take wait in memory."""

    def __init__(self, folder: RunFolder | None) -> None:
        """`folder` None: nothing is kept (every rank but the first)."""
        self._log = None if folder is None else folder.row_log(FILE)

    def add(self, kind: str, text: str, step: int | None = None) -> None:
        """`kind`: a word such as "alarm"; `step`: the last one that was finished."""
        if self._log is None:
            return
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self._log.append([{"time": time, "step": step, "kind": kind, "text": text}])


def tell_slow(slow: SlowRank, events: Events) -> None:
    """One line on stderr and an event; the run goes on."""
    events.add("slow_rank", str(slow), slow.step)
    with suppress(OSError, ValueError):
        print(f"moemesh: {slow}", file=sys.stderr, flush=True)
