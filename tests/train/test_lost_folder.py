"""A folder that is lost while its run trains, and a disk that is full at the last step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from moemesh.checkpoint.files import CheckpointError
from moemesh.monitor import lease
from moemesh.monitor.lease import LeaseLost
from moemesh.train import session as session_module
from moemesh.train.early_stop import EarlyStop
from moemesh.train.records.run_folder import (
    Events,
    RunFolder,
    RunFolderError,
)
from moemesh.train.session import Session
from tests.checkpoint.simulate import save_one, whole
from tests.train import runs

# --- a folder that is lost while a run works in it ----------------------------------------------


def _lose(out: Path, how: str) -> Path | None:
    """The folder of the run afterwards."""
    if how == "deleted":
        while out.exists():  # the run may be writing
            shutil.rmtree(out, ignore_errors=True)
        return None
    moved = out.rename(out.with_name("moved"))
    if how == "replaced":
        out.mkdir()
    elif how == "replaced by a run":
        other = RunFolder.open(out)
        other.lock()
        other.release()
    return moved


@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced", "replaced by a run"])
def test_a_lost_folder_takes_nothing_more(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_PAUSES", (0.0, 0.01))
    out = tmp_path / "run"
    holder = RunFolder.open(out)
    holder.lock()
    rank = RunFolder.inspect(out, None)
    rank.join()
    save_one(out / "checkpoints", 3, [whole("w", torch.zeros(2))])
    log = rank.row_log("metrics.jsonl")
    assert log.append([{"step": 1}]) and holder.why_lost() is None
    moved = _lose(out, how)
    before = sorted(out.rglob("*"))
    for folder in (holder, rank):
        with pytest.raises(LeaseLost, match=r"renamed, deleted|replaced") as lost:
            folder.check_lease()
        assert folder.present_path() == moved and folder.lost() is not None
        with pytest.raises(LeaseLost):
            folder.write_text("summary.json", "{}")
        if moved is None:
            assert "no checkpoint of this run is left" in lost.value.facts["advice"]
        else:
            assert f"it is {moved} now" in str(lost.value)
            assert f"is {moved}/checkpoints/step-3; --out {moved}" in lost.value.facts["advice"]
    log.append([{"step": 2}])
    Events(rank).add("note", "text")
    with pytest.raises(LeaseLost):
        holder.raise_epoch()
    if moved is not None:  # as long as the run lives, no other one enters there
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder.open(moved).lock()
    holder.release()
    assert sorted(out.rglob("*")) == before
    if moved is not None:
        assert not json.loads((moved / "lease").read_text())["held"]


def test_a_lost_folder_of_checkpoints_elsewhere(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run = RunFolder.open(tmp_path / "run", checkpoint_folder=str(shared))
    run.lock()
    save_one(shared, 7, [whole("w", torch.zeros(2))])
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(LeaseLost) as lost:
        run.check_lease()
    assert f"the last checkpoint of this run is {shared}/step-7" in lost.value.facts["advice"]
    (tmp_path / "moved").rename(tmp_path / "run")
    assert run.lost() is None
    shared.rename(tmp_path / "away")
    assert run.why_lost() is None and "shared was renamed, deleted or replaced" in str(run.lost())
    run.release()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced by a run"])
def test_a_run_whose_folder_is_lost_stops(tmp_path: Path, ranks: int, how: str) -> None:
    out = tmp_path / "run"
    keys = {"plan__dp": ranks, "train__steps": 100_000, "train__checkpoint_every": 5}
    process = runs.start(*runs.arguments(out, **keys))
    runs.until(lambda: (out / "checkpoints/step-10").exists(), process)
    moved = _lose(out, how)
    before = sorted(out.rglob("*"))
    output, err = process.communicate(timeout=runs.PATIENCE)
    assert process.returncode == 1 and "Traceback" not in err, output + err
    assert "renamed, deleted" in err or "replaced" in err
    assert sorted(out.rglob("*")) == before
    if moved is None:
        assert "no checkpoint of this run is left" in err
        return
    step = max(int(path.name[5:]) for path in moved.glob("checkpoints/step-*[0-9]"))
    assert f"the last checkpoint of this run is {moved}/checkpoints/step-{step}" in err, err
    assert json.loads((moved / "failure.json").read_text())["run_folder"] == str(moved)
    runs.said(*runs.arguments(moved, **keys), "--stop-after", step + 5)


# --- a disk that is full at the last step -------------------------------------------------------


def _last_save(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[str], stops: list[bool]
) -> list[str]:
    """Console lines of the save of step 6 of 6, after a last saved step of 4.

    `outcomes`: of the attempts; `stops`: whether a stop was requested, after each attempt.
    """
    monkeypatch.setattr(session_module, "_ROOM_SECONDS", 0.01)
    said = list[str]()
    attempts = iter(outcomes)

    def save(step: int, state: object, *, is_last: bool, hurries: Callable[[], bool]) -> None:
        # A stop while the save runs ends it after the attempt; it has none of its own here.
        session.stop.requested = True
        assert hurries() == is_last
        session.stop.requested = False
        if problem := next(attempts):
            raise CheckpointError(problem)

    requests = iter(stops)
    session = SimpleNamespace(
        folder=SimpleNamespace(check_lease=lambda: None, path=Path()),
        artifacts=SimpleNamespace(flush=lambda: None, identity={}),
        num_read=lambda step: step,
        migration=SimpleNamespace(state=dict),
        nan_policy=SimpleNamespace(state=dict),
        early_stop=EarlyStop(0),
        _base={},
        checkpoints=SimpleNamespace(save=save),
        last=6,
        stop=SimpleNamespace(requested=False),
        largest=lambda number: next(requests),
        mesh=SimpleNamespace(rank=0),
        console=SimpleNamespace(warn=said.append),
        saved=5,  # that save failed later
    )
    monkeypatch.setattr(session_module, "newest_step", lambda path: 4)
    Session.save(cast("Session", session), 6, is_last=True)
    return said


def test_the_last_step_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full = "checkpoint of step 6: /r/step-6: No space left on device: 9 bytes needed, 1 free"
    said = _last_save(monkeypatch, [full, full, full, ""], [False] * 3)
    assert len(said) == 1 and "waits for room" in said[0] and "steps 5 to 6 are lost" in said[0]
    with pytest.raises(CheckpointError, match="steps 5 to 6 are lost"):
        _last_save(monkeypatch, [full, full], [False, True])
    with pytest.raises(CheckpointError, match="Input/output error"):
        _last_save(monkeypatch, ["Input/output error"], [])
