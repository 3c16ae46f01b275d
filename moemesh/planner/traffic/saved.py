"""Tensors that the operations of a forward save for their backward, as predicted entries."""

from __future__ import annotations

from typing import NamedTuple


class Saved(NamedTuple):
    """Bytes that one operation keeps from its forward to its backward.

    `held` of them stay until the weight gradients of a split backward, which besides keep
    `gradient` bytes from then on. `is_again`: kept by a computation that is done again in the
    backward, just before it. `is_shared`: one storage for all layers of a forward.
    """

    kind: str
    size: float
    held: float = 0.0
    gradient: float = 0.0
    is_again: bool = False
    is_shared: bool = False


class SavedTensors(NamedTuple):
    """What one layer (or end of the model) keeps, in the order of its forward. `again`: bytes of
    its input, which alone is kept where the layer is computed again as a whole (None: never);
    `entry` of them are what its first operation keeps, too."""

    saved: list[Saved]
    again: float | None = None
    entry: float = 0.0
