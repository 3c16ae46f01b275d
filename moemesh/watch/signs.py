"""Signs of ranks: what a supervisor sees of one at one moment, and what the rank has told."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moemesh.watch.word_file import Word

#: A rank that leaves as intended is gone within this, or is ended.
END_SECONDS = 120.0
#: In the place of an exit code: the process is gone, and only its parent knows how.
GONE = 256
_PEER_GONE = ("closed by peer", "reset by peer", "broken pipe")


@dataclass(frozen=True, kw_only=True)
class Told:
    """An exception that a rank told of before it left. ``at``: monotonic seconds of this host.

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

    ``state``: the letter of the kernel, "" where it is not known or the rank has moved since the
    look before; ``cpu_seconds``: of all its threads, where the state is known. ``word`` None: it
    has not come as far as to write one.
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

    def has_left(self, now: float) -> bool:
        """Whether it has ended, or has said so long ago that it will: NCCL may never come back from
        taking its communicators down."""
        if self.exit_code is not None:
            return True
        return self.is_done and self.word is not None and now - self.word.moved > END_SECONDS

    @property
    def code(self) -> int | None:
        """The exit code that it ended with, or has said it will end with."""
        if self.exit_code is None and self.is_done and self.word is not None:
            return self.word.code
        return self.exit_code

    @property
    def has_failed(self) -> bool:
        """Whether it is a sign of a failure, its own or another rank's."""
        if self.is_done:
            return False
        return self.told is not None or self.exit_code is not None

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether it told of an error of gloo's that a peer's end brings, inside of an operation or
        where it started one."""
        text = self.told.message.lower() if self.told is not None else ""
        return "gloo" in text and any(word in text for word in _PEER_GONE)

    @property
    def is_inside(self) -> bool:
        """Whether it waits, or was waiting when it failed, in an operation of several ranks."""
        return self.word is not None and self.word.inside


@dataclass(frozen=True, kw_only=True)
class LostHost:
    """Another host of the run, `name` with `ranks`, whose kernel does not answer."""

    name: str
    ranks: tuple[int, ...]


def weakness(one: Seen, *, aborts_follow: bool = False) -> int:
    """0: surely a cause; 1: likely one; 2: may have followed from another rank's end.

    `aborts_follow`: a watchdog of the backend aborts ranks whose peers do not come, wherever their
    hosts are.
    """
    if one.exit_code is not None and one.exit_code < 0:
        if -one.exit_code != signal.SIGABRT:
            return 0
        return 2 if one.is_inside or aborts_follow else 0
    if one.exit_code is not None and one.told is None:
        # Whoever meets the end of another rank tells of an exception before it leaves.
        return 0 if one.exit_code == GONE else 1
    if one.has_lost_a_peer:
        return 2
    # An error of its own device comes up where the host waits for it.
    return 2 if one.is_inside and one.word is not None and not one.word.on_device else 1
