"""Power lost at any moment of a save: the old checkpoint or the new one is whole, and stays."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from moemesh.checkpoint import files
from moemesh.checkpoint.store import candidates, latest
from tests.checkpoint.power import RecordingOs, after_power_loss, survivors
from tests.checkpoint.savers import TENSOR, on_ranks, one_rank, shards
from tests.checkpoint.simulate import save_as_ranks
from tests.checkpoint.test_faults import never


def recorded_save(
    run: Path, monkeypatch: pytest.MonkeyPatch, *, older: int, ranks: int
) -> tuple[RecordingOs, int]:
    """A save of step 3 with retention of one, above so many older ones; and the number of its
    operations after which it is announced."""
    folder = run / "checkpoints"
    run.mkdir()
    for step in range(3 - older, 3):
        save_as_ranks(folder, step, [shards(step)])
    with monkeypatch.context() as patch:
        recorded = RecordingOs(run)
        patch.setattr(files, "os", recorded)
        patch.setattr(files, "shutil", recorded)
        if ranks == 1:
            own = one_rank(folder, keep=1)
            own.start(3, shards(3), {"step": 3})
            outcomes = [own.finish()]
        else:

            def work(rank: int, own: object) -> object:
                own.start(3, shards(3)[rank::ranks], {"step": 3})  # type: ignore[attr-defined]
                return own.finish()  # type: ignore[attr-defined]

            outcomes = on_ranks(ranks, folder, work)
    assert all(one.problem is None for one in outcomes), outcomes
    is_named = [isinstance(change, dict) and "step-3" in change for _, change in recorded.log]
    parent = recorded.log[is_named.index(True)][0]
    committed = recorded.log.index((parent, None), is_named.index(True)) + 1
    assert committed < len(recorded.log)
    return recorded, committed


def check_recovery(run: Path, *, is_committed: bool, older: int) -> None:
    """I2 and I5: whatever was committed verifies and is what was saved; the next save succeeds."""
    folder = run / "checkpoints"
    found = latest(folder, never)
    if found is None:
        assert not older and not is_committed
    else:
        assert torch.equal(found.read("w"), TENSOR + found.step)
        assert found.step == 3 or not is_committed
    own = one_rank(folder, keep=1)
    own.start(4, shards(4), {})
    outcome = own.finish()
    assert outcome is not None and outcome.problem is None and not own.news()
    assert candidates(folder) == [4]
    names = {path.name for path in folder.iterdir()}
    assert names <= {"step-4", "verified.json", ".verified.json.tmp"}, names


def replay(tmp_path: Path, recorded: RecordingOs, committed: int, older: int, share: float) -> int:
    draw, number = random.Random(5), 0
    for prefix in range(len(recorded.log) + 1):
        for name, survive in survivors(prefix).items():
            if draw.random() >= share:
                continue
            number += 1
            target = tmp_path / f"{prefix}"
            after_power_loss(recorded, prefix, survive, target)
            try:
                check_recovery(target, is_committed=prefix >= committed, older=older)
            except BaseException as error:
                error.add_note(f"after {prefix} operations (committed: {committed}), {name}")
                raise
            shutil.rmtree(target)
    return number


def test_a_sample_of_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, committed = recorded_save(tmp_path / "run", monkeypatch, older=2, ranks=1)
    assert replay(tmp_path, recorded, committed, 2, share=0.1) > 20


@pytest.mark.slow
@pytest.mark.parametrize("older", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: int, ranks: int
) -> None:
    recorded, committed = recorded_save(tmp_path / "run", monkeypatch, older=older, ranks=ranks)
    assert replay(tmp_path, recorded, committed, older, share=1.0) > 150
