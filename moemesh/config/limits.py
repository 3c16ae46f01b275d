"""Limits of text that is read from files, and escapes of characters for terminals."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

#: Characters of the longest accepted JSON text; files of runs and models are far below it.
LARGEST_JSON = 1 << 29
#: A key of more than a hundred parts; tomllib's time grows with the square of their number.
_LONG_KEY = re.compile(r"""(?<![\w"'.-])(?:[\w"'-]+[ \t]*\.[ \t]*){100}""")
#: Characters that control a terminal (C0, C1), end a line, or change the direction of text, except
#: tabs and line feeds, which text has.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def parse_json(text: str | bytes, *, last_counts: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError if it is invalid, too long or too deep, and for
    an object with a key twice, of which readers use different values; with `last_counts` the last
    one counts, as in the json of Python."""
    if len(text) > LARGEST_JSON:
        raise ValueError(f"longer than {LARGEST_JSON:,} characters")
    try:
        return json.loads(text, object_pairs_hook=None if last_counts else _once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`. Raises ValueError for a repeated key."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name} is repeated")
            seen.add(name)
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError for invalid TOML, and for a text that is nested
    too deeply or has a key of too many parts."""
    if match := _LONG_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise ValueError(f"a key has more than 100 parts (at line {line}, column 1)")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def visible(text: str) -> str:
    """`text` with escapes in place of control characters, except tabs and line feeds."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """:func:`visible`, with line ends escaped, too."""
    return visible(text).replace("\n", "\\n")


def few(texts: Iterable[object], most: int) -> str:
    """The first `most` of the texts with commas between them, then "..." for the rest.

    >>> few(range(3), 2), few("ab", 2)
    ('0, 1, ...', 'a, b')
    """
    words = list(map(str, texts))
    return ", ".join([*words[:most], *["..."] * (len(words) > most)])


class VisibleText(TextIOWrapper):
    """Replacement of `stream` that escapes control characters (:func:`visible`), since text that a
    verb prints may come from a file. Verbs write coloured text to `stream` itself
    (:func:`drawn_on`)."""

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            stream.encoding,
            "backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self.stream = stream

    def write(self, text: str) -> int:
        with self._naming():
            return super().write(visible(text))

    def flush(self) -> None:
        with self._naming():
            super().flush()

    @contextmanager
    def _naming(self) -> Generator[None]:
        """Context that adds the name of the stream to an OSError, as a file adds its path."""
        try:
            yield
        except OSError as error:
            error.filename = self.name
            raise


def drawn_on(stream: Any) -> Any:
    """The stream below a :class:`VisibleText`, for coloured text that is escaped already."""
    stream.flush()
    return getattr(stream, "stream", stream)
