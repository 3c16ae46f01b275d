"""Progress on stderr of work that takes longer than a moment."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

#: Seconds until the first line, between drawings on a terminal, and between lines elsewhere.
FIRST, REDRAW, NEXT = 1.0, 0.25, 10.0


@contextmanager
def progress(task: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Say what is being done, how far it is and for how many seconds, while inside.

    Called with a text, what is given says how far ("3 of 8"). On a terminal one line is drawn
    anew, and gone in the end; elsewhere lines follow one another, or none where `quiet`.
    """
    on_terminal, begin = sys.stderr.isatty(), time.monotonic()
    is_over, said = Event(), [""]

    def show() -> None:
        wait = FIRST
        while not is_over.wait(wait):
            line = f"moemesh: {task}{said[0]}, {time.monotonic() - begin:.0f} s"
            text, end = (f"\r{line}\x1b[K", "") if on_terminal else (line, "\n")
            print(text, end=end, file=sys.stderr, flush=True)
            wait = REDRAW if on_terminal else NEXT
        if on_terminal and wait == REDRAW:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    thread = Thread(target=show, daemon=True)
    if on_terminal or not quiet:
        thread.start()
    try:
        yield lambda text: said.__setitem__(0, f": {text}")
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
