"""Power lost at any moment of a save: the old checkpoint or the new one is whole, and stays."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint import files
from moemesh.checkpoint.store import latest
from moemesh.checkpoint.stored import candidates
from tests.checkpoint.simulate import (
    TENSOR,
    never,
    one_rank,
    save_among,
    save_as_ranks,
    save_with,
    shards,
)


def recorded_save(
    run: Path, monkeypatch: pytest.MonkeyPatch, *, older: int, ranks: int
) -> tuple[RecordingOs, int]:
    """A save of step 3 with a retention of one checkpoint and `older` older ones, and the number of
    operations after which the save is announced."""
    folder = run / "checkpoints"
    run.mkdir()
    for step in range(3 - older, 3):
        save_as_ranks(folder, step, [shards(step)])
    with monkeypatch.context() as patch:
        recorded = RecordingOs(run)
        patch.setattr(files, "os", recorded)
        patch.setattr(files, "shutil", recorded)
        if ranks == 1:
            outcomes = [save_with(one_rank(folder, keep=1), 3)]
        else:
            outcomes = [outcome for outcome, _ in save_among(ranks, folder, 3, value=3)]
    assert all(one.problem is None for one in outcomes), outcomes
    is_named = [isinstance(change, dict) and "step-3" in change for _, change in recorded.log]
    parent = recorded.log[is_named.index(True)][0]
    committed = recorded.log.index((parent, None), is_named.index(True)) + 1
    assert committed < len(recorded.log)
    return recorded, committed


def check_recovery(run: Path, *, is_committed: bool, older: int) -> None:
    """I2 and I5: whatever was committed verifies and is what was saved; the next save succeeds."""
    folder = run / "checkpoints"
    checkpoint = latest(folder, never)
    if checkpoint is None:
        assert not older and not is_committed
    else:
        assert torch.equal(checkpoint.read("w"), TENSOR + checkpoint.step)
        assert checkpoint.step == 3 or not is_committed
    own = one_rank(folder, keep=1)
    assert save_with(own, 4).problem is None and not own.news()
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


# Loss of power, replayed: what of a recorded sequence of file operations a disk may hold.
#
# A file's writes and a folder's names are on the disk when the file, or the folder, was synced
# since. Of all that was done later any part may be there: a rename is one change of its folder.

#: Change of a file: offset and bytes of a write. Change of a folder: names -> their new nodes.
Change = Any


@dataclass(eq=False)
class Node:
    """A file or a folder: its content before the recording and, live, with all changes."""

    is_folder: bool
    before: Any
    names: dict[str, Node] = field(default_factory=dict)


class RecordingOs:
    """A recorder of `os` and `shutil.rmtree`: runs every operation below `root` and logs it."""

    def __init__(self, root: Path) -> None:
        self._lock = threading.Lock()
        self._path, self.root = root, _read(root)
        self._handles: dict[int, tuple[Node, list[int]]] = {}
        #: Log of operations in order: a node and a change of it, or None for a sync.
        self.log: list[tuple[Node, Change]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            handle = os.open(path, flags, mode)
            if flags & os.O_CREAT:
                assert flags & os.O_EXCL
                self._change(path.parent, {path.name: Node(False, b"")})
            if (node := self._node(path)) is not None:
                self._handles[handle] = node, [0]
            return handle

    def write(self, handle: int, content: bytes) -> int:
        with self._lock:
            size = os.write(handle, content)
            node, place = self._handles[handle]
            self.log.append((node, (place[0], bytes(content[:size]))))
            place[0] += size
            return size

    def fsync(self, handle: int) -> None:
        with self._lock:
            os.fsync(handle)
            self.log.append((self._handles[handle][0], None))

    def mkdir(self, path: Path) -> None:
        with self._lock:
            os.mkdir(path)
            self._change(path.parent, {path.name: Node(True, {})})

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            os.rename(source, target)
            assert source.parent == target.parent
            self._change(source.parent, {source.name: None, target.name: self._node(source)})

    replace = rename

    def unlink(self, path: Path) -> None:
        with self._lock:
            os.unlink(path)
            self._change(path.parent, {path.name: None})

    def rmtree(self, path: Path, *, ignore_errors: bool) -> None:
        for found in sorted(path.iterdir()) if path.is_dir() else ():
            if found.is_dir():
                self.rmtree(found, ignore_errors=ignore_errors)
            else:
                self.unlink(found)
        if path.is_dir():
            with self._lock:
                os.rmdir(path)
                self._change(path.parent, {path.name: None})

    def _node(self, path: Path) -> Node | None:
        node: Node | None = self.root
        for name in path.relative_to(self._path).parts:
            node = node and node.names.get(name)
        return node

    def _change(self, folder: Path, names: dict[str, Node | None]) -> None:
        node = self._node(folder)
        assert node is not None
        for name, found in names.items():
            if found is None:
                node.names.pop(name)
            else:
                node.names[name] = found
        self.log.append((node, names))


def _read(path: Path) -> Node:
    if not path.is_dir():
        return Node(False, path.read_bytes())
    names = {found.name: _read(found) for found in path.iterdir()}
    return Node(True, dict(names), dict(names))


#: Changes of a node since its last sync -> the changes that reached the disk.
Survivors = Callable[[Node, list[Change]], list[Change]]


def survivors(seed: int) -> dict[str, Survivors]:
    """Ways to lose power, by name; `seed` for those that draw."""
    draw = random.Random(seed)

    def torn(node: Node, changes: list[Change]) -> list[Change]:
        if node.is_folder or not changes:
            return changes
        *rest, (place, content) = changes
        return [*rest, (place, content[: len(content) // 2])]

    def zeros(node: Node, changes: list[Change]) -> list[Change]:
        if node.is_folder:
            return changes
        return [(place, bytes(len(content))) for place, content in changes]

    return {
        "all of it is there": lambda _, changes: changes,
        "nothing of it is there": lambda _, changes: [],
        "names without content": lambda node, changes: changes if node.is_folder else [],
        "content without names": lambda node, changes: [] if node.is_folder else changes,
        "the last write of each file is torn": torn,
        "sizes without content": zeros,
        "some of it": lambda _, changes: [one for one in changes if draw.random() < 0.5],
    }


def after_power_loss(recorded: RecordingOs, prefix: int, survive: Survivors, target: Path) -> None:
    """Write what is left of the first `prefix` operations into the new folder `target`."""
    changes: dict[Node, list[Change]] = {}
    synced: dict[Node, int] = {}
    for node, change in recorded.log[:prefix]:
        own = changes.setdefault(node, [])
        if change is None:
            synced[node] = len(own)
        else:
            own.append(change)

    def kept(node: Node) -> Iterator[Change]:
        own, place = changes.get(node, []), synced.get(node, 0)
        yield from own[:place]
        yield from survive(node, own[place:])

    def write(node: Node, path: Path) -> None:
        if not node.is_folder:
            content = bytearray(node.before)
            for place, written in kept(node):
                content.extend(bytes(max(place - len(content), 0)))
                content[place : place + len(written)] = written
            path.write_bytes(content)
            return
        names = dict(node.before)
        for change in kept(node):
            names |= change
        path.mkdir()
        for name, found in names.items():
            if found is not None:
                write(found, path / name)

    write(recorded.root, target)
