"""Tensor and sequence parallelism: sharded weights inside blocks, sharded tokens between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis, Mesh
from moemesh.comm.transfers import all_gather, all_reduce, all_reduce_
from moemesh.config.layout import shard_range, shard_sizes
from moemesh.model.seams import Boundary, Tokens, Vocabulary
from moemesh.model.visibility import Runs
from moemesh.ops.cross_entropy import cross_entropy
from moemesh.ops.linear import Weight, linear
from moemesh.sharding.context import context_runs, context_sizes

# Between the token-sharded residual stream and head- or width-sharded blocks: three exits.
#
# Legend: N = tp, T all tokens of the microbatch, A attention (or MLP) width, H hidden,
# V vocabulary. A rank holds about T/N rows of the stream: rows need not divide evenly, and it may
# hold none.
#
# | step | in | out | forward comm | backward comm |
# |---|---|---|---|---|
# | enter | T/N x H | T x H | all_gather | reduce_scatter |
# | total | T x X partial sums | T x X | all_reduce | all_reduce |
# | exit reduce_scatter | T x A/N | T/N x H | reduce_scatter of partial sums | all_gather |
# | exit all_reduce | T x A/N | T/N x H | all_reduce of partial sums, slice | all_gather |
# | exit all_to_all | T x A/N | T/N x H | all_to_all heads -> tokens | all_to_all |
#
# X: 2, sums of squares of queries and of keys, for a norm over all heads. Rows that enter have the
# width H, or that of the latents of MLA. The first two exits shard the output weight over its
# input (row parallelism); the third keeps it whole on every rank, and its gradient is partial over
# tp. A rank sends (N-1)/N T H, 2(N-1)/N T H and (N-1)/N^2 T A numbers in the forward of the exits,
# and in their backward (N-1)/N T H for the first two.


class ReduceScatterBoundary(Boundary):
    """Megatron's sequence parallelism (Korthikanti et al., 2022). The default."""

    def __init__(self, axis: Axis, caller: str) -> None:
        self.axis, self.caller = axis, caller

    def enter(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        """This rank's rows of the stream -> all rows [T, H]; backward: partial gradients are
        reduce-scattered."""
        sizes = shard_sizes(num_tokens, self.axis.size)
        return collectives.all_gather(x_TH, self.axis, sizes, caller=f"{self.caller}.enter")

    def total(self, sums_TX: Tensor) -> Tensor:
        return collectives.all_reduce_both(sums_TX, self.axis, caller=f"{self.caller}.norm")

    def leave(self, y_TA: Tensor, weight_HA: Weight) -> Tensor:
        partial_TH = linear(y_TA, weight_HA)
        sizes = shard_sizes(len(partial_TH), self.axis.size)
        return collectives.reduce_scatter(
            partial_TH, self.axis, sizes, caller=f"{self.caller}.leave"
        )


class AllReduceBoundary(ReduceScatterBoundary):
    """All-reduce, then keep this rank's rows: twice a reduce-scatter's bytes in the forward, the
    same in the backward. For comparison."""

    def leave(self, y_TA: Tensor, weight_HA: Weight) -> Tensor:
        caller = f"{self.caller}.leave"
        total_TH = collectives.all_reduce(linear(y_TA, weight_HA), self.axis, caller=caller)
        sizes = shard_sizes(len(total_TH), self.axis.size)
        return collectives.take_shard(total_TH, self.axis, sizes, caller=caller)


class AllToAllBoundary(ReduceScatterBoundary):
    """Exchange heads for tokens, then project this rank's rows with the whole weight. Sends N times
    fewer bytes than a reduce-scatter (for A = H), but needs memory for the whole weight, and a sum
    of its gradient over tp once a step. No activations are summed in low precision."""

    def leave(self, y_TA: Tensor, weight_HA: Weight) -> Tensor:
        sizes = shard_sizes(len(y_TA), self.axis.size)
        num_own = sizes[self.axis.index]
        # From each rank a block of its heads for this rank's rows, in the order of the heads.
        blocks = collectives.all_to_all(
            y_TA, self.axis, sizes, [num_own] * self.axis.size, caller=f"{self.caller}.leave"
        )
        rows = blocks.view(self.axis.size, num_own, y_TA.shape[1]).transpose(0, 1).flatten(1)
        return linear(rows, weight_HA)


#: `plan.attention_exit` -> boundary.
ATTENTION_BOUNDARIES = {
    "reduce_scatter": ReduceScatterBoundary,
    "all_reduce": AllReduceBoundary,
    "all_to_all": AllToAllBoundary,
}


# Context and sequence parallelism: the tokens of a microbatch that a rank holds.
#
# | call | in | out | forward comm | backward comm |
# |---|---|---|---|---|
# | gather | T x ... own rows | all rows | all_gather over tp, cp_tp | none: no gradient |
# | sum_over_shards | counts | sums over a sequence's ranks | all_reduce over tp, cp_tp | none |
# | sum_over_ranks, max_over_ranks | counts | sums, maxima | all_reduce over stage | none |


class ShardedTokens(Tokens):
    """Positions are spread over cp (:mod:`moemesh.sharding.context`); the flattened tokens of a
    rank's positions are cut over tp in contiguous, balanced blocks, in rank order. `stage`: the
    axis of all ranks that run the same layers."""

    def __init__(self, mesh: Mesh, stage: str = "stage") -> None:
        self.axis, self.context, self.stage = mesh["tp"], mesh["cp"], mesh[stage]
        #: Axis of the ranks that hold tokens of the same sequences.
        self.sharing = mesh["cp_tp"] if self.context.size > 1 else self.axis

    def runs(self, length: int) -> Runs | None:
        if self.context.size == 1:
            return None
        return context_runs(length, self.context.size, self.context.index)

    def local(self, num_tokens: int) -> range:
        return shard_range(num_tokens, self.axis.size, self.axis.index)

    def gather(self, x_T: Tensor, num_sequences: int, length: int) -> Tensor:
        sizes = [
            rows
            for positions in context_sizes(length, self.context.size)
            for rows in shard_sizes(num_sequences * positions, self.axis.size)
        ]
        return all_gather(x_T, self.sharing, sizes, phase="forward", caller="moe.choose")

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        return all_reduce(counts, self.sharing, caller="moe.balance", phase="forward")

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        return all_reduce(counts, self.stage, caller="moe.balance", phase="forward")

    def max_over_ranks(self, number: Tensor) -> Tensor:
        largest = number.clone()
        all_reduce_(largest, self.stage, op="max", caller="moe.choose", phase="forward")
        return largest


# Embedding and loss with the vocabulary's rows sharded over tp: the loss needs no full logits.
#
# | step | in | out | forward comm | backward comm |
# |---|---|---|---|---|
# | embed | T ids | T/N x H | reduce_scatter of partial rows | all_gather |
# | cross_entropy | T/N x H | T losses | all_gather, all_reduce of 3 T numbers | reduce_scatter |


class ShardedVocabulary(Vocabulary):
    """Rank i of the axis holds the i-th block of vocabulary rows; blocks may differ by one row, and
    are empty after the end of a vocabulary smaller than the axis."""

    def __init__(self, axis: Axis, vocab_size: int) -> None:
        self.axis, self.vocab_size = axis, vocab_size
        self.boundary = ReduceScatterBoundary(axis, "head")
        self.rows = shard_range(vocab_size, axis.size, axis.index)

    def embed(self, tokens_T: Tensor, weight_VH: Tensor) -> Tensor:
        local_T = tokens_T - self.rows.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.rows))
        if not self.rows:
            # A row of zeros to look up, so that this rank takes part in the backward.
            weight_VH = F.pad(weight_VH, (0, 0, 0, 1))
        partial_TH = F.embedding(local_T.clamp(0, len(weight_VH) - 1), weight_VH)
        partial_TH = partial_TH.masked_fill(elsewhere_T[:, None], 0.0)
        sizes = shard_sizes(len(tokens_T), self.axis.size)
        return collectives.reduce_scatter(partial_TH, self.axis, sizes, caller="embedding")

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        def combine(lse_T: Tensor, logit_T: Tensor) -> tuple[Tensor, Tensor]:
            """Log-sum-exp [T] over all shards, and logits of targets, each from the shard with its
            row."""
            highest_T = lse_T.clone()
            all_reduce_(highest_T, self.axis, op="max", caller="head.loss", phase="forward")
            sums_2T = torch.stack([torch.exp(lse_T - highest_T), logit_T])
            all_reduce_(sums_2T, self.axis, caller="head.loss", phase="forward")
            return highest_T + sums_2T[0].log(), sums_2T[1]

        x_TH = self.boundary.enter(x_TH, len(targets_T))
        first = self.rows.start
        return cross_entropy(x_TH, weight_VH, targets_T, first_row=first, combine=combine)

    def logits(self, x_TH: Tensor, weight_VH: Tensor, num_tokens: int) -> Tensor:
        rows_VT = F.linear(weight_VH, self.boundary.enter(x_TH, num_tokens))
        sizes = shard_sizes(self.vocab_size, self.axis.size)
        return all_gather(rows_VT, self.axis, sizes, phase="forward", caller="head").T
