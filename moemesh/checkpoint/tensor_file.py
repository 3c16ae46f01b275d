"""The bytes of new safetensors files, whose tensors may be made when they are written.

The format is that of :mod:`moemesh.checkpoint.header`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch

from moemesh.checkpoint.files import CheckpointError, file_size
from moemesh.checkpoint.header import HEADER_LIMIT, read_places
from moemesh.checkpoint.manifest import DTYPES
from moemesh.checkpoint.remote import RemotePath

_TORCH_DTYPES = {stored: name for name, stored in DTYPES.items()}


class DeferredTensor(NamedTuple):
    """A tensor that is made when it is written: its dtype and shape, and how."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def in_order(tensors: Mapping[str, DeferredTensor]) -> list[str]:
    """The keys as a file has them: wide elements first, so that each tensor starts at a multiple of
    its element size."""
    return sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))


def safetensors_bytes(
    tensors: Mapping[str, DeferredTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: its header, then a tensor at a time as :func:`in_order`."""
    ordered = [(key, tensors[key]) for key in in_order(tensors)]
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, tensor in ordered:
        start, end = end, end + tensor.num_bytes
        header[key] = {
            "dtype": DTYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"the names of {len(tensors)} tensors exceed the header limit")
    yield struct.pack("<Q", len(text)) + text
    for key, tensor in ordered:
        made = tensor.make().detach().cpu().contiguous()
        assert (made.dtype, tuple(made.shape)) == (tensor.dtype, tensor.shape), key
        yield memoryview(made.reshape(-1).view(torch.uint8).numpy())


class RemoteTensors:
    """A safetensors file in an object store, of which tensors are read one at a time."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._places = path, read_places(path, file_size(path))

    def get_slice(self, key: str) -> torch.Tensor:
        """The whole tensor, of which safetensors would read parts."""
        entry, start = self._places[key]
        content = bytearray(self._path.read(start, start + entry.num_bytes))
        if len(content) != entry.num_bytes:
            raise CheckpointError(f"{self._path}: ends within {key}")
        dtype = getattr(torch, _TORCH_DTYPES[entry.dtype])
        return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)
