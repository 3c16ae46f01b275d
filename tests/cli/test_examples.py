"""Examples in the help: lines that can be copied, none wider than a terminal of 80 columns."""

from __future__ import annotations

import shlex

import typer
from typer.testing import CliRunner

from moemesh.cli import import_verbs
from moemesh.cli.application import app, with_examples

LONG = "moemesh plan --model m --cluster dgx_h100 --set data.path='a b' --out /shared/runs/a -v x"


def test_a_long_command_goes_on_behind_a_backslash_and_options_keep_their_values() -> None:
    kept = with_examples(f"One line.\n\n    Example:\n\n        {LONG}\n    ")
    _, _, example = kept.split("\n\n")
    mark, *lines = example.splitlines()
    assert mark == "\b" and len(lines) == 2
    assert all(len(line) <= 76 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(LONG)
    assert lines[0].endswith(" \\") and not lines[1].endswith("\\")
    assert not lines[0].removesuffix(" \\").split()[-1].startswith("-")


def test_each_command_of_an_example_has_its_own_line() -> None:
    kept = with_examples("Do.\n\nExample:\n\n    first --a \\\n        --b\n    second")
    assert kept.split("\n\n")[2] == "\b\n    first --a --b\n    second"


def test_every_verb_fits_into_eighty_columns() -> None:
    import_verbs()
    command = typer.main.get_command(app)
    runner = CliRunner()
    for name in command.commands:  # type: ignore[attr-defined]
        text = runner.invoke(app, [name, "--help"], terminal_width=80).output
        assert "Usage:" in text and max(map(len, text.splitlines())) <= 80, name
