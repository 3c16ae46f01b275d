"""Where parallelism enters the plain model: the seams, each with a default that does nothing.

Legend: T tokens of the residual stream held here, A attention or MLP width held here, H hidden,
V vocabulary. On one device "held here" means all of it. The model calls these objects and knows no
rank; `parallel/` puts others in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.nn.functional as F
from torch import Tensor

from moemesh.model.batch import Context
from moemesh.ops.cross_entropy import cross_entropy
from moemesh.ops.linear import Operand, linear

R = TypeVar("R")


class Boundary(Protocol):
    """Around a block whose weights may be sharded, in a residual stream that may be too."""

    def enter(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        """Rows of the residual stream -> the rows that the block computes on, `num_tokens`: all
        tokens of the microbatch."""
        ...

    def leave(self, y_TA: Operand, weight_HA: Tensor) -> Tensor:
        """Project back to hidden with the block's last weight, and return to the stream's rows."""
        ...


class Vocabulary(Protocol):
    """Embedding and loss over a vocabulary whose rows may be sharded."""

    def embed(self, tokens_T: Tensor, weight_VH: Tensor) -> Tensor:
        """All tokens of the microbatch -> this rank's rows of the residual stream."""
        ...

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        """This rank's rows of the stream -> negative log-likelihood of *all* targets [T]."""
        ...


class Tokens(Protocol):
    """Which tokens of a microbatch this rank's residual stream holds."""

    def local(self, num_tokens: int) -> range:
        """The rows of the flattened tokens that are held here."""
        ...

    def gather(self, x_T: Tensor, num_tokens: int) -> Tensor:
        """Own rows [T, ...] -> all rows of the microbatch [num_tokens, ...]; no gradient."""
        ...

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        """Integer counts summed over the ranks that hold the other rows of the same sequences."""
        ...

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Integer counts summed over all ranks that run these layers."""
        ...

    def max_over_ranks(self, number: Tensor) -> Tensor:
        """The largest of a number over all ranks that run these layers."""
        ...


class Memory(Protocol):
    """What a part of the model keeps for its backward."""

    def run(self, part: Callable[[Tensor, Context], R], x: Tensor, context: Context) -> R:
        """``part(x, context)``: a layer, or the core of its attention."""
        ...


class LocalBoundary:
    """One device: nothing to gather, nothing to sum."""

    def enter(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        return x_TH

    def leave(self, y_TA: Operand, weight_HA: Tensor) -> Tensor:
        return linear(y_TA, weight_HA)


class LocalVocabulary:
    """One device: the whole vocabulary."""

    def embed(self, tokens_T: Tensor, weight_VH: Tensor) -> Tensor:
        return F.embedding(tokens_T, weight_VH)

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        return cross_entropy(x_TH, weight_VH, targets_T)


class LocalTokens:
    """One device: all tokens."""

    def local(self, num_tokens: int) -> range:
        return range(num_tokens)

    def gather(self, x_T: Tensor, num_tokens: int) -> Tensor:
        return x_T

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        return counts

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        return counts

    def max_over_ranks(self, number: Tensor) -> Tensor:
        return number


class KeepAll:
    """Whatever autograd wants to keep."""

    def run(self, part: Callable[[Tensor, Context], R], x: Tensor, context: Context) -> R:
        return part(x, context)
