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


def test_a_refusal_names_what_was_given(tmp_path: Path, invoke: Invoke) -> None:
    compare = ("dispatch", "--compare", "--cluster", "hgx_h800")
    for words, wanted in (
        (("dispatch", "--experts", "6", "--plan", "dp=4,ep=4"), "fix: --experts 8"),
        (("dispatch", "--hidden-size", str(10**20)), "a row has 1 to 2147483647 channels"),
        ((*compare, "--groups-kept", "9"), "fix: groups_kept = 8"),
        ((*compare, "--groups", "6"), "fix: groups = 4 or 8"),
        ((*compare, "--groups", "0", "--groups-kept", "2"), "--groups-kept needs groups"),
        ((*compare, "--experts", "64", "--groups-kept", "2"), "--groups-kept needs groups"),
    ):
        code, _, err = invoke(*words)
        assert code == 2 and wanted in err, err
    path = tmp_path / "routing.json"
    routing = {"plan": "dp=2,ep=2", "num_experts": 2, "experts": [[[0]], [[1]]]}
    for names in ("all_to_all", []):
        path.write_text(json.dumps(routing | {"dispatchers": names}))
        code, _, err = invoke("dispatch", str(path))
        assert code == 2 and "1 problem" in err and 'fix: ["all_to_all"]' in err


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
