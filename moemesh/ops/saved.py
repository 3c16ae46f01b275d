"""Count the bytes that are kept for the backward: measured activation memory, by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moemesh.trace.memory_profile import OTHER

# The active measurement: one for the whole process, since one backward runs at a time.
_active: SavedForBackward | None = None


class Held:
    """Holds a tensor, for the backward or as long as an operation needs it; a running measurement
    counts its storage while this object lives."""

    def __init__(self, tensor: Tensor, kind: str | None = None) -> None:
        self.tensor = tensor
        if _active is not None:
            _active.count(self, kind)


class SavedForBackward:
    """Context that counts the storages of tensors saved by autograd, and of other :class:`Held`
    ones: each storage once, without parameters.

    ``peak_bytes``: most bytes that were alive at one time, ``peak_by_kind`` their parts;
    ``total_bytes``: all bytes that were kept, summed over microbatches. A storage has the kind of
    the innermost running module of `kinds` when it is first kept (:data:`OTHER` outside of them).
    `becomes`: kind of the rest of the enclosing module, after the module of the key has run.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        kinds: Mapping[nn.Module, str] | None = None,
        becomes: Mapping[nn.Module, str] | None = None,
    ) -> None:
        # Ids of storages, not addresses of memory: a storage may be resized.
        self._ignored = {p.untyped_storage()._cdata for p in parameters}
        self._kinds, self._becomes = dict(kinds or {}), dict(becomes or {})
        self._running = [OTHER]
        self._uses: Counter[int] = Counter()
        self._kind_of: dict[int, str] = {}
        self._alive: Counter[str] = Counter()
        self.total_bytes = self.peak_bytes = self._alive_bytes = 0
        self.peak_by_kind: dict[str, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> SavedForBackward:
        global _active
        assert _active is None, "memory is already being measured"
        _active = self
        self._hooks.__enter__()
        for module, kind in self._kinds.items():

            def before(*_: Any, kind: str = kind) -> None:
                self._running.append(kind)

            def after(*_: Any, then: str | None = self._becomes.get(module)) -> None:
                self._running.pop()
                if then is not None:
                    self._running[-1] = then

            self._handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after, always_call=True),
            ]
        return self

    def __exit__(self, *failure: object) -> None:
        global _active
        _active = None
        for handle in self._handles:
            handle.remove()
        self._hooks.__exit__(*failure)

    def count(self, held: Held, kind: str | None) -> None:
        """Count the storage of `held` until `held` is freed."""
        storage = held.tensor.untyped_storage()
        storage_id, size = storage._cdata, storage.nbytes()
        if not size or storage_id in self._ignored:
            return
        if not self._uses[storage_id]:
            kind_now = self._running[-1] if kind is None else kind
            self._kind_of[storage_id] = kind_now
            self._alive[kind_now] += size
            self._alive_bytes += size
            self.total_bytes += size
            if self._alive_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_by_kind = self._alive_bytes, dict(self._alive)
        self._uses[storage_id] += 1
        weakref.finalize(held, self._release, storage_id, size)

    def _release(self, storage_id: int, size: int) -> None:
        self._uses[storage_id] -= 1
        if not self._uses[storage_id]:
            self._alive_bytes -= size
            self._alive[self._kind_of[storage_id]] -= size
