"""A folder of weights in the layout of transformers, opened with care and read by slices.

    config.json                       sizes and kinds of layers
    model.safetensors                 all tensors, or
    model.safetensors.index.json      tensor -> file, and the files it names

The index comes from outside: a file that it names must be a plain name of this folder, every header
is bounded and checked against the file, and index and headers must agree, before a number is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError, check_folder, file_size, read_start
from moemesh.checkpoint.header import read_places
from moemesh.checkpoint.huggingface.quantized import Quantized, quantized_tensors
from moemesh.checkpoint.huggingface.slices import Place, SliceReader
from moemesh.checkpoint.manifest import DTYPES
from moemesh.config.huggingface.folder import INDEX, SINGLE, once
from moemesh.config.huggingface.quantization import Quantization

#: Upper bound of an index that will be parsed, in bytes.
INDEX_LIMIT = 64 << 20
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
#: Numbers that a weight can be stored as.
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TORCH_DTYPES = {name: cast("torch.dtype", getattr(torch, key)) for key, name in DTYPES.items()}


class Stored(NamedTuple):
    """A tensor of a folder: the file that holds it, its dtype and shape, and its first byte."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0


class WeightFolder:
    """The tensors of a folder. Raises CheckpointError naming file and tensor for anything that is
    missing, damaged, or would lead out of the folder.

    With `quantization`, `tensors` are those that stored ones of fewer bits stand for, and all are
    read as float32.
    """

    def __init__(self, path: Path, quantization: Quantization | None = None) -> None:
        check_folder(path)
        self.path = path
        self._reader = SliceReader()
        index = _index(path)
        files = sorted(set(index.values())) if index is not None else [SINGLE]
        self.tensors: dict[str, Stored] = {}
        for file in files:
            self._add(file, index)
        if index is not None and (missing := sorted(index.keys() - self.tensors.keys())):
            raise CheckpointError(
                f"{path / index[missing[0]]}: holds no tensor {missing[0]}, which {INDEX} places "
                f"there ({len(missing)} such tensors)"
            )
        self._stored = dict(self.tensors)
        self._quantized: dict[str, Quantized] = {}
        if quantization is not None:
            self._dequantize(quantization)

    @property
    def is_quantized(self) -> bool:
        """Whether tensors are stored in fewer bits than they are read as."""
        return bool(self._quantized)

    def _dequantize(self, quantization: Quantization) -> None:
        """Put the tensors that others stand for in their place."""
        self._quantized, problems = quantized_tensors(self._stored, quantization)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckpointError(f"{self.path}: {problems[0]}{more}")
        for name, tensor in self._quantized.items():
            file = self._stored[tensor.sources[0]].file
            for source in tensor.sources:
                self.tensors.pop(source, None)
            self.tensors[name] = Stored(file, torch.float32, tensor.shape)

    def _add(self, file: str, index: dict[str, str] | None) -> None:
        path = plain_file(self.path, file)
        for name, (entry, start) in read_places(path, file_size(path)).items():
            if entry.dtype not in _TORCH_DTYPES:
                raise CheckpointError(f"{path}: {name} has the dtype {entry.dtype}, not known here")
            dtype = _TORCH_DTYPES[entry.dtype]
            if prod(entry.shape) * dtype.itemsize != entry.num_bytes:
                raise CheckpointError(
                    f"{path}: {name} {list(entry.shape)} of {entry.dtype} has {entry.num_bytes} "
                    "bytes"
                )
            if index is not None and index.get(name) != file:
                there = index.get(name, "no file")
                raise CheckpointError(f"{path}: holds {name}, which {INDEX} places in {there}")
            self.tensors[name] = Stored(file, dtype, entry.shape, start)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._reader.bytes_read

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a tensor on the CPU, in its stored dtype (of a folder with quantized
        tensors in float32)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor named {name}")
        if (quantized := self._quantized.get(name)) is not None:
            return quantized.read(box, self._read)
        found = self._read(name, box)
        return found.float() if self._quantized else found

    def read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        """Fill `out`, of any dtype, strides and device, with the part `box` of a tensor."""
        if name in self._quantized or name not in self._stored:
            out.copy_(self.read(name, box))
        else:
            self._fill(self._stored[name], box, out)

    def _read(self, name: str, box: Sequence[range]) -> Tensor:
        stored = self._stored[name]
        found = torch.empty([len(part) for part in box], dtype=stored.dtype)
        self._fill(stored, box, found)
        return found

    def _fill(self, stored: Stored, box: Sequence[range], out: Tensor) -> None:
        place = Place(stored.start, stored.dtype, stored.shape)
        self._reader.read_into(plain_file(self.path, stored.file), place, box, out)

    def check(self, expected: dict[str, tuple[int, ...]], known: Collection[str] = ()) -> None:
        """Raises CheckpointError unless the folder holds the tensors `expected` with these shapes,
        and no others but those that match a pattern of `known`."""
        missing = [name for name in expected if name not in self.tensors]
        extra = [
            name
            for name in self.tensors
            if name not in expected and not any(re.fullmatch(one, name) for one in known)
        ]
        lines = _listed("is missing", missing) + _listed("belongs to no part of the model", extra)
        for name, shape in expected.items():
            if name in self.tensors and self.tensors[name].shape != shape:
                found = list(self.tensors[name].shape)
                lines.append(f"{name} has shape {found}, config.json makes it {list(shape)}")
            elif name in self.tensors and self.tensors[name].dtype not in _WEIGHT_DTYPES:
                dtype = str(self.tensors[name].dtype).removeprefix("torch.")
                why = "and config.json names no quantization" if "float8" in dtype else ""
                lines.append(f"{name} is stored as {dtype} {why}".rstrip())
        if lines:
            more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise CheckpointError(
                f"{self.path}: the weights are not those of its config.json:\n  "
                + "\n  ".join(lines[:5])
                + more
            )

    def close(self) -> None:
        """Let go of the files; a later read opens them again."""
        self._reader.close()


def plain_file(folder: Path, name: str) -> Path:
    """The file `name` of a folder. In the hub's cache, whose folders ``snapshots/REVISION`` hold
    links to ``blobs``, the file there; any other link is left as it is, and not followed."""
    path = folder / name
    if not path.is_symlink():
        return path
    home, target = folder.resolve(), path.resolve()
    is_cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return target if is_cached else path


def _index(path: Path) -> dict[str, str] | None:
    """Tensor -> file; None where there is one file without an index."""
    if not (path / INDEX).exists():
        if (path / SINGLE).exists():
            return None
        raise CheckpointError(f"{path}: holds neither {SINGLE} nor {INDEX}")
    found = read_json(plain_file(path, INDEX), INDEX_LIMIT).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path / INDEX}: has no weight_map")
    for name, file in cast("dict[str, object]", found).items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise CheckpointError(
                f"{path / INDEX}: places {name} in {file!r}, which is no plain file name of the "
                "folder"
            )
    return cast("dict[str, str]", found)


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes. Raises CheckpointError for anything else."""
    if not path.exists():
        raise CheckpointError(f"{path}: missing")
    raw = read_start(path, limit + 1)
    if len(raw) > limit:
        raise CheckpointError(f"{path}: larger than the limit of {limit} bytes")
    try:
        found = json.loads(raw, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return cast("dict[str, Any]", found)


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [f"{names[0]} {what}{more}"]
