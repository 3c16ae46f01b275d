"""Count the bytes that autograd saves for the backward: measured activation memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor


class SavedForBackward:
    """Counts storages saved inside the context, each once, parameters left out.

    ``peak_bytes`` is the most that was alive at one time, ``total_bytes`` what was ever saved: they
    differ when several microbatches save one after another.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # Storages themselves: the memory of one may come and go.
        self._ignored = {p.untyped_storage()._cdata for p in parameters}
        self._uses: Counter[int] = Counter()
        self.total_bytes = self.peak_bytes = self._alive_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Packed:
        packed, storage = _Packed(tensor), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size and storage._cdata not in self._ignored:
            if not self._uses[address]:
                self.total_bytes += size
                self._alive_bytes += size
                self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
            self._uses[address] += 1
            weakref.finalize(packed, self._release, address, size)
        return packed

    def _release(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self._alive_bytes -= size

    @staticmethod
    def _unpack(packed: _Packed) -> Tensor:
        return packed.tensor


class _Packed:
    """Holds a saved tensor; its finalizer runs when autograd frees the saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
