"""Terminal output of all verbs: tables, ranges of numbers, progress of long tasks."""

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import Event, Thread

from moemesh.config.limits import drawn_on, visible


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, wraps: bool = True
) -> str:
    """Table as text: rows under a header, two blanks between columns, no trailing blanks.

    The first `left` columns are aligned to the left (names), all others to the right (numbers). On
    a narrow terminal cells are wrapped; a file or pipe, and a caller with `wraps` False, gets one
    line per row.
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if wraps and sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        if sum(widths) + 2 * (len(widths) - 1) > columns:
            # Late: the import of rich takes a tenth of a second.
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text

            drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for number, name in enumerate(header):
                drawn.add_column(Text(name), justify="left" if number < left else "right")
            for line in lines[1:]:
                drawn.add_row(*map(Text, line))  # Text: a cell such as "[red]" is not markup
            console = Console(width=columns, color_system=None)
            with console.capture() as captured:
                console.print(drawn)
            return "\n".join(line.rstrip() for line in captured.get().splitlines())
    sides = [str.ljust if number < left else str.rjust for number in range(len(widths))]
    return "\n".join(
        "  ".join(side(*cell) for side, *cell in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    )


def with_texts(table: str, texts: Iterable[str]) -> str:
    """A table with one of `texts`, of any length, after each of its lines, header included."""
    lines = table.split("\n")
    width = max(map(len, lines))
    pairs = zip(lines, texts, strict=True)
    return "\n".join(f"{line:{width}}  {text}" for line, text in pairs)


#: Columns of a line of sentences.
WIDTH = 80


def wrapped(line: str, indent: str = "    ") -> list[str]:
    """The line wrapped to :data:`WIDTH` columns; longer words are not broken."""
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def folded(
    command: str, width: int = WIDTH, indent: str = "  ", kept: str = " (?!--)"
) -> list[str]:
    """A command in lines of at most `width` columns, joined by backslashes. No line ends at a blank
    that the pattern `kept` matches; by default lines end only before options."""
    parts = textwrap.wrap(
        re.sub(kept, "\0", command),
        width - 2,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    *first, last = (part.replace("\0", " ") for part in parts)
    return [*(f"{part} \\" for part in first), last]


def interval(numbers: range) -> str:
    """Consecutive numbers: ``0-3``, ``5``, or ``-`` for none."""
    if not numbers:
        return "-"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as short text: ``0-3``, ``0 4 8 12``, ``0 8 ... 504``."""
    if not numbers:
        return "-"
    steps = {later - number for number, later in pairwise(numbers)}
    if steps <= {1}:
        return interval(range(numbers[0], numbers[-1] + 1))
    if len(numbers) > 6 and len(steps) == 1:
        return f"{numbers[0]} {numbers[1]} ... {numbers[-1]}"
    return " ".join(map(str, numbers))


#: Seconds until the first line, between drawings on a terminal, and between lines elsewhere.
FIRST, REDRAW, NEXT = 1.0, 0.25, 10.0


@contextmanager
def progress(task: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Context that prints a task, its progress and its seconds.

    Yields a function that sets the progress ("3 of 8"). On a terminal one line is redrawn, and
    erased at the end; elsewhere lines are appended, or none with `quiet`.
    """
    on_terminal, begin = sys.stderr.isatty(), time.monotonic()
    is_over, state = Event(), [""]

    def show() -> None:
        wait = FIRST
        while not is_over.wait(wait):
            line = f"moemesh: {task}{state[0]}, {time.monotonic() - begin:.0f} s"
            text, end = (f"\r{visible(line)}\x1b[K", "") if on_terminal else (line, "\n")
            print(text, end=end, file=drawn_on(sys.stderr), flush=True)
            wait = REDRAW if on_terminal else NEXT
        if on_terminal and wait == REDRAW:
            print("\r\x1b[K", end="", file=drawn_on(sys.stderr), flush=True)

    thread = Thread(target=show, daemon=True)
    if on_terminal or not quiet:
        thread.start()
    try:
        yield lambda text: state.__setitem__(0, f": {text}")
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
