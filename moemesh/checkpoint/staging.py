"""Copies of a rank's shards in host memory, from which a save writes while training goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from moemesh.checkpoint.load import Shard
from moemesh.trace.machine import available_bytes

#: Largest share of the memory that is free on a machine, for the buffers of all its ranks.
LARGEST_SHARE = 0.5
#: Each copy starts at a multiple of this, as torch's own tensors do.
_ALIGNMENT = 64


class Staging:
    """One buffer, as large as the largest set of shards so far; it is kept for the next save,
    because fresh memory costs more than the copy itself."""

    def __init__(self, ranks_on_machine: int = 1) -> None:
        self._ranks = ranks_on_machine
        self._buffer: torch.Tensor | None = None
        self._unpin: Callable[[], object] = lambda: None

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self._buffer is None else self._buffer.numel()

    def missing(self, keyed: Mapping[str, Shard]) -> str | None:
        """Why the copies do not fit, or None where there is a buffer for them."""
        needed = _num_bytes(keyed)
        if needed <= self.num_bytes:
            return None
        bound = int(available_bytes() * LARGEST_SHARE / self._ranks) + self.num_bytes
        if needed > bound:
            return f"{needed:,} bytes to stage, at most {bound:,} are left to this rank"
        try:
            self._reserve(needed, pins=any(shard.tensor.is_cuda for shard in keyed.values()))
        except RuntimeError:  # torch's word for no memory
            return f"{needed:,} bytes to stage, which cannot be allocated"
        return None

    def _reserve(self, needed: int, *, pins: bool) -> None:
        if needed > self.num_bytes:
            self._unpin()
            self._buffer = None  # first, so that there are never two
            self._buffer = torch.empty(needed, dtype=torch.uint8)
            if pins:
                self._pin(self._buffer)

    def copy(self, keyed: Mapping[str, Shard]) -> dict[str, Shard]:
        """The same shards with copies of their tensors, until the next call."""
        on_cuda = any(shard.tensor.is_cuda for shard in keyed.values())
        self._reserve(_num_bytes(keyed), pins=on_cuda)
        copies: dict[str, Shard] = {}
        end = 0
        with torch.no_grad():
            for key, shard in keyed.items():
                tensor = shard.tensor
                if not tensor.numel() or shard.make is not None:
                    copies[key] = shard
                    continue
                assert self._buffer is not None
                part = self._buffer[end : end + tensor.nbytes].view(tensor.dtype)
                target = part.view(tensor.shape)
                target.copy_(tensor, non_blocking=on_cuda)
                copies[key] = replace(shard, tensor=target)
                end += _padded(tensor.nbytes)
        if on_cuda:
            torch.cuda.synchronize()
        return copies

    def _pin(self, buffer: torch.Tensor) -> None:
        """Lock the pages of `buffer`, for copies at the speed of the bus; without, they are slower.

        Not ``pin_memory``: torch takes pinned memory in powers of two, up to twice of what was
        asked for, and keeps it when it is given back.
        """
        cuda: Any = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0:
            # Before the memory is given back, or its next owner could not lock it.
            self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, buffer.data_ptr())
            return
        with suppress(RuntimeError):  # CUDA would give the error to the next kernel of a step
            torch.zeros(1, device="cuda")


def _num_bytes(keyed: Mapping[str, Shard]) -> int:
    made = (shard for shard in keyed.values() if shard.make is None)
    return sum(_padded(shard.tensor.nbytes) for shard in made)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
