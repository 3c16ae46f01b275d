"""Answers and help texts equal the files that a person read: a change of them shows in a diff.

``python -m tests.snapshots`` writes the files again. Refusals are in ``tests/mistakes``.
"""

from __future__ import annotations

import pytest

from tests.snapshots.cases import NAMES, path_of, text_of


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_that_were_read(name: str) -> None:
    assert text_of(name) == path_of(name).read_text(encoding="utf-8")
