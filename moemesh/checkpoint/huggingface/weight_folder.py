"""A folder of weights in the layout of transformers, opened with care and read by slices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents, plain_file
from moemesh.checkpoint.huggingface.packed import (
    BLOCKS,
    GROUP,
    GROUP_BYTES,
    SCALE,
    SCALES,
    Fp8Blocks,
    Mxfp4,
)
from moemesh.config.huggingface.model import Quantization

# Parts of tensors from files, straight into the memory where they are needed.
#
# Files are read by position, not mapped: a mapped file costs a fault for every few pages, counts
# as memory of the process while it is read, and ends the process when it becomes shorter.


#: Numbers that change their dtype, place or device on the way pass through so many bytes, which
#: stay in the cache of a core.
_BUFFER_BYTES = 1 << 20
#: Shorter runs are not read one by one: rows are read in full, and the rest is dropped. Disks and
#: the page cache hold pages of this size anyway.
_SHORTEST_RUN_BYTES = 4096


class Place(NamedTuple):
    """The place of a tensor: its first byte in the file, its dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SliceReader:
    """Opened files; not for several threads."""

    def __init__(self) -> None:
        #: Bytes that were read so far.
        self.bytes_read = 0
        self._handles: dict[Path, int] = {}
        self._buffer: Tensor | None = None

    def read_into(self, path: Path, place: Place, box: Sequence[range], out: Tensor) -> None:
        """Fill `out`, of any dtype, strides and device, with the part `box` of a tensor."""
        if 0 not in out.shape:
            if path not in self._handles:
                try:
                    self._handles[path] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror}") from error
            source = _Source(path, self._handles[path], place.dtype)
            if not place.shape:
                self._run(source, place.start, out.view(1))
            else:
                self._fill(source, place.start, place.shape, box, out)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _fill(
        self,
        source: _Source,
        start: int,
        shape: Sequence[int],
        box: Sequence[range],
        out: Tensor,
    ) -> None:
        rows, *rest = box
        row_bytes = prod(shape[1:]) * source.dtype.itemsize
        start += rows.start * row_bytes
        if all(len(part) == size for part, size in zip(rest, shape[1:], strict=True)):
            self._run(source, start, out)
            return
        at_once = _BUFFER_BYTES // row_bytes
        if (
            at_once
            and len(rows) > 1
            and _run_length(shape[1:], rest) * source.dtype.itemsize < _SHORTEST_RUN_BYTES
        ):
            inner = tuple(slice(part.start, part.stop) for part in rest)
            for first in range(0, len(rows), at_once):
                part = out[first : first + at_once]
                whole = self._numbers(source, start + first * row_bytes, (len(part), *shape[1:]))
                part.copy_(whole[(slice(None), *inner)])
            return
        for index in range(len(rows)):
            self._fill(source, start + index * row_bytes, shape[1:], rest, out[index])

    def _run(self, source: _Source, start: int, out: Tensor) -> None:
        """Numbers that lie one behind the other in the file."""
        if out.dtype == source.dtype and out.device.type == "cpu" and out.is_contiguous():
            flat = out.detach().reshape(-1).view(torch.uint8)
            self._read(source, start, memoryview(flat.numpy()))
            return
        row_bytes = prod(out.shape[1:]) * source.dtype.itemsize
        at_once = _BUFFER_BYTES // row_bytes
        if not at_once:
            for index in range(len(out)):
                self._run(source, start + index * row_bytes, out[index])
            return
        for first in range(0, len(out), at_once):
            part = out[first : first + at_once]
            part.copy_(self._numbers(source, start + first * row_bytes, tuple(part.shape)))

    def _numbers(self, source: _Source, start: int, shape: tuple[int, ...]) -> Tensor:
        """Numbers that fit the buffer, valid until the next are read."""
        if self._buffer is None:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        raw = self._buffer[: prod(shape) * source.dtype.itemsize]
        self._read(source, start, memoryview(raw.numpy()))
        return raw.view(source.dtype).view(shape)

    def _read(self, source: _Source, start: int, into: memoryview) -> None:
        self.bytes_read += len(into)
        while into:
            count = os.preadv(source.handle, [into], start)
            if not count:
                raise CheckpointError(f"{source.path}: became shorter while it was read")
            into, start = into[count:], start + count


class _Source(NamedTuple):
    path: Path
    handle: int
    dtype: torch.dtype


def _run_length(shape: Sequence[int], box: Sequence[range]) -> int:
    """Numbers of `box` that lie one behind the other in a tensor of `shape`, at least."""
    count = 1
    for size, part in zip(reversed(shape), reversed(box), strict=True):
        count *= len(part)
        if len(part) != size:
            break
    return count


# Stored tensors of fewer bits, turned into numbers slice by slice.
#
# Only the blocks that a slice touches are read. :mod:`moemesh.checkpoint.huggingface.packed` has
# the formats.


#: (name of a stored tensor, a range of each of its dims) -> these numbers, as stored.
Read = Callable[[str, Sequence[range]], Tensor]
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: The two numbers of every byte; the scale of every exponent, of which the last is not a number.
_PAIRS = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
_E8M0 = torch.tensor([*(2.0**exponent for exponent in range(-127, 128)), torch.nan])


def _fp8(tensor: Fp8Blocks, box: Sequence[range], read: Read) -> Tensor:
    *stack, rows, columns = box
    found = read(tensor.weight, box).float()
    blocks = [_blocks(part, size) for part, size in zip(box[-2:], tensor.block, strict=True)]
    scales = read(tensor.weight + SCALE, [*stack, *blocks]).float()
    of_column = torch.arange(columns.start, columns.stop) // tensor.block[1] - blocks[1].start
    # Block by block of rows, so that no second tensor of this size is made.
    for index, block in enumerate(blocks[0]):
        first = max(block * tensor.block[0], rows.start) - rows.start
        last = min((block + 1) * tensor.block[0], rows.stop) - rows.start
        found[..., first:last, :] *= scales[..., index : index + 1, :][..., of_column]
    return found


def _mxfp4(tensor: Mxfp4, box: Sequence[range], read: Read) -> Tensor:
    stack, columns, rows = box
    groups = _blocks(columns, GROUP)
    packed = read(tensor.name + BLOCKS, [stack, rows, groups, range(GROUP_BYTES)])
    exponents = read(tensor.name + SCALES, [stack, rows, groups])
    found = _PAIRS.index_select(0, packed.reshape(-1).int()).view(*exponents.shape, GROUP)
    found *= _E8M0.index_select(0, exponents.reshape(-1).int()).view(*exponents.shape, 1)
    found = found.flatten(2)
    start = columns.start - groups.start * GROUP
    return found[..., start : start + len(columns)].transpose(1, 2)


def _blocks(part: range, size: int) -> range:
    """The blocks of `size` that hold `part`."""
    return range(part.start // size, -(-part.stop // size))


class FolderTensor(NamedTuple):
    """A tensor of a folder as torch knows it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFolder:
    """The tensors of a folder. Raises CheckpointError as :class:`FolderContents`.

    With `quantization`, `tensors` are those that stored ones of fewer bits stand for, and all are
    read as float32.
    """

    def __init__(self, path: Path, quantization: Quantization | None = None) -> None:
        self.contents = FolderContents(path, quantization)
        self.path = path
        self._reader = SliceReader()
        self.tensors = {
            name: FolderTensor(_dtype(tensor.dtype), tensor.shape)
            for name, tensor in self.contents.tensors.items()
        }

    @property
    def is_quantized(self) -> bool:
        """Whether tensors are stored in fewer bits than they are read as."""
        return bool(self.contents.packed)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._reader.bytes_read

    def read(self, name: str, box: Sequence[range]) -> Tensor:
        """The part `box` of a tensor on the CPU, in its stored dtype (of a folder with quantized
        tensors in float32)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor named {name}")
        if (packed := self.contents.packed.get(name)) is not None:
            if isinstance(packed, Fp8Blocks):
                return _fp8(packed, box, self._read)
            return _mxfp4(packed, box, self._read)
        found = self._read(name, box)
        return found.float() if self.is_quantized else found

    def read_into(self, name: str, box: Sequence[range], out: Tensor) -> None:
        """Fill `out`, of any dtype, strides and device, with the part `box` of a tensor."""
        if name in self.contents.packed or name not in self.contents.stored:
            out.copy_(self.read(name, box))
        else:
            self._fill(name, box, out)

    def _read(self, name: str, box: Sequence[range]) -> Tensor:
        dtype = _dtype(self.contents.stored[name].dtype)
        found = torch.empty([len(part) for part in box], dtype=dtype)
        self._fill(name, box, found)
        return found

    def _fill(self, name: str, box: Sequence[range], out: Tensor) -> None:
        stored = self.contents.stored[name]
        place = Place(stored.start, _dtype(stored.dtype), stored.shape)
        self._reader.read_into(plain_file(self.path, stored.file), place, box, out)

    def close(self) -> None:
        """Let go of the files; a later read opens them again."""
        self._reader.close()


def _dtype(name: str) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, name))
