"""Seams of the plain model that parallelism replaces; the classes do the work of one device.

| seam | decides |
|---|---|
| :class:`Boundary` | how a block with sharded weights is entered and left |
| :class:`Vocabulary` | how an embedding and a loss work with sharded vocabulary rows |
| :class:`Tokens` | which tokens of a microbatch a rank holds, and sums over other ranks |
| :class:`KeyValues` | how queries read the keys and values of other positions |
| :class:`SliceState` | KV cache and partial losses between slices (TeraPipe, generation) |
| :class:`Memory` | which activations are kept for the backward |
| :class:`WeightGate` | when the weights of a unit are present |
| :class:`Flow` | whether a forward is a recomputation, and whether its graph is cut |

The dispatcher is the seam of the experts (:mod:`moemesh.model.dispatcher`). The model calls these
objects, and has no code for ranks; `parallel/` derives other classes and sets their instances, as
does generation for its cache of keys and values.

Legend: H hidden, V vocabulary, B sequences, S positions of a slice, C positions so far, D head
size, Q scopes of the auxiliary losses, E experts; of this rank: T tokens of the residual stream, A
attention or MLP width, N query heads, M key/value heads. One device has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.nn.functional as F
from torch import Tensor

from moemesh.model.attention_core import attention
from moemesh.model.visibility import Runs, Visibility
from moemesh.ops.attention import Qkv
from moemesh.ops.cross_entropy import cross_entropy
from moemesh.ops.linear import Operand, Weight, linear
from moemesh.ops.pending import Pending

C = TypeVar("C")
R = TypeVar("R")
X = TypeVar("X")
T = TypeVar("T")
P = ParamSpec("P")


class Boundary:
    """Entry and exit of a block, whose weights may be sharded, as may the residual stream."""

    def enter(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        """Rows of the residual stream on this rank -> rows of all `num_tokens` tokens."""
        return x_TH

    def leave(self, y_TA: Operand, weight_HA: Weight) -> Tensor:
        """Project to hidden with the block's last weight -> rows of the stream on this rank."""
        return linear(y_TA, weight_HA)

    def total(self, sums_TX: Tensor) -> Tensor:
        """Sums over this rank's part of the block's width -> sums over the whole width."""
        return sums_TX


class Vocabulary:
    """Embedding and loss over a vocabulary whose rows may be sharded."""

    def embed(self, tokens_T: Tensor, weight_VH: Tensor) -> Tensor:
        """All tokens of the microbatch -> this rank's rows of the residual stream."""
        return F.embedding(tokens_T, weight_VH)

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        """This rank's rows of the stream -> negative log-likelihood (nats) of all `targets_T`."""
        return cross_entropy(x_TH, weight_VH, targets_T)

    def logits(self, x_TH: Tensor, weight_VH: Tensor, num_tokens: int) -> Tensor:
        """Rows of the stream -> logits of `num_tokens` tokens, whole vocabulary; no gradient."""
        return F.linear(x_TH, weight_VH)


class Tokens:
    """The tokens of a microbatch in this rank's residual stream: rows of the flattened tokens at
    some positions of every sequence."""

    def runs(self, length: int) -> Runs | None:
        """Positions, in sequences of `length`, of this rank's part of the batch; None: all."""
        return None

    def local(self, num_tokens: int) -> range:
        """This rank's rows of the `num_tokens` flattened tokens at these positions."""
        return range(num_tokens)

    def gather(self, x_T: Tensor, num_sequences: int, length: int) -> Tensor:
        """This rank's rows [T, ...] -> rows of all ranks that share its sequences, in the order of
        ranks [num_sequences * length, ...]; no gradient."""
        return x_T

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        """Integer counts summed over the ranks that hold the other rows of the same sequences."""
        return counts

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Integer counts summed over all ranks that run these layers."""
        return counts

    def max_over_ranks(self, number: Tensor) -> Tensor:
        """Maximum of `number` over all ranks that run these layers."""
        return number


class KeyValues:
    """Attention over sequences whose positions may be on several ranks."""

    def attend(
        self, qkv: Qkv, visible: Visibility, *, sinks_N: Tensor | None, scale: float
    ) -> Tensor:
        """Attention of this rank's queries over the keys of whole sequences, [B, N, S, value head
        size]. ``visible`` is that of this rank's queries and keys."""
        return attention(qkv, visible, sinks_N=sinks_N, scale=scale)


class ScopeSums(NamedTuple):
    """Sums over this rank's tokens in each scope: choices of each expert (int64); with gradient,
    probabilities of each expert and squares of the z-loss."""

    counts_QE: Tensor
    probabilities_QE: Tensor
    squares_Q: Tensor


class SliceState:
    """State carried between the slices of a sequence (TeraPipe, generation): KV cache and partial
    sums of the auxiliary losses. Each slice has a forward; `layer` is the global index. `is_last`:
    no slice of these sequences follows."""

    is_last: bool = True
    #: Cache of transformers' modelling code, used in place of :meth:`extend`.
    foreign: Any = None

    def extend(self, layer: int, key_BMSD: Tensor, value_BMSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far [B, M, C, D], with these appended."""
        return key_BMSD, value_BMSD

    def total(self, layer: int, sums: ScopeSums) -> ScopeSums | None:
        """The sums over whole sequences; None before the last slice."""
        return sums


class Memory:
    """The choice of activations that a part of the model keeps for its backward."""

    def run(self, part: Callable[[X, C], R], x: X, context: C) -> R:
        """``part(x, context)``: a layer, or the core of its attention; `x` is a tensor, or a tuple
        of them."""
        return part(x, context)


class WeightGate:
    """Called before and after the code that reads a unit's weights, so that parallelism can gather
    and free them. Units are those of :mod:`moemesh.sharding.buckets` ("embedding", "layers.3",
    "head")."""

    def fetch(self, unit: str) -> None:
        """Called before the weights of `unit` are read."""

    def enter(self, unit: str, x: Tensor) -> Tensor:
        """:meth:`fetch` at the input `x` of the unit, where its backward ends."""
        return x

    def leave(self, unit: str, x: Tensor, *, read_in_backward: bool = True) -> Tensor:
        """Called after the weights have been read, at the output `x` of the unit. Its backward
        starts there, and reads the weights if `read_in_backward`."""
        return x


class Flow:
    """Hooks in a forward for its recomputation and for cuts of its graph. By default it runs once,
    in one graph."""

    def once(self, decide: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``decide(...)``, without gradient: choices of experts, exchanged counts, dispatch plans.
        A recomputation gets the recorded result, without communication."""
        return decide(*args, **kwargs)

    def unread(
        self, send: Callable[[Tensor, Any], Pending[Tensor]], y_RH: Tensor, plan: Any, rows: int
    ) -> Pending[Tensor]:
        """``send(y_RH, plan)``, [rows, H]. No backward reads the result: a recomputation may skip
        the exchange."""
        return send(y_RH, plan)

    def start(self, send: Callable[P, Pending[T]], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        """Start ``send(...)``; the caller waits for its result after the next pause."""
        return send(*args, **kwargs)

    def cut(self, x: Tensor) -> Tensor:
        """`x`, for use after the next :meth:`pause`; if the graph is cut there, a leaf."""
        return x

    def pause(self) -> None:
        """Called while exchanges are in flight: other work may run."""


#: The default: sequences are not cut into slices.
NO_SLICES = SliceState()
#: A forward that is computed once, in one piece.
PLAIN_FLOW = Flow()
