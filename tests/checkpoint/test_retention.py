"""Retention counts what was read back and is finite; older formats and lists are understood."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from moemesh.checkpoint.files import quarantine
from moemesh.checkpoint.manifest import DTYPES
from moemesh.checkpoint.retention import plan_pruning, prune
from moemesh.checkpoint.store import latest, open_checkpoint
from moemesh.checkpoint.stored import StoredCheckpoint, candidates, num_nonfinite
from tests.checkpoint.simulate import as_format_1, cut, flip, save_as_ranks, save_one, whole


def save(folder: Path, step: int, value: float = 1.0) -> None:
    bad = torch.full((3,), value)
    save_one(folder, step, [whole("bad", bad), whole("w", torch.arange(5.0) + step)])


def newest(folder: Path) -> tuple[int, list[int]]:
    skipped: list[int] = []
    checkpoint = latest(folder, lambda step, _: skipped.append(step), prefer_finite=True)
    assert checkpoint is not None
    return checkpoint.step, skipped


@pytest.mark.parametrize("format_1", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_checkpoints_that_are_not_finite_evict_nothing(
    tmp_path: Path, value: float, format_1: bool
) -> None:
    for step in range(1, 9):
        save(tmp_path, step, value if step > 3 else 1.0)
        if format_1:
            as_format_1(tmp_path / f"step-{step}")
        prune(tmp_path, 2)
    # the newest of the poisoned ones stays to be looked at, and no other
    assert candidates(tmp_path) == [8, 3, 2]
    assert newest(tmp_path) == (3, [8])
    assert json.loads((tmp_path / "verified.json").read_bytes())["step-8"]["finite"] is False


def test_only_poisoned_checkpoints_are_better_than_none(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, float("nan"))
        prune(tmp_path, 2)
    assert candidates(tmp_path) == [4, 3]
    assert newest(tmp_path) == (4, [])
    # a user's own program may save infinities on purpose: its state need not be finite
    save(tmp_path, 9, float("-inf"))
    checkpoint = latest(tmp_path, lambda *_: None)
    assert checkpoint is not None and checkpoint.step == 9


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_that_are_not_finite_by_their_bits(name: str) -> None:
    dtype = getattr(torch, name)
    if not dtype.is_floating_point:
        assert num_nonfinite(bytes([255] * 16), name) == 0
        return
    size = torch.empty(0, dtype=dtype).element_size()
    if size == 1:
        codes = torch.arange(256, dtype=torch.uint8)
    else:
        codes = torch.randint(0, 256, (4096 * size,), dtype=torch.uint8)
        special = [float("inf"), float("-inf"), float("nan"), 0.0, torch.finfo(dtype).max]
        codes = torch.cat([codes, torch.tensor(special, dtype=dtype).view(torch.uint8)])
    expected = int((~torch.isfinite(codes.view(dtype).double())).sum())
    assert expected > 0
    assert num_nonfinite(codes.numpy().tobytes(), name) == expected


def test_format_1_is_read_verified_and_kept(tmp_path: Path) -> None:
    tensor = torch.arange(30.0).reshape(10, 3)
    save_as_ranks(tmp_path, 2, [[s] for s in cut("w", tensor, [2, 1])])
    as_format_1(tmp_path / "step-2")
    checkpoint = open_checkpoint(tmp_path, 2)
    assert checkpoint.manifest.format == 1 and torch.equal(checkpoint.read("w"), tensor)
    assert prune(tmp_path, 1) == [] and candidates(tmp_path) == [2]
    save_one(tmp_path, 3, [whole("w", tensor)])
    assert prune(tmp_path, 1) == [2]


def test_lists_of_older_versions_and_none_at_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    digests = {
        f"step-{n}": json.loads((tmp_path / f"step-{n}/manifest.json").read_bytes())["digest"]
        for n in (1, 2)
    }
    (tmp_path / "verified.json").write_text(json.dumps(digests))
    # recorded as verified: not reread, so that a flipped bit is not seen
    flip(tmp_path / "step-2/rank-00000.safetensors")
    assert prune(tmp_path, 2) == [1]
    (tmp_path / "verified.json").unlink()
    assert [one.step for one in plan_pruning(tmp_path, 1).kept] == [3]
    shutil.rmtree(tmp_path / "step-3")
    # the last one left is damaged: it stays
    assert prune(tmp_path, 1) == [] and candidates(tmp_path) == [2]


def test_a_damaged_checkpoint_takes_the_place_of_none(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step-3/rank-00000.safetensors")
    assert prune(tmp_path, 1) == [1] and candidates(tmp_path) == [3, 2]
    assert list(json.loads((tmp_path / "verified.json").read_bytes())) == ["step-2"]


def test_another_checkpoint_of_a_step_that_was_verified_is_read_back(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    prune(tmp_path, 2)  # both are remembered
    shutil.rmtree(tmp_path / "step-2")
    save(tmp_path, 2, 5.0)
    flip(tmp_path / "step-2/rank-00000.safetensors")
    assert prune(tmp_path, 1) == [] and candidates(tmp_path) == [2, 1]
    assert list(json.loads((tmp_path / "verified.json").read_bytes())) == ["step-1"]


def test_a_list_that_says_nothing_of_numbers_evicts_no_finite_checkpoint(tmp_path: Path) -> None:
    """The list of an older version and a checkpoint of format 1 lack the flag: tensors are read."""
    digests: dict[str, str] = {}
    for step, value in ((1, 1.0), (2, float("nan"))):
        save(tmp_path, step, value)
        as_format_1(tmp_path / f"step-{step}")
        manifest = json.loads((tmp_path / f"step-{step}/manifest.json").read_bytes())
        digests[f"step-{step}"] = manifest["digest"]
    (tmp_path / "verified.json").write_text(json.dumps(digests))
    assert prune(tmp_path, 1) == [] and candidates(tmp_path) == [2, 1]
    known = json.loads((tmp_path / "verified.json").read_bytes())
    assert [known[name]["finite"] for name in ("step-2", "step-1")] == [False, True]


def test_what_stays_is_remembered_before_anything_goes(tmp_path: Path) -> None:
    """A run that dies in between finds no list without what it has left."""
    for step in (1, 2, 3):
        save(tmp_path, step)

    class Died(Exception):
        pass

    looks = iter([None, Died])

    def check() -> None:
        if error := next(looks):
            raise error

    with pytest.raises(Died):
        prune(tmp_path, 2, check=check)
    assert list(json.loads((tmp_path / "verified.json").read_bytes())) == ["step-3", "step-2"]
    assert candidates(tmp_path) == [3, 2, 1]


def test_a_pruning_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"keep \(0\) must be at least 1"):
        prune(tmp_path, 0)
    assert candidates(tmp_path) == [1]


def test_what_was_put_aside_goes_when_its_step_or_a_later_one_counts(tmp_path: Path) -> None:
    for step in (1, 2):
        save_one(tmp_path, step, [whole("w", torch.ones(3))])
    quarantine(tmp_path / "step-2")
    prune(tmp_path, 2)
    (aside,) = tmp_path.glob("broken-step-2-*")
    save_one(tmp_path, 2, [whole("w", torch.full((3,), float("inf")))])
    prune(tmp_path, 2)
    assert aside.is_dir()  # the new one holds numbers that are not finite
    save_one(tmp_path, 3, [whole("w", torch.ones(3))])
    prune(tmp_path, 2)
    assert not aside.exists() and candidates(tmp_path)[0] == 3
    quarantine(tmp_path / "step-3")
    (aside,) = tmp_path.glob("broken-step-3-*")
    save_one(tmp_path, 3, [whole("w", torch.ones(3))])
    prune(tmp_path, 2)
    assert not aside.exists()  # its own step is back


def test_leftovers_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    for name in (f"step-11.tmp-{'0' * 32}", f".trash-step-0-{'0' * 32}", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "verified.json").write_text("{broken")
    assert prune(tmp_path, 3) == [1]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-2", "step-3", "step-10", "notes", "verified.json"}


def test_prune_reads_each_checkpoint_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = StoredCheckpoint.verify

    def verify(self: StoredCheckpoint, part: int = 0, parts: int = 1) -> None:
        read.append(self.path.name.partition(".")[0])
        real(self, part, parts)

    monkeypatch.setattr(StoredCheckpoint, "verify", verify)
    for step in (1, 2, 3):
        save_one(tmp_path, step, [whole("a", torch.arange(3.0))])
        prune(tmp_path, 2)
    # by the save, and by the first pruning after it
    assert read == [f"step-{step}" for step in (1, 2, 3) for _ in range(2)]
    assert candidates(tmp_path) == [3, 2]
