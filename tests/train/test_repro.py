"""`moemesh repro`: a run, its second run, and what differs."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from moemesh.train.repro import Comparison, ReproError, compare_rows, covering_parts, repro
from tests.commands import python
from tests.trace.test_run import row
from tests.train.runs import arguments, metrics, moemesh
from tests.waiting import PATIENCE


def test_the_newest_start_that_has_taken_a_step_counts() -> None:
    starts = [{"first_step": 1}, {"first_step": 11}, {"first_step": 5}, {"first_step": 31}]
    found = [(one.record, one.first, one.last) for one in covering_parts(starts, 20)]
    assert found == [(starts[0], 1, 4), (starts[2], 5, 20)]
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
    found = compare_rows(before, after, 5)
    assert (found.first_step, found.key, found.num_different) == (3, "loss", 2)
    assert found.largest == 0.7 - 1 / 5
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
        done = moemesh(*arguments(out, train__steps=steps, **keys))
        assert done.returncode == 0, done.stderr
    return json.loads((out / "provenance.json").read_text())["starts"]


@pytest.mark.slow
def test_a_run_in_two_starts_is_repeated_to_the_bit(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first, second = two_starts(out)
    assert (first["first_step"], second["first_step"], second["last_step"]) == (1, 4, 6)
    found, causes, again = repro(out, steps=5, say=lambda text: None, python=python())
    assert found == Comparison(steps=5) and causes == []
    assert [one["step"] for one in metrics(again)] == [1, 2, 3, 4, 5]
    assert again == tmp_path / "run-repro"
    with pytest.raises(ReproError, match="holds a run already"):
        repro(out, again)


def test_a_value_that_differs_is_named_with_what_else_differs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert moemesh(*arguments(out, train__steps=3)).returncode == 0
    content = json.loads((out / "provenance.json").read_text())
    (start,) = content["starts"]
    assert start["argv"][:2] == ["moemesh", "train"] and start["directory"] == str(Path.cwd())
    assert start["seed"] == 0 and start["hosts"][0]["ranks"] == [0] and start["last_step"] == 3
    start["packages"]["torch"] = "1.0"
    (out / "provenance.json").write_text(json.dumps(content))
    rows = metrics(out)
    rows[1]["loss"] = math.nextafter(rows[1]["loss"], 9)
    (out / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    done = moemesh("repro", str(out), "--steps", "2", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["steps"], told["first_step"], told["key"], told["num_different"]) == (
        2, 2, "loss", 1
    )  # fmt: skip
    assert told["differences"][0].startswith("package torch: 1.0 then, ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"plan__dp": 2, "plan__ep": 2},
        {"plan__pp": 2, "plan__schedule": "zb_h1", "plan__microbatches": 2},
        {"plan__pp": 2, "plan__schedule": "pipedream", "plan__microbatches": 6},
        {"plan__pp": 2, "plan__schedule": "search", "plan__microbatches": 2},
        {
            "plan__pp": 2,
            "plan__schedule": "zb_h1",
            "plan__microbatches": 2,
            "plan__optimizer_validation": "after",
        },
    ],
    ids=lambda keys: ",".join(f"{k[6:]}={v}" for k, v in keys.items()),
)
def test_plans_of_several_ranks(keys: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    two_starts(out, **keys)
    found, causes, _ = repro(out, steps=5, say=lambda text: None, python=python())
    assert found == Comparison(steps=5) and causes == []


def test_what_cannot_be_repeated(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        done = subprocess.run(
            [python(), "-m", "moemesh", "repro", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 2 and "no run with steps" in done.stderr
        assert "Traceback" not in done.stderr
