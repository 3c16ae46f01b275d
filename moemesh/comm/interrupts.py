"""Words and times of Ctrl-C: an answer at once, and an end at the second one."""

from __future__ import annotations

import sys
from contextlib import suppress

#: Signals closer together than this are one key that bounced.
SAME_KEY_SECONDS = 0.2
STOPPING_SOON = "stopping; press Ctrl-C again to stop now"
STOPPING = "stopping after this step, and saving; press Ctrl-C again to stop now"
STOPPING_NOW = "stopping now, without saving"


def say(text: str) -> None:
    """One line on stderr, below the terminal's own ``^C``."""
    with suppress(OSError, ValueError):
        print(f"\nmoemesh: {text}", file=sys.stderr, flush=True)
