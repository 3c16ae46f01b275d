"""A save stopped at every file operation, and every way a stored checkpoint can be wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.checkpoint import files, header, load, manifest
from moemesh.checkpoint.store import CheckpointError, Shard, latest, open_checkpoint
from tests.checkpoint.simulate import (
    FaultyOs,
    Killed,
    count,
    cut,
    flip,
    manifest_of,
    never,
    replace_manifest,
    save_as_ranks,
    save_one,
    whole,
)


def shards(value: float) -> list[Shard]:
    return cut("w", torch.full((6, 2), value), [2, 1])


def test_everything_is_durable_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyOs(-1, Killed)
    monkeypatch.setattr(files, "os", faulty)
    save_one(tmp_path, 1, shards(1))
    new_file, synced_folder = ["open", "write", "fsync"], ["open", "fsync"]
    tensors = ["open", "write", "write", "write", "fsync"]  # header and two slices
    read_back = ["open"]
    commit = [*new_file, *synced_folder, *read_back, "rename", *synced_folder]
    assert faulty.log == ["mkdir", *tensors, *synced_folder, *read_back, *commit]


def test_error_at_each_operation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "count").mkdir()
    calls = count(tmp_path / "count", monkeypatch, lambda folder: save_one(folder, 1, shards(1)))
    for fail_at in range(1, calls + 1):
        folder = tmp_path / str(fail_at)
        save_one(folder, 1, shards(1))
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", FaultyOs(fail_at, full))
            with pytest.raises(CheckpointError, match=r"rank 0: .*No space left on device"):
                save_one(folder, 2, shards(2))
        assert [path.name for path in folder.iterdir()] == ["step-1"]
        save_one(folder, 2, shards(2))


# --- what is on the disk is wrong --------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two ranks' checkpoint of step 2, above a good step 1."""
    save_one(tmp_path, 1, shards(1))
    tensor = torch.arange(30.0).reshape(10, 3)
    save_as_ranks(tmp_path, 2, [[s] for s in cut("w", tensor, [2, 1])], {"note": "hello"})
    return tmp_path


def refused(folder: Path, message: str, verify: Any = "full") -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, 2, verify=verify)
    skipped: list[int] = []
    checkpoint = latest(folder, lambda step, _: skipped.append(step))
    assert checkpoint is not None and checkpoint.step == 1 and skipped == [2]


def test_every_flipped_byte_is_seen(saved: Path) -> None:
    for name in os.listdir(saved / "step-2"):
        file = saved / "step-2" / name
        original = file.read_bytes()
        for position in range(len(original)):
            damaged = bytearray(original)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                open_checkpoint(saved, 2)
        file.write_bytes(original)
    assert open_checkpoint(saved, 2).state == {"note": "hello"}


def test_truncated_missing_extra_empty_swapped(saved: Path) -> None:
    folder = saved / "step-2"
    file = folder / "rank-00001.safetensors"
    other = folder / "rank-00000.safetensors"
    original = file.read_bytes()
    size = len(original)
    for cut_to in (0, 7, 8, 40, size - 1):
        file.write_bytes(original[:cut_to])
        refused(saved, rf"rank-00001.*truncated: size {cut_to}, expected {size}", "sizes")
    file.write_bytes(original + b"\0")
    refused(saved, "too long: size", "sizes")
    file.unlink()
    refused(saved, "rank-00001.safetensors: missing", "sizes")
    file.write_bytes(original)
    (folder / "rank-00002.safetensors").write_bytes(original)
    refused(saved, "rank-00002.safetensors: does not belong", "sizes")
    (folder / "rank-00002.safetensors").unlink()
    file.write_bytes(other.read_bytes())
    other.write_bytes(original)
    refused(saved, "the header disagrees with the manifest", "sizes")


def test_manifest_missing_damaged_or_of_another_step(saved: Path) -> None:
    file = saved / "step-2" / "manifest.json"
    original = file.read_bytes()
    file.write_bytes(original[:-20])
    refused(saved, "manifest.json: not valid JSON", "sizes")
    file.write_bytes(b"[" * 100_000)
    refused(saved, "manifest.json: not valid JSON", "sizes")
    file.write_bytes(b"3")
    refused(saved, "manifest.json: not a JSON object", "sizes")
    file.write_bytes(original.replace(b"hello", b"hallo"))
    refused(saved, "manifest.json: its digest is", "sizes")
    file.write_bytes(original + b"\n")
    refused(saved, "manifest.json: it was rewritten with the same content", "sizes")
    text = json.loads(original) | {"digest": "\ud800"}  # which no console could print
    file.write_text(json.dumps(text))
    refused(saved, r"manifest.json: its digest is .*, expected '\\ud800'", "sizes")
    file.unlink()
    refused(saved, "manifest.json: No such file", "sizes")
    shutil.rmtree(saved / "step-2")
    shutil.copytree(saved / "step-1", saved / "step-2")
    refused(saved, "is of step 1: a renamed folder", "sizes")


def forge(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the manifest with a digest that fits: only schema and containment can refuse it."""
    content = manifest_of(saved / "step-2")
    change(content)
    replace_manifest(saved / "step-2", content)


RANK_9 = "rank-00009.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=4), "format 4; this version reads the formats 1, 2, 3"),
        (lambda m: m.update(format=1), "not the fields of format 1"),
        (lambda m: m.update(format=2), "not the fields of format 2"),
        (lambda m: m.update(chunk_bytes=None), "not the fields of format 3"),
        (lambda m: m.update(nonfinite=["v"]), "nonfinite names v"),
        (lambda m: m["tensors"]["w"]["slices"][0].update(chunks=[]), "0 digests in rank"),
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m.update(step="2"), "step: "),
        (lambda m: m["tensors"]["w"].update(shape=[-10, 3]), "tensors.w.shape.0"),
        (lambda m: m["tensors"]["w"].update(shape=[10.0, 3]), "tensors.w.shape.0"),
        (lambda m: m["tensors"]["w"].update(shape=[2**62, 3]), "tensors.w.shape.0"),
        (lambda m: m["tensors"]["w"].update(shape=[2**59, 3]), "more than"),
        (lambda m: m["tensors"]["w"].update(dtype="object"), "tensors.w.dtype"),
        (lambda m: m["tensors"]["w"]["slices"].pop(), "no rank holds 15 of its 30"),
        (lambda m: m["tensors"]["w"]["slices"][0].update(file="../x"), "tensors.w.slices.0.file"),
        (lambda m: m["files"].update({"/etc/passwd": {"size": 1, "header": "x"}}), "files"),
        (lambda m: m["tensors"]["w"]["slices"][1].update(file=RANK_9), "not a file here"),
        (lambda m: m["tensors"]["w"]["slices"][1].update(key="w@0,0"), "header disagrees"),
        (lambda m: m["tensors"]["w"].update(dtype="float64"), "header disagrees"),
        (lambda m: m["tensors"].update(v=m["tensors"]["w"]), "used twice"),
    ],
)
def test_forged_manifests(
    saved: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    forge(saved, change)
    refused(saved, message, "sizes")


def test_links_are_not_followed(saved: Path) -> None:
    file = saved / "step-2" / "rank-00001.safetensors"
    outside = saved / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    refused(saved, "rank-00001.safetensors: is not a regular file")
    shutil.rmtree(saved / "step-2")
    (saved / "step-2").symlink_to(saved / "step-1")
    refused(saved, "step-2: is not a folder")


def rewrite_header(saved: Path, header: bytes, length: int | None = None) -> None:
    """Another header before the same tensor bytes, with a manifest that agrees about the size."""
    file = saved / "step-2" / "rank-00001.safetensors"
    raw = file.read_bytes()
    body = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    content = struct.pack("<Q", len(header) if length is None else length) + header + body
    file.write_bytes(content)
    forge(saved, lambda m: m["files"][file.name].update(size=len(content)))


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"{}", None, "its header describes 10: it is damaged"),
        (b"{}", 2**63, "the header has 9223372036854775808 bytes"),
        (b"{}", 0, "the header has 0 bytes"),
        (b"[]", None, "header is damaged"),
        (b"[" * 50_000, None, "header is damaged"),
        (b'{"w@5,0":{"dtype":"F32","shape":[5,3],"data_offsets":[0,56]}}', None, "describes"),
        (b'{"w@5,0":{"dtype":"F32","shape":[5,3],"data_offsets":[4,60]}}', None, "leave gaps"),
        (b'{"w@5,0":{"dtype":"F32","shape":[3,5],"data_offsets":[0,60]}}', None, "disagrees"),
        (b'{"w@5,0":{"dtype":"I32","shape":[5,3],"data_offsets":[0,60]}}', None, "disagrees"),
        (b'{"w@5,0":{"dtype":"F32","shape":[5,3],"data_offsets":["0",60]}}', None, "damaged"),
        (b'{"w@5,0":{"dtype":"F32","shape":[5,3]}}', None, "damaged"),
    ],
)
def test_forged_headers(saved: Path, header: bytes, length: int | None, message: str) -> None:
    rewrite_header(saved, header, length)
    refused(saved, message, "sizes")


def test_header_limit(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "HEADER_LIMIT", 10)
    with pytest.raises(CheckpointError, match="at most 10 are read"):
        open_checkpoint(saved, 2)
    monkeypatch.setattr(manifest, "MANIFEST_LIMIT", 10)
    with pytest.raises(CheckpointError, match="larger than the limit of 10"):
        open_checkpoint(saved, 2)


def test_no_pickle_and_no_second_door_in_the_sources() -> None:
    sources = {path.name: path.read_text() for path in Path(load.__file__).parent.glob("*.py")}
    for name, text in sources.items():
        for word in ("pickle.", "import pickle", "torch.load", "marshal", "torch.distributed."):
            assert word not in text, f"{name} uses {word}"
        if name not in ("files.py", "remote.py"):
            assert "import os" not in text and ".open(" not in text, name


def test_sharing_the_verification(saved: Path) -> None:
    flip(saved / "step-2" / "rank-00001.safetensors")
    checkpoint = open_checkpoint(saved, 2, verify="sizes")
    checkpoint.verify(0, 2)
    with pytest.raises(CheckpointError, match="rank-00001"):
        checkpoint.verify(1, 2)


def test_a_checkpoint_that_a_run_deletes_meanwhile_has_a_newer_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader beside a run that keeps one checkpoint."""
    real, opened = load.open_checkpoint, list[int]()

    def open_late(folder: Path, step: int) -> load.Checkpoint:
        opened.append(step)
        if step == 2:
            (folder / "step-2").rename(folder / "step-3")
        return real(folder, step)

    monkeypatch.setattr(load, "open_checkpoint", open_late)
    shutil.rmtree(saved / "step-1")
    skipped: list[tuple[int, str]] = []
    assert latest(saved, lambda *why: skipped.append(why)) is None
    assert opened == [2, 3] and [step for step, _ in skipped] == [3]  # whose manifest is that of 2


def test_reading_what_is_not_there(saved: Path) -> None:
    checkpoint = open_checkpoint(saved, 2)
    with pytest.raises(CheckpointError, match="no tensor named x"):
        checkpoint.read("x")
    for offset, shape in (((0,), (1,)), ((-1, 0), (1, 1)), ((9, 0), (2, 1)), ((0, 0), (-1, 1))):
        with pytest.raises(CheckpointError, match="has no part of shape"):
            checkpoint.read("w", offset, shape)
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(saved, 77)
    assert latest(saved / "nowhere", never) is None
    assert whole("w", torch.zeros(1)).offset == (0,)
