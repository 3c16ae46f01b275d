"""Folders of checkpoints with an owner: one run at a time, whatever the requests of others do."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from moemesh.checkpoint import files, ownership
from moemesh.checkpoint import saver as saves
from moemesh.checkpoint.files import CheckpointError, list_names, read_start
from moemesh.checkpoint.ownership import Claim
from moemesh.checkpoint.remote import Place, RemotePath, place_of
from moemesh.checkpoint.retention import prune
from moemesh.checkpoint.saver import Saver
from moemesh.checkpoint.store import latest
from moemesh.checkpoint.stored import candidates, examine
from moemesh.monitor.lease import RunFolderError
from tests.checkpoint.simulate import TENSOR, never, one_rank, shards
from tests.checkpoint.simulate import save_with as save


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(ownership, "_OBSERVE_SECONDS", 0.2)
    monkeypatch.setattr(ownership, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ownership, "_PAUSES", (0.0, 0.01, 0.03))


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty folder that two runs have in common: a prefix of a store, and one of a disk."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield place_of("memory://bucket/run" if request.param == "memory" else tmp_path / "run")


@pytest.fixture
def held() -> Iterator[Callable[..., Claim]]:
    """A function like Claim.take; the claims are released after the test."""
    taken: list[Claim] = []

    def take(folder: Place, run: str, **keys: Any) -> Claim:
        taken.append(Claim.take(folder, run, **keys))
        return taken[-1]

    yield take
    for one in taken:
        one.release()


def saver_of(folder: Place, claim: Claim, keep: int = 1) -> Saver:
    own = one_rank(folder, keep=keep)
    own.lost = claim.lost
    return own


def stop_beating(one: Claim) -> None:
    """Stop the heartbeat of a claim, like the death of its process."""
    one._ended.set()
    one._thread.join()


def test_a_second_run_is_refused_while_the_first_lives(
    folder: Place, held: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_OBSERVE_SECONDS", 100.0)  # its first sign ends that
    first = held(folder, "a")
    lines: list[str] = []
    with pytest.raises(
        RunFolderError, match=r"in use by .*pid .* since 20.*checkpoint_folder.*--take"
    ):
        held(folder, "b", log=lines.append)
    assert first.lost() is None and "for its heartbeat" in lines[0]
    first.release()
    lines.clear()
    second = held(folder, "b", log=lines.append)
    assert not lines and first.lost() and second.lost() is None
    assert list_names(folder) == ["owner-2.json"]


def test_a_run_that_died_keeps_nobody_away(folder: Place, held: Callable[..., Claim]) -> None:
    stop_beating(held(folder, "a"))
    again = held(folder, "a", log=lambda text: pytest.fail(text))  # the same run: at once
    stop_beating(again)
    since = time.monotonic()
    other = held(folder, "b")
    assert time.monotonic() - since > 0.2
    assert again.lost() and other.lost() is None


def test_what_a_dying_run_left_of_its_claim_is_nobodys(
    folder: Place, held: Callable[..., Claim]
) -> None:
    held(folder, "a").release()
    files.create_file(folder / "owner-2.json", b"")
    assert held(folder, "b").number == 3


def test_of_many_that_start_at_once_one_goes_on(folder: Place) -> None:
    start, taken = threading.Barrier(8), list[Claim]()

    def run(name: str) -> None:
        start.wait()
        with suppress(RunFolderError):
            taken.append(Claim.take(folder, name))

    threads = [threading.Thread(target=run, args=(f"run{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([one for one in taken if one.lost() is None]) == 1
    for one in taken:
        one.release()


def test_a_run_that_was_taken_over_stops_before_its_next_commit(
    folder: Place, held: Callable[..., Claim]
) -> None:
    first = held(folder, "a")
    own = saver_of(folder, first)
    assert save(own, 1).problem is None
    second = held(folder, "b", takeover=True)
    outcome = save(own, 2)
    assert outcome.is_lost and "taken over" in str(outcome.problem) and own.news() == []
    assert candidates(folder) == [1]
    assert save(saver_of(folder, second), 2).problem is None


@pytest.mark.parametrize("look", [1, 2, 3, 4, 5])
def test_taken_over_between_two_looks_nothing_of_the_newer_is_deleted(
    folder: Place, held: Callable[..., Claim], look: int
) -> None:
    """The newer run saves the same step while the older one saves it: before its look `look`."""
    first = held(folder, "a")
    assert save(saver_of(folder, first), 1).problem is None
    looks = itertools.count(1)

    def lost() -> str | None:
        if next(looks) == look:
            newer = saver_of(folder, held(folder, "b", takeover=True))
            assert save(newer, 2).problem is None
        return first.lost()

    older = saver_of(folder, first)
    older.lost = lost
    outcome = save(older, 2, shards(9))
    checkpoint = latest(folder, never)
    assert checkpoint is not None and checkpoint.step == 2
    if outcome.problem is None:  # it had committed before
        assert look > 2
    else:
        assert outcome.is_lost
        assert torch.equal(checkpoint.read("w"), TENSOR + 2)
    assert examine(folder, 2) == []


def test_a_save_that_loses_the_folder_behind_its_commit_deletes_nothing(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = one_rank(folder, keep=9)
    for step in (1, 2):
        assert save(own, step).problem is None
    lost: list[str] = []
    remember = saves.remember
    monkeypatch.setattr(saves, "remember", lambda *given: (remember(*given), lost.append("taken")))
    own = one_rank(folder, keep=1)
    own.lost = lambda: lost[0] if lost else None
    save(own, 3)
    assert lost and sorted(candidates(folder)) == [1, 2, 3]


def test_a_pruning_ends_where_the_folder_is_lost(folder: Place) -> None:
    own = one_rank(folder, keep=9)
    for step in (1, 2, 3):
        assert save(own, step).problem is None
    looks = itertools.count()

    class Lost(Exception):
        pass

    def check() -> None:
        if next(looks) == 2:  # before the list, the first deletion, the second
            raise Lost

    with pytest.raises(Lost):
        prune(folder, 1, check=check)
    assert candidates(folder) == [3, 1]


class Late:
    """A store whose n-th call fails, and has its effect `delay` calls later."""

    def __init__(self, real: Any, late_at: int, delay: int) -> None:
        self.real, self.late_at, self.delay = real, late_at, delay
        self.count, self.due = 0, None

    def __get__(self, path: RemotePath, kind: object = None) -> Any:
        def call(work: Any, *args: Any, **keys: Any) -> Any:
            self.count += 1
            if self.count == self.late_at:
                self.due = lambda: self.real(path, work, *args, **keys)
                raise OSError(5, "no reply")
            result = self.real(path, work, *args, **keys)
            if self.count >= self.late_at + self.delay:
                self.flush()
            return result

        return call

    def flush(self) -> None:
        due, self.due = self.due, None
        try:
            if due is not None:
                due()
        except OSError:
            pass


@pytest.mark.representative("12")
@pytest.mark.parametrize("delay", [1, 12, 1000])
def test_requests_that_arrive_late_cost_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    MemoryFileSystem.store.clear()
    folder = place_of("memory://bucket/late")
    own = one_rank(folder, keep=1)
    assert save(own, 1).problem is None
    for number in itertools.count(1):
        step = number + 1
        prune(folder, 1)  # what a failed clean-up has left would add calls
        with monkeypatch.context() as patch:
            late = Late(RemotePath._call, number, delay)
            patch.setattr(RemotePath, "_call", late)
            try:
                assert save(own, step).problem is None, number
            except CheckpointError:  # before anything was written
                assert number <= 2
            late.flush()  # at the latest now
        if number > 2:
            assert candidates(folder)[0] == step and examine(folder, step) == [], number
        assert latest(folder, never) is not None
        if late.count < number:
            break
    assert number > 20


def test_a_request_whose_reply_was_lost_is_no_other_writer() -> None:
    MemoryFileSystem.store.clear()
    path = place_of("memory://bucket/run/object")
    assert isinstance(path, RemotePath)
    path.create(b"mine")
    path.create(b"mine")
    for content in (b"other", b"mine too", b""):
        with pytest.raises(FileExistsError):
            path.create(content)
    assert read_start(path, 10) == b"mine"
