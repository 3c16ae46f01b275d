"""Saves behind the steps: the same bytes as before, faults retried, the last one complete."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.bench.simulated_device import SimulatedDevice
from moemesh.checkpoint import files, job, staging, writing
from moemesh.checkpoint.saver import Outcome, Saver
from moemesh.checkpoint.store import CheckpointError, Shard, candidates, latest, open_checkpoint
from tests import commands
from tests.checkpoint.simulate import Ranks, cut, save_as_ranks, whole
from tests.checkpoint.test_faults import FaultyOs, Killed, never

TENSOR = torch.arange(60.0).reshape(20, 3)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "PAUSES", (0.01, 0.01))


def one_rank(folder: Path, *, keep: int = 2, in_background: bool = True) -> Saver:
    return Saver(
        folder,
        rank=0,
        world_size=1,
        gather=lambda value: [value],
        keep=keep,
        in_background=in_background,
    )


def on_ranks(
    size: int, folder: Path, work: Callable[[int, Saver], Any], *, in_background: bool = True
) -> list[Any]:
    """`work` with the saver of each of `size` ranks, on a thread a rank."""
    ranks, results = Ranks(size), list[Any]([None] * size)

    def run(rank: int) -> None:
        own = Saver(
            folder,
            rank=rank,
            world_size=size,
            gather=ranks.gather(rank),
            keep=2,
            in_background=in_background,
        )
        try:
            results[rank] = work(rank, own)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def shards(value: float = 0.0) -> list[Shard]:
    return cut("w", TENSOR + value, [4, 1])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "verified.json"
    }


@pytest.mark.parametrize("size", [1, 3])
def test_the_same_bytes_as_a_save_of_all_ranks_at_once(tmp_path: Path, size: int) -> None:
    per_rank = [shards()[rank::size] for rank in range(size)]
    state = {"cursor": 7, "loads": None}
    for step in (1, 2):
        save_as_ranks(tmp_path / "together", step, per_rank, state)
    for folder, in_background in (("background", True), ("waiting", False)):

        def work(rank: int, own: Saver) -> list[Outcome | None]:
            found: list[Outcome | None] = []
            for step in (1, 2):
                mine = [
                    Shard(name=s.name, shape=s.shape, offset=s.offset, tensor=s.tensor.clone())
                    for s in per_rank[rank]
                ]
                own.start(step, mine, dict(state))
                for shard in mine:  # training goes on at once
                    shard.tensor.fill_(float("nan"))
                found.append(own.finish())
                assert own.finish() is None and own.news() == []
            return found

        for outcomes in on_ranks(size, tmp_path / folder, work, in_background=in_background):
            assert [outcome.problem for outcome in outcomes] == [None, None], outcomes
        assert tree(tmp_path / folder) == tree(tmp_path / "together")


def test_start_returns_before_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    real = writing.write_file

    def write(path: Path, parts: Any) -> files.Written:
        assert may_write.wait(30)
        return real(path, parts)

    monkeypatch.setattr(writing, "write_file", write)
    own = one_rank(tmp_path)
    own.start(1, shards(), {})
    assert candidates(tmp_path) == []
    may_write.set()
    outcome = own.finish()
    assert outcome is not None and outcome.problem is None and candidates(tmp_path) == [1]
    own.start(2, shards(), {})
    own.finish()
    # one buffer of the size of the shards, whatever the number of saves
    assert own._staging.num_bytes == sum(-(-s.tensor.nbytes // 64) * 64 for s in shards())


def test_what_does_not_fit_into_memory_is_written_while_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "available_bytes", lambda: 100)

    def work(rank: int, own: Saver) -> str | None:
        # rank 1 holds nothing, and waits all the same
        own.start(1, shards() if rank == 0 else [], {})
        assert candidates(tmp_path) == [1]
        outcome = own.finish()
        assert outcome is not None and outcome.problem is None
        return own.why_blocking

    for why in on_ranks(2, tmp_path, work):
        assert why == "rank 0: 256 bytes to stage, at most 50 are left to this rank"


def test_mistakes_are_told_on_all_ranks_at_once(tmp_path: Path) -> None:
    def work(rank: int, own: Saver) -> None:
        own.start(1, shards()[rank::2], {})
        own.finish()
        own.start(1, shards()[rank::2], {})

    for error in on_ranks(2, tmp_path, work):
        assert isinstance(error, CheckpointError) and "rank 0: " in str(error)
        assert "step-1 exists; a checkpoint is never overwritten" in str(error)

    def hole(rank: int, own: Saver) -> Outcome | None:
        own.start(2, shards()[rank : 2 * rank + 1], {})
        return own.finish()

    for outcome in on_ranks(2, tmp_path, hole):
        assert "no rank holds 15 of its 60 elements" in outcome.problem
    assert candidates(tmp_path) == [1] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_full_disk_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int, times: int
) -> None:
    failures, real = [times], writing.write_file

    def write(path: Path, parts: Any) -> files.Written:
        if path.name == f"rank-{bad_rank:05d}.safetensors" and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, parts)

    def work(rank: int, own: Saver) -> tuple[Outcome | None, list[str]]:
        own.start(1, shards()[rank::3], {})
        return own.finish(), own.news()

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_file", write)
        results = on_ranks(3, tmp_path, work)
    outcome, news = results[0]
    assert [result[0] for result in results] == [outcome] * 3
    assert all(text.endswith("trying again in 0.01 s") for text in news)
    needed = 60 if bad_rank else 120  # bytes; rank 0 holds two of the four slices
    if times < 3:
        assert outcome.problem is None and len(news) == times
        assert torch.equal(open_checkpoint(tmp_path, 1).read("w"), TENSOR)
    else:
        assert f": {needed} bytes needed, " in outcome.problem and " free" in outcome.problem
        assert f"rank-{bad_rank:05d}.safetensors" in outcome.problem
        assert list(tmp_path.iterdir()) == []
        assert on_ranks(3, tmp_path, work)[0][0].problem is None


def test_a_rank_that_cannot_even_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_part, real_report = writing.write_file, job.replace_file
    broken = [True]

    def write(path: Path, parts: Any) -> files.Written:
        if "rank-00001" in path.name and broken[0]:
            raise OSError(errno.EIO, "Input/output error")
        return real_part(path, parts)

    def report(path: Path, content: bytes) -> None:
        if path.name == "report-00001.json" and broken[0]:
            broken[0] = False
            raise OSError(errno.ENOSPC, "No space left on device")
        real_report(path, content)

    monkeypatch.setattr(writing, "write_file", write)
    monkeypatch.setattr(job, "replace_file", report)

    def work(rank: int, own: Saver) -> tuple[Outcome | None, list[str]]:
        own.start(1, shards()[rank::2], {})
        return own.finish(), own.news()

    results = on_ranks(2, tmp_path, work)
    assert results[0][0].problem is None and results[1][0].problem is None
    assert len(results[0][1]) == 1 and "Input/output error" in results[0][1][0]


def test_ranks_without_a_common_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "FOLDER_SECONDS", 0.2)

    def work(rank: int, own: Saver) -> Outcome | None:
        own.folder = tmp_path / str(rank)
        own.folder.mkdir()
        own.start(1, shards()[rank::2], {})
        return own.finish()

    for outcome in on_ranks(2, tmp_path, work):
        assert "is it on a file system that all ranks share?" in outcome.problem


def test_what_reads_back_wrong_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, bad = writing.write_file, [True]

    def write(path: Path, parts: Any) -> files.Written:
        written = real(path, parts)
        if bad[0] and path.suffix == ".safetensors":
            bad[0] = False
            with path.open("r+b") as file:
                file.seek(-3, os.SEEK_END)
                file.write(b"\xff")
        return written

    monkeypatch.setattr(writing, "write_file", write)
    own = one_rank(tmp_path)
    own.start(1, shards(), {})
    outcome = own.finish()
    assert outcome is not None and outcome.problem is None
    (text,) = own.news()
    assert "w, slice at [5, 0], chunk 0: digest" in text
    assert open_checkpoint(tmp_path, 1).step == 1


def count(folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], Any]) -> int:
    with monkeypatch.context() as patch:
        faulty = FaultyOs(-1, Killed)
        patch.setattr(files, "os", faulty)
        work(folder)
        return faulty.count


def save_third(folder: Path) -> Outcome | None:
    """A save with retention, over two older checkpoints."""
    own = one_rank(folder, keep=1)
    own.start(3, shards(3), {})
    return own.finish()


def prepared(folder: Path) -> Path:
    """Two older checkpoints, those of a folder beside it where there is one."""
    template = folder.parent / "template"
    if not template.exists():
        for step in (1, 2):
            save_as_ranks(template, step, [shards(step)])
    shutil.copytree(template, folder)
    return folder


ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.ESTALE, errno.EFBIG)


@pytest.mark.representative("ENOSPC")
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_an_error_at_every_call_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    calls = count(prepared(tmp_path / "count"), monkeypatch, save_third)
    assert calls > 30
    for fail_at in range(1, calls + 1):
        folder = prepared(tmp_path / str(fail_at))
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", FaultyOs(fail_at, lambda: OSError(code, os.strerror(code))))
            outcome = save_third(folder)
        # an error is tried again, one in the clean-up is noted: the checkpoint is there in any case
        assert outcome is not None and outcome.problem is None, outcome
        found = latest(folder, never)
        assert found is not None and found.step == 3
        assert torch.equal(found.read("w"), TENSOR + 3)
        assert not list(folder.glob("*.tmp-*"))


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ShortWrites(FaultyOs):
        def __getattr__(self, name: str) -> Any:
            if name == "write":
                return lambda handle, data: os.write(handle, data[: max(1, len(data) // 3)])
            return super().__getattr__(name)

    with monkeypatch.context() as patch:
        patch.setattr(files, "os", ShortWrites(-1, Killed))
        outcome = save_third(prepared(tmp_path / "run"))
    assert outcome is not None and outcome.problem is None
    assert torch.equal(open_checkpoint(tmp_path / "run", 3).read("w"), TENSOR + 3)


def test_killed_at_every_call_something_verified_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a death: nothing is caught, nothing cleaned up; the next process goes on."""
    calls, seen = count(prepared(tmp_path / "count"), monkeypatch, save_third), set[int]()
    for fail_at in range(1, calls + 1):
        folder = prepared(tmp_path / str(fail_at))
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", FaultyOs(fail_at, Killed))
            patch.setattr(threading, "excepthook", lambda _: None)
            own = one_rank(folder, keep=1)
            own.start(3, shards(3), {})
            assert own._job is not None
            own._job.join()
        found = latest(folder, never)
        assert found is not None and torch.equal(found.read("w"), TENSOR + found.step)
        seen.add(found.step)
        if found.step == 2:
            outcome = save_third(folder)
            assert outcome is not None and outcome.problem is None
        files_left = {path.name for path in folder.iterdir() if path.name.startswith("step-3")}
        assert files_left >= {"step-3"}
    assert seen == {2, 3}


def test_a_process_that_fails_leaves_its_save_complete(tmp_path: Path) -> None:
    """The interpreter waits for the thread, also behind an uncaught error."""
    script = f"""
import time, torch
from pathlib import Path
from moemesh.checkpoint import writing
from tests.checkpoint.simulate import whole
from tests.checkpoint.test_saver import one_rank
real = writing.write_file
writing.write_file = lambda *args: (time.sleep(0.3), real(*args))[1]
one_rank(Path({str(tmp_path)!r})).start(1, [whole("w", torch.ones(3))], {{}})
raise ValueError("training broke")
"""
    done = subprocess.run(
        [commands.python(), "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "training broke" in done.stderr
    assert candidates(tmp_path) == [1]


def test_hurry_ends_the_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "PAUSES", (60.0,))

    def write(path: Path, parts: Any) -> files.Written:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = one_rank(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_file", write)
        own.start(1, shards(), {})
        since = time.monotonic()
        outcome = own.finish(hurry=True)
    assert outcome is not None and outcome.problem is not None
    assert time.monotonic() - since < 10
    own.start(2, [whole("w", torch.ones(3))], {})
    assert own.finish() is not None and candidates(tmp_path) == [2]


def test_poisoned_tensors_are_named(tmp_path: Path) -> None:
    def work(rank: int, own: Saver) -> Sequence[str]:
        bad = torch.tensor([1.0, float("inf")])
        own.start(1, [whole("bad", bad)] if rank else shards(), {})
        outcome = own.finish()
        assert outcome is not None
        return outcome.nonfinite

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
        own = staging.Staging()
        for rows in (1000, 3000, 2000):
            copied = own.copy(shard(rows))["x"].tensor
            assert copied.tolist() == list(range(rows))
            assert list(locked.values()) == [own.num_bytes]
        assert own.num_bytes == -(-12000 // 64) * 64
        del own
        assert not locked
        codes[0] = 1  # the driver refuses: slower copies, and nothing to unlock
        staging.Staging().copy(shard(10))
        assert len(locked) == 1
