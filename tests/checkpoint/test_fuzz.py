"""Files that come from outside, changed at random: opened as they were meant, or a typed error.

Digests of our own checkpoints are recomputed, so that the checks after them are reached.
"""

from __future__ import annotations

import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moemesh.checkpoint import manifest
from moemesh.checkpoint.digests import WRITTEN, digest_text, hash_bytes
from moemesh.checkpoint.huggingface.contents import FolderContents
from moemesh.checkpoint.store import CheckpointError, open_checkpoint
from moemesh.config.errors import UserError
from moemesh.data.indexed import IDX, META, IndexedTokens, path_with
from moemesh.data.tokenizer import DataError
from moemesh.sharding.load_run import load_run
from tests.checkpoint.simulate import cut, manifest_of, replace_manifest, save_as_ranks
from tests.data.test_indexed import writer

#: One case of an input: change the file, and open it.
Case = Callable[[random.Random], object]
#: Replacements of a value of JSON or TOML.
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, "", "x", "0", "../../etc/passwd",
    "/etc/passwd", "a\x00b", "\ud800", "F32", [], {}, [[]], [2**62, 2**62], {"x": 1}, "x" * 5000,
]  # fmt: skip
#: The limits on what a case may take, far above what any needs.
MOST_SECONDS = 20.0


def changed_json(draw: random.Random, content: Any) -> Any:
    """A copy in which one to three values were replaced, removed, exchanged, added or renamed."""
    content = json.loads(json.dumps(content))
    for _ in range(draw.randint(1, 3)):
        places = list(places_of(content))
        if not places:
            return content
        holder, key = draw.choice(places)
        match draw.choice(("replace", "remove", "exchange", "add", "number", "rename")):
            case "replace":
                holder[key] = deepcopy(draw.choice(VALUES))
            case "remove":
                del holder[key]
            case "exchange":
                other, there = draw.choice(places)
                holder[key], other[there] = other[there], holder[key]
                content = cut_circles(content)
            case "add" if isinstance(holder, dict):
                holder[draw.choice(["x", "", "../x", "__metadata__", key * 2])] = holder[key]
            case "number" if type(holder[key]) is int:
                holder[key] += draw.choice((-1, 1, 8, -holder[key], 1 << draw.randrange(62)))
            case "rename" if isinstance(holder, dict):
                holder[draw.choice(["x", "", "../../x", "a/b"])] = holder.pop(key)
            case _:
                if isinstance(holder, list):
                    holder.append(holder[key])
    return content


def places_of(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of JSON: what holds it, and its key there."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        yield content, key
        if isinstance(value, dict | list):
            yield from places_of(value)


def cut_circles(content: Any) -> Any:
    """An exchange of a value with its own part has no JSON."""
    try:
        return json.loads(json.dumps(content))
    except ValueError:
        return {"circle": 1}


def changed_bytes(draw: random.Random, content: bytes) -> bytes:
    """One to four bytes flipped, removed, added or repeated, or the rest cut off."""
    raw = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(raw) + 1)
        match draw.choice(("flip", "remove", "add", "repeat", "cut", "number")):
            case "flip" if place < len(raw):
                raw[place] ^= 1 << draw.randrange(8)
            case "remove":
                del raw[place : place + draw.randint(1, 9)]
            case "add":
                raw[place:place] = draw.randbytes(draw.randint(1, 9))
            case "repeat":
                raw[place:place] = raw[place : place + draw.randint(1, 99)]
            case "number":
                raw[place : place + 8] = struct.pack("<q", draw.choice((-1, 0, 1 << 40, 2**63 - 1)))
            case _:
                if draw.random() < 0.1:
                    del raw[place:]
    return bytes(raw)


def change_header(draw: random.Random, file: Path, whole: bytes) -> bytes:
    """Write a file of tensors with another header before the same bytes; the new header."""
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    if draw.random() < 0.45:
        raw = changed_bytes(draw, whole[:length])
    else:
        raw = json.dumps(changed_json(draw, json.loads(whole[8:length]))).encode()
        raw = struct.pack("<Q", len(raw)) + raw
    file.write_bytes(raw + whole[length:])
    return raw


def of_checkpoint(folder: Path) -> dict[str, Case]:
    """The manifest, and the header of a file of tensors, of a checkpoint of two ranks."""
    tensor = torch.arange(30.0).reshape(10, 3)
    save_as_ranks(folder, 2, [[one] for one in cut("w", tensor, [2, 1])], {"note": "hello"})
    text, shard = folder / "step-2" / "manifest.json", folder / "step-2" / "rank-00001.safetensors"
    content, whole = manifest_of(folder / "step-2"), shard.read_bytes()

    def write(values: Any) -> None:
        if isinstance(values, dict):
            values.pop("digest", None)
            replace_manifest(folder / "step-2", values)
        else:
            text.write_bytes(manifest.encode_json(values))

    def opened() -> None:
        checkpoint = open_checkpoint(folder, 2)
        for name in checkpoint.manifest.tensors:
            assert torch.equal(checkpoint.read(name), tensor)

    def in_manifest(draw: random.Random) -> None:
        shard.write_bytes(whole)
        if draw.random() < 0.2:
            text.write_bytes(changed_bytes(draw, manifest.encode_json(content)))
        else:
            write(changed_json(draw, content))
        opened()

    def in_header(draw: random.Random) -> None:
        raw = change_header(draw, shard, whole)
        values = json.loads(json.dumps(content))
        values["files"][shard.name] = {
            "size": shard.stat().st_size,
            "header": digest_text(hash_bytes(raw), WRITTEN),
        }
        write(values)
        opened()

    return {"manifest": in_manifest, "header": in_header}


def of_transformers(folder: Path) -> dict[str, Case]:
    """The index, and the header of a file, of a folder of transformers."""
    folder.mkdir()
    shard, index = folder / "m-1.safetensors", folder / "model.safetensors.index.json"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2)}, shard)
    content = {"metadata": {"total_size": 56}, "weight_map": {"a": shard.name, "b": shard.name}}
    whole = shard.read_bytes()

    def opened() -> None:
        contents = FolderContents(folder)
        assert all(tensor.file == shard.name for tensor in contents.stored.values())

    def in_index(draw: random.Random) -> None:
        shard.write_bytes(whole)
        if draw.random() < 0.3:
            index.write_bytes(changed_bytes(draw, json.dumps(content).encode()))
        else:
            index.write_text(json.dumps(changed_json(draw, content)))
        opened()

    def in_file(draw: random.Random) -> None:
        index.write_text(json.dumps(content))
        change_header(draw, shard, whole)
        opened()

    return {"index of transformers": in_index, "file of transformers": in_file}


def of_data(folder: Path) -> dict[str, Case]:
    """The index and the sidecar of indexed tokens."""
    folder.mkdir()
    prefix = folder / "a"
    with writer(prefix) as made:
        for length in (2, 1, 3):
            made.add(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))
    index, sidecar = path_with(prefix, IDX), path_with(prefix, META)
    whole, said = index.read_bytes(), sidecar.read_text()
    tokens = IndexedTokens.open(prefix).tokens

    def opened() -> None:
        assert np.array_equal(IndexedTokens.open(prefix).tokens, tokens)

    def in_index(draw: random.Random) -> None:
        sidecar.write_text(said)
        index.write_bytes(changed_bytes(draw, whole))
        opened()

    def in_sidecar(draw: random.Random) -> None:
        index.write_bytes(whole)
        sidecar.write_text(json.dumps(changed_json(draw, json.loads(said))))
        opened()

    return {"index of data": in_index, "sidecar of data": in_sidecar}


def of_configuration(folder: Path) -> dict[str, Case]:
    """A configuration file."""
    folder.mkdir()
    file = folder / "run.toml"
    text = (
        b'[model]\npreset = "tiny"\nnum_layers = 4\nexperts_per_token = 2\n[plan]\ndp = 2\n'
        b'ep = 2\ntp = 1\n[train]\nsteps = 10\nlr = 1e-3\ndtype = "float32"\n[data]\nseq_len = 32\n'
    )

    def in_text(draw: random.Random) -> None:
        if draw.random() < 0.5:
            file.write_bytes(changed_bytes(draw, text))
        else:
            lines = text.splitlines()
            place = draw.randrange(len(lines))
            value = json.dumps(draw.choice(VALUES)).replace("null", "nan").encode()
            lines[place] = lines[place].partition(b"=")[0] + b"= " + value
            file.write_bytes(b"\n".join(lines))
        load_run([file], environ={})

    return {"configuration": in_text}


def fuzz(tmp_path: Path, number: int) -> Counter[str]:
    """`number` cases of every input: how many were refused. Anything but a typed error, or another
    meaning than that of the whole file, comes out, with the seed that repeats it."""
    cases = of_checkpoint(tmp_path / "ours") | of_transformers(tmp_path / "theirs")
    cases |= of_data(tmp_path / "data") | of_configuration(tmp_path / "configuration")
    refused = Counter[str]()
    for name, case in cases.items():
        for seed in range(number):
            start = time.process_time()
            try:
                case(random.Random(f"{name} {seed}"))
            except UserError:
                refused[name] += 1
            except BaseException as error:
                error.add_note(f"{name}, case {seed}")
                raise
            assert time.process_time() - start < MOST_SECONDS, (name, seed)
    assert len(refused) == len(cases)
    return refused


def test_a_few_of_every_input(tmp_path: Path) -> None:
    refused = fuzz(tmp_path, 40)
    assert min(refused.values()) > 10, refused


#: Names that would lead out of a folder, or into it by another way.
ESCAPES = [
    "../secret", "../step-1/rank-00000.safetensors", "a/../../secret", "..", ".", "/etc/passwd",
    "//etc/passwd", "./m-1.safetensors", "a/m-1.safetensors", "~/m-1.safetensors",
    "$HOME/m-1.safetensors", "..\\secret.safetensors", "C:\\secret.safetensors",
    "file:///etc/passwd", "m-1.safetensors\x00.txt", "m-1.safetensors\n",
    "\u2025/secret.safetensors", "%2e%2e/secret.safetensors", "-rf.safetensors", "",
]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_sixty_ways_out_of_a_folder(tmp_path: Path, name: str) -> None:
    """Refused by the manifest, by an index of transformers, and by the sidecar of data."""
    of_checkpoint(tmp_path / "ours")
    of_transformers(tmp_path / "theirs")
    of_data(tmp_path / "data")
    content = manifest_of(tmp_path / "ours/step-2")
    content["tensors"]["w"]["slices"][0]["file"] = name
    content["files"][name] = content["files"].pop("rank-00000.safetensors")
    replace_manifest(tmp_path / "ours/step-2", content)
    with pytest.raises(CheckpointError, match="file"):
        open_checkpoint(tmp_path / "ours", 2)
    index = {"weight_map": {"a": name, "b": "m-1.safetensors"}}
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        FolderContents(tmp_path / "theirs")
    sidecar = path_with(tmp_path / "data" / "a", META)
    said = json.loads(sidecar.read_text())
    said["files"][name] = said["files"].pop(".bin")
    sidecar.write_text(json.dumps(said))
    with pytest.raises(DataError, match="must name"):
        IndexedTokens.open(tmp_path / "data" / "a")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_thousand(tmp_path: Path) -> None:
    refused = fuzz(tmp_path, 3000)
    assert sum(refused.values()) > 10_000, refused
    print(refused)
