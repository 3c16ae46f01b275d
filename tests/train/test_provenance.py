"""Provenance of runs: git, secrets, packages, how two starts differ, and `moemesh repro`."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.run import RunConfig
from moemesh.trace.provenance import differences, read_starts
from moemesh.train.records import provenance
from moemesh.train.records.provenance import (
    git_state,
    packages,
    redacted,
    redacted_arguments,
    weights,
)
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.repro import Comparison, ReproError, compare_rows, covering_parts, repro
from tests.commands import python
from tests.test_cli import Invoke
from tests.trace.test_run import row
from tests.train.runs import metrics, moemesh, train


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *who, "-C", str(folder), *words], check=True, capture_output=True)


def repository(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "model.py").write_text("layers = 2\n")
    git(folder, "add", "model.py")
    git(folder, "commit", "-qm", "first")
    return folder


def test_git_of_a_clean_and_of_a_changed_directory(tmp_path: Path) -> None:
    folder = repository(tmp_path / "project")
    clean = git_state(folder)
    assert clean["branch"] == "main" and len(clean["commit"]) == 40
    assert clean["is_changed"] is False and "text" not in clean and clean["untracked"] == []
    (folder / "model.py").write_text("layers = 4\n")
    (folder / "notes.txt").write_text("mine")
    (folder / "below").mkdir()
    changed = git_state(folder / "below")
    assert changed["is_changed"] and changed["untracked"] == ["notes.txt"]
    assert "-layers = 2\n+layers = 4\n" in changed["text"] and changed["diff_is_cut"] is False
    assert changed["diff_bytes"] == len(changed["text"])


def test_a_long_diff_is_cut_and_a_directory_without_git_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path / "project")
    (folder / "model.py").write_text("x\n" * 10_000)
    monkeypatch.setattr(provenance, "MOST_DIFF_BYTES", 100)
    state = git_state(folder)
    assert state["diff_is_cut"] and len(state["text"]) == 100 and state["diff_bytes"] > 20_000
    assert git_state(tmp_path) == {}
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert "commit" not in git_state(tmp_path / "empty")
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert git_state(folder) == {}


def test_equal_diffs_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, mesh = RunFolder.open(tmp_path / "run"), Mesh.single("cpu")
    samples: Any = SimpleNamespace(fingerprint=dict)
    for text, number in (("a", ""), ("a", ""), ("b", "-3"), ("a", "")):
        name = f"diff{number}.patch"
        state = {"text": text, "diff_sha256": f"digest of {text}"}
        monkeypatch.setattr(provenance, "git_state", lambda _, state=state: dict(state))
        provenance.record_start(run, RunConfig(), mesh, samples, 1)
        diff = read_starts(run.path)[-1]["git"]["diff"]
        assert diff == name and (run.path / name).read_text() == text
    assert sorted(p.name for p in run.path.glob("*.patch")) == ["diff-3.patch", "diff.patch"]


def test_a_return_behind_the_first_step_of_a_start_is_recorded(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "run")
    run.write_json("provenance.json", {"starts": [{"first_step": 1}, {"first_step": 21}]})
    for step, first in ((30, 21), (20, 21), (10, 11)):
        provenance.record_return(run, step)
        assert [start["first_step"] for start in read_starts(run.path)] == [1, first]


def test_no_secret_is_written_down() -> None:
    given = {
        "OMP_NUM_THREADS": "2",
        "HOME": "/home/me",
        "NCCL_SECRET": "s3cret",
        "MOEMESH__data__path": "https://me:s3cret@example.org/x",
        "CUDA_API_KEY": "s3cret",
        "TOKENIZERS_PARALLELISM": "false",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
    }
    shown = redacted(given)
    assert shown["OMP_NUM_THREADS"] == "2" and shown["TOKENIZERS_PARALLELISM"] == "false"
    assert shown["MOEMESH__data__path"] == "https://(redacted)@example.org/x"
    assert "HOME" not in shown and "AWS_SECRET_ACCESS_KEY" not in shown
    assert "s3cret" not in json.dumps(shown)
    command = ["moemesh", "train", "--token", "s3cret", "--api-key=s3cret", "--set", "train.lr=1"]
    shown_command = redacted_arguments([*command, "--set", "data.tokenizer=bytes"])
    assert "s3cret" not in " ".join(shown_command)
    assert shown_command[-3:] == ["train.lr=1", "--set", "data.tokenizer=bytes"]


def test_differences_name_what_changes_a_result() -> None:
    before = {
        "python": "3.11.7",
        "packages": {"torch": "2.9", "numpy": "2.0", "old": "1"},
        "git": {"commit": "a" * 40, "branch": "main", "root": "/a"},
        "environment": {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7"},
        "data": {"source 1": "x"},
        "threads": 2,
    }
    assert differences(before, before) == []
    after = {
        **before,
        "packages": {"torch": "2.10", "numpy": "2.0"},
        "git": {"commit": "b" * 40, "branch": "other", "root": "/b"},
        "environment": {"SLURM_JOB_ID": "8"},
        "data": {"source 1": "y"},
        "threads": 1,
    }
    assert differences(before, after) == [
        "package old: 1 then, none now",
        "package torch: 2.9 then, 2.10 now",
        f"git commit: {'a' * 40} then, {'b' * 40} now",
        "environment OMP_NUM_THREADS: 1 then, none now",
        "data source 1: x then, y now",
        "threads of a rank: 2 then, 1 now",
    ]


def test_weights_that_were_changed_in_place_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    (tmp_path / "config.json").write_text("{}")
    before = weights(tmp_path)
    assert set(before) == {"model.safetensors", "config.json"}
    file.write_bytes(bytes((3 << 20) - 1) + b"\1")
    assert weights(tmp_path)["model.safetensors"] != before["model.safetensors"]


def test_packages_and_files_that_are_no_records(tmp_path: Path) -> None:
    assert packages()["torch"]
    assert read_starts(tmp_path) == []
    for text in ("", "[]", '{"starts": 3}', '{"starts": [3]}', "\xff"):
        (tmp_path / "provenance.json").write_text(text, encoding="latin-1")
        assert read_starts(tmp_path) == []


def test_the_newest_start_that_has_taken_a_step_counts() -> None:
    starts = [{"first_step": 1}, {"first_step": 11}, {"first_step": 5}, {"first_step": 31}]
    parts = [(one.record, one.first, one.last) for one in covering_parts(starts, 20)]
    assert parts == [(starts[0], 1, 4), (starts[2], 5, 20)]
    assert [(one.first, one.last) for one in covering_parts(starts, 3)] == [(1, 3)]
    with pytest.raises(ReproError, match="do not cover"):
        covering_parts(starts[1:2], 20)
    with pytest.raises(ReproError, match="do not cover"):
        covering_parts([], 20)


def test_rows_are_compared_bit_by_bit() -> None:
    before = {step: row(step, loss=1 / step) for step in range(1, 6)}
    assert compare_rows(before, dict(before), 5) == Comparison(steps=5)
    after = before | {
        3: row(3, loss=math.nextafter(1 / 3, 1)),
        4: row(4, loss=1 / 4, seconds=9.0, tokens_per_second=1.0),
        5: row(5, loss=0.7),
    }
    difference = compare_rows(before, after, 5)
    assert (difference.first_step, difference.key, difference.num_different) == (3, "loss", 2)
    assert difference.largest == 0.7 - 1 / 5
    assert compare_rows(before, after, 2) == Comparison(steps=2)
    not_finite = {1: row(1, loss=math.nan)}
    assert compare_rows(not_finite, {1: row(1, loss=math.nan)}, 1).first_step is None
    with pytest.raises(ReproError, match="not taken step 2"):
        compare_rows(before, {1: before[1]}, 2)
    with pytest.raises(ReproError, match="no row"):
        compare_rows({7: before[1]}, before, 2)


def two_starts(out: Path, **keys: object) -> list[dict[str, object]]:
    """A run of 6 steps in two starts, whose learning rates follow from other ends; its starts."""
    for steps in (3, 6):
        train(out, train__steps=steps, **keys)
    return json.loads((out / "provenance.json").read_text())["starts"]


def test_a_value_that_differs_is_named_with_what_else_differs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, train__steps=3)
    content = json.loads((out / "provenance.json").read_text())
    (start,) = content["starts"]
    assert start["argv"][:2] == ["moemesh", "train"] and start["directory"] == str(Path.cwd())
    assert start["seed"] == 0 and start["hosts"][0]["ranks"] == [0] and start["last_step"] == 3
    start["packages"]["torch"] = "1.0"
    (out / "provenance.json").write_text(json.dumps(content))
    rows = metrics(out)
    rows[1]["loss"] = math.nextafter(rows[1]["loss"], 9)
    (out / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    report = json.loads(moemesh("repro", str(out), "--steps", "2", "--json").stdout)
    assert (report["steps"], report["first_step"], report["key"], report["num_different"]) == (
        2, 2, "loss", 1
    )  # fmt: skip
    # A library that was imported before may have added packages to the path of this process.
    assert any(line.startswith("package torch: 1.0 then, ") for line in report["differences"])


ZB_H1 = {"plan__pp": 2, "plan__schedule": "zb_h1", "plan__microbatches": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"plan__dp": 2, "plan__ep": 2},
        ZB_H1,
        {"plan__pp": 2, "plan__schedule": "pipedream", "plan__microbatches": 6},
        {"plan__pp": 2, "plan__schedule": "search", "plan__microbatches": 2},
        ZB_H1 | {"plan__optimizer_validation": "after"},
    ],
    ids=lambda keys: ",".join(f"{k[6:]}={v}" for k, v in keys.items()) or "one rank",
)
def test_a_run_in_two_starts_is_repeated_to_the_bit(
    keys: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first, second = two_starts(out, **keys)
    assert (first["first_step"], second["first_step"], second["last_step"]) == (1, 4, 6)
    comparison, causes, again = repro(out, steps=5, log=lambda text: None, python=python())
    assert comparison == Comparison(steps=5) and causes == []
    assert [one["step"] for one in metrics(again)] == [1, 2, 3, 4, 5]
    assert again == tmp_path / "run-repro"
    with pytest.raises(ReproError, match="holds a run already"):
        repro(out, again)


def test_what_cannot_be_repeated(tmp_path: Path, invoke: Invoke) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        code, _, err = invoke("repro", str(folder))
        assert code == 2 and "no run with steps" in err
