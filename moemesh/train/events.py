"""Events of a run: what the console says besides steps, kept in ``events.jsonl``."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

from moemesh.train.folder import RunFolder

FILE = "events.jsonl"


class Events:
    """Appends an event a line. A full disk stops no run: the console still says it."""

    def __init__(self, folder: RunFolder | None) -> None:
        """`folder` None: nothing is kept (every rank but the first)."""
        self._folder = folder

    def add(self, kind: str, text: str, step: int | None = None) -> None:
        """`kind`: a word such as "alarm"; `step`: the last one that was finished."""
        if self._folder is None:
            return
        time = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            self._folder.append(FILE, {"time": time, "step": step, "kind": kind, "text": text})
