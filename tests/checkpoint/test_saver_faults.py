"""Saves whose disk fails: retried, with one result on all ranks, and without a loss."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint import files, saver
from moemesh.checkpoint.retention import prune
from moemesh.checkpoint.saver import SaveOutcome, Saver
from moemesh.checkpoint.store import latest, open_checkpoint
from tests.checkpoint.simulate import (
    TENSOR,
    FaultyOs,
    Killed,
    count,
    never,
    on_ranks,
    one_rank,
    prepared,
    save_among,
    save_third,
    save_with,
    shards,
)


def failing_write(name: str, error: BaseException, times: list[int]) -> Any:
    """`files.write_file` that fails `times[0]` times, which it counts down, for files whose name
    contains `name`."""
    real = files.write_file

    def write(path: Path, *given: Any) -> Any:
        if name in path.name and times[0]:
            times[0] -= 1
            raise error
        return real(path, *given)

    return write


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_full_disk_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int, times: int
) -> None:
    write = failing_write(f"rank-{bad_rank:05d}.safetensors", NO_SPACE, [times])
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", write)
        results = save_among(3, tmp_path)
    outcome, news = results[0]
    assert [result[0] for result in results] == [outcome] * 3
    assert all(text.endswith("retrying in 0.01 s") for text in news)
    needed = 60 if bad_rank else 120  # bytes; rank 0 holds two of the four slices
    if times < 3:
        assert outcome.problem is None and len(news) == times
        assert torch.equal(open_checkpoint(tmp_path, 1).read("w"), TENSOR)
    else:
        assert f": {needed} bytes needed, " in outcome.problem and " free" in outcome.problem
        assert f"rank-{bad_rank:05d}.safetensors" in outcome.problem
        assert list(tmp_path.iterdir()) == []
        assert save_among(3, tmp_path)[0][0].problem is None


def test_a_rank_that_cannot_even_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_report, broken = files.replace_file, [1]

    def report(path: Path, content: bytes) -> None:
        if path.name == "report-00001.json" and broken:
            broken.clear()
            raise NO_SPACE
        real_report(path, content)

    error = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(files, "write_file", failing_write("rank-00001", error, [1]))
    monkeypatch.setattr(files, "replace_file", report)
    results = save_among(2, tmp_path)
    assert results[0][0].problem is None and results[1][0].problem is None
    assert len(results[0][1]) == 1 and "Input/output error" in results[0][1][0]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_has_no_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int
) -> None:
    write = failing_write(f"rank-{bad_rank:05d}", MemoryError("no memory left"), [9])
    monkeypatch.setattr(files, "write_file", write)
    for outcome, _ in save_among(2, tmp_path):
        assert f"{'rank 1: ' * bad_rank}MemoryError: no memory left" == outcome.problem
    assert list(tmp_path.iterdir()) == [] or bad_rank == 0


@pytest.mark.parametrize(
    ("code", "limit", "reason"),
    [
        (errno.ENOSPC, 9, r": 7 bytes needed, [\d,]+ free"),
        (errno.EDQUOT, 9, ": 7 bytes needed, the quota of this user, group or project is used up"),
        (errno.EFBIG, 1024, r": 7 bytes needed, this process may write 1,024 into a file .*"),
        (errno.EFBIG, resource.RLIM_INFINITY, ": 7 bytes needed, more than this file system .*"),
        (errno.EIO, 9, ""),
    ],
)
def test_what_there_is_no_room_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, limit: int, reason: str
) -> None:
    monkeypatch.setattr(files.resource, "getrlimit", lambda _: (limit, limit))
    message = str(files.explain(OSError(code, os.strerror(code)), tmp_path / "x", 7))
    assert re.fullmatch(f"{tmp_path}/x: {os.strerror(code)}{reason}", message), message


def test_ranks_without_a_common_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "FOLDER_SECONDS", 0.2)

    def work(rank: int, own: Saver) -> SaveOutcome:
        own.folder = tmp_path / str(rank)
        own.folder.mkdir()
        return save_with(own, 1, shards()[rank::2])

    for outcome in on_ranks(2, tmp_path, work):
        assert "is it on a file system that all ranks share?" in outcome.problem


def test_what_reads_back_wrong_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, bad = files.write_file, [True]

    def write(path: Path, parts: Any, *look: Any) -> Any:
        written = real(path, parts, *look)
        if bad[0] and path.suffix == ".safetensors":
            bad[0] = False
            with path.open("r+b") as file:
                file.seek(-3, os.SEEK_END)
                file.write(b"\xff")
        return written

    monkeypatch.setattr(files, "write_file", write)
    own = one_rank(tmp_path)
    assert save_with(own, 1).problem is None
    (text,) = own.news()
    assert "w, slice at [5, 0], chunk 0: digest" in text
    assert open_checkpoint(tmp_path, 1).step == 1


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
        # an error is retried, one of the clean-up is noted: the checkpoint exists in any case
        assert outcome.problem is None, outcome
        checkpoint = latest(folder, never)
        assert checkpoint is not None and checkpoint.step == 3
        assert torch.equal(checkpoint.read("w"), TENSOR + 3)
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
    assert outcome.problem is None
    assert torch.equal(open_checkpoint(tmp_path / "run", 3).read("w"), TENSOR + 3)


def test_killed_at_every_call_something_verified_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is a death: nothing is caught or cleaned up; the next process resumes."""
    calls, seen = count(prepared(tmp_path / "count"), monkeypatch, save_third), set[int]()
    for fail_at in range(1, calls + 1):
        folder = prepared(tmp_path / str(fail_at))
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", FaultyOs(fail_at, Killed))
            assert save_third(folder).problem in (None, "Killed: ")
        checkpoint = latest(folder, never)
        assert checkpoint is not None and torch.equal(
            checkpoint.read("w"), TENSOR + checkpoint.step
        )
        seen.add(checkpoint.step)
        if checkpoint.step == 2:
            assert save_third(folder).problem is None
        prune(folder, 1)
        assert {path.name for path in folder.iterdir()} == {"step-3", "verified.json"}
    assert seen == {2, 3}
