"""Runs with Muon: resumed under other plans, with experts of which some train, validated late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moemesh.checkpoint.stored import read_manifest
from tests.train import runs

MUON: dict[str, Any] = {
    "train__optimizer": "muon",
    "train__dtype": "float64",
    "train__lr": 0.02,
    "train__steps": 6,
    "train__lr_schedule": "constant",
}
#: Two experts of each layer of the small model train, and its attention.
SOME = {"train__train_only": ["*.experts.2.*", "*.experts.5.*", "*.attention.*"]}


def matrices_of(run: Path, name: str) -> dict[int, tuple[int, int]]:
    """Count and bytes of the exchanges of matrices of each rank in a ledger, in one step."""
    ledger = json.loads((run / name).read_text())
    sums: dict[int, tuple[int, int]] = {}
    for rank in ledger["ranks"]:
        rows = [row for row in rank["entries"] if row["caller"] == "matrices"]
        numbers = [sum(row[key] for row in rows) for key in ("count", "wire_bytes")]
        assert all(number % ledger["steps"] == 0 for number in numbers)
        count, size = (number // ledger["steps"] for number in numbers)
        sums[rank["rank"]] = count, size
    return sums


@pytest.mark.representative("all")
@pytest.mark.parametrize("keys", [{}, SOME], ids=["all", "some experts"])
def test_a_run_resumes_under_other_plans(keys: dict[str, Any], tmp_path: Path) -> None:
    expected = runs.losses(runs.train(tmp_path / "one", **MUON | keys | {"train__steps": 4}))
    out = tmp_path / "run"
    plans: list[dict[str, Any]] = [
        {"plan__tp": 2},
        {"plan__dp": 2, "plan__ep": 1, "plan__etp": 2, "plan__data": "zero2"},
    ]
    for steps, plan in zip((2, 4), plans, strict=True):
        rows = runs.train(out, **MUON | keys | plan | {"train__steps": steps})
        measured, predicted = (
            matrices_of(out, name) for name in ("ledger.json", "ledger_predicted.json")
        )
        assert measured == predicted and any(size for _, size in measured.values())
    assert runs.losses(rows) == pytest.approx(expected, abs=1e-10)


@pytest.mark.representative("adamw")
@pytest.mark.parametrize(
    "other",
    [{}, {"train__optimizer": "sgd", "train__momentum": 0.9}, {"train__optimizer": "sgd"}],
    ids=["adamw", "momentum", "sgd"],
)
def test_matrices_begin_with_new_moments_after_muon(other: dict[str, Any], tmp_path: Path) -> None:
    """AdamW has moments that Muon has for the other parameters only, and the reverse."""
    keys = MUON | {"train__validate_every": 0, "train__steps": 2}
    changes = ["train.optimizer", *(["train.momentum"] if "train__momentum" in other else [])]
    allowed = [word for key in changes for word in ("--allow-change", key)]
    keys_after = keys | {"train__steps": 6, "train__optimizer": "adamw"} | other
    losses: list[list[float]] = []
    # The second run stops in between: the new moments have fewer updates than the run.
    many = {"plan__dp": 2, "plan__data": "zero3"}
    for name, plan, stops in (("one", {}, ()), ("many", many, ("--stop-after", "4"))):
        runs.train(tmp_path / name, **keys)
        words = runs.arguments(tmp_path / name, **keys_after | plan)
        assert "resumed from step 2" in runs.said(*words, *allowed, *stops)
        if stops:
            runs.train(tmp_path / name, **keys_after)
        losses.append(runs.losses(runs.metrics(tmp_path / name)))
        state = read_manifest(tmp_path / name / "checkpoints/step-6").state
        assert state["updates"] == 6
        assert set(state["updates_of"].values()) == (set() if other else {4})
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert len(losses[0]) == 6 and losses[0][5] < losses[0][2] < losses[0][1]
