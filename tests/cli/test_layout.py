"""The verb layout: text, JSON, picture, mistakes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moemesh.cli.terminal import interval, spans
from tests.test_cli import Invoke


def test_text_of_a_cut_model(invoke: Invoke) -> None:
    plan = "dp=4,tp=4,ep=4,etp=4,ranks_per_node=8"
    _, out, _ = invoke("layout", "--plan", plan, "--model", "tiny")
    lines = out.splitlines()
    assert lines[0] == "16 ranks on 2 nodes of 8"
    assert "0-3 | 4-7 | 8-11 | 12-15" in next(line for line in lines if line.startswith("etp"))
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] != []}
    assert rows["15"][2:8] == ["192-255", "6-7", "3", "6-7", "96-127", "3"]
    assert "every rank: layers 0-7, positions 0-127" in lines


def test_sizes_of_a_batch_need_a_model(invoke: Invoke) -> None:
    for option in ("--seq-len", "--global-batch"):
        code, _, err = invoke("layout", "--plan", "dp=2", option, "8")
        assert code == 2 and f"{option} goes with --model" in err


def test_configuration_as_train_takes_it(invoke: Invoke) -> None:
    given = ("--set", "plan.dp=2", "--set", "data.global_batch=3")
    _, out, _ = invoke("layout", *given, "--json")
    answer = json.loads(out)
    assert [rank["sequences"] for rank in answer["ranks"]] == [[0, 2], [2, 3]]
    assert answer["groups"]["dp"] == [[0, 1]]


def test_only_some_ranks_of_a_large_world(invoke: Invoke) -> None:
    arguments = ("layout", "--plan", "pp=16,dp=128,ep=64,microbatches=16")
    assert "... 2016 more: --rank NUMBER shows one" in invoke(*arguments)[1]
    _, out, _ = invoke(*arguments, "--rank", "2047", "--json")
    (rank,) = json.loads(out)["ranks"]
    assert (rank["rank"], rank["at"]["pp"], rank["at"]["ep"]) == (2047, 15, 63)


@pytest.mark.parametrize("plan", ["dp=4,tp=4,ep=4,etp=4", "pp=16,dp=128,ep=64,microbatches=16"])
def test_picture(plan: str, tmp_path: Path, invoke: Invoke) -> None:
    invoke("layout", "--plan", plan, "--svg", str(tmp_path / "meshes.svg"))
    root = ElementTree.parse(tmp_path / "meshes.svg").getroot()
    titles = {title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {"rank 0, node 0", "rank 15, node 0"} <= titles


def test_numbers_in_few_words() -> None:
    assert [interval(range(3)), interval(range(2, 3)), interval(range(0))] == ["0-2", "2", "-"]
    assert spans([0, 1, 2]) == "0-2"
    assert spans([0, 4, 8]) == "0 4 8"
    assert spans(list(range(0, 80, 8))) == "0 8 ... 72"
    assert spans([0, 1, 7]) == "0 1 7"
