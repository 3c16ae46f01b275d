"""Gather whole sequences from the ranks that share them, in the order of their positions.

Legend: T tokens held here, N tokens of the microbatch on all ranks that share its sequences,
B sequences, S positions. For choices that compare the tokens of a sequence; without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.model.batch import Context
from moemesh.model.seams import Tokens


class WholeSequences:
    """The microbatch as [B, S, ...]; ``valid_BS`` is False for padding."""

    def __init__(self, context: Context, tokens: Tokens) -> None:
        self._context, self._tokens = context, tokens
        ids_T = context.token_ids_T
        # One exchange for both: the complement of an id says that it is padding.
        key_T = ids_T if context.valid_T is None else torch.where(context.valid_T, ids_T, ~ids_T)
        key_N = self._gather(key_T)
        self._order_N = torch.argsort(torch.where(key_N < 0, ~key_N, key_N))
        self.valid_BS = self._in_order(key_N) >= 0
        self._own_T = context.sequence_T * context.length + context.position_T

    def _gather(self, x_T: Tensor) -> Tensor:
        context = self._context
        return self._tokens.gather(x_T, context.num_sequences, context.length)

    def _in_order(self, x_N: Tensor) -> Tensor:
        shape = (self._context.num_sequences, self._context.length, *x_N.shape[1:])
        return x_N[self._order_N].view(shape)

    def gather(self, x_T: Tensor) -> Tensor:
        """Own rows [T, ...] -> all rows [B, S, ...]."""
        return self._in_order(self._gather(x_T.detach()))

    def own(self, x_BS: Tensor) -> Tensor:
        """All rows [B, S, ...] -> own rows [T, ...]."""
        return x_BS.flatten(0, 1)[self._own_T]
