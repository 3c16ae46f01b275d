"""A folder of weights in the layout of transformers, opened with care and read by slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents, plain_file
from moemesh.checkpoint.huggingface.quantized import read_packed
from moemesh.checkpoint.huggingface.slices import Place, SliceReader
from moemesh.config.huggingface.quantization import Quantization


class Stored(NamedTuple):
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
            name: Stored(_dtype(tensor.dtype), tensor.shape)
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
            return read_packed(packed, box, self._read)
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
