"""A folder of weights in the layout of transformers, written file by file.

One tensor is in memory at a time. Every file appears by a rename when it is whole, the index and
config.json come last: an interrupted conversion goes on with the first file that is missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from moemesh.checkpoint.files import CheckpointError, file_size, read_chunks, reading, replace_by
from moemesh.checkpoint.header import read_header
from moemesh.checkpoint.huggingface.contents import plain_file
from moemesh.checkpoint.manifest import DTYPES
from moemesh.checkpoint.tensor_file import DeferredTensor, safetensors_bytes
from moemesh.config.huggingface.folder import INDEX, SINGLE

#: Upper bound of one file of weights in bytes; a larger tensor has a file of its own.
FILE_BYTES = 4 << 30
#: Files beside the weights that are carried along, up to this size in bytes.
CARRIED_BYTES = 64 << 20
_METADATA = {"format": "pt"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def write_folder(
    out: Path,
    tensors: Mapping[str, DeferredTensor],
    config: Mapping[str, object],
    *,
    file_bytes: int = FILE_BYTES,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `tensors` and ``config.json`` to the folder `out`, which may hold a part of the same.

    `on_file` is called for each finished file. Raises CheckpointError for a file of another
    conversion.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.num_bytes > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.num_bytes
    files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    groups = dict(zip(files if len(parts) > 1 else [SINGLE], parts, strict=True))
    # Loaders take the single file where both are there: one of them would be of another model.
    if (other := out / (SINGLE if len(groups) > 1 else INDEX)).exists():
        raise CheckpointError(f"{other}: is a file of another model: choose an empty folder")
    for done, (file, names) in enumerate(groups.items()):
        part = {name: tensors[name] for name in names}
        if not _is_there(out / file, part):
            replace_by(out / file, safetensors_bytes(part, _METADATA))
        on_file(done + 1, len(groups))
    if len(groups) > 1:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in groups.items() for name in names},
        }
        write_json(out / INDEX, index)
    write_json(out / "config.json", config)


def carry_along(source: Path, out: Path) -> list[str]:
    """Copy tokenizer, generation settings and whatever else lies beside the weights of `source`,
    but config.json; returns the names. Large files stay, and links that lead out of it."""
    out.mkdir(parents=True, exist_ok=True)
    copied: list[str] = []
    for name in sorted(path.name for path in source.iterdir()):
        path = plain_file(source, name)
        is_plain = path.is_file() and not path.is_symlink()
        if not is_plain or name.startswith(".") or name in ("config.json", INDEX):
            continue
        if name.endswith(_WEIGHTS) or path.stat().st_size > CARRIED_BYTES:
            continue
        shutil.copyfile(path, out / name)
        copied.append(name)
    return copied


def _is_there(path: Path, part: Mapping[str, DeferredTensor]) -> bool:
    """Whether an earlier conversion has finished this file, with the same numbers."""
    if not path.exists():
        return False
    expected = {
        name: (DTYPES[str(tensor.dtype).removeprefix("torch.")], tensor.shape)
        for name, tensor in part.items()
    }
    header = read_header(path, file_size(path)).items()
    if {name: (entry.dtype, entry.shape) for name, entry in header} != expected:
        raise CheckpointError(f"{path}: is a file of another model: choose an empty folder")
    # Names and shapes are also those of another run, and of another step of the same one.
    with reading(path) as file:
        if not all(_follows(file, chunk) for chunk in safetensors_bytes(part, _METADATA)):
            raise CheckpointError(
                f"{path}: holds other weights, of another source or of an earlier step: choose an "
                "empty folder, or remove this one first"
            )
    return True


def _follows(file: BinaryIO, expected: bytes | memoryview) -> bool:
    """Whether the next bytes of `file` are those."""
    place = 0
    for chunk in read_chunks(file, len(expected)):
        if chunk != expected[place : place + len(chunk)]:
            return False
        place += len(chunk)
    return place == len(expected)


def write_json(path: Path, value: object) -> None:
    """Write `value`, by a rename when it is whole."""
    replace_by(path, [(json.dumps(value, indent=2) + "\n").encode()])
