"""Checkpoints in an object store: the manifest is the commit, and errors and deaths cost none."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem

import moemesh
from moemesh.checkpoint import files, remote, saver
from moemesh.checkpoint.files import CheckpointError, quarantine
from moemesh.checkpoint.remote import RemoteError, RemotePath, place_of
from moemesh.checkpoint.retention import prune
from moemesh.checkpoint.saver import SaveOutcome
from moemesh.checkpoint.store import Shard, latest
from moemesh.checkpoint.stored import candidates, examine, unfinished
from moemesh.train.records.failure import newest_step
from tests.checkpoint.simulate import (
    TENSOR,
    Killed,
    cut,
    never,
    on_ranks,
    one_rank,
    save_among,
    save_with,
    shards,
    whole,
)


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    """An empty prefix in memory, and one of a disk with the same interface."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    address = "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/run"
    place = place_of(address)
    assert isinstance(place, RemotePath)
    yield place


def save(folder: RemotePath, step: int, keep: int = 2) -> SaveOutcome:
    return save_with(one_rank(folder, keep=keep), step)


class Faulty:
    """A store whose n-th call fails, before or after its work."""

    def __init__(self, real: Any, fail_at: int, error: Any, *, behind: bool = False) -> None:
        self.real, self.fail_at, self.error, self.behind = real, fail_at, error, behind
        self.count = 0

    def __call__(self, path: RemotePath, work: Any, *args: Any, **keys: Any) -> Any:
        self.count += 1
        if self.count == self.fail_at and not self.behind:
            raise self.error()
        result = self.real(path, work, *args, **keys)
        if self.count == self.fail_at:
            raise self.error()
        return result

    def __get__(self, path: RemotePath, kind: object = None) -> Any:
        return lambda *args, **keys: self(path, *args, **keys)


def faulty(fail_at: int, error: Any, *, behind: bool = False) -> Faulty:
    return Faulty(RemotePath._call, fail_at, error, behind=behind)


@pytest.mark.parametrize("size", [1, 3])
def test_saved_by_ranks_and_read_in_other_slices(folder: RemotePath, size: int) -> None:
    def work(rank: int, own: Any) -> list[Any]:
        outcomes = []
        for step in (1, 2, 3):
            mine = shards(step)[rank::size]
            if not rank:
                mine.append(whole("scale", torch.tensor(2.5, dtype=torch.bfloat16)))
            outcomes.append(save_with(own, step, mine).problem)
        return outcomes

    assert on_ranks(size, folder, work) == [[None] * 3] * size
    assert candidates(folder) == [3, 2] and unfinished(folder) == []
    checkpoint = latest(folder, never)
    assert checkpoint is not None and checkpoint.state == {"step": 3}
    assert torch.equal(checkpoint.read("w"), TENSOR + 3)
    for shard in cut("w", TENSOR + 3, [3, 2]):
        assert torch.equal(checkpoint.read("w", shard.offset, shard.tensor.shape), shard.tensor)
    into = torch.empty((), dtype=torch.bfloat16)
    checkpoint.load_into([Shard(name="scale", shape=(), offset=(), tensor=into)])
    assert into.item() == 2.5
    assert folder.names() == ["step-2", "step-3", "verified.json"]


def test_a_program_saves_and_loads_there(folder: RemotePath) -> None:
    saved = moemesh.save_checkpoint(str(folder), {"w": TENSOR, "epoch": 3}, step=2)
    assert saved == folder / "step-2" and folder.names() == ["step-2"]
    tree = moemesh.load_checkpoint(str(folder))
    assert torch.equal(tree["w"], TENSOR) and tree["epoch"] == 3


@pytest.mark.representative("memory")
def test_a_report_that_is_being_written_is_waited_for(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system other than an object store shows a half-written file."""
    real, halves = files.replace_file, [b"", b'{"problem": n']

    def in_parts(path: RemotePath, content: bytes) -> None:
        for half in halves:
            real(path, half)
            time.sleep(0.05)
        real(path, content)

    monkeypatch.setattr(files, "replace_file", in_parts)
    assert [outcome.problem for outcome, _ in save_among(2, folder)] == [None, None]
    assert candidates(folder) == [1]


@pytest.mark.representative("memory")
def test_a_report_that_stays_broken_is_a_failed_attempt(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "REPORT_SECONDS", 0.1)
    real = files.replace_file
    monkeypatch.setattr(files, "replace_file", lambda path, content: real(path, content[:-1]))
    problems = [str(outcome.problem) for outcome, _ in save_among(2, folder)]
    assert all("report-00001.json: cannot be read" in problem for problem in problems), problems
    assert candidates(folder) == []


def test_an_object_of_a_disk_is_replaced_at_once(tmp_path: Path) -> None:
    """No reader gets an empty claim while its owner rewrites it."""
    place = place_of(f"file://{tmp_path}/claim.json")
    assert isinstance(place, RemotePath)
    contents = {bytes([letter]) * 40_000 for letter in b"abcdef"}
    place.put(b"a" * 40_000)
    stop, seen = threading.Event(), set[bytes]()

    def read() -> None:
        while not stop.is_set():
            seen.add(place.read(0, 50_000))

    reader = threading.Thread(target=read)
    reader.start()
    for content in [*contents] * 12:
        place.put(content)
    stop.set()
    reader.join()
    assert seen <= contents and place.parent.names() == ["claim.json"]


def test_without_a_manifest_it_is_none(folder: RemotePath) -> None:
    save(folder, 1), save(folder, 2)
    (folder / "step-2" / "manifest.json").remove()
    assert candidates(folder) == [1] and unfinished(folder) == ["step-2"]
    # what a dead run of more ranks has left does not become part of the next save
    with (folder / "step-2" / "rank-00007.safetensors").writing() as write:
        write(b"left")
    assert save(folder, 2).problem is None
    checkpoint = latest(folder, never)
    assert checkpoint is not None and checkpoint.step == 2
    (folder / "step-1" / "manifest.json").remove()
    prune(folder, 1)
    assert folder.names() == ["step-2", "verified.json"]


def test_damage_is_named_and_put_aside(folder: RemotePath) -> None:
    save(folder, 1), save(folder, 2)
    (name,) = set((folder / "step-2").names()) - {"manifest.json"}
    part = folder / "step-2" / name
    content = bytearray(part.read(0, part.num_bytes()))
    content[-3] ^= 16
    with part.writing() as write:
        write(content)
    (damage,) = examine(folder, 2)
    assert (damage.file, damage.tensor) == (name, "w")
    skipped: list[int] = []
    checkpoint = latest(folder, lambda step, _: skipped.append(step))
    assert checkpoint is not None and (checkpoint.step, skipped) == (1, [2])
    quarantine(folder / "step-2")
    assert candidates(folder) == [1]
    assert any(name.startswith("broken-step-2-") for name in folder.names())
    assert save(folder, 2).problem is None
    assert folder.names() == ["step-1", "step-2", "verified.json"]
    with pytest.raises(CheckpointError, match="step-2 exists; a checkpoint is never overwritten"):
        save(folder, 2)


def test_a_supervisor_sees_its_progress(folder: RemotePath, tmp_path: Path) -> None:
    text = f'[train]\ncheckpoint_folder = "{folder}"\n'
    (tmp_path / "config.toml").write_text(text)
    assert newest_step(tmp_path) is None
    save(folder, 3)
    assert newest_step(tmp_path) == 3


@pytest.mark.representative("memory-False")
@pytest.mark.parametrize("behind", [False, True])
def test_an_error_at_every_call_costs_no_checkpoint(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    def error() -> OSError:
        return OSError(errno.EIO, "the store is busy")

    save(folder, 1), save(folder, 2)
    step, fail_at = 2, 0
    while True:
        prune(folder, 1)  # what a failed clean-up has left would add calls
        step, fail_at = step + 1, fail_at + 1
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "_call", fault := faulty(fail_at, error, behind=behind))
            try:
                outcome = save(folder, step, keep=1)
            except CheckpointError as failure:  # before anything was written
                assert fail_at == 1, failure
                step -= 1
                continue
        assert outcome.problem is None, (fail_at, outcome)
        checkpoint = latest(folder, never)
        assert checkpoint is not None and checkpoint.step == step
        assert torch.equal(checkpoint.read("w"), TENSOR + step)
        if fault.count < fail_at:
            break
    assert fail_at > 20


@pytest.mark.representative("memory")
def test_killed_at_every_call_something_verified_is_left(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    fail_at, newest, seen = 0, 1, set[bool]()
    while True:
        prune(folder, 1)
        fail_at += 1
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "_call", fault := faulty(fail_at, Killed))
            with suppress(Killed):
                save(folder, newest + 1, keep=1)
        checkpoint = latest(folder, never)
        assert checkpoint is not None and checkpoint.step in (newest, newest + 1)
        assert torch.equal(checkpoint.read("w"), TENSOR + checkpoint.step)
        seen.add(checkpoint.step > newest)
        newest = checkpoint.step
        if fault.count < fail_at:
            break
    assert seen == {False, True} and save(folder, newest + 1, keep=1).problem is None
    assert folder.names() == [f"step-{newest + 1}", "verified.json"]


def test_a_store_that_does_not_answer_is_no_damage(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1), save(folder, 2)
    fault = faulty(8, lambda: ConnectionError("reset"))
    monkeypatch.setattr(RemotePath, "_call", fault)
    with pytest.raises(CheckpointError, match="reset"):
        latest(folder, never)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("AccessDenied"), "RuntimeError: AccessDenied: "),
        (FSTimeoutError(), "FSTimeoutError: "),
        (FileNotFoundError(), "^$"),
    ],
)
def test_errors_of_clients_are_errors_of_the_disk(error: Exception, message: str) -> None:
    def fail(*args: object, **keys: object) -> None:
        raise error

    path = RemotePath(fsspec.filesystem("memory"), "/bucket/run")
    with pytest.raises(OSError, match=message):
        path._call(fail)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/a", "runs/a"),
        ("memory://bucket/run/", "memory:///bucket/run"),
        (Path("memory://bucket/run"), "memory:///bucket/run"),
        ("file:///tmp/run", "file:///tmp/run"),
        (Path("file:///tmp/run"), "file:///tmp/run"),
    ],
)
def test_texts_and_what_they_mean(text: str | Path, expected: str) -> None:
    assert str(place_of(text)) == expected


def test_addresses_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="Protocol not known: nowhere"):
        place_of("nowhere://bucket/run")
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(RemoteError, match="needs the package fsspec: pip install fsspec"):
        remote.place_of("s3://bucket/run")


class Remembering(MemoryFileSystem):
    """A client that answers from lists of names that it has seen, as those of object stores may."""

    protocol = "remembering"
    cachable = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[str, Any] = {}

    def ls(self, path: str, detail: bool = True, **keys: Any) -> Any:
        key = f"{self._strip_protocol(path)} {detail}"
        if key not in self.seen:
            self.seen[key] = super().ls(path, detail=detail, **keys)
        return self.seen[key]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


def test_lists_of_names_are_those_of_now() -> None:
    """Whatever a client remembers; the objects of one memory are seen through two clients."""
    MemoryFileSystem.store.clear()
    one, other = (RemotePath(Remembering(), "/bucket/run") for _ in range(2))
    for step in (1, 2, 3):
        assert save(one, step, keep=1).problem is None
        assert candidates(other) == [step] == candidates(one)
        assert not unfinished(other)
