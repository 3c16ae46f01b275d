"""Tensors of files: reads from verified checkpoints of any layout, and the bytes of new files,
whose tensors may be computed at the time of the write.

Everything, by default with the digests, is checked (:mod:`moemesh.checkpoint.stored`) before
anything is read; nothing is cast. The format of files is that of :mod:`moemesh.checkpoint.header`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from moemesh.checkpoint.files import CheckpointError, explain, is_committed
from moemesh.checkpoint.header import HEADER_LIMIT
from moemesh.checkpoint.manifest import DTYPES
from moemesh.checkpoint.remote import Place, RemotePath
from moemesh.checkpoint.retention import nonfinite
from moemesh.checkpoint.stored import StoredCheckpoint, candidates, open_stored


class DeferredTensor(NamedTuple):
    """A tensor that is computed at the time of the write: dtype, shape, and the function."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def in_order(tensors: Mapping[str, DeferredTensor]) -> list[str]:
    """Keys in file order: the widest dtype first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))


def safetensors_bytes(
    tensors: Mapping[str, DeferredTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: header, then tensors in the order of :func:`in_order`."""
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
        values = tensor.make().detach().cpu().contiguous()
        assert (values.dtype, tuple(values.shape)) == (tensor.dtype, tensor.shape), key
        yield memoryview(values.reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The rectangle ``offset .. offset + tensor.shape`` of the logical tensor `name` of `shape`.

    In a save exactly one shard has each element: replicas are saved by one of their holders. The
    tensor may then be on the meta device, and `make` returns its numbers at the time of the write.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    make: Callable[[], torch.Tensor] | None = None

    @property
    def box(self) -> list[range]:
        """Its ranges in the dims of the logical tensor."""
        ends = zip(self.offset, self.tensor.shape, strict=True)
        return [range(start, start + size) for start, size in ends]

    def deferred(self) -> DeferredTensor:
        """The tensor for a file."""
        make = self.make or (lambda: self.tensor)
        return DeferredTensor(self.tensor.dtype, tuple(self.tensor.shape), make)


class Checkpoint(StoredCheckpoint):
    """One opened checkpoint: the caller's state, and tensors read by logical name."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a saved tensor."""
        return getattr(torch, self.entry(name).dtype)

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The rectangle ``offset .. offset + shape`` (default: all) of a tensor, on the CPU.

        Reads the needed pages of files; from an object store, each slice of which any part is
        needed. Raises CheckpointError for an unknown name, a rectangle outside the tensor, or a
        file that was shortened.
        """
        bits = self.read_bits(name, offset, shape)
        return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(self.dtype(name))

    def load_into(self, shards: Sequence[Shard]) -> None:
        """Copies saved values into the shards, in place, on any device, after all checks."""
        self.check(shards)
        with torch.no_grad():
            for shard in shards:
                shard.tensor.copy_(self.read(shard.name, shard.offset, shard.tensor.shape))

    def check(self, shards: Sequence[Shard]) -> None:
        """Raises CheckpointError for a shard with another name, shape or dtype than saved."""
        for shard in shards:
            saved = self.shape(shard.name)
            if saved != tuple(shard.shape):
                raise CheckpointError(
                    f"{self.path}: {shard.name} has shape {list(saved)}, the model has "
                    f"{list(shard.shape)}"
                )
            if shard.tensor.dtype != self.dtype(shard.name):
                raise CheckpointError(
                    f"{self.path}: {shard.name} is {self.entry(shard.name).dtype}, requested as "
                    f"{str(shard.tensor.dtype).removeprefix('torch.')}; dtypes are not cast on "
                    "loading"
                )
            self.check_rectangle(shard.name, shard.offset, shard.tensor.shape)


def open_checkpoint(
    folder: Place, step: int, *, verify: Literal["full", "sizes"] = "full"
) -> Checkpoint:
    """Opens and verifies ``folder/step-<step>``.

    With "sizes", digests of the tensor files are not checked, since that reads every byte: ranks
    share that work, or one of them does it, and the others open by sizes. Raises CheckpointError
    naming the file and its fault.
    """
    stored = open_stored(folder, step)
    checkpoint = Checkpoint(stored.path, stored.manifest)
    if verify == "full":
        checkpoint.verify()
    return checkpoint


def latest(
    folder: Place, on_skip: Callable[[int, str], None], *, prefer_finite: bool = False
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None.

    Each newer one that fails is passed to ``on_skip(step, reason)``, which should warn the user,
    unless a run that is training has deleted it in the meantime: then there is a newer one.
    `prefer_finite`: a checkpoint with infinities or NaN is skipped in the same way; the newest of
    them is returned if no finite one verifies. Raises CheckpointError for an object store that does
    not answer.
    """
    poisoned: list[tuple[int, str, Checkpoint]] = []  # with numbers that are not finite
    tried = set[int]()
    while left := [step for step in candidates(folder) if step not in tried]:
        step = left[0]
        tried.add(step)
        try:
            checkpoint = open_checkpoint(folder, step)
            names = nonfinite(checkpoint) if prefer_finite else ()
        except (CheckpointError, OSError) as error:
            if isinstance(folder, RemotePath) and isinstance(error, OSError):
                raise explain(error, folder) from error  # the store does not answer: not damage
            if is_committed(folder / f"step-{step}"):
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
