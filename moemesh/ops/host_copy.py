"""Numbers between a device and the host: copies that wait late, or not at all.

A read such as ``tolist()`` makes the host wait for all operations that are queued on the device,
also for those queued after the number was computed. :class:`HostCopy` starts a copy to pinned
memory, and waits only for this copy and what was queued before it, when its numbers are read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moemesh.monitor import progress


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, without a wait for work that is queued there; for a CPU
    the tensor itself."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def constant(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 numbers that are the same in every step, on `device`; the result is read-only."""
    make = torch.tensor if device.type == "cpu" else _uploaded
    return make(tuple(numbers), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _uploaded(numbers: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(numbers, dtype=dtype), device)


class HostCopy:
    """A pending copy of a tensor to the host; on a CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type != "cpu":
            # With non_blocking, torch allocates pinned memory on the host.
            self._tensor = tensor.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tensor(self) -> Tensor:
        """The copy, on the CPU; waits for it."""
        if self._event is not None:
            progress.waiting_for_device()
            self._event.synchronize()
            progress.left()
            self._event = None
        return self._tensor

    def tolist(self) -> Any:
        """The numbers, as :meth:`torch.Tensor.tolist` gives them; waits for them."""
        return self.tensor().tolist()
