"""Parts of tensors from files, straight into the memory where they are needed.

Files are read by position, not mapped: a mapped file costs a fault for every few pages, counts as
memory of the process while it is read, and ends the process when it becomes shorter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError

#: Numbers that change their dtype, place or device on the way pass through so many bytes, which
#: stay in the cache of a core.
_BUFFER_BYTES = 1 << 20
#: Shorter runs are not read one by one: rows are read in full, and the rest is dropped. Disks and
#: the page cache hold pages of this size anyway.
_SHORTEST_RUN_BYTES = 4096


class Place(NamedTuple):
    """Where a tensor lies: its first byte in the file, its dtype and shape."""

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
            source = _Source(path, self._handle(path), place.dtype)
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

    def _handle(self, path: Path) -> int:
        if path not in self._handles:
            try:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
        return self._handles[path]

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
