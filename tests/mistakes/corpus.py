"""All mistakes, their outcomes, and the file of their messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mistakes.case import Mistake
from tests.mistakes.commands import COMMANDS
from tests.mistakes.configurations import CONFIGURATIONS
from tests.mistakes.files import prepare
from tests.mistakes.runner import Outcome
from tests.waiting import PATIENCE

MISTAKES = [*CONFIGURATIONS, *COMMANDS]
MESSAGES = Path(__file__).with_name("messages.txt")
ROOT = Path(__file__).parent.parent.parent
#: Facts of the machine in a message.
_MACHINE = re.compile(r"this machine has [0-9.]+ \w+")
_FREE = re.compile(r"[0-9.]+ \w+ \([0-9,]+ bytes\) are free")


#: The folder of the call.
_HERE = re.compile(re.escape(tempfile.gettempdir()) + r"/mistakes-\w+")


def outcomes() -> list[Outcome]:
    """Of every mistake, run in one process of its own."""
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        prepare(Path(folder))
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("MOEMESH_")
        }
        environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.mistakes.runner"],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def is_kept(mistake: Mistake, found: Outcome) -> bool:
    """Whether the message is ours word by word, and neither typer's nor that of a parser."""
    return found.err.startswith("moemesh: ") and not mistake.foreign


def messages(found: Sequence[Outcome]) -> str:
    """The commands and their messages, one after the other."""
    kept = [
        f"$ {mistake.title}\n{_without_machine(one.err)}"
        for mistake, one in zip(MISTAKES, found, strict=True)
        if is_kept(mistake, one)
    ]
    return "\n".join(kept)


def _without_machine(text: str) -> str:
    """A message without the facts of the machine that it was printed on."""
    return _HERE.sub(
        "/HERE", _FREE.sub("N GiB are free", _MACHINE.sub("this machine has N GiB", text))
    )
