"""`moemesh balance`: files of every kind, the output, and mistakes."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moemesh.balance.inputs import BalanceError
from moemesh.balance.load_files import load_placement, load_table
from moemesh.cli.balancing import BalanceSettings, balance, place
from moemesh.config.errors import UserError
from moemesh.trace.loads import LayerLoads
from tests.balance.cases import check_maps, hottest
from tests.waiting import ended

LOADS = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]]
LOADS += [[20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]


def command(path: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """The output of the verb."""
    balance(**DEFAULTS | {"loads": path} | options)
    return capsys.readouterr().out


DEFAULTS = {
    field.name: field.default for field in fields(BalanceSettings) if field.default is not MISSING
}
SIZES: dict[str, Any] = {"replicas": 16, "gpus": 8, "nodes": 2, "groups": 4}


def write(folder: Path, name: str) -> Path:
    """LOADS as a file, in the format of the suffix of its name."""
    path = folder / name
    table = np.array(LOADS)
    match path.suffix:
        case ".json":
            path.write_text(json.dumps({"loads": LOADS} if name == "keyed.json" else LOADS))
        case ".csv":
            rows = [",".join(map(str, row)) for row in LOADS]
            path.write_text("\n".join([",".join("abcdefghijkl"), *rows, ""]))
        case ".npy":
            np.save(path, table)
        case ".npz":
            np.savez(path, other=table[:, :1], loads=table)
        case ".jsonl":
            steps = [
                LayerLoads(step=step, layer=5 + layer, tokens_per_expert=tuple(row))
                for step in (1, 2)
                for layer, row in enumerate(LOADS)
            ]
            path.write_text("".join(loads.to_line() for loads in steps))
    return path


@pytest.mark.parametrize("name", ["a.json", "keyed.json", "a.csv", "a.npy", "a.npz", "loads.jsonl"])
def test_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, name)
    document = json.loads(command(path, capsys, **SIZES, as_json=True))
    keys = ("physical_to_logical", "logical_to_physical", "replica_count")
    check_maps(tuple(document[key] for key in keys), 12, 16)
    top = hottest(np.array(LOADS, float), document["physical_to_logical"], 8)
    assert top.tolist() == [151.0, 179.5]
    assert document["balance"] == pytest.approx(top * 8 / np.sum(LOADS, axis=1))
    assert all(
        b <= a * (1 + 1e-9) for a, b in zip(document["balance"], document["bound"], strict=True)
    )
    if name == "loads.jsonl":  # the folder of the run gives the same result
        assert json.loads(command(tmp_path, capsys, **SIZES, as_json=True)) == document


def test_previous(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.json")
    old = tmp_path / "old.json"
    old.write_text(command(path, capsys, **SIZES, as_json=True))
    again = place(BalanceSettings(loads=path, previous=old, **SIZES))
    assert again.to_json()["moved"] == [0, 0]
    reversed_loads = tmp_path / "reversed.json"
    reversed_loads.write_text(json.dumps([row[::-1] for row in LOADS]))
    moved = place(BalanceSettings(loads=reversed_loads, previous=old, **SIZES)).to_json()
    assert sum(moved["moved"]) > 0
    assert [sum(map(len, rounds)) for rounds in moved["transfers"]] == moved["moved"]
    with pytest.raises(BalanceError, match=r"has 16 slots a layer, and --replicas is 24"):
        place(BalanceSettings(loads=path, previous=old, **(SIZES | {"replicas": 24})))
    assert "warning" not in capsys.readouterr().err
    place(BalanceSettings(loads=path, previous=old, **(SIZES | {"gpus": 4})))
    assert "places experts on 8 GPUs; it is read as one for 4" in capsys.readouterr().err


def test_text_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, svg = write(tmp_path, "a.csv"), tmp_path / "out.svg"
    lines = command(path, capsys, **SIZES, svg=svg).splitlines()
    assert lines[0] == "2 layers: 12 experts in 16 slots (4 redundant) on 8 GPUs"
    assert lines[1].startswith("most loaded GPU / mean GPU, mean over layers: 2.116 -> 1.206 (no ")
    assert lines[2].startswith(
        "most loaded GPU / mean GPU, worst layer: 2.381 (layer 1) -> 1.242 ("
    )
    assert lines[3].split()[:6] == ["layer", "before", "after", "bound", "above", "bound"]
    assert lines[4].split()[:3] == ["0", "1.851", "1.169"]
    assert sum(line.startswith("layer ") and "|" in line for line in lines) == 2
    ElementTree.fromstring(svg.read_text())
    with pytest.raises(UserError, match="cannot be written: the folder"):
        command(path, capsys, **SIZES, svg=tmp_path / "no" / "a.svg")


def test_a_large_placement_is_a_summary_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 layers of 32 experts, layer 11 the worst: its figure is printed, its map is saved."""
    loads = np.ones((20, 32))
    loads[11, :2] = 40
    path, out = tmp_path / "a.npy", tmp_path / "placement.json"
    np.save(path, loads)
    text = command(path, capsys, gpus=16, redundant=16, effort="fast", out=out)
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert lines[0] == "20 layers: 32 experts in 48 slots (16 redundant) on 16 GPUs"
    assert "mean over layers: " in lines[1] and "(layer 11) -> " in lines[2]
    assert lines[-1].startswith("(the first 8 of 20 layers; ") and "--out FILE" in lines[-1]
    written = json.loads(out.read_text())
    assert np.shape(written["physical_to_logical"]) == (20, 48)
    assert "replicas move, in at most" in command(path, capsys, gpus=16, previous=out)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"redundant": 5},
            "12 experts and --redundant 5 make 17 slots, no multiple of 8 GPUs: take",
        ),
        ({"redundant": 5}, "--redundant 4 or 12"),
        ({"redundant": 1, "gpus": 16}, "--redundant 4$"),
        ({"redundant": 4, "replicas": 16}, "give --replicas, or --redundant"),
    ],
)
def test_mistakes_in_redundant_experts(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.json")
    with pytest.raises(BalanceError, match=words):
        place(BalanceSettings(**{"loads": path, "gpus": 8} | given))


def test_redundant_experts_are_replicas_beside_the_experts(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json")
    same = [
        place(BalanceSettings(loads=path, gpus=8, effort="fast", **one)).to_json()
        for one in ({"redundant": 4}, {"replicas": 16})
    ]
    assert same[0] == same[1]


def test_shares_of_the_placement_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One expert on both GPUs fills up the GPU that has room; nothing moves."""
    path, old = tmp_path / "a.json", tmp_path / "old.json"
    path.write_text("[[6, 2, 0]]")
    old.write_text("[[0, 2, 0, 1]]")
    document = place(BalanceSettings(loads=path, gpus=2, previous=old, shares=True)).to_json()
    assert document["physical_to_logical"] == [[0, 2, 0, 1]] and "moved" not in document
    assert document["shares"][0] == pytest.approx([4 / 6, 1, 2 / 6, 1])
    assert document["balance"] == pytest.approx([1.0]) and document["balance_before"] == [1.25]
    printed = command(path, capsys, gpus=2, previous=old, shares=True)
    assert printed.splitlines()[-1] == "layer 0: 0 (67%) 2 (100%) | 0 (33%) 1 (100%)"
    with pytest.raises(BalanceError, match="--shares needs the placement in use"):
        place(BalanceSettings(loads=path, gpus=2, shares=True))
    for more in ({}, {"previous": old, "shares": True}):
        with pytest.raises(BalanceError, match="--tolerance goes with --previous FILE"):
            place(BalanceSettings(loads=path, gpus=2, tolerance=0.1, **more))


@pytest.mark.parametrize(
    ("mode", "options", "unused"),
    [
        ({"shares": True}, {"nodes": 2, "policy": "global"}, "--nodes, --policy"),
        ({"shares": True}, {"groups": 3, "effort": "fast"}, "--groups, --effort"),
        ({}, {"effort": "1"}, "--effort"),
    ],
)
def test_options_of_a_search_that_is_not_run_are_refused(
    tmp_path: Path, mode: dict[str, Any], options: dict[str, Any], unused: str
) -> None:
    path, old = tmp_path / "a.json", tmp_path / "old.json"
    path.write_text("[[6, 2, 0]]")
    old.write_text("[[0, 2, 0, 1]]")
    with pytest.raises(BalanceError, match=f"{unused} would have no effect"):
        place(BalanceSettings(loads=path, gpus=2, previous=old, **mode, **options))


def test_the_published_policy(tmp_path: Path) -> None:
    """DeepSeek's algorithm: 156 / 179.5 where 151 / 179.5 is possible."""
    path = write(tmp_path, "a.json")
    placement = place(BalanceSettings(loads=path, policy="published", **SIZES))
    assert placement.loads_after.max(axis=1).tolist() == [156.0, 179.5]
    with pytest.raises(BalanceError, match="leave out --previous"):
        old = tmp_path / "old.json"
        old.write_text(json.dumps(placement.to_json()))
        place(BalanceSettings(loads=path, policy="published", previous=old, **SIZES))


def test_a_warning_where_groups_do_not_fit_the_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "a.json")
    fast = {"loads": path, "effort": "fast"}
    balance(**DEFAULTS | fast | SIZES | {"nodes": 8})
    assert "nodes (8) do not divide groups (4), so the policy is global" in capsys.readouterr().err
    balance(**DEFAULTS | {"loads": path, "policy": "published"} | SIZES | {"nodes": 8})
    assert "so the policy is global" in capsys.readouterr().err
    balance(**DEFAULTS | fast | {"policy": "global"} | SIZES | {"nodes": 8})
    balance(**DEFAULTS | fast | SIZES)
    assert not capsys.readouterr().err
    for policy in (None, "global"):
        with pytest.raises(
            BalanceError, match=r"--nodes \(3\) must divide --gpus \(8\).* 2 or 4 nodes"
        ):
            balance(**DEFAULTS | {"loads": path, "policy": policy} | SIZES | {"nodes": 3})


def test_json_with_a_mark_is_read_and_answers_yes_or_no_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\ufeff[[5, 6]]", encoding="utf-8")
    assert load_table(path).tolist() == [[5, 6]]
    for text in ("[[true, false]]", "[[true, 6]]"):
        path.write_text(text)
        with pytest.raises(BalanceError, match="row 0 holds true instead of a number"):
            load_table(path)


def test_damaged_numpy_files(tmp_path: Path) -> None:
    """Any byte may be wrong, or the end missing: an error or other numbers, no traceback."""
    for name in ("a.npz", "a.npy"):
        good = write(tmp_path, name).read_bytes()
        damaged = [good[:end] for end in range(0, len(good), 7)]
        damaged += [
            good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(0, len(good), 3)
        ]
        refused = 0
        for data in damaged:
            (tmp_path / name).write_bytes(data)
            try:
                load_table(tmp_path / name)
            except BalanceError as error:
                refused += str(error).startswith(str(tmp_path / name))
        assert refused > len(damaged) // 4


def test_without_replicas_it_permutes(tmp_path: Path) -> None:
    placement = place(BalanceSettings(loads=write(tmp_path, "a.json"), replicas=None, gpus=4))
    assert (
        placement.maps[2].max() == 1 and placement.balance[1].mean() < placement.balance[0].mean()
    )


@pytest.mark.parametrize(
    ("text", "row", "warning"),
    [
        ("layer,e0,e1\n0,5,6\n1,7,8\n", [5, 6], "names the rows"),
        (",0,1\n0,5,6\n1,7,8\n", [5, 6], "names the rows"),
        ("layer0,5,6\nlayer1,7,8\n", [5, 6], "names the rows"),
        ("\ufeff5,6\n7,8\n", [5, 6], None),
        ("e0,e1\n5,6\n", [5, 6], None),
        ("load\n5\n6\n", [5], None),
        ("0,5,6\n1,7,8\n2,9,1\n", [0, 5, 6], "first column only counts"),
        ("0,1,2\n5,6,7\n", [0, 1, 2], "first row only counts"),
    ],
)
def test_names_of_rows_are_no_loads(
    text: str, row: list[int], warning: str | None, tmp_path: Path
) -> None:
    path, warnings = tmp_path / "a.csv", list[str]()
    path.write_text(text, encoding="utf-8")
    assert load_table(path, warnings.append)[0].tolist() == row
    assert [text for text in warnings if warning is None or warning not in text] == []
    assert len(warnings) == (warning is not None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.txt",
            "1",
            r"not a file of a known kind \(.json, .jsonl, .csv, .tsv, .npy, .npz, .pt\)",
        ),
        ("a.json", "{", r"a.json: Expecting"),
        ("a.json", "{}", r"must have loads or weight or tokens_per_expert or .*, and has nothing"),
        (
            "a.json",
            '{"loads": [1], "weight": [2]}',
            r"must have one of loads or weight, and has lo",
        ),
        (
            "a.json",
            '[{"layer": 0, "e0": 1}, {"layer": 1}]',
            r"object 1 has layer, object 0 has layer",
        ),
        ("a.json", '[{"layer": 0, "loads": [1, null]}]', r"row 0 holds 'null' instead of a number"),
        ("a.json", "[{}, {}]", r"no column of loads: no column at all"),
        ("a.json", "[[1, 2], [3]]", r"a.json: row 1 has 1 numbers, row 0 has 2 numbers"),
        ("a.json", "[1, [2]]", r"a.json: row 1 has 1 numbers, row 0 has one number"),
        ("a.json", "[" * 100_000, r"a.json: nested too deeply"),
        ("a.json", '[["x"]]', r'a.json: row 0 holds "x" instead of a number'),
        ("a.json", "[[1, 2], [3, null]]", r"a.json: row 1 holds null instead of a number"),
        ("a.json", f"[[1, 1{'0' * 400}]]", r"a.json: int too large"),
        ("a.json", "[[1, -1]]", r"a.json: the load of expert 1 in layer 0 is -1"),
        ("a.json", "[]", r"a.json is empty"),
        ("a.csv", "1,2\n3,x\n", r"row 1 holds 'x' instead of a number"),
        ("a.csv", '"1,000",2,3,4\n', r"row 0 holds '1,000' instead of a number"),
        ("a.csv", "e0;e1\n1,5;2\n", r"row 0 holds '1,5' instead of a number"),
        ("a.csv", "e0,e1\n", r"a.csv: no row of numbers"),
        ("a.csv", "e0,e1\n1,nan\n", r"a.csv: the load of expert 1 in layer 0 is nan"),
        ("a.csv", f'1,"2\n{"x" * 200_000}', r"a.csv: no table: field larger"),
        ("a.npy", "nonsense", r"a.npy: no NumPy file of numbers"),
        ("a.jsonl", "{}", r"line 1 holds no loads"),
        ("a.jsonl", "[1, 2]\nx", r"a.jsonl: line 2: Expecting"),
        ("a.jsonl", "", r"no loads in it"),
        ("missing.json", None, r"missing.json: No such file or directory"),
    ],
)
def test_mistakes(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(BalanceError, match=message):
        place(BalanceSettings(loads=path, replicas=4, gpus=2))


@pytest.mark.parametrize(
    "text", ["[1e308, 5e307, 1e308, 0]", f"[1{'0' * 30}, 5{'0' * 29}, 1{'0' * 30}, 0]"]
)
def test_loads_as_large_as_numbers_can_be(text: str, tmp_path: Path) -> None:
    """Loads whose sum overflows; the figures are those of 2, 1, 2, 0: best pairs 2 + 1 and 2."""
    (tmp_path / "a.json").write_text(text)
    placed = place(BalanceSettings(loads=tmp_path / "a.json", gpus=2))
    assert placed.balance[1].tolist() == pytest.approx([1.2])
    assert 1.1 < placed.bound[0] <= 1.2 and placed.balance[0].tolist() == pytest.approx([1.2])


def test_the_verb(tmp_path: Path) -> None:
    """The verb as a process: exit codes, one message on stderr, no import of torch or numba."""
    path = write(tmp_path, "a.json")
    code = (
        "import sys\nfrom moemesh.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'numba') if name in sys.modules], file=sys.stderr)"
    )
    words = ["balance", str(path), "--replicas", "16", "--gpus", "8", "--nodes", "2"]
    further = ("--groups", "4", "--json", "--svg", "a.svg")
    done = ended([sys.executable, "-c", code, *words, *further], cwd=tmp_path)
    assert json.loads(done.stdout)["balance"][0] == pytest.approx(151 * 8 / sum(LOADS[0]))
    assert done.stderr.strip() == "[]" and (tmp_path / "a.svg").exists()
    words[3] = "17"
    wrong = ended([sys.executable, "-m", "moemesh", *words], cwd=tmp_path)
    assert wrong.returncode == 2 and not wrong.stdout
    said = "--gpus (8) must divide --replicas (17): take 16 or 24 replicas"
    assert wrong.stderr == f"moemesh: {said}\n"


@pytest.mark.parametrize(
    ("text", "loads", "note"),
    [
        # SGLang's long table; a layer's expert without a row has no load.
        ("layer_id,expert_id,count\n0,0,5\n0,1,6\n0,2,1\n1,2,9\n1,0,2\n", [[5, 6, 1], [2, 0, 9]],
         "2 layers of 3 experts, one row for each; 1 expert of a layer without a row"),
        ("step,layer,expert,tokens\n0,3,0,5\n0,3,1,6\n1,3,0,2\n1,3,1,9\n", [[7, 15]], "summed"),
        ("step,layer,e0,e1\n0,0,1,2\n0,1,4,5\n1,0,1,1\n1,1,1,1\n", [[2, 3], [5, 6]], "summed"),
        ("expert,layer0,layer1\n1,3,4\n0,1,2\n", [[1, 3], [2, 4]], "every row is an expert"),
        ("name,layer0,layer1\nfoo,1,2\nbar,3,4\n", [[1, 3], [2, 4]], "every row is an expert"),
        ("what,a,b\ne0,1,2\ne1,3,4\n", [[1, 3], [2, 4]], "every row is an expert"),
        ("layer,e0,e1\n0,1,2\n1,3,4\n", [[1, 2], [3, 4]], "first column names the rows"),
        # Numbers in names give the order, in any place; other columns are left out.
        ("layer,e2,e1,e0\n10,3,2,1\n2,6,5,4\n", [[4, 5, 6], [1, 2, 3]], "names the rows"),
        ("e1,e0,Layer ID\n2,1,9\n4,3,8\n", [[3, 4], [1, 2]], ""),
        ("layer\texpert 2 tokens\texpert 1 tokens\n0\t6\t5\n", [[5, 6]], "numbered from 1 in it"),
        ("layer;e0;e2;total\n0;1;2;3\n", [[1, 0, 2]], "left out of the loads: total; 1 expert of"),
        ("expert,layer 10,layer 2\n1,4,3\n0,2,1\n", [[1, 3], [2, 4]], "every row is an expert"),
        ("layer,e0,e1\na.layers.1,1,2\na.layers.0,3,4\n", [[3, 4], [1, 2]], "names the rows"),
        ("model,layer,expert,n\nx,0.0,0,5\nx,0.0,1,6\n", [[5, 6]], "left out of the loads: model"),
        ("a.layers.10.b,1,2\na.layers.9.b,3,4\n", [[3, 4], [1, 2]], "names the rows"),
        ("layer,expert,count\n3,1,5\n3,2,6\n", [[5, 6]], "numbered from 1 in it"),
        ("expert,count\n0,5\n2,6\n", [[5, 0, 6]], "1 expert of a layer without a row"),
        ("layer,rank,e0,e1\n0,0,1,2\n0,1,3,4\n", [[4, 6]], "1 layer of 2 experts, summed"),
    ],
)  # fmt: skip
def test_tables_of_other_shapes(text: str, loads: list, note: str, tmp_path: Path) -> None:
    path, notes = tmp_path / "a.csv", list[str]()
    path.write_text(text)
    assert load_table(path, notes.append).tolist() == loads
    assert len(notes) == (note != "") and note in "".join(notes)


@pytest.mark.parametrize(
    ("name", "text", "loads"),
    [
        ("a.json", '[{"layer": 1, "loads": [1, 2]}, {"layer": 0, "loads": [3, 4]}]',
         [[3, 4], [1, 2]]),
        ("a.json", '[{"layer": 0, "expert": 1, "n": 5}, {"layer": 0, "expert": 0, "n": 6}]',
         [[6, 5]]),
        ("a.jsonl", "[1, 2]\n\n[3, 4]\n", [[1, 2], [3, 4]]),
        ("a.jsonl", "0\n5\n", [[0, 5]]),
        ("a.jsonl", '{"steps": 9, "layer": 0, "loads": [1, 2]}\n', [[1, 2]]),
        ("a.jsonl", '{"step": 0, "layer": 0, "e1": 1, "e0": 2}\n', [[2, 1]]),
    ],
)  # fmt: skip
def test_tables_of_objects(name: str, text: str, loads: list, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert load_table(tmp_path / name).tolist() == loads


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,e0,e1\n0,1,2\n", "'step' counts rows to sum, and none names the layer"),
        ("rank,e0,e1\n0,1,2\n", "'rank' counts rows to sum, and none names the layer"),
        ("layer,physical_expert,n\n0,0,5\n0,1,6\n", "several rows of one layer: name the expert"),
        ("expert,n\n0,5\n0,6\n", "several rows of one expert: name the expert"),
        ("layer,e0 n,e0 s,e1 n,e1 s\n0,1,2,3,4\n", "columns such as e1 n, e1 s number more than"),
        ("layer,expert,n\n-1,0,5\n", "names a layer or expert '-1': these names must differ in"),
        ("layer,e0,e9999999\n0,1,2\n", "10,000,000 experts: a layer may have 16,384 experts"),
        (f"layer,e0,e1{'0' * 30}\n0,1,2\n", "0,001 experts: a layer may have 16,384 experts"),
        ("layer,e0,e1\n1,1,2\n01,3,4\n", "row 0 names a layer or expert '1': these names must"),
        ("layer,e0,e1\n0,1,2\ntotal,1,2\n", "row 1 names a layer or expert 'total': these names"),
        ("layer\n0\n", "no column of loads: layer"),
        ("layer,expert,count,share\n0,0,5,1\n", "there are count, share: keep one"),
        ("layer,expert,count\n0,zero,5\n", "names a layer or expert 'zero': these names must"),
        ("layer,expert,count\n0,0\n", "row 0 has 2 cells, the header 3"),
        ("layer,expert,count\n0,999999,5\n", "1,000,000 experts: a layer may have 16,384 experts"),
        (
            "layer,expert,count\n0,16383,5\n" + "".join(f"{n},0,5\n" for n in range(1025)),
            "a file 16,777,216 loads",
        ),
        (",".join(["1"] * 16385), "16,385 experts: a layer may have 16,384 experts"),
    ],
)
def test_ambiguous_tables_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(BalanceError, match=words):
        load_table(path)


def test_a_placement_is_a_row_for_each_layer(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("layer,slot 1,slot 0\n1,0,1\n0,1,0\n")
    assert load_placement(path).tolist() == [[0, 1], [1, 0]]
    path.write_text("layer,gpu0 slot0,gpu0 slot1,gpu1 slot0,gpu1 slot1\n0,2,0,1,3\n")
    assert load_placement(path).tolist() == [[2, 0, 1, 3]]
    for text, words in (
        ("layer,slot,expert\n0,0,1\n0,1,0\n", "a row of a placement is a layer"),
        ("layer,slot 0,slot 2\n0,0,1\n", "1 slots of a layer have no expert"),
        ("layer,slot 0,slot 1\n0,0,1\n0,1,0\n", "several rows of one layer"),
    ):
        path.write_text(text)
        with pytest.raises(BalanceError, match=words):
            load_placement(path)


def test_loads_in_a_folder_of_runs_are_read_before_a_run_is_named(tmp_path: Path) -> None:
    run = tmp_path / "first"
    run.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (run / name).touch()
    with pytest.raises(BalanceError, match=r"holds no loads: did you mean .*first"):
        load_table(tmp_path)
    loads = LayerLoads(step=1, layer=0, tokens_per_expert=(3, 4))
    (tmp_path / "loads.jsonl").write_text(json.dumps(loads.to_json()))
    assert load_table(tmp_path).tolist() == [[3, 4]]


def test_recorders_of_serving_stacks(tmp_path: Path) -> None:
    """SGLang's recorder: steps x layers x experts, as JSON or by torch.save; vLLM's expert_load."""
    import torch

    counts = np.arange(12).reshape(2, 2, 3)
    (tmp_path / "a.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    torch.save({"logical_count": torch.from_numpy(counts), "rank": 0}, tmp_path / "a.pt")
    for name in ("a.json", "a.pt"):
        notes: list[str] = []
        assert load_table(tmp_path / name, notes.append).tolist() == counts.sum(axis=0).tolist()
        assert notes == [f"{tmp_path / name}: loads of 2 steps are summed"]
    (tmp_path / "b.json").write_text(json.dumps({"expert_load": [[1, 2]]}))
    assert load_table(tmp_path / "b.json").tolist() == [[1, 2]]
    torch.save({"loads": torch.nn.Linear(1, 1)}, tmp_path / "code.pt")
    with pytest.raises(BalanceError, match="tensors alone"):
        load_table(tmp_path / "code.pt")


def test_redundant_experts_that_would_help(tmp_path: Path) -> None:
    """One expert with half of the load: four times the mean, which copies even out."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([[7, 1, 1, 1, 1, 1, 1, 1]]))
    document = place(BalanceSettings(loads=path, gpus=4)).to_json()
    rows = {row["redundant"]: row["worst"] for row in document["by_redundant"]}
    assert list(rows) == [0, 4, 8]
    assert rows[0] == 8 / 3.5 and rows[4] < 1.2
    assert "by_redundant" not in place(BalanceSettings(loads=path, gpus=4, redundant=4)).to_json()
