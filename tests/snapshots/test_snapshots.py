"""Answers and help texts equal the files that a person read: a change of them shows in a diff.

``python -m tests.snapshots`` regenerates the files, and ``-m "slow or not slow"`` compares all of
them. Refusals are in ``tests/mistakes``.
"""

from __future__ import annotations

import pytest

from tests.snapshots.cases import NAMES, WHOLE, answer, kept, path_of, text_of

#: Verbs that search: every n-th of their commands runs by default, the others are slow.
EVERY = {"plan": 8, "estimate": 6, "partition": 4, "balance": 2, "schedule": 2, "layout": 2}
ANSWERS = [
    pytest.param(
        name, command, id=command, marks=[pytest.mark.slow] * bool(number % EVERY.get(name, 1))
    )
    for name in NAMES
    if name not in WHOLE
    for number, command in enumerate(kept(name))
]


@pytest.mark.parametrize("name", WHOLE)
def test_helps_and_predictions_are_those_that_were_read(name: str) -> None:
    assert text_of(name) == path_of(name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "command"), ANSWERS)
def test_answers_are_those_that_were_read(name: str, command: str) -> None:
    assert f"{answer(command)}\n" == kept(name)[command]
