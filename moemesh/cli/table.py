"""The one look of all tables that verbs print."""

import shutil
import sys
from collections.abc import Iterable, Sequence

#: Where the output is no terminal, no row is wrapped: a reader may cut columns by blanks.
_WIDEST = 10_000


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Rows of text under a header, two blanks between columns, no blanks at the end of a line.

    The first `left` columns are aligned to the left (names), all others to the right (numbers). On
    a terminal that is too narrow, cells are wrapped.
    """
    # rich takes a twentieth of a second: only verbs that print a table wait for it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(header):
        drawn.add_column(Text(name), justify="left" if number < left else "right")
    for row in rows:
        drawn.add_row(*map(Text, row))  # Text: a cell such as "[red]" is no markup
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDEST
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
