"""Early stopping, the checkpoint with the lowest validation loss, and the verbs that read it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moemesh.checkpoint.retention import plan_pruning, validated
from moemesh.checkpoint.store import open_checkpoint
from moemesh.checkpoint.stored import candidates
from moemesh.trace.run import Run, state_of
from moemesh.train.early_stop import EarlyStop
from tests.checkpoint import simulate
from tests.train.runs import arguments, metrics, moemesh, said, train

#: A rate with which the losses of the small model soon rise and fall.
UNSTEADY: dict[str, Any] = {
    "data__global_batch": 2,
    "train__steps": 33,
    "train__lr": 0.2,
    "train__lr_schedule": "constant",
    "train__validate_every": 3,
    "train__validation_batches": 2,
    "train__checkpoint_every": 8,
    "train__checkpoints_kept": 1,
}


def expected_stop(rows: list[dict[str, Any]], patience: int) -> tuple[int, int]:
    """The step at which a run with a patience ends, and the step of its lowest loss."""
    best, since, at = math.inf, 0, 0
    for row in rows:
        if (loss := row.get("validation_loss")) is not None:
            best, since, at = (loss, 0, row["step"]) if loss < best else (best, since + 1, at)
            if since == patience:
                return row["step"], at
    raise AssertionError("this run never stops: choose another rate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run without early stopping."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, train(out, **UNSTEADY)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same run with a patience of 2, which no test changes, and its output."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    return out, said(*arguments(out, **UNSTEADY, train__patience=2))


def test_the_run_ends_and_its_best_checkpoint_stays(
    whole: tuple[Path, list[dict[str, Any]]], stopped: tuple[Path, str], tmp_path: Path
) -> None:
    last, best = expected_stop(whole[1], 2)
    text, out = stopped[1], shutil.copytree(stopped[0], tmp_path / "run")
    keys = UNSTEADY | {"data__path": str(stopped[0].parent / "corpus.txt")}
    rows = metrics(out)
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole[1][:last]]
    assert f"no lower validation loss since step {best}" in text
    assert candidates(out / "checkpoints") == [last, best]
    run = Run.load(out)
    assert state_of(run) == "finished"
    explained = " ".join(said("explain", out).split())
    assert f"ended early: no lower validation loss since step {best}" in explained
    assert "Early stop" in (out / "report.html").read_text()
    # The same command does not train further; a larger patience does.
    assert f"already trained to step {last}" in said(*arguments(out, **keys, train__patience=2))
    assert len(metrics(out)) == last
    longer = train(out, **keys, train__patience=3)
    assert len(longer) == expected_stop(whole[1], 3)[0]


def test_without_a_patience_the_best_checkpoint_stays(
    whole: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, rows = whole
    by_step = {row["step"]: row.get("validation_loss") for row in rows}
    # Only steps with both have a loss: 24 and the last one.
    losses = {step: by_step[step] for step in (24, 33)}
    best = min(losses, key=lambda step: losses[step])
    kept = candidates(out / "checkpoints")
    assert best == 24 and kept == [33, 24]
    assert validated(out / "checkpoints")[0] == (losses[best], best)


def test_verbs_read_the_best_checkpoint(stopped: tuple[Path, str], tmp_path: Path) -> None:
    out = stopped[0]
    best = candidates(out / "checkpoints")[-1]
    said("convert", out, tmp_path / "best", "--best")
    said("convert", out / "checkpoints" / f"step-{best}", tmp_path / "named")
    tensors, named = (
        load_file(tmp_path / name / "model.safetensors") for name in ("best", "named")
    )
    assert all(torch.equal(tensors[name], named[name]) for name in named)
    text = tmp_path / "text.txt"
    text.write_text((out.parent / "corpus.txt").read_text()[:800])
    options = ("--data", str(text), "--seq-len", "16", "--json")
    scored = [
        json.loads(moemesh("evaluate", str(source), *options, *more).stdout)
        for source, more in ((out, ["--best"]), (out, []))
    ]
    assert scored[0]["loss"] != pytest.approx(scored[1]["loss"], rel=1e-6)
    listed = json.loads(said("checkpoint", "ls", out, "--json"))
    assert listed["best"] == best
    assert json.loads(said("checkpoint", "prune", out, "--dry-run", "--json"))["deleted"] == []


def test_a_damaged_best_checkpoint_holds_no_place(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.6}
    for step, loss in losses.items():
        state = {"validation_loss": loss}
        simulate.save_one(tmp_path, step, [simulate.whole("w", torch.arange(5.0) + step)], state)
    assert {state.step for state in plan_pruning(tmp_path, 1).kept} == {5, 2}
    (damaged,) = (tmp_path / "step-2").glob("rank-*")
    simulate.flip(damaged, -1)
    assert {state.step for state in plan_pruning(tmp_path, 1).kept} == {5, 3}
    assert plan_pruning(tmp_path, 1).doomed == [4, 2, 1]


def test_mistakes_have_one_message(
    tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    done = moemesh(
        "config", "check", "--set", "train.patience=2", "--set", "train.validate_every=0"
    )
    assert done.returncode == 2 and "validate_every is 0" in done.stdout + done.stderr
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = moemesh("convert", str(folder), str(tmp_path / "out"), "--best")
    assert done.returncode == 2 and "is not a run" in done.stderr
    out, rows = whole
    manifest = open_checkpoint(out / "checkpoints", 33).state
    assert manifest["validation_loss"] == rows[-1]["validation_loss"]


def test_a_loss_that_is_not_finite_is_never_lowest() -> None:
    stop = EarlyStop(2)
    stop.add(3, math.nan)
    assert stop.best[0] == 0 and stop.reason is None and "validation_loss" not in stop.state(3)
    stop.add(6, math.inf)
    assert stop.reason is not None and "yet in 2 validations" in stop.reason
    single = EarlyStop(1)
    for step, loss in ((2, 1.0), (4, 1.5)):
        single.add(step, loss)
    assert single.reason is not None and "since step 2 (1.0000) in 1 validation (" in single.reason
    stop.add(9, 1.5)
    again = EarlyStop(2)
    again.load_state(json.loads(json.dumps(stop.state(9))))
    again.add(12, 1.5)  # equal is not lower
    assert again.best == (9, 1.5) and again.since == 1 and again.reason is None
