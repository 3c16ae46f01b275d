"""The verb dispatch: text, JSON, picture, mistakes."""

import json
from pathlib import Path
from xml.etree import ElementTree

from tests.test_cli import Invoke


def test_a_packaged_routing(invoke: Invoke) -> None:
    code, out, _ = invoke("dispatch", "uneven-reduce-scatter")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["from", "0", "(3)", "2", "2", "3", "7"] in lines
    assert ["received", "9", "6", "6", "9", "30"] in lines


def test_random_tokens_under_every_dispatcher(tmp_path: Path, invoke: Invoke) -> None:
    arguments = ("dispatch", "--plan", "dp=4,ep=4,ranks_per_node=2", "--tokens", "3", "--json")
    _, out, _ = invoke(*arguments, "--svg", str(tmp_path / "pairs.svg"))
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


def test_many_ranks_have_no_matrices(invoke: Invoke) -> None:
    _, out, _ = invoke("dispatch", "--plan", "dp=32,ep=8")
    assert "from 0" not in out
    assert "--svg draws them" in out


def test_sizes_of_rows_take_the_place_of_a_routings_own(invoke: Invoke) -> None:
    def sent(*options: str) -> int:
        code, out, _ = invoke("dispatch", "even-all-to-all", "--json", *options)
        assert code == 0
        exchanges = json.loads(out)["dispatchers"]["all_to_all"]["exchanges"]
        return sum(sum(line) for line in exchanges[-1]["sent_bytes"])

    assert sent("--hidden-size", "2048") == 2 * sent("--hidden-size", "1024")
    assert sent("--hidden-size", "64", "--dtype", "bfloat16") * 2 == sent(
        "--hidden-size", "64", "--dtype", "float32"
    )
