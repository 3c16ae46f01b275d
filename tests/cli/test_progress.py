"""Lines of progress: soon, on stderr, gone from a terminal, none if quiet without a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from moemesh import cli
from moemesh.cli import terminal as module
from moemesh.cli.application import app
from moemesh.cli.terminal import progress
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import plan_named


class Stream(io.StringIO):
    """A stderr that is a terminal or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "shown"),
    [(True, False, True), (True, True, True), (False, False, True), (False, True, False)],
)
def test_who_sees_progress(
    is_terminal: bool, quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST", 0.01)
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("working", quiet=quiet) as update:
        update("3 of 8")
        deadline = time.monotonic() + (20 if shown else 0.1)
        while "3 of 8" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    text = stream.getvalue()
    assert ("moemesh: working: 3 of 8, 0 s" in text) == shown
    assert text.endswith("\r\x1b[K") == is_terminal
    assert is_terminal or not text or text.endswith("\n")


def test_a_mistake_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal=True))
    with pytest.raises(ValueError, match="no"), progress("working"):
        raise ValueError("no")


class Once:
    """A thread that is over when it is started, and the event of a wait that ends once."""

    ident = None

    def __init__(self, target: Callable[[], None] | None = None, **_: object) -> None:
        self.target, self.answers = target, [True, False]

    def start(self) -> None:
        assert self.target is not None
        self.target()

    def wait(self, _: float) -> bool:
        return self.answers.pop()

    def set(self) -> None:
        pass


@pytest.mark.parametrize(
    "words",
    [
        "plan --model tiny --cluster laptop_cpu --seq-len 64 --global-batch 8",
        "estimate --model tiny --cluster laptop_cpu --plan dp=1 --seq-len 8 --global-batch 1",
        "layout --model tiny --plan dp=2",
        "partition --model tiny --cluster laptop_cpu --global-batch 8 --seq-len 8 --stages 1",
        "schedule zb_h2 --ranks 4 --microbatches 8",
        "schedule --all --ranks 4 --microbatches 8",
    ],
)
def test_verbs_that_may_work_long_say_so(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Thread", Once)
    monkeypatch.setattr(module, "Event", Once)
    cli.import_verbs()
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0 and result.stderr.startswith("moemesh: ")
    assert "moemesh: " not in result.stdout


def test_a_search_tells_how_far_it_is() -> None:
    lines: list[str] = []
    planned = plan_named(PlanRequest("tiny", "laptop_cpu", 64, 8), progress=lines.append)
    count = f"{planned.certificate.examined:,} layouts"
    assert count in lines and any(one.startswith(f"{count}, ") for one in lines)
    assert planned.certificate.examined > 10_000
