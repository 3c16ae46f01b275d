"""`make gpu` names commands that exist and plans that the GPUs at hand can run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from benchmarks.application import app as benchmarks_app
from moemesh import cli
from moemesh.cli.application import app
from moemesh.config.trainable import refusals
from moemesh.sharding.load_run import load_run
from tests.gpu_session import main, parts, plans, run, sanitized, shared_plans
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
    session = parts(num_gpus, Path("results"))
    assert len({one.name for one in session}) == len(session)
    for one in session:
        if one.arguments[0] == "moemesh":
            parse(one.words[1:])
        if one.arguments[:2] == ("moemesh", "train"):
            config = load_run([], one.settings, {}).config
            is_shared = one.environ == ("MOEMESH_COMM=gloo",)
            assert is_shared or config.plan.layout.world_size <= num_gpus
            assert config.train.device == "cuda" and not refusals(config)


def test_several_gpus_run_what_one_cannot() -> None:
    assert set(plans(1)) == {"one", "exact"}
    assert {"all_to_all", "zero3", "dualpipe", "context ring", "tp"} <= set(plans(2))
    assert {"hierarchical", "pp and ep"} <= set(plans(8)) - set(plans(2))
    names = {one.name for one in parts(2, Path("results"))}
    assert names > {"links", "resume", "generate", "evaluate"}


def test_the_parts_come_in_the_order_of_their_worth() -> None:
    names = [one.name for one in parts(1, Path("results"))]
    first = ["tests", "layer Q", "layer B", "step", "step Q", "ranks on one GPU"]
    assert names[: len(first)] == first
    for one in parts(1, Path("results"))[: len(first)]:
        if one.arguments[0].startswith("benchmarks."):
            verb = one.arguments[0].removeprefix("benchmarks.")
            benchmark: Any = typer.main.get_command(benchmarks_app)
            benchmark.commands[verb].make_context(verb, list(one.arguments[1:]))


def test_plans_of_ranks_on_one_gpu_are_legal() -> None:
    """They have every dispatcher, form of data and context parallelism, and schedule."""
    plans_of = {name: load_run([], plan, {}).config.plan for name, plan in shared_plans().items()}
    assert {plan.layout.world_size for plan in plans_of.values()} == {2, 4}
    dispatchers = {plan.dispatcher for plan in plans_of.values()}
    assert dispatchers >= {"all_to_all", "all_gather", "low_latency", "hierarchical"}
    assert {plan.data for plan in plans_of.values()} == {"replicate", "zero1", "zero2", "zero3"}
    assert {plan.context for plan in plans_of.values()} >= {"ring", "all_gather", "all_to_all"}


def test_a_failed_part_stops_no_other_and_every_part_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, "it fails", [sys.executable, "-c", "print('first'); exit(3)"]) == 3
    assert run(tmp_path, "missing", ["no-such-program"]) == 127
    monkeypatch.setattr("tests.gpu_session.LIMIT", 1)
    # Not Python, which takes longer than the limit to start on a busy machine.
    assert run(tmp_path, "cut off", ["sh", "-c", "echo before; exec sleep 60"]) == 124
    printed = capsys.readouterr().out
    assert "first" in printed and "it fails: exit code 3" in printed and "before" in printed
    assert (tmp_path / "cut-off.txt").read_text() == "before\n"
    rows = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert [(row["name"], row["code"]) for row in rows] == [
        ("it fails", 3),
        ("missing", 127),
        ("cut off", 124),
    ]


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
    assert main(tmp_path / "results") == 1
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
