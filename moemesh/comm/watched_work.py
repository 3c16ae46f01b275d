"""Work of the backend whose waits are shown in the rank's progress word."""

from __future__ import annotations

from typing import Any

from moemesh.watch import progress_words
from moemesh.watch.progress_words import Ticket


class WatchedWork:
    """As the work it wraps; :meth:`wait` says in the progress word what is waited for."""

    def __init__(self, work: Any, ticket: Ticket) -> None:
        self._work, self._ticket = work, ticket

    def wait(self) -> None:
        """Wait for the end of the operation."""
        progress_words.waiting(self._ticket)
        self._work.wait()
        progress_words.left()

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self._work.is_completed()


def watched(work: Any, ticket: Ticket | None) -> Any:
    """`work` itself where no progress word is written, or where there is no work."""
    return work if ticket is None or work is None else WatchedWork(work, ticket)
