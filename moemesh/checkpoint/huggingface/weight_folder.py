"""Reader of weight folders in the layout of transformers, by stored names and by the logical names
of our checkpoints.

A rank reads the slices of its shards, or the rows and blocks around them (short runs, quantized
tensors), and keeps no other weights.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import isclose, prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.adapters import StoredAdapter, check_adapter_folder
from moemesh.checkpoint.huggingface.contents import (
    GROUP,
    GROUP_BYTES,
    FolderContents,
    plain_file,
)
from moemesh.checkpoint.huggingface.logical import LogicalTensor, checked_tensors
from moemesh.checkpoint.huggingface.pieces import Read, TensorPiece, slices
from moemesh.checkpoint.load import Shard
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import Quantization, quantization_of
from moemesh.config.lora import ADAPTER_WEIGHTS, is_adapter
from moemesh.config.model import ModelConfig

#: Bytes of the buffer for numbers that change dtype, strides or device; it fits a core's cache.
_BUFFER_BYTES = 1 << 20
#: Shortest contiguous run in bytes that is read on its own, the page size of disks and of the page
#: cache. If runs are shorter, whole rows are read, and what is not needed is dropped.
_SHORTEST_RUN_BYTES = 4096

# Dequantization of stored tensors, slice by slice.
#
# Only the blocks that overlap a slice are read. The formats are in
# :mod:`moemesh.checkpoint.huggingface.contents`.

#: Values of the 16 codes of e2m1.
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: The two numbers of each byte.
_PAIRS = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
#: The scale of each stored exponent; the last one is NaN.
_E8M0 = torch.tensor([*(2.0**exponent for exponent in range(-127, 128)), torch.nan])


def _blocks(part: range, size: int) -> range:
    """The blocks of `size` that hold `part`."""
    return range(part.start // size, -(-part.stop // size))


class WeightFolder(FolderContents):
    """The tensors of a folder and their numbers. If any tensor is quantized, :meth:`read` returns
    float32 for all. Not thread-safe. Raises CheckpointError like :class:`FolderContents`.

    Parts of tensors are read directly into their destination. Files are read by position, not
    mapped: a mapped file costs a page fault for every few pages, counts as memory of the process
    while it is read, and kills the process if it is truncated.
    """

    def __init__(self, path: Path, quantization: Quantization | None = None) -> None:
        super().__init__(path, quantization)
        #: Bytes of tensors read so far.
        self.bytes_read = 0
        self._handles: dict[Path, int] = {}
        self._buffer: Tensor | None = None
        #: File and dtype of the tensor being read.
        self._file, self._dtype = Path(), torch.float32

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a tensor on the CPU, in its stored dtype, or in float32 if the folder
        has packed tensors."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor named {name}")
        if (tensor := self.packed.get(name)) is None:
            stored = self._read(name, box)
            return stored.float() if self.packed else stored
        # Only the blocks of a packed tensor that overlap the box are read.
        numbers, scales_of = tensor.sources
        if tensor.block is None:
            stack, columns, rows = box
            groups = _blocks(columns, GROUP)
            packed = self._read(numbers, [stack, rows, groups, range(GROUP_BYTES)])
            exponents = self._read(scales_of, [stack, rows, groups])
            values = _PAIRS.index_select(0, packed.reshape(-1).int()).view(*exponents.shape, GROUP)
            values *= _E8M0.index_select(0, exponents.reshape(-1).int()).view(*exponents.shape, 1)
            start = columns.start - groups.start * GROUP
            return values.flatten(2)[..., start : start + len(columns)].transpose(1, 2)
        *stack, rows, columns = box
        values = self._read(numbers, box).float()
        blocks = [_blocks(part, size) for part, size in zip(box[-2:], tensor.block, strict=True)]
        scales = self._read(scales_of, [*stack, *blocks]).float()
        of_column = torch.arange(columns.start, columns.stop) // tensor.block[1] - blocks[1].start
        # One block of rows at a time, so that no second tensor of this size is allocated.
        for index, block in enumerate(blocks[0]):
            start = max(block * tensor.block[0], rows.start) - rows.start
            last = min((block + 1) * tensor.block[0], rows.stop) - rows.start
            values[..., start:last, :] *= scales[..., index : index + 1, :][..., of_column]
        return values

    def read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        """Fill `out`, of any dtype, strides and device, with the part `box` of a tensor."""
        if name in self.packed or name not in self.stored:
            out.copy_(self.read(name, box))
        else:
            self._read_stored(name, box, out)

    def close(self) -> None:
        """Close the files; a later read reopens them."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_handles"):  # missing if the constructor raised
            self.close()

    def _read(self, name: str, box: Sequence[range]) -> Tensor:
        """Same as :meth:`read`, without dequantization."""
        dtype = torch_dtype(self.stored[name].dtype)
        numbers = torch.empty([len(part) for part in box], dtype=dtype)
        self._read_stored(name, box, numbers)
        return numbers

    def _read_stored(self, name: str, box: Sequence[range], out: Tensor) -> None:
        if 0 in out.shape:
            return
        stored = self.stored[name]
        self._file, self._dtype = plain_file(self.path, stored.file), torch_dtype(stored.dtype)
        if self._file not in self._handles:
            try:
                self._handles[self._file] = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError as error:
                raise CheckpointError(f"{self._file}: {error.strerror}") from error
        if not stored.shape:
            self._run(stored.start, out.view(1))
        else:
            self._fill(stored.start, stored.shape, box, out)

    def _fill(self, start: int, shape: Sequence[int], box: Sequence[range], out: Tensor) -> None:
        """Read the part `box` of a tensor of `shape`, which is at byte `start` of the file, by
        contiguous runs, or by whole rows if runs are short."""
        rows, *rest = box
        row_bytes = prod(shape[1:]) * self._dtype.itemsize
        start += rows.start * row_bytes
        if all(len(part) == size for part, size in zip(rest, shape[1:], strict=True)):
            self._run(start, out)
            return
        run_bytes = self._dtype.itemsize  # contiguous bytes of the box in the file
        for size, part in zip(reversed(shape[1:]), reversed(rest), strict=True):
            run_bytes *= len(part)
            if len(part) != size:
                break
        at_once = _BUFFER_BYTES // row_bytes  # rows that fit the buffer
        if at_once and len(rows) > 1 and run_bytes < _SHORTEST_RUN_BYTES:
            inner = tuple(slice(part.start, part.stop) for part in rest)
            for row in range(0, len(rows), at_once):
                part = out[row : row + at_once]
                whole = self._numbers(start + row * row_bytes, (len(part), *shape[1:]))
                part.copy_(whole[(slice(None), *inner)])
            return
        for index in range(len(rows)):
            self._fill(start + index * row_bytes, shape[1:], rest, out[index])

    def _run(self, start: int, out: Tensor) -> None:
        """Read a contiguous run of the file into `out`."""
        if out.dtype == self._dtype and out.device.type == "cpu" and out.is_contiguous():
            self._read_bytes(start, out.detach().reshape(-1).view(torch.uint8))
            return
        row_bytes = prod(out.shape[1:]) * self._dtype.itemsize
        at_once = _BUFFER_BYTES // row_bytes
        if not at_once:
            for index in range(len(out)):
                self._run(start + index * row_bytes, out[index])
            return
        for row in range(0, len(out), at_once):
            part = out[row : row + at_once]
            part.copy_(self._numbers(start + row * row_bytes, tuple(part.shape)))

    def _numbers(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """Numbers of a contiguous run that fits the buffer; valid until the next read."""
        if self._buffer is None:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        raw = self._buffer[: prod(shape) * self._dtype.itemsize]
        self._read_bytes(start, raw)
        return raw.view(self._dtype).view(shape)

    def _read_bytes(self, start: int, out: Tensor) -> None:
        rest = memoryview(out.numpy())
        self.bytes_read += len(rest)
        while rest:
            count = os.preadv(self._handles[self._file], [rest], start)
            if not count:
                raise CheckpointError(f"{self._file}: became shorter while it was read")
            rest, start = rest[count:], start + count


def torch_dtype(name: str) -> torch.dtype:
    """The dtype with torch's `name`."""
    return cast("torch.dtype", getattr(torch, name))


#: Name of one expert of a stack: ``...experts.17.gate_up``.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")


class FolderWeights(ABC):
    """The weights of a folder by the names of checkpoints; :meth:`load_into` takes them with the
    prefix "model.", the other methods without it."""

    folder: WeightFolder

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Fill every shard's tensor in place, of any dtype and device. Adapters are skipped."""
        with torch.no_grad():
            for shard in (shard for shard in shards if not is_adapter(shard.name)):
                self.read_into(shard.name.removeprefix("model."), shard.box, shard.tensor)
        self.folder.close()

    @abstractmethod
    def read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        """Fill `out` with the part `box` of a parameter, a buffer, a stack of experts or one of
        them."""


class HuggingFaceWeights(FolderWeights):
    """An opened weight folder. Raises CheckpointError, before any number is read, unless it holds
    the tensors of the model `config`, and no others but those known to be unused."""

    def __init__(
        self, path: Path, config: ModelConfig, given: Mapping[str, Any] | None = None
    ) -> None:
        """`given`: content of its ``config.json``, which has the family, the format of the weights
        and the prediction layers; None: read it."""
        given = read_config(path) if given is None else given
        self.quantization = quantization_of(given)
        self.folder = WeightFolder(path, self.quantization)
        self._experts: dict[str, list[LogicalTensor]] = {}
        self.tensors = checked_tensors(self.folder, config, given)

    def read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        tensor, box, is_expert = self._located(name, box)
        out = out[None] if is_expert else out
        if tensor.view != tensor.shape:
            out.copy_(tensor.read(box, self.folder.read))
            return
        for piece in tensor.pieces:
            if (common := piece.overlap(box)) is not None:
                piece.read_into(common, out[slices(common, box)], self.folder)

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a parameter, buffer, stack or expert, in the dtype of
        :meth:`WeightFolder.read`."""
        tensor, box, is_expert = self._located(name, box)
        part = tensor.read(box, self.folder.read)
        return part[0] if is_expert else part

    def _located(
        self, name: str, box: Sequence[range]
    ) -> tuple[LogicalTensor, Sequence[range], bool]:
        """Tensor of a name, the box in it, and whether the name is that of one expert. An expert is
        its stack with only the expert's pieces; they are sorted by expert once for a stack."""
        if (match := EXPERT.fullmatch(name)) is None:
            return self.tensors[name], box, False
        stack, expert = f"{match[1]}.{match[3]}", int(match[2])
        if stack not in self._experts:
            tensor = self.tensors[stack]
            by_expert: list[list[TensorPiece]] = [[] for _ in range(tensor.shape[0])]
            for piece in tensor.pieces:
                start = piece.offset[0]
                for index in range(start, start + piece.shape[0]):
                    by_expert[index].append(piece)
            self._experts[stack] = [tensor._replace(pieces=pieces) for pieces in by_expert]
        return self._experts[stack][expert], [range(expert, expert + 1), *box], True


class AdapterFolder:
    """An opened folder of PEFT's. Raises CheckpointError, before any number is read, unless its
    adapters and whole weights are those of `model`; `trains` as in
    :func:`moemesh.checkpoint.huggingface.adapters.check_adapter_folder`."""

    def __init__(self, path: Path, model: ModelConfig, kind: str, *, trains: bool = True) -> None:
        self.contents = check_adapter_folder(path, model, kind, trains=trains)
        #: Our name of a factor -> its adapter, the index of its part, and "A" or "B".
        self._places: dict[str, tuple[StoredAdapter, int, str]] = {
            adapter.adaptation.factor(part, factor): (adapter, index, factor)
            for adapter in self.contents.adapters
            for index, part in enumerate(adapter.adaptation.parts)
            for factor in "AB"
        }
        self._ends = {weight.ours: weight.stored for weight in self.contents.ends}
        self._file: Any = safe_open(path / ADAPTER_WEIGHTS, framework="pt", device="cpu")
        #: Name of the stored factor that was read last, and its parts.
        self._last: tuple[str, list[Tensor]] = "", []

    def joined(self, base: Read) -> Read:
        """Reader of the adapters and of the weights of `base`, which whole weights of the folder
        replace. Tensors of the folder are read in fp32."""

        def read(name: str, box: Sequence[range]) -> Tensor:
            if name not in self._places and name not in self._ends:
                return base(name, box)
            shape, offset = tuple(map(len, box)), tuple(part.start for part in box)
            tensor = torch.empty(shape)
            self.load_into([Shard(name=f"model.{name}", shape=shape, offset=offset, tensor=tensor)])
            return tensor

        return read

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Fill the shards of adapters and of whole weights, in place; names are those of a
        checkpoint. An adapter that the folder lacks gets zeros in both factors, whose gradients are
        then zero. Adapters of extra prediction layers are not changed."""
        with torch.no_grad():
            for shard in shards:
                name, expert = shard.name.removeprefix("model."), None
                if (match := EXPERT.fullmatch(name)) is not None:
                    name, expert = f"{match[1]}.{match[3]}", int(match[2])
                box = slices(shard.box)
                if (end := self._ends.get(name)) is not None:
                    shard.tensor.copy_(self._file.get_slice(end)[box])
                if name not in self._places:
                    continue
                (adaptation, rank, ratio), index, factor = self._places[name]
                if not rank:
                    shard.tensor.zero_()
                    continue
                stored = adaptation.name(factor)
                if self._last[0] != stored:
                    tensor = self._file.get_tensor(stored)
                    if factor == "B" and not isclose(ratio, 1):
                        tensor = tensor.double() * ratio
                    self._last = stored, adaptation.load(factor, tensor)
                whole = self._last[1][index]
                shard.tensor.copy_((whole if expert is None else whole[expert])[box])
