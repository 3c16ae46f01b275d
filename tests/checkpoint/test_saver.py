"""Saves during later steps: the bytes of their step, faults retried, the last save complete."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulated_device import SimulatedDevice
from moemesh.checkpoint import files, saver, writing
from moemesh.checkpoint.saver import SaveOutcome, Saver
from moemesh.checkpoint.store import CheckpointError, Shard, open_checkpoint
from moemesh.checkpoint.stored import candidates
from tests import commands
from tests.checkpoint.simulate import (
    on_ranks,
    one_rank,
    save_as_ranks,
    save_with,
    shards,
    tree,
    whole,
)
from tests.waiting import PATIENCE, until


@pytest.mark.parametrize("size", [1, 3])
def test_the_same_bytes_in_the_background_and_at_once(tmp_path: Path, size: int) -> None:
    per_rank = [shards()[rank::size] for rank in range(size)]
    state = {"cursor": 7, "loads": None}
    for step in (1, 2):
        save_as_ranks(tmp_path / "together", step, per_rank, state)

    def work(rank: int, own: Saver) -> list[SaveOutcome | None]:
        outcomes: list[SaveOutcome | None] = []
        for step in (1, 2):
            mine = [replace(shard, tensor=shard.tensor.clone()) for shard in per_rank[rank]]
            own.start(step, mine, dict(state))
            for shard in mine:  # training continues at once
                shard.tensor.fill_(float("nan"))
            outcomes.append(own.finish())
            assert own.finish() is None and own.news() == []
        return outcomes

    for outcomes in on_ranks(size, tmp_path / "background", work):
        assert [outcome.problem for outcome in outcomes] == [None, None], outcomes
    assert tree(tmp_path / "background") == tree(tmp_path / "together")


def test_start_returns_before_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    real = files.write_file

    def write(path: Path, parts: Any, *look: Any) -> Any:
        assert may_write.wait(30)
        return real(path, parts, *look)

    monkeypatch.setattr(files, "write_file", write)
    own = one_rank(tmp_path)
    own.start(1, shards(), {})
    assert candidates(tmp_path) == []
    may_write.set()
    outcome = own.finish()
    assert outcome is not None and outcome.problem is None and candidates(tmp_path) == [1]
    save_with(own, 2)
    # one buffer of the size of the shards, whatever the number of saves
    assert own._staging.num_bytes == sum(-(-s.tensor.nbytes // 64) * 64 for s in shards())


def test_what_does_not_fit_into_memory_is_written_while_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "available_bytes", lambda: 100)

    def work(rank: int, own: Saver) -> str | None:
        # rank 1 holds nothing, and waits all the same
        own.start(1, shards() if rank == 0 else [], {})
        assert candidates(tmp_path) == [1]
        outcome = own.finish()
        assert outcome is not None and outcome.problem is None
        return own.why_blocking

    for why in on_ranks(2, tmp_path, work):
        assert why == "rank 0: 256 bytes to stage, at most 50 are left to this rank"


def test_a_buffer_that_cannot_be_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    own = one_rank(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saver.torch, "empty", refuse)
        own.start(1, shards(), {})
    assert candidates(tmp_path) == [1]
    assert own.why_blocking == "rank 0: 256 bytes to stage, which cannot be allocated"


@pytest.mark.parametrize("error", [None, RuntimeError("can't start new thread")])
def test_a_save_needs_no_new_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A thread cannot be started where memory is short, or never begins."""

    def start(*_: object) -> None:
        if error is not None:
            raise error

    own, large = one_rank(tmp_path), torch.arange(200_000.0)
    with monkeypatch.context() as patch:
        # Python 3.13 has another name for what starts a thread.
        names = ("_start_new_thread", "_start_joinable_thread")
        (name,) = [one for one in names if hasattr(threading, one)]
        patch.setattr(threading, name, start)
        patch.setattr("_thread.start_new_thread", start)
        outcome = save_with(own, 1, [whole("w", large), whole("v", large + 1)])
    assert outcome.problem is None
    assert torch.equal(open_checkpoint(tmp_path, 1).read("v"), large + 1)


def test_mistakes_are_told_on_all_ranks_at_once(tmp_path: Path) -> None:
    def work(rank: int, own: Saver) -> None:
        for _ in range(2):
            save_with(own, 1, shards()[rank::2])

    for error in on_ranks(2, tmp_path, work):
        assert isinstance(error, CheckpointError) and "rank 0: " in str(error)
        assert "step-1 exists; a checkpoint is never overwritten" in str(error)

    def hole(rank: int, own: Saver) -> SaveOutcome:
        return save_with(own, 2, shards()[rank : 2 * rank + 1])

    for outcome in on_ranks(2, tmp_path, hole):
        assert "no rank holds 15 of its 60 elements" in outcome.problem
    assert candidates(tmp_path) == [1] and len(list(tmp_path.iterdir())) == 2


def test_a_process_that_fails_leaves_its_save_complete(tmp_path: Path) -> None:
    """The interpreter waits for the thread, also after an uncaught error."""
    script = f"""
import time, torch
from pathlib import Path
from moemesh.checkpoint import files
from tests.checkpoint.simulate import one_rank
from tests.checkpoint.simulate import whole
real = files.write_file
files.write_file = lambda *args: (time.sleep(0.1), real(*args))[1]
one_rank(Path({str(tmp_path)!r})).start(1, [whole("w", torch.ones(3))], {{}})
raise ValueError("training broke")
"""
    command = [commands.python(), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "training broke" in done.stderr
    assert candidates(tmp_path) == [1]


def test_a_save_that_is_abandoned_ends_before_its_next_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is to end at once: it neither writes on nor commits."""
    own, real, begun = one_rank(tmp_path), writing.safetensors_bytes, list[int]()

    def parts(tensors: Any) -> Any:
        for place, part in enumerate(real(tensors)):
            begun.append(place)
            if place == 2:
                until(lambda: own._job is not None)
                own.abandon()
            yield part

    monkeypatch.setattr(writing, "safetensors_bytes", parts)
    assert save_with(own, 1).problem == "stopped"
    assert begun == [0, 1, 2] and candidates(tmp_path) == []


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_hurry_ends_the_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "PAUSES", (60.0,))

    own = one_rank(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", no_space)
        own.start(1, shards(), {})
        since = time.monotonic()
        outcome = own.finish(hurry=True)
    assert outcome is not None and outcome.problem is not None
    assert time.monotonic() - since < 50
    save_with(own, 2)
    assert candidates(tmp_path) == [2]


def test_a_stop_during_a_save_ends_the_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that one of two ranks sees ends the attempts of both."""
    monkeypatch.setattr(saver, "PAUSES", (60.0,))

    monkeypatch.setattr(files, "write_file", no_space)
    since = time.monotonic()

    def work(rank: int, own: Saver) -> SaveOutcome | None:
        hurries = lambda: rank == 1 and time.monotonic() > since + 0.1  # noqa: E731
        own.start(1, [] if rank else shards(), {}, hurries=hurries)
        return own.finish()

    for outcome in on_ranks(2, tmp_path, work):
        assert outcome is not None and "No space left" in str(outcome.problem)
    assert time.monotonic() - since < 50


def test_poisoned_tensors_are_named(tmp_path: Path) -> None:
    def work(rank: int, own: Saver) -> Sequence[str]:
        bad = torch.tensor([1.0, float("inf")])
        return save_with(own, 1, [whole("bad", bad)] if rank else shards()).nonfinite

    assert on_ranks(2, tmp_path, work) == [["bad"], ["bad"]]


def test_copies_of_a_device_lock_memory_of_their_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    codes = [0]

    class Cudart:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
            locked[pointer] = size
            return codes[0]

        def cudaHostUnregister(self, pointer: int) -> None:
            del locked[pointer]

    def shard(rows: int) -> dict[str, Shard]:
        place = {"name": "x", "shape": (rows,), "offset": (0,)}
        return {"x": Shard(tensor=torch.arange(rows, dtype=torch.float32).to("cuda"), **place)}

    with SimulatedDevice():
        monkeypatch.setattr(torch.cuda, "cudart", Cudart)
        own = saver.Staging()
        for rows in (1000, 3000, 2000):
            assert own.reserve(shard(rows)) is None
            copied = own.copy(shard(rows))["x"].tensor
            assert copied.tolist() == list(range(rows))
            assert list(locked.values()) == [own.num_bytes]
        assert own.num_bytes == -(-12000 // 64) * 64
        del own
        assert not locked
        codes[0] = 1  # the driver refuses: slower copies, and nothing to unlock
        assert saver.Staging().reserve(shard(10)) is None
        assert len(locked) == 1
