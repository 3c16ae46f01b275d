"""Tensors of a transformers folder, listed from its index and headers, without torch.

    config.json                       sizes and kinds of layers
    model.safetensors                 all tensors, or
    model.safetensors.index.json      tensor -> file, and the files it names

Quantized tensors are recognised by their names and dtypes; two formats are supported:

    fp8     NAME.weight [R, C] of e4m3, and NAME.weight_scale_inv [ceil(R / r), ceil(C / c)]: the
            number is weight * scale of its block of r x c (DeepSeek-V3, section 3.3 of its report)
    mxfp4   NAME_blocks [E, R, G, 16] and NAME_scales [E, R, G] of uint8, for NAME [E, 32 G, R]: two
            e2m1 numbers a byte, the low half first, times 2 ** (scale - 127) (OCP Microscaling
            Formats 1.0; the layout is that of gpt-oss)

The index is untrusted: it may only name plain files of this folder, every header is bounded and
checked against its file, and index and headers must agree, before a number is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

from moemesh.checkpoint.files import CheckpointError, check_folder, read_start
from moemesh.checkpoint.header import read_header
from moemesh.checkpoint.manifest import DTYPES, ITEM_BYTES
from moemesh.config.huggingface.folder import INDEX, SINGLE, lacks_weights
from moemesh.config.huggingface.model import Quantization
from moemesh.config.limits import one_line, parse_json

#: Largest index that is parsed, in bytes.
INDEX_LIMIT = 64 << 20
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
#: Prefix of the base model's tensors in a model with a head: ``base_model_prefix`` of transformers.
_PREFIX = "model."
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
#: Dtypes of weights that are not quantized.
WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
#: safetensors' names of dtypes -> torch's.
_NAMES = {name: key for key, name in DTYPES.items()}
#: Most faults that an error message lists.
_MOST_LINES = 5
#: Endings of the names of scales in fp8, and of numbers and scales in mxfp4.
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
#: Numbers of mxfp4 that share an exponent; bytes of these numbers.
GROUP, GROUP_BYTES = 32, 16


class StoredTensor(NamedTuple):
    """A tensor of a folder: file, torch's name of the dtype, shape, offset of the first byte."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0


class Packed(NamedTuple):
    """A quantized tensor: in fp8 a matrix, or a stack of matrices, with a scale for each `block` of
    its last two dims; in mxfp4 (`block` None) a stack of matrices [E, C, R], with a scale for each
    group of 32 numbers along C."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None

    @property
    def sources(self) -> tuple[str, str]:
        """Names of the stored numbers and of their scales."""
        if self.block is not None:
            return self.name, self.name + SCALE
        return self.name + BLOCKS, self.name + SCALES


class FolderContents:
    """The tensors of a folder. Raises CheckpointError naming file and tensor if anything is
    missing, damaged, or outside of the folder.

    `stored`: tensors in the files; `packed`: quantized tensors of a folder with `quantization`;
    `tensors`: all tensors that can be read, the packed ones as float32.
    """

    def __init__(self, path: Path, quantization: Quantization | None = None) -> None:
        check_folder(path.resolve())  # a link to the folder is followed, links in it are not
        # The index: tensor -> file.
        self.path = path
        self.stored: dict[str, StoredTensor] = {}
        index: dict[str, Any] | None = None
        if not (path / SINGLE).exists():  # transformers prefers the single file
            if not (path / INDEX).exists():
                raise CheckpointError(lacks_weights(path))
            index = read_json(plain_file(path, INDEX), INDEX_LIMIT).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise CheckpointError(f"{path / INDEX}: has no weight_map")
            for name, file in index.items():
                if one_line(name) != name:
                    shown = one_line(name)[:80]
                    raise CheckpointError(f"{path / INDEX}: control characters in a name: {shown}")
                if not isinstance(file, str) or not _FILE.fullmatch(file):
                    raise CheckpointError(
                        f"{path / INDEX}: places {name} in {file!r}, which is not a plain file "
                        "name of the folder"
                    )
        # The headers of all files.
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            file_path = plain_file(path, file)
            for name, entry in read_header(file_path).items():
                if entry.dtype not in _NAMES:
                    raise CheckpointError(
                        f"{file_path}: {name} has the dtype {entry.dtype}, not known here"
                    )
                dtype = _NAMES[entry.dtype]
                if prod(entry.shape) * ITEM_BYTES[dtype] != entry.num_bytes:
                    raise CheckpointError(
                        f"{file_path}: {name} {list(entry.shape)} of {entry.dtype} has "
                        f"{entry.num_bytes} bytes"
                    )
                if index is not None and index.get(name) != file:
                    raise CheckpointError(
                        f"{file_path}: holds {name}, which {INDEX} places in "
                        f"{index.get(name, 'no file')}"
                    )
                self.stored[name] = StoredTensor(file, dtype, entry.shape, entry.start)
        if index is not None and (missing := sorted(index.keys() - self.stored.keys())):
            raise CheckpointError(
                f"{path / index[missing[0]]}: holds no tensor {missing[0]}, which {INDEX} places "
                f"there ({len(missing)} such tensors)"
            )
        self.tensors = dict(self.stored)
        self.packed = {} if quantization is None else self._find_packed(quantization)
        for name, tensor in self.packed.items():
            file = self.stored[tensor.sources[0]].file
            for source in tensor.sources:
                self.tensors.pop(source, None)
            self.tensors[name] = StoredTensor(file, "float32", tensor.shape)

    def take_names(self, expected: Collection[str]) -> None:
        """Rename tensors as transformers does on loading: names of a folder that was saved from the
        base model lack the prefix ``model.``, those saved from a larger module have one more.
        Raises CheckpointError if two tensors get the same name."""

        def renamed(name: str) -> str:
            suffix = next((end for end in (SCALE, BLOCKS, SCALES) if name.endswith(end)), "")
            plain = name.removesuffix(suffix)
            shorter, longer = plain.removeprefix(_PREFIX), _PREFIX + plain
            if plain not in expected and shorter in expected:
                return shorter + suffix
            return longer + suffix if longer in expected or _LAYER.match(longer) else name

        for table in (self.stored, self.tensors, self.packed):
            names = {name: renamed(name) for name in table}
            if twice := [new for name, new in names.items() if new != name and new in names]:
                raise CheckpointError(
                    f"{self.path}: holds {twice[0]} with and without {_PREFIX} in front"
                )
        self.stored = {renamed(name): tensor for name, tensor in self.stored.items()}
        self.tensors = {renamed(name): tensor for name, tensor in self.tensors.items()}
        packed = [tensor._replace(name=renamed(tensor.name)) for tensor in self.packed.values()]
        self.packed = {tensor.name: tensor for tensor in packed}

    def _find_packed(self, quantization: Quantization) -> dict[str, Packed]:
        """The quantized tensors of the folder by name."""
        tensors: dict[str, Packed] = {}
        problems: list[str] = []
        is_fp8 = quantization.method == "fp8"
        for stored, (_, dtype, shape, _) in self.stored.items():
            if is_fp8 and dtype == "float8_e4m3fn" and not stored.endswith(SCALE):
                if len(shape) < 2:
                    problems.append(f"{stored} {list(shape)} is in fp8 and not a matrix")
                    continue
                packed = Packed(stored, shape, quantization.block)
                blocks = zip(shape[-2:], quantization.block, strict=True)
                needed = (*shape[:-2], *(-(-size // block) for size, block in blocks))
                legal = (*WEIGHT_DTYPES, "float8_e4m3fn", "float8_e5m2")
            elif not is_fp8 and stored.endswith(BLOCKS):
                if dtype != "uint8" or len(shape) != 4 or shape[-1] != GROUP_BYTES:
                    problems.append(
                        f"{stored} {list(shape)} of {dtype} is not [experts, rows, groups, "
                        f"{GROUP_BYTES}] of bytes"
                    )
                    continue
                name, (stack, rows, groups, _) = stored.removesuffix(BLOCKS), shape
                packed = Packed(name, (stack, groups * GROUP, rows), None)
                if name in self.stored:
                    problems.append(f"{name} exists twice: under its name, and as {stored}")
                needed, legal = shape[:-1], ("uint8",)
            else:
                continue
            tensors[packed.name] = packed
            scales = packed.sources[1]
            entry = self.stored.get(scales)
            if entry is None:
                problems.append(f"{scales} is missing, the scales of {stored}")
            elif entry.shape != needed or entry.dtype not in legal:
                is_now = f"{list(entry.shape)} of {entry.dtype}"
                problems.append(f"{scales} is {is_now}; {stored} needs {list(needed)}")
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckpointError(f"{self.path}: {problems[0]}{more}")
        return tensors

    def check(
        self, expected: dict[str, tuple[int, ...]], known: Collection[str], num_layers: int
    ) -> None:
        """Raises CheckpointError unless the folder holds the tensors `expected` of a model with
        `num_layers` layers in these shapes; tensors in `known` may exist as well."""
        missing = [name for name in expected if name not in self.tensors]
        extra = [name for name in self.tensors if name not in expected and name not in known]
        surplus = [name for name in sorted(extra, key=layer_of) if layer_of(name) >= num_layers]
        why = f"is after the {num_layers} layers of config.json and not of a prediction layer (MTP)"
        extra = [name for name in extra if name not in surplus]
        lines = _listed("is missing", missing) + _listed("belongs to no part of the model", extra)
        lines += _listed(why, surplus)
        for name, shape in expected.items():
            if (tensor := self.tensors.get(name)) is None:
                continue
            if tensor.shape != shape:
                actual = list(tensor.shape)
                lines.append(f"{name} has shape {actual}, config.json makes it {list(shape)}")
            elif tensor.dtype not in WEIGHT_DTYPES:
                why = "and config.json names no such format" if "float8" in tensor.dtype else ""
                lines.append(f"{name} is stored as {tensor.dtype} {why}".rstrip())
        refuse_problems(self.path, lines)


def refuse_problems(path: Path, lines: Sequence[str]) -> None:
    """Raises CheckpointError with the first of `lines`: faults of a folder's weights."""
    if lines:
        head = f"{path}: the weights are not those of its config.json:"
        left = len(lines) - _MOST_LINES
        more = [f"and {left} more"] if left > 0 else []
        raise CheckpointError("\n  ".join([head, *lines[:_MOST_LINES], *more]))


def layer_of(name: str) -> int:
    """Layer index in the name of a tensor; -1 without one."""
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


def plain_file(folder: Path, name: str) -> Path:
    """The file `name` of a folder. In the hub's cache, whose folders ``snapshots/REVISION`` hold
    links to ``blobs``, the link is resolved; any other link is returned unresolved."""
    path = folder / name
    if not path.is_symlink():
        return path
    home, target = folder.resolve(), path.resolve()
    is_cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return target if is_cached else path


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes. Raises CheckpointError for anything else."""
    if not path.exists():
        raise CheckpointError(f"{path}: missing")
    raw = read_start(path, limit + 1)
    if len(raw) > limit:
        raise CheckpointError(f"{path}: larger than the limit of {limit} bytes")
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return cast("dict[str, Any]", content)


def _listed(what: str, names: Sequence[str]) -> list[str]:
    """A line about the first of `names` and the number of others; empty without names."""
    if not names:
        return []
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [f"{names[0]} {what}{more}"]
