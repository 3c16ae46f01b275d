"""The page of the seed texts: every command in its tables does the described work."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.documents import ROOT, text_of
from tests.test_cli import Invoke

pytestmark = pytest.mark.documents

COMMANDS = tuple(dict.fromkeys(re.findall(r"`moemesh ([a-z][^`]*)`", text_of("docs/seeds.md"))))


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_run(
    command: str,
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    golden = json.loads((ROOT / "tests/golden/seed_examples.json").read_text())
    (tmp_path / "loads.json").write_text(json.dumps(golden["expert_balance"]["loads"]))
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke(*shlex.split(command))
    assert code == 0, err
    assert out.strip()
