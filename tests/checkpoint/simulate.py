"""Saves in one process: ranks as threads that gather through a barrier, uneven slices, faults."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint import files
from moemesh.checkpoint.digests import BLAKE2B, blake2b, digest_text
from moemesh.checkpoint.manifest import MANIFEST, encode_json
from moemesh.checkpoint.remote import Place
from moemesh.checkpoint.saver import SaveOutcome, Saver
from moemesh.checkpoint.store import Shard, save
from moemesh.config.layout import shard_range
from tests.waiting import PATIENCE


class Ranks:
    """An all-gather of JSON for `size` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=100)

    def gather(self, rank: int) -> Callable[[object], list[Any]]:
        def exchange(value: object) -> list[Any]:
            self.slots[rank] = json.loads(json.dumps(value))
            self._barrier.wait()
            result = list(self.slots)
            self._barrier.wait()
            return result

        return exchange


def save_as_ranks(
    folder: Path,
    step: int,
    per_rank: Sequence[Sequence[Shard]],
    state: dict[str, Any] | None = None,
) -> list[Path | BaseException]:
    """Runs save on one thread a rank; gives each rank's result or exception."""
    ranks = Ranks(len(per_rank))

    def work(rank: int) -> Path:
        content = state if state is not None else {"step": step}
        world = {"rank": rank, "world_size": ranks.size, "gather": ranks.gather(rank)}
        return save(folder, step, per_rank[rank], content, **world)

    return on_threads(ranks.size, work)


def on_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """`work` of each rank on a thread of its own; gives each one's result or exception."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return results


def save_one(
    folder: Path, step: int, shards: Sequence[Shard], state: dict[str, Any] | None = None
) -> Path:
    """Saves as a world of one rank."""
    return save(folder, step, shards, state if state is not None else {"step": step})


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """A tensor that one rank holds entirely."""
    return Shard(name=name, shape=tuple(tensor.shape), offset=(0,) * tensor.ndim, tensor=tensor)


def cut(name: str, tensor: torch.Tensor, parts: Sequence[int]) -> list[Shard]:
    """The balanced rectangles of `tensor`, ``parts[d]`` of them along dimension d, row-major."""
    shards = [((), tensor)]
    for dim, count in enumerate(parts):
        shards = [
            ((*offset, pieces.start), part.narrow(dim, pieces.start, len(pieces)))
            for offset, part in shards
            for index in range(count)
            for pieces in [shard_range(tensor.shape[dim], count, index)]
        ]
    return [
        Shard(name=name, shape=tuple(tensor.shape), offset=offset, tensor=part)
        for offset, part in shards
    ]


def as_format_2(checkpoint: Path) -> None:
    """Turns a stored checkpoint into one whose digests are BLAKE2b and unnamed."""
    content = manifest_of(checkpoint)
    content["format"] = 2
    del content["hash"]
    for name, known in content["files"].items():
        raw = (checkpoint / name).read_bytes()
        length = 8 + int.from_bytes(raw[:8], "little")
        known["header"] = digest_text(blake2b(raw[:length]), BLAKE2B)
        places = json.loads(raw[8:length])
        for piece in (s for entry in content["tensors"].values() for s in entry["slices"]):
            if piece["file"] == name:
                start, end = (length + n for n in places[piece["key"]]["data_offsets"])
                size = content["chunk_bytes"]
                chunks = [raw[first : min(first + size, end)] for first in range(start, end, size)]
                piece["chunks"] = [blake2b(chunk) for chunk in chunks]
    replace_manifest(checkpoint, content)


def as_format_1(checkpoint: Path) -> None:
    """Turns a stored checkpoint into what the first version of this package wrote."""
    content = manifest_of(checkpoint)
    del content["chunk_bytes"], content["nonfinite"], content["hash"]
    content["format"] = 1
    for entry in content["tensors"].values():
        for piece in entry["slices"]:
            del piece["chunks"]
    for name, known in content["files"].items():
        del known["header"]
        known["digest"] = digest_text(blake2b((checkpoint / name).read_bytes()), BLAKE2B)
    replace_manifest(checkpoint, content)


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Without its digest."""
    content = json.loads((checkpoint / MANIFEST).read_bytes())
    del content["digest"]
    return content


def replace_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """With a digest that fits: only schema and containment can refuse what is wrong in it."""
    digest = digest_text(blake2b(encode_json(content)), BLAKE2B)
    (checkpoint / MANIFEST).write_bytes(encode_json({**content, "digest": digest}))


# Savers of one rank, and of several on threads, over small shards; a disk that fails.

TENSOR = torch.arange(60.0).reshape(20, 3)


def one_rank(folder: Place, *, keep: int = 2) -> Saver:
    return saver_of_rank(folder, 0, Ranks(1), keep)


def saver_of_rank(folder: Place, rank: int, ranks: Ranks, keep: int = 2) -> Saver:
    world = {"rank": rank, "world_size": ranks.size, "gather": ranks.gather(rank)}
    return Saver(folder, **world, keep=keep, in_background=True)


def on_ranks(size: int, folder: Place, work: Callable[[int, Saver], Any]) -> list[Any]:
    """`work` with the saver of each of `size` ranks, on a thread a rank."""
    ranks = Ranks(size)

    return on_threads(size, lambda rank: work(rank, saver_of_rank(folder, rank, ranks)))


def save_with(own: Saver, step: int, mine: list[Shard] | None = None) -> SaveOutcome:
    """A save of `step`, all shards by default, to its end."""
    own.start(step, shards(step) if mine is None else mine, {"step": step})
    outcome = own.finish()
    assert outcome is not None
    return outcome


def save_among(
    size: int, folder: Place, step: int = 1, value: float = 0.0
) -> list[tuple[SaveOutcome, list[str]]]:
    """One save by `size` ranks, each with its share of the shards: outcomes and news."""

    def work(rank: int, own: Saver) -> tuple[SaveOutcome, list[str]]:
        return save_with(own, step, shards(value)[rank::size]), own.news()

    return on_ranks(size, folder, work)


def shards(value: float = 0.0) -> list[Shard]:
    return cut("w", TENSOR + value, [4, 1])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "verified.json"
    }


def count(folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], Any]) -> int:
    with monkeypatch.context() as patch:
        faulty = FaultyOs(-1, Killed)
        patch.setattr(files, "os", faulty)
        work(folder)
        return faulty.count


def save_third(folder: Path) -> SaveOutcome:
    """A save with retention, over two older checkpoints."""
    return save_with(one_rank(folder, keep=1), 3)


def prepared(folder: Path) -> Path:
    """Two older checkpoints, those of a folder beside it where there is one."""
    template = folder.parent / "template"
    if not template.exists():
        for step in (1, 2):
            save_as_ranks(template, step, [shards(step)])
    shutil.copytree(template, folder)
    return folder


CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace")


class Killed(BaseException):
    """The process died here."""


class FaultyOs:
    """`os`, whose n-th call of CALLS fails instead of (or after half of) being done."""

    def __init__(self, fail_at: int, error: Callable[[], BaseException]) -> None:
        self.fail_at, self.error, self.count = fail_at, error, 0
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.log.append(name)
            if self.count == self.fail_at:
                if name == "write":  # half of it reaches the disk
                    real(args[0], args[1][: len(args[1]) // 2])
                raise self.error()
            return real(*args, **kwargs)

        return call


def never(step: int, reason: str) -> None:
    raise AssertionError(f"step {step} was skipped: {reason}")


def flip(path: Path, place: int = -1, bit: int = 0) -> None:
    """Turns one bit of a file."""
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))
