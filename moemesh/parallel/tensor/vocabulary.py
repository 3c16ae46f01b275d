"""Embedding and loss with the vocabulary's rows sharded over tp: no rank ever holds full logits.

Legend: T all tokens of the microbatch, N = tp, V vocabulary, H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| embed | T ids | T/N x H | reduce_scatter of partial rows | all_gather |
| cross_entropy | T/N x H | T losses | all_gather, all_reduce (3 a token) | reduce_scatter |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Axis
from moemesh.comm.transfers import all_gather
from moemesh.config.layout import shard_range, shard_sizes
from moemesh.ops.cross_entropy import cross_entropy
from moemesh.parallel.tensor.boundary import enter


class ShardedVocabulary:
    """Rank i of the axis holds the i-th block of vocabulary rows; blocks may differ by one row, and
    are empty behind the end of a vocabulary smaller than the axis."""

    def __init__(self, axis: Axis, vocab_size: int) -> None:
        self.axis, self.vocab_size = axis, vocab_size
        self.rows = shard_range(vocab_size, axis.size, axis.index)

    def embed(self, tokens_T: Tensor, weight_VH: Tensor) -> Tensor:
        local_T = tokens_T - self.rows.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.rows))
        if not self.rows:
            # A row of zeros to look up, in the graph: the backward needs every rank.
            weight_VH = F.pad(weight_VH, (0, 0, 0, 1))
        partial_TH = F.embedding(local_T.clamp(0, len(weight_VH) - 1), weight_VH)
        partial_TH = partial_TH.masked_fill(elsewhere_T[:, None], 0.0)
        sizes = shard_sizes(len(tokens_T), self.axis.size)
        return collectives.reduce_scatter(partial_TH, self.axis, sizes, caller="embedding")

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        x_TH = enter(x_TH, len(targets_T), self.axis, "head")
        return cross_entropy(
            x_TH, weight_VH, targets_T, first_row=self.rows.start, combine=self._combine
        )

    def logits(self, x_TH: Tensor, weight_VH: Tensor, num_tokens: int) -> Tensor:
        x_TH = enter(x_TH, num_tokens, self.axis, "head")
        rows_VT = F.linear(weight_VH, x_TH)
        sizes = shard_sizes(self.vocab_size, self.axis.size)
        return all_gather(rows_VT, self.axis, sizes, phase="forward", caller="head").T

    def _combine(self, lse_T: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        """log-sum-exp of the shards' log-sum-exps; only one shard holds the target's logit."""
        highest_T = lse_T.clone()
        all_reduce_(highest_T, self.axis, op="max", caller="head.loss", phase="forward")
        sums_2T = torch.stack([torch.exp(lse_T - highest_T), target_T])
        all_reduce_(sums_2T, self.axis, caller="head.loss", phase="forward")
        return highest_T + sums_2T[0].log(), sums_2T[1]
