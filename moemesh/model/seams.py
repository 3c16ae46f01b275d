"""Seams of the plain model, where parallelism enters: each is what happens on one device.

| seam | decides |
|---|---|
| :class:`Boundary` | how a block with sharded weights is entered and left |
| :class:`Vocabulary` | how an embedding and a loss work with sharded vocabulary rows |
| :class:`Tokens` | which tokens of a microbatch are held here, and sums over the others |
| :class:`KeyValues` | how queries reach the keys and values of other positions |
| :class:`SliceState` | KV cache and partial losses between slices (TeraPipe) |
| :class:`Memory` | which activations are kept for the backward |
| :class:`WeightGate` | when the weights of a unit are here |
| :class:`Flow` | whether a forward is a recomputation, and whether its graph is cut |

The dispatcher is the seam of the experts (:mod:`moemesh.model.dispatcher`). The model calls these
objects and knows no rank; `parallel/` derives others, and puts them in their place.

Legend: T tokens of the residual stream held here, A attention or MLP width held here, H hidden,
V vocabulary; B sequences, N query heads and M key/value heads held here, S positions of a slice,
C positions so far, D head size; Q scopes of the auxiliary losses, E experts. On one device "held
here" means all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.nn.functional as F
from torch import Tensor

from moemesh.model.attention_core import attention
from moemesh.model.visibility import Runs, Visibility
from moemesh.ops.cross_entropy import cross_entropy
from moemesh.ops.linear import Operand, Weight, linear
from moemesh.ops.pending import Pending

C = TypeVar("C")
R = TypeVar("R")
X = TypeVar("X")
T = TypeVar("T")
P = ParamSpec("P")


class Boundary:
    """Around a block whose weights may be sharded, in a residual stream that may be too. On one
    device there is nothing to gather and nothing to sum."""

    def enter(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        """Rows of the residual stream -> rows of the block, of `num_tokens` tokens in all."""
        return x_TH

    def leave(self, y_TA: Operand, weight_HA: Weight) -> Tensor:
        """Project back to hidden with the block's last weight, and return to the stream's rows."""
        return linear(y_TA, weight_HA)

    def total(self, sums_TX: Tensor) -> Tensor:
        """Sums over the part of the block's width that is held here -> sums over all of it."""
        return sums_TX


class Vocabulary:
    """Embedding and loss over a vocabulary whose rows may be sharded."""

    def embed(self, tokens_T: Tensor, weight_VH: Tensor) -> Tensor:
        """All tokens of the microbatch -> this rank's rows of the residual stream."""
        return F.embedding(tokens_T, weight_VH)

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        """This rank's rows of the stream -> negative log-likelihood of *all* targets [T]."""
        return cross_entropy(x_TH, weight_VH, targets_T)

    def logits(self, x_TH: Tensor, weight_VH: Tensor, num_tokens: int) -> Tensor:
        """Rows of the stream -> logits of `num_tokens` tokens, whole vocabulary; no gradient."""
        return F.linear(x_TH, weight_VH)


class Tokens:
    """The tokens of a microbatch that this rank's residual stream holds: some positions of every
    sequence, and of these tokens some rows."""

    def runs(self, length: int) -> Runs | None:
        """The positions of sequences of `length` whose tokens come here; None: all."""
        return None

    def local(self, num_tokens: int) -> range:
        """The rows that are held here, of the flattened tokens of these positions."""
        return range(num_tokens)

    def gather(self, x_T: Tensor, num_sequences: int, length: int) -> Tensor:
        """Own rows [T, ...] -> those of all ranks that share sequences, in the order of the ranks,
        [num_sequences * length, ...]; no gradient."""
        return x_T

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        """Integer counts summed over the ranks that hold the other rows of the same sequences."""
        return counts

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Integer counts summed over all ranks that run these layers."""
        return counts

    def max_over_ranks(self, number: Tensor) -> Tensor:
        """The largest of a number over all ranks that run these layers."""
        return number


class KeyValues:
    """Attention where the positions of a sequence may be spread."""

    def attend(
        self,
        query_BNSD: Tensor,
        key_BMCD: Tensor,
        value_BMCD: Tensor,
        visible: Visibility,
        *,
        sinks_N: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of the queries held here over the keys of whole sequences, [B, N, S, value head
        size]. ``visible`` describes the queries and keys held here."""
        return attention(query_BNSD, key_BMCD, value_BMCD, visible, sinks_N=sinks_N, scale=scale)


class ScopeSums(NamedTuple):
    """Sums over the tokens held here, per scope: choices of each expert (int64), and with gradient
    the probabilities of each expert and the squares of the z-loss."""

    counts_QE: Tensor
    probabilities_QE: Tensor
    squares_Q: Tensor


class SliceState:
    """State carried between the slices of a sequence (TeraPipe): KV cache and partial sums of the
    auxiliary losses. A slice is a forward of its own; `layer` is the global index. `is_last`: no
    slice of these sequences follows."""

    is_last: bool = True
    #: The cache of modelling code that keeps one of its own.
    foreign: Any = None

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far [B, M, C, D], these at the end."""
        return key_BMSD, value_BMSD

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        """The sums over whole sequences; None while there are slices to come."""
        return sums


class Memory:
    """The choice of activations that a part of the model keeps for its backward."""

    def run(self, part: Callable[[X, C], R], x: X, context: C) -> R:
        """``part(x, context)``: a layer, or the core of its attention; x: a tensor, or several."""
        return part(x, context)


class WeightGate:
    """The presence of a unit's weights; units are those of :mod:`moemesh.sharding.buckets`
    ("embedding", "layers.3", "head"). The code that reads the weights is between two calls."""

    def fetch(self, unit: str) -> None:
        """The weights of `unit` are about to be read."""

    def enter(self, unit: str, x: Tensor) -> Tensor:
        """Same as :meth:`fetch`; the backward has read the weights when it reaches `x`."""
        return x

    def leave(self, unit: str, x: Tensor, *, read_in_backward: bool = True) -> Tensor:
        """The weights have been read. The backward will read them (if `read_in_backward`) when it
        reaches this `x`, the output of the unit."""
        return x


class Flow:
    """The computation of one forward; the default is once, in one graph."""

    def once(self, decide: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A decision without gradient: choices of experts, exchanged counts, dispatch plans. A
        recomputation gets the recorded decision, without communication."""
        return decide(*args, **kwargs)

    def unread(
        self, send: Callable[[Tensor, Any], Pending[Tensor]], y_RH: Tensor, plan: Any, rows: int
    ) -> Pending[Tensor]:
        """``send(y, plan)`` of [rows, H], unread by a backward: a recomputation skips it."""
        return send(y_RH, plan)

    def start(self, send: Callable[P, Pending[T]], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        """Start ``send(...)``; its result is waited for after the next pause."""
        return send(*args, **kwargs)

    def cut(self, x: Tensor) -> Tensor:
        """`x`, for use after the next pause."""
        return x

    def pause(self) -> None:
        """Exchanges are in flight: other work may run now."""


#: Sequences are whole.
NO_SLICES = SliceState()
#: A forward that is computed once, in one piece.
PLAIN_FLOW = Flow()
