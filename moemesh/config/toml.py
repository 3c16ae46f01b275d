"""Functions that tomllib lacks: TOML text of a value, and the line of each key in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from moemesh.config.limits import parse_toml

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

#: A token of TOML: a text, a comment, a bracket, "=", the end of a line, blanks, other characters.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # multi-line text
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}=\n]"
    r"|[ \t\r]+"
    r"|[^\s\[\]{}=#\"']+",
    re.DOTALL,
)


def format_value(value: object) -> str:
    """`value` as TOML text. Objects without a TOML form have their Python text, huge integers a
    remark."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        parts: list[str] = []
        for character in value:
            code = ord(character)
            escape = f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
            shown = character if character.isprintable() else escape
            parts.append(_ESCAPES.get(character, shown))
        return f'"{"".join(parts)}"'
    if isinstance(value, Mapping):
        table = cast("Mapping[object, object]", value)
        inner = ", ".join(f"{format_key(str(k))} = {format_value(v)}" for k, v in table.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return "[" + ", ".join(format_value(item) for item in items) + "]"
    if isinstance(value, int) and value.bit_length() > 256:
        return "(an integer of more than 75 digits)"
    return str(value)


def is_number(text: str) -> bool:
    """Whether Python reads `text` as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def unreadable(error: Exception) -> str:
    """The reason why a text is not TOML; `error` is that of decoding or of tomllib."""
    if isinstance(error, UnicodeDecodeError):
        return f"the file is not UTF-8 text: {error.reason} at byte {error.start}"
    return f"not valid TOML: {error}"


def format_key(key: str) -> str:
    """One part of a key: bare when TOML allows it, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_value(key)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The first line (from 1) of every key and table header in `text`, which tomllib has accepted.
    Keys of tables in one line have none."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    line, depth = 1, 0  # depth: open brackets of a value
    statement, in_value, start = "", False, 1  # a key or header, and its line
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "\n" and depth == 0:
            if statement.strip().startswith("["):
                table = _path(statement.strip())
                lines.setdefault(table, start)
            statement, in_value = "", False
        elif token == "=" and depth == 0 and not in_value:
            in_value = True
            lines.setdefault(table + _path(statement + "= 0"), start)
        elif in_value:
            depth += (token in "[{") - (token in "]}")
        elif not token.startswith("#"):
            if not statement.strip():
                start = line
            statement += token
        line += token.count("\n")
    if statement.strip().startswith("[") and not in_value:
        lines.setdefault(_path(statement.strip()), start)
    return lines


def _path(statement: str) -> tuple[str, ...]:
    """The parts of a key or header, read by tomllib itself."""
    node: object = parse_toml(statement)
    parts: list[str] = []
    while isinstance(node, (dict, list)) and node:
        if isinstance(node, list):
            node = cast("list[object]", node)[0]
            continue
        name, node = next(iter(cast("dict[str, object]", node).items()))
        parts.append(name)
    return tuple(parts)
