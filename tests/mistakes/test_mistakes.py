"""Every mistake ends in one message, exit code 2, within a second and without torch.

All cases run in one process of their own, which cannot import torch; a handful run as a user would
run them. ``messages.txt`` keeps what is printed, for a reader: ``python -m tests.mistakes`` writes
it again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mistakes.case import Mistake
from tests.mistakes.corpus import MESSAGES, MISTAKES, is_kept, messages, outcomes
from tests.mistakes.files import prepare
from tests.mistakes.runner import Outcome
from tests.waiting import PATIENCE

#: Seconds of CPU that a message may take: reading, checking and printing.
SECONDS = 1.0


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return outcomes()


def test_every_mistake_is_one_message_and_exit_code_2(found: list[Outcome]) -> None:
    wrong = [
        (mistake.title, one)
        for mistake, one in zip(MISTAKES, found, strict=True)
        if one.code != 2 or one.out or not one.err or "Traceback" in one.err
    ]
    assert not wrong, wrong[:3]


def test_every_message_names_key_value_and_nearest_choice(found: list[Outcome]) -> None:
    wrong = [
        (mistake.title, missing, one.err)
        for mistake, one in zip(MISTAKES, found, strict=True)
        if (missing := [word for word in mistake.words if word not in one.err])
    ]
    assert not wrong, wrong[:3]
    assert all(mistake.words for mistake in MISTAKES)


def test_a_problem_that_can_be_mended_by_a_rule_has_a_fix(found: list[Outcome]) -> None:
    kinds = "wrong-type|not-a-choice|missing|unknown-key|unknown-option|not-divisible"
    bare = re.compile(rf"\[({kinds})\]\n(?!    fix: .)")
    assert not [one.err for one in found if bare.search(one.err)]


def test_a_message_takes_less_than_a_second(found: list[Outcome]) -> None:
    slow = [
        (mistake.title, one.seconds)
        for mistake, one in zip(MISTAKES, found, strict=True)
        if one.seconds > SECONDS
    ]
    assert not slow


def test_a_mistake_writes_nothing(found: list[Outcome]) -> None:
    wrote = [
        (mistake.title, one.left)
        for mistake, one in zip(MISTAKES, found, strict=True)
        if one.left and not mistake.found_late
    ]
    assert not wrote


def test_messages_are_those_that_were_read(found: list[Outcome]) -> None:
    kept = sum(is_kept(*pair) for pair in zip(MISTAKES, found, strict=True))
    assert len(MISTAKES) >= 200 and kept >= 100
    assert len({mistake.title for mistake in MISTAKES}) == len(MISTAKES)
    written = MESSAGES.read_text(encoding="utf-8")
    assert messages(found) == written, "python -m tests.mistakes, then read what changed"


@pytest.mark.parametrize(
    "mistake",
    [
        mistake
        for mistake in MISTAKES
        if mistake.command
        in (
            "train --set data.path=none",
            "config check --set plan.tp=3",
            "generate none --prompt a",
            "launch --slurm --k8s",
        )
    ],
    ids=lambda mistake: mistake.command,
)
def test_a_mistake_of_a_user(mistake: Mistake, tmp_path: Path) -> None:
    prepare(tmp_path)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "moemesh"), *mistake.arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert all(word in done.stderr for word in mistake.words)
