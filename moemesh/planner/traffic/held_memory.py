"""Memory that the operations of a rank's pipeline hold at each moment, from the tensors they keep.

A forward keeps tensors, a backward frees them from the last layer to the first. Recomputed tensors
are added just before their backward, and an input half keeps the inputs of its weight half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from moemesh.trace.memory_profile import DEFERRED


class Saved(NamedTuple):
    """Bytes that one operation keeps from its forward to its backward.

    In a split backward `held` of them stay until the weight half, and the input half adds
    `gradient` bytes. `is_recomputed` bytes are allocated by recomputation, just before the
    backward. `is_shared`: one storage for all layers of a forward. `working` bytes exist only while
    the operation runs, forward or backward. `pauses`: in an overlapped block the computation pauses
    before and after the operation, while rows are in flight.
    """

    kind: str
    size: float
    held: float = 0.0
    gradient: float = 0.0
    is_recomputed: bool = False
    is_shared: bool = False
    working: float = 0.0
    pauses: bool = False


class SavedTensors(NamedTuple):
    """Tensors that one layer (or end of the model) keeps, in the order of its forward.

    `input` is the bytes of its input, the only kept tensor if the layer is recomputed as a whole
    (None: it never is). The first operation keeps `entry` bytes of the same storage.
    """

    saved: list[Saved]
    input: float | None = None
    entry: float = 0.0


class HeldMemory:
    """Bytes by kind that are allocated now, and at the peak. Operations yield at their pauses, so
    that two of them can alternate."""

    def __init__(self, *, is_full: bool) -> None:
        #: Whether layers are recomputed as a whole.
        self.is_full = is_full
        self.now: defaultdict[str, float] = defaultdict(float)
        self.peak: dict[str, float] = {}
        self._total = self._most = 0.0

    def run(self, kind: str, layers: list[SavedTensors]) -> Iterator[None]:
        """One operation (F, B, I or W) on the layers of a stage."""
        if kind in ("B", "I"):
            yield from self._backward(kind, layers)
        if kind == "W":
            # In the order of the input half: the head comes first.
            for saved in chain.from_iterable(layer.saved[::-1] for layer in layers[::-1]):
                self._work(saved)
                self._add(saved.kind, -saved.held)
                self._add(DEFERRED, -saved.gradient)
        #: Kinds of storages that an earlier layer of this forward has allocated for all layers.
        shared: set[str] = set()
        for layer in layers if kind == "F" else ():
            if self.is_full and layer.input is not None:
                self._add("stream", layer.input)
                continue
            for saved in layer.saved:
                if saved.pauses:
                    yield
                if not saved.is_recomputed and not (saved.is_shared and saved.kind in shared):
                    self._add(saved.kind, saved.size)
                self._work(saved)
                if saved.is_shared:
                    shared.add(saved.kind)
                if saved.pauses:
                    yield

    def _add(self, kind: str, size: float) -> None:
        self.now[kind] += size
        self._total += size
        if self._total > self._most:
            self._most, self.peak = self._total, dict(self.now)

    def _work(self, saved: Saved) -> None:
        """Count bytes that exist only while the operation runs."""
        self._add(saved.kind, saved.working)
        self._add(saved.kind, -saved.working)

    def _backward(self, kind: str, layers: list[SavedTensors]) -> Iterator[None]:
        """A whole backward ("B"), or its input half ("I")."""
        #: Kind of a shared storage -> index of the first layer that keeps it.
        first: dict[str, int] = {}
        for index, layer in enumerate(layers):
            for saved in layer.saved:
                if saved.is_shared:
                    first.setdefault(saved.kind, index)
        for index, layer in reversed(list(enumerate(layers))):
            kept_input = layer.input if self.is_full else None
            if kept_input is not None:
                # The whole layer is recomputed from its input, which stays allocated and is counted
                # once: the first operation does not keep its entry a second time.
                self._add(layer.saved[0].kind, -layer.entry)
                for saved in layer.saved:
                    self._add(saved.kind, saved.size)
            #: Whether the recomputed tensors of the layer are allocated.
            is_rebuilt = kept_input is not None
            for saved in reversed(layer.saved):
                # The backward of a layer that is recomputed as a whole does not pause.
                pauses = saved.pauses and kept_input is None
                if pauses:
                    yield
                self._work(saved)
                if saved.is_recomputed and not is_rebuilt:
                    is_rebuilt = True
                    for other in layer.saved:
                        if other.is_recomputed:
                            self._add(other.kind, other.size)
                if kind == "I":
                    self._add(DEFERRED, saved.gradient)
                # Backwards of earlier layers still read a shared storage, unless each layer has
                # recomputed its own.
                is_read_later = saved.is_shared and index > first[saved.kind]
                if kept_input is not None or saved.is_recomputed or not is_read_later:
                    self._add(saved.kind, (saved.held if kind == "I" else 0.0) - saved.size)
                if pauses:
                    yield
            if kept_input is not None:
                self._add("stream", -kept_input)
                self._add(layer.saved[0].kind, layer.entry)
