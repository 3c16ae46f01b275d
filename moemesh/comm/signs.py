"""Signs of ranks: what a supervisor sees of one at one moment, and what the rank has told."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moemesh.trace.word_file import Word


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank told of an exception before it left. ``at``: monotonic seconds of this host.

    ``facts``: more keys for the report. ``is_final``: the same would happen again (a mistake of the
    user, a training that diverged).
    """

    kind: str
    message: str
    at: float
    trace: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_final: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank at one moment. ``exit_code`` None: alive; negative: killed by that signal.

    ``state``: as in ``/proc/PID/stat``, "" where it is not known; ``cpu_seconds``: of all its
    threads. ``word`` None: it has not come as far as to write one.
    """

    rank: int
    exit_code: int | None = None
    state: str = ""
    cpu_seconds: float = 0.0
    word: Word | None = None
    told: Told | None = None

    @property
    def is_done(self) -> bool:
        """Whether it left, or is about to, as intended."""
        return self.word is not None and self.word.done

    @property
    def has_failed(self) -> bool:
        """Whether it is a sign of a failure, its own or another rank's."""
        if self.is_done:
            return False
        return self.told is not None or self.exit_code is not None

    @property
    def is_inside(self) -> bool:
        """Whether it waits, or was waiting when it failed, in an operation of several ranks."""
        return self.word is not None and self.word.inside


def weakness(one: Seen) -> int:
    """0: surely a cause; 1: likely one; 2: may have followed from another rank's end."""
    if one.exit_code is not None and one.exit_code < 0:
        return 2 if -one.exit_code == signal.SIGABRT and one.is_inside else 0
    return 2 if one.is_inside else 1
