"""The table of all verbs: aligned, no trailing blanks, wrapped only on a narrow terminal."""

from __future__ import annotations

import sys

import pytest

from moemesh.cli.terminal import table

ROWS = [("all_to_all", "1.5", ""), ("[red]", "120.25", "x")]


def test_names_left_numbers_right_and_no_trailing_blanks() -> None:
    assert table(("name", "ms", "note"), ROWS).splitlines() == [
        "name            ms  note",
        "all_to_all     1.5",
        "[red]       120.25     x",
    ]
    assert table(("a", "b"), [("1", "22")], left=0).splitlines() == ["a   b", "1  22"]
    assert table(("a",), []) == "a"


def test_only_a_terminal_that_is_too_narrow_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a name of many words", "1.0", "some words to wrap")]
    header = ("name", "ms", "note")
    monkeypatch.setenv("COLUMNS", "30")
    assert len(table(header, rows).splitlines()) == 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = table(header, rows).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 30
    assert all(line == line.rstrip() for line in lines) and "1.0" in "".join(lines)
    assert len(table(header, rows, wraps=False).splitlines()) == 2
