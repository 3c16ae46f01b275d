"""Digests of checkpoints: which function, recorded where, and reading without its package."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from moemesh.checkpoint import digests, writing
from moemesh.checkpoint.digests import BLAKE2B, MissingPackageError
from moemesh.checkpoint.files import map_in_thread
from moemesh.checkpoint.store import CheckpointError, latest, open_checkpoint
from moemesh.checkpoint.stored import examine
from tests.checkpoint.simulate import (
    TENSOR,
    as_format_2,
    cut,
    flip,
    never,
    save_as_ranks,
    save_one,
    whole,
)


def without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "xxhash", None)
    for module in (digests, writing):
        monkeypatch.setattr(module, "WRITTEN", BLAKE2B)


def test_chunks_and_headers_have_xxh3_under_its_name(tmp_path: Path) -> None:
    path = save_one(tmp_path, 1, [whole("w", TENSOR)])
    manifest = json.loads((path / "manifest.json").read_bytes())
    raw = (path / "rank-00000.safetensors").read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    assert manifest["hash"] == "xxh3-128" and manifest["digest"].startswith("blake2b-128:")
    (piece,) = manifest["tensors"]["w"]["slices"]
    assert piece["chunks"] == [xxhash.xxh3_128(raw[length:]).hexdigest()]
    header = manifest["files"]["rank-00000.safetensors"]["header"]
    assert header == f"xxh3-128:{xxhash.xxh3_128(raw[:length]).hexdigest()}"


def test_format_2_is_read_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_ranks(tmp_path, 1, [[shard] for shard in cut("w", TENSOR, [2, 1])])
    as_format_2(tmp_path / "step-1")
    without_xxhash(monkeypatch)
    assert torch.equal(open_checkpoint(tmp_path, 1).read("w"), TENSOR)
    flip(tmp_path / "step-1/rank-00001.safetensors")
    (damage,) = examine(tmp_path, 1)
    assert (damage.tensor, damage.chunk) == ("w", 0)


def test_a_missing_package_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_one(tmp_path, 1, [whole("w", TENSOR)])
    save_one(tmp_path, 2, [whole("w", TENSOR)])
    with monkeypatch.context() as patch:
        without_xxhash(patch)
        for look in (lambda: examine(tmp_path, 2), lambda: latest(tmp_path, never)):
            with pytest.raises(MissingPackageError, match="pip install xxhash"):
                look()
        path = save_one(tmp_path, 3, [whole("w", TENSOR)])
        assert torch.equal(open_checkpoint(tmp_path, 3).read("w"), TENSOR)
    assert json.loads((path / "manifest.json").read_bytes())["hash"] == BLAKE2B
    assert open_checkpoint(tmp_path, 3).manifest.hash == BLAKE2B


def test_ranks_of_two_minds_save_nothing(tmp_path: Path) -> None:
    parts = cut("w", TENSOR, [2, 1])
    tmp = tmp_path / "step-1.tmp-0"
    tmp.mkdir()
    reports = [
        writing.write_part(tmp / f"rank-{rank:05d}.safetensors", writing.check_shards([part]))
        for rank, part in enumerate(parts)
    ]
    reports[1]["hash"] = BLAKE2B
    with pytest.raises(CheckpointError, match="blake2b-128 and xxh3-128: install the package"):
        writing.commit(tmp, tmp_path / "step-1", 1, reports, {})


# Work on chunks in a thread during their writing: in order, at the same time, ended by errors.


@pytest.mark.parametrize("sizes", [[], [1], [1 << 20], [1 << 20, 3, 1 << 20, 1 << 20, 5, 7]])
def test_results_are_those_of_the_chunks_in_order(sizes: list[int]) -> None:
    chunks = [bytes([n]) * size for n, size in enumerate(sizes)]
    assert [*map_in_thread(lambda chunk: (chunk[0], len(chunk)), chunks)] == [*enumerate(sizes)]
    assert "map_in_thread" not in {thread.name for thread in threading.enumerate()}


def test_the_next_chunk_is_made_while_one_is_worked_on() -> None:
    made, chunk = threading.Event(), bytes(1 << 20)

    def chunks() -> Iterator[bytes]:
        yield chunk
        made.set()
        yield chunk

    assert [*map_in_thread(lambda _: made.wait(20), chunks())] == [True, True]


def test_errors_end_it() -> None:
    def work(chunk: bytes) -> None:
        raise ValueError("of the work")

    def broken() -> Iterator[bytes]:
        yield bytes(1 << 20)
        raise OSError("of the disk")

    with pytest.raises(ValueError, match="of the work"):
        [*map_in_thread(work, [bytes(1 << 20)] * 3)]
    with pytest.raises(OSError, match="of the disk"):
        [*map_in_thread(len, broken())]
    assert "map_in_thread" not in {thread.name for thread in threading.enumerate()}
