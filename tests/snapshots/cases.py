"""Stored answers: a file a verb, each command line followed by its output.

A case is a line ``$ moemesh ...`` in one of the files; the lines below it are the answer.
``help.txt`` has every verb, and ``validate.txt`` the predictions of a small table of measured runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from moemesh import cli
from moemesh.cli.application import app
from tests.planner.published_rows import write_table
from tests.sandbox import ROOT

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))
#: Files whose text is made as a whole; the others hold commands and their answers.
WHOLE = ("help", "validate")
#: Digits of a number that are kept: libraries round the last ones by the processor.
DIGITS = 9
#: A key whose number is the time that a search took.
_OWN_SECONDS = ("wall_seconds",)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def text_of(name: str) -> str:
    """The content that the file would have now."""
    if name == "help":
        return "\n".join(f"$ moemesh {verb} --help\n{help_of(verb)}" for verb in verbs())
    if name == "validate":
        return validation()
    return "".join(f"$ moemesh {command}\n{answer(command)}\n" for command in kept(name))


def kept(name: str) -> dict[str, str]:
    """Command line -> answer, of the commands in the file."""
    parts = path_of(name).read_text(encoding="utf-8").split("$ moemesh ")[1:]
    return {line: answer for line, _, answer in (part.partition("\n") for part in parts)}


def verbs() -> list[str]:
    """Every verb, and every group of verbs, by its words."""
    cli.import_verbs()
    names, waiting = [], [("", get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        names.append(name)
        waiting += [(f"{name} {k}".strip(), v) for k, v in getattr(command, "commands", {}).items()]
    return sorted(names)


def help_of(verb: str) -> str:
    return printed([*verb.split(), "--help"])


def validation() -> str:
    """Predictions of measured runs, and their errors."""
    with tempfile.TemporaryDirectory() as folder:
        table, rows = write_table(Path(folder)), Path(folder) / "rows.json"
        text = printed(["validate", str(table), "--json", str(rows)]).replace(folder, ".")
        return f"{text}{shown(json.loads(rows.read_text()))}\n"


def answer(command: str) -> str:
    """The JSON that a command prints, as :func:`shown`. Files are those of the checkout."""
    words = [str(ROOT / word) if word.startswith("tests/") else word for word in command.split()]
    return shown(json.loads(printed([*words, "--json"])))


def printed(words: list[str]) -> str:
    """The standard output of a command that ends with exit code 0."""
    cli.import_verbs()
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, (words, result.output)
    return result.stdout


def shown(value: dict[str, Any]) -> str:
    """One key a line; a long value is folded at its own keys."""
    return "\n".join(_lines(_rounded(value), 1))


def _lines(value: Any, depth: int) -> Iterator[str]:
    text = json.dumps(value)
    if len(text) <= 160 or not isinstance(value, dict | list):
        yield "  " * depth + text
        return
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        head, inside = "  " * depth + f"{key}:", list(_lines(one, depth + 1))
        yield from [f"{head} {inside[0].strip()}"] if len(inside) == 1 else [head, *inside]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items() if key not in _OWN_SECONDS}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
