"""What earlier slices of the same sequences have left behind: keys, values, sums of losses.

Where sequences are cut into slices (TeraPipe), a slice is a forward of its own. It sees the keys
and values of the slices before it, and the last one knows the auxiliary losses of the whole. The
default is that of whole sequences.

Legend: B sequences, M key/value heads held here, S positions of a slice, C positions so far, D head
size, Q scopes of the auxiliary losses, E experts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class ScopeSums(NamedTuple):
    """Of the tokens held here, per scope: choices of each expert (int64), and with gradient the
    probabilities of each expert and the squares of the z-loss."""

    counts_QE: Tensor
    probabilities_QE: Tensor
    squares_Q: Tensor


class Past(Protocol):
    """What the layers of a forward ask for; `layer` is the global index."""

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far [B, M, C, D], these at the end."""
        ...

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        """The sums over whole sequences; None while there are slices to come."""
        ...


class NoPast:
    """Sequences are whole."""

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        return key_BMSD, value_BMSD

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        return sums


NO_PAST = NoPast()
