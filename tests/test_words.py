"""Words that slow a reader down never become more."""

from __future__ import annotations

import re

import pytest

from tests import words


@pytest.mark.documents
def test_no_kind_of_word_is_above_its_ceiling() -> None:
    highest = words.ceilings()
    above = {
        f"{part} {kind}": f"{count} places, at most {highest[part][kind]}: "
        f"write {words.KINDS[kind][1]} (python -m tests.words {part} {kind})"
        for part, row in words.counts().items()
        for kind, count in row.items()
        if count > highest[part][kind]
    }
    assert not above


@pytest.mark.parametrize(
    ("kind", "counted", "legal"),
    [
        ("headless", "#: Of a step: what is sent.", "#: Bytes sent in a step."),
        ("headless", '"""What a rank holds."""', '"""Parameters of a rank."""'),
        ("speech", "# The planner is told of it.", "# The planner reads it."),
        ("behind", "# The stage behind this one.", "# The next stage."),
        ("count", "# so many ranks", "# as many as there are"),
        ("person", 'text = "nobody reads it"', 'text = "no rank reads it"'),
        ("repeat", "# computed again", "# recomputed"),
        ("standing", "# a save under way", "# a pending save"),
        ("denial", 'text = "x is no key"', 'text = "a key is required"'),
    ],
)
def test_each_kind_is_found_where_it_is_and_only_there(kind: str, counted: str, legal: str) -> None:
    expression = words.KINDS[kind][0]
    found, other = (list(words.prose_of(text + "\n")) for text in (counted, legal))
    assert any(re.search(expression, text) for _, text in found)
    assert not any(re.search(expression, text) for _, text in other)


def test_names_are_read_from_code() -> None:
    assert re.search(words.KINDS["name"][0], "found = 3")
    assert not re.search(words.KINDS["name"][0], "if found == 3:")
