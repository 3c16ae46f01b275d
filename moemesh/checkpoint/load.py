"""Tensors of files: read from verified checkpoints under whatever layout they were saved, and the
bytes of new files, whose tensors may be made when they are written.

Everything is checked (:mod:`moemesh.checkpoint.stored`) before anything is read; nothing is cast.
The format of files is that of :mod:`moemesh.checkpoint.header`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from moemesh.checkpoint.files import CheckpointError, explain
from moemesh.checkpoint.header import HEADER_LIMIT, read_header
from moemesh.checkpoint.manifest import DTYPES, Manifest
from moemesh.checkpoint.remote import Place, RemotePath
from moemesh.checkpoint.retention import nonfinite
from moemesh.checkpoint.stored import StoredCheckpoint, candidates, open_stored

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
        self._path, self._header = path, read_header(path)

    def get_slice(self, key: str) -> torch.Tensor:
        """The whole tensor, of which safetensors would read parts."""
        entry = self._header[key]
        content = bytearray(self._path.read(entry.start, entry.start + entry.num_bytes))
        if len(content) != entry.num_bytes:
            raise CheckpointError(f"{self._path}: ends within {key}")
        dtype = getattr(torch, _TORCH_DTYPES[entry.dtype])
        return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The rectangle ``offset .. offset + tensor.shape`` of the logical tensor `name` of `shape`.

    Exactly one rank holds each element; replicas are saved by one of their holders only. To be
    saved, the tensor may be one of the meta device that `make` gives numbers when it is written.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    make: Callable[[], torch.Tensor] | None = None

    def deferred(self) -> DeferredTensor:
        """The numbers, for a file."""
        make = self.make or (lambda: self.tensor)
        return DeferredTensor(self.tensor.dtype, tuple(self.tensor.shape), make)


class Checkpoint(StoredCheckpoint):
    """One opened checkpoint: the caller's state, and tensors read by logical name."""

    def __init__(self, path: Place, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self._open: dict[str, Any] = {}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype it was saved with."""
        return getattr(torch, self.entry(name).dtype)

    def read(
        self,
        name: str,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The rectangle ``offset .. offset + shape`` (default: all) of a tensor, on the CPU.

        Reads the needed parts of however many files hold them. Raises CheckpointError for an
        unknown name, a rectangle outside the tensor, or a `dtype` other than the saved one.
        """
        entry = self.entry(name)
        offset = tuple(offset) if offset is not None else (0,) * len(entry.shape)
        shape = tuple(shape) if shape is not None else entry.shape
        self._check_rectangle(name, offset, shape, dtype)
        result = torch.empty(shape, dtype=self.dtype(name))
        for piece in entry.slices:
            starts = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            ends = [
                min(a + size_a, b + size_b)
                for a, size_a, b, size_b in zip(
                    offset, shape, piece.offset, piece.shape, strict=True
                )
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            source, target = (
                tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, origin, strict=True))
                for origin in (piece.offset, offset)
            )
            if piece.file not in self._open:
                there = self.path / piece.file
                try:
                    self._open[piece.file] = (
                        RemoteTensors(there)
                        if isinstance(there, RemotePath)
                        else safe_open(there, framework="pt", device="cpu")
                    )
                except SafetensorError as error:  # stricter than our own reading of the header
                    raise CheckpointError(f"{there}: {error}") from error
            stored = self._open[piece.file].get_slice(piece.key)
            # An empty index means "all" for a scalar tensor, in both libraries.
            result[target or ...] = stored[source or ...]
        return result

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Copies the saved values into every shard's tensor, in place, whatever its device.

        All names, shapes and dtypes are checked before the first byte is copied.
        """
        for shard in shards:
            saved = self.shape(shard.name)
            if saved != tuple(shard.shape):
                raise CheckpointError(
                    f"{self.path}: {shard.name} has shape {list(saved)}, the model has "
                    f"{list(shard.shape)}"
                )
            self._check_rectangle(
                shard.name, tuple(shard.offset), tuple(shard.tensor.shape), shard.tensor.dtype
            )
        with torch.no_grad():
            for shard in shards:
                shard.tensor.copy_(self.read(shard.name, shard.offset, shard.tensor.shape))

    def close(self) -> None:
        """Lets go of the files; a later read opens them again."""
        self._open.clear()

    def _check_rectangle(
        self,
        name: str,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> None:
        entry = self.entry(name)
        if dtype is not None and dtype != self.dtype(name):
            raise CheckpointError(
                f"{self.path}: {name} is {entry.dtype}, asked for as "
                f"{str(dtype).removeprefix('torch.')}; dtypes are not cast on loading"
            )
        if not len(offset) == len(shape) == len(entry.shape) or any(
            start < 0 or size < 0 or start + size > whole
            for start, size, whole in zip(offset, shape, entry.shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.path}: {name} {list(entry.shape)} has no part of shape {list(shape)} at "
                f"{list(offset)}"
            )


def open_checkpoint(
    folder: Place, step: int, *, verify: Literal["full", "sizes"] = "full"
) -> Checkpoint:
    """Opens and verifies ``folder/step-<step>``.

    "sizes" checks all but the digests of the tensor files, which are the part that reads every
    byte: one rank checks in full, the others then open by sizes. Raises CheckpointError naming the
    file and what is wrong with it.
    """
    stored = open_stored(folder, step)
    checkpoint = Checkpoint(stored.path, stored.manifest)
    if verify == "full":
        checkpoint.verify()
    return checkpoint


def latest(
    folder: Place,
    on_skip: Callable[[int, str], None],
    *,
    verify: Literal["full", "sizes"] = "full",
    prefer_finite: bool = False,
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None.

    Each newer one that does not is passed to ``on_skip(step, reason)``, which must say so loudly.
    `prefer_finite`: one that holds numbers that are not finite is taken only where there is no
    other; it is skipped in the same way.
    """
    poisoned: list[tuple[int, str, Checkpoint]] = []
    for step in candidates(folder):
        try:
            checkpoint = open_checkpoint(folder, step, verify=verify)
            names = nonfinite(checkpoint) if prefer_finite else ()
        except (CheckpointError, OSError) as error:
            if isinstance(folder, RemotePath) and isinstance(error, OSError):
                raise explain(error, folder) from error  # a store that does not answer is no damage
            on_skip(step, str(error))
            continue
        if not names:
            for number, why, _ in poisoned:
                on_skip(number, why)
            return checkpoint
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        why = f"{checkpoint.path}: {names[0]}{more} hold numbers that are not finite"
        poisoned.append((step, why, checkpoint))
    return poisoned[0][2] if poisoned else None
