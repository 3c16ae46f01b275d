"""Every mistake ends in one message, exit code 2, within a second and without torch.

All cases run in one process of their own, which cannot import torch; a handful run as a user would
run them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.mistakes.cases import FOREIGN, KEPT, MESSAGES, MISTAKES, Mistake, messages, outcomes
from tests.mistakes.files import prepare
from tests.mistakes.runner import Outcome
from tests.waiting import ended

#: Seconds of CPU that a message may take: reading, checking and printing.
SECONDS = 1.0


@pytest.fixture(scope="module")
def results() -> list[Outcome]:
    return outcomes(commands.python())


def test_every_mistake_is_one_message_and_exit_code_2(results: list[Outcome]) -> None:
    wrong = [
        (mistake.title, one)
        for mistake, one in zip(MISTAKES, results, strict=True)
        if one.code != 2 or one.out or not one.err or "Traceback" in one.err
    ]
    assert not wrong, wrong[:3]


def test_messages_are_those_that_were_read(results: list[Outcome]) -> None:
    assert len(KEPT) >= 500 and len({mistake.title for mistake in MISTAKES}) == len(MISTAKES)
    written = MESSAGES.read_text(encoding="utf-8")
    assert messages(results) == written, "python -m tests.mistakes, then read what changed"
    assert all(one.err.startswith("moemesh: ") for one in results[: len(KEPT)])


def test_foreign_messages_name_what_was_given(results: list[Outcome]) -> None:
    wrong = [
        (mistake.title, missing, one.err)
        for mistake, one in zip(FOREIGN, results[len(KEPT) :], strict=True)
        if (missing := [word for word in mistake.words if word not in one.err])
    ]
    assert not wrong, wrong[:3]
    assert all(mistake.words for mistake in FOREIGN)


def test_a_problem_that_can_be_mended_by_a_rule_has_a_fix(results: list[Outcome]) -> None:
    kinds = "wrong-type|not-a-choice|missing|unknown-key|unknown-option|not-divisible"
    bare = re.compile(rf"\[({kinds})\]\n(?!    fix: .)")
    assert not [one.err for one in results if bare.search(one.err)]


def test_a_mistake_takes_less_than_a_second_and_writes_nothing(results: list[Outcome]) -> None:
    outcomes_of = list(zip(MISTAKES, results, strict=True))
    slow = [(mistake.title, one.seconds) for mistake, one in outcomes_of if one.seconds > SECONDS]
    assert not slow
    wrote = [(mistake.title, one.left) for mistake, one in outcomes_of
             if one.left and not mistake.found_late]  # fmt: skip
    assert not wrote


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --set data.path=none", "data.path none"),
        ("launch --slurm --k8s", "--torchrun"),
    ],
)
def test_a_mistake_of_a_user(command: str, words: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    given = [Path(sys.executable).parent / "moemesh", *Mistake(command).arguments]
    done = ended(given, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
