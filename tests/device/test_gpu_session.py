"""`make gpu` names commands that exist and plans that the GPUs at hand can run."""

import sys
from typing import Any

import pytest
import typer.main

from moemesh import cli
from moemesh.cli.application import app
from moemesh.config.trainable import refusals
from moemesh.sharding.load_run import load_run
from tests.gpu_session import commands, main, plans, run, sanitized
from tests.sandbox import ROOT


def parse(words: list[str]) -> None:
    """Read a command line as the verb does, without running it."""
    cli.import_verbs()
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands"), f"no verb: {words}"
    command.make_context(command.name, list(words))


@pytest.mark.parametrize(
    "num_gpus", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_every_command_can_be_run_on_so_many_gpus(num_gpus: int) -> None:
    assert cli.USER_ERROR == 2
    session = commands(num_gpus)
    assert len({one.name for one in session}) == len(session)
    for one in session:
        if one.arguments[0] == "moemesh":
            parse(one.words[1:])
        if one.arguments[:2] == ("moemesh", "train"):
            config = load_run([], one.settings, {}).config
            assert config.plan.layout.world_size <= num_gpus
            assert config.train.device == "cuda" and not refusals(config)


def test_several_gpus_run_what_one_cannot() -> None:
    assert set(plans(1)) == {"one", "exact"}
    assert {"all_to_all", "zero3", "dualpipe", "context ring", "tp"} <= set(plans(2))
    assert {"hierarchical", "pp and ep"} <= set(plans(8)) - set(plans(2))
    assert {one.name for one in commands(2)} > {"links", "resume", "generate", "evaluate"}


def test_the_report_goes_on_behind_a_failure(tmp_path: Any) -> None:
    with (tmp_path / "report.txt").open("w") as report:
        assert run(report, "fails", [sys.executable, "-c", "print('here'); exit(3)"])[1] == 3
        assert run(report, "missing", ["no-such-program"])[1] == 127
    text = (tmp_path / "report.txt").read_text()
    assert "here" in text and "fails: exit code 3" in text and "missing: exit code 127" in text


def test_memory_is_checked_where_the_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (None, "/opt/cuda/bin/compute-sanitizer"):
        monkeypatch.setattr("shutil.which", lambda name, *options, path=path: path)
        words = sanitized()
        assert (path in words) if path else not words
    assert (ROOT / words[words.index("gpu") + 1]).exists()


def test_a_machine_without_a_gpu_says_so(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.gpu_session.num_gpus", lambda: 0)
    assert main(tmp_path / "report.txt") == 1
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
