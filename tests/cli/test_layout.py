"""The verb layout: text, JSON, picture, mistakes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moemesh.cli.terminal import interval, spans
from tests.test_cli import run

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def test_text_of_a_cut_model(capsys: Capture, monkeypatch: Patch) -> None:
    plan = "dp=4,tp=4,ep=4,etp=4,ranks_per_node=8"
    _, out, _ = run(capsys, monkeypatch, "layout", "--plan", plan, "--model", "tiny")
    lines = out.splitlines()
    assert lines[0] == "16 ranks on 2 nodes of 8"
    assert "0-3 | 4-7 | 8-11 | 12-15" in next(line for line in lines if line.startswith("etp"))
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] != []}
    assert rows["15"][2:8] == ["192-255", "6-7", "3", "6-7", "96-127", "3"]
    assert "every rank: layers 0-7, positions 0-127" in lines


def test_configuration_as_train_takes_it(capsys: Capture, monkeypatch: Patch) -> None:
    given = ("--set", "plan.dp=2", "--set", "data.global_batch=3")
    _, out, _ = run(capsys, monkeypatch, "layout", *given, "--json")
    answer = json.loads(out)
    assert [rank["sequences"] for rank in answer["ranks"]] == [[0, 2], [2, 3]]
    assert answer["groups"]["dp"] == [[0, 1]]


def test_only_some_ranks_of_a_large_world(capsys: Capture, monkeypatch: Patch) -> None:
    arguments = ("layout", "--plan", "pp=16,dp=128,ep=64,microbatches=16")
    assert "... 2016 more: --rank NUMBER shows one" in run(capsys, monkeypatch, *arguments)[1]
    _, out, _ = run(capsys, monkeypatch, *arguments, "--rank", "2047", "--json")
    (rank,) = json.loads(out)["ranks"]
    assert (rank["rank"], rank["at"]["pp"], rank["at"]["ep"]) == (2047, 15, 63)


@pytest.mark.parametrize("plan", ["dp=4,tp=4,ep=4,etp=4", "pp=16,dp=128,ep=64,microbatches=16"])
def test_picture(plan: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    run(capsys, monkeypatch, "layout", "--plan", plan, "--svg", str(tmp_path / "meshes.svg"))
    root = ElementTree.parse(tmp_path / "meshes.svg").getroot()
    titles = {title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {"rank 0, node 0", "rank 15, node 0"} <= titles


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "dp=4", "--rank", "4"], "there is no rank 4"),
        (["--model", "tiny"], "--model goes with --plan"),
        (["--plan", "dp=2", "--set", "plan.tp=2"], "give --plan, or a configuration"),
        (["--plan", "dp=2", "--svg", "nowhere/a.svg"], "there is no folder nowhere"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: Capture, monkeypatch: Patch) -> None:
    code, _, err = run(capsys, monkeypatch, "layout", *arguments)
    assert code == 2
    assert words in " ".join(err.split())


def test_numbers_in_few_words() -> None:
    assert [interval(range(3)), interval(range(2, 3)), interval(range(0))] == ["0-2", "2", "-"]
    assert spans([0, 1, 2]) == "0-2"
    assert spans([0, 4, 8]) == "0 4 8"
    assert spans(list(range(0, 80, 8))) == "0 8 ... 72"
    assert spans([0, 1, 7]) == "0 1 7"
