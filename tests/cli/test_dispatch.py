"""The verb dispatch: text, JSON, picture, mistakes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_cli import run

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def test_a_packaged_routing(capsys: Capture, monkeypatch: Patch) -> None:
    code, out, _ = run(capsys, monkeypatch, "dispatch", "uneven-reduce-scatter")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["from", "0", "(3)", "2", "2", "3", "7"] in lines
    assert ["received", "9", "6", "6", "9", "30"] in lines


def test_random_tokens_under_every_dispatcher(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    arguments = ("dispatch", "--plan", "dp=4,ep=4,ranks_per_node=2", "--tokens", "3", "--json")
    _, out, _ = run(capsys, monkeypatch, *arguments, "--svg", str(tmp_path / "pairs.svg"))
    answer = json.loads(out)
    assert set(answer["dispatchers"]) == {
        "all_to_all",
        "all_gather",
        "hierarchical",
        "low_latency",
    }
    # 2048 bytes a row, 3 tokens to each of three others.
    gathered = answer["dispatchers"]["all_gather"]["exchanges"]
    (rows,) = [x for x in gathered if x["caller"] == "moe.dispatch" and x["phase"] == "forward"]
    assert rows["sent_bytes"] == [[3 * 2048.0] * 4] * 4
    root = ElementTree.parse(tmp_path / "pairs.svg").getroot()
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "3 rows from 0 to 1" in titles


def test_many_ranks_have_no_matrices(capsys: Capture, monkeypatch: Patch) -> None:
    _, out, _ = run(capsys, monkeypatch, "dispatch", "--plan", "dp=32,ep=8")
    assert "from 0" not in out
    assert "--svg draws them" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such"], "neither a packaged routing"),
        (["--plan", "dp=4"], "nothing to show"),
        (["--plan", "pp=2,dp=2,ep=2"], "one pipeline stage"),
        (["--experts", "2", "--experts-per-token", "3"], "1 to 2 experts"),
        (["--tokens", "99999999999"], "fix: --tokens 125000"),
        (["--experts", "2000000000"], "more than 1000000"),
        (["--dispatcher", "all_to_al"], "all_to_all"),
        (["--dtype", "int8"], "dtype is one of"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: Capture, monkeypatch: Patch) -> None:
    code, _, err = run(capsys, monkeypatch, "dispatch", *arguments)
    assert code == 2
    assert words in " ".join(err.split())


def test_sizes_of_rows_take_the_place_of_a_routings_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*options: str) -> int:
        code, out, _ = run(capsys, monkeypatch, "dispatch", "even-all-to-all", "--json", *options)
        assert code == 0
        exchanges = json.loads(out)["dispatchers"]["all_to_all"]["exchanges"]
        return sum(sum(line) for line in exchanges[-1]["sent_bytes"])

    assert sent("--hidden-size", "2048") == 2 * sent("--hidden-size", "1024")
    assert sent("--hidden-size", "64", "--dtype", "bfloat16") * 2 == sent(
        "--hidden-size", "64", "--dtype", "float32"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("even-all-to-all", "--tokens", "4"), "--tokens draws a random routing"),
        (("even-all-to-all", "--seed", "0"), "--seed draws a random routing"),
        (("--payload", "fp8"), "--payload goes with --compare"),
        (("--groups-kept", "2"), "--groups-kept goes with --compare"),
        (("--compare", "--cluster", "hgx_h800", "--dtype", "float32"), "--dtype shows a routing"),
    ],
)
def test_no_option_is_passed_over(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    code, _, err = run(capsys, monkeypatch, "dispatch", *options)
    assert code == 2 and message in err
