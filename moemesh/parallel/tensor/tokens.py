"""Context and sequence parallelism: the tokens of a microbatch that a rank holds.

| call | in | out | forward comm | backward comm |
|---|---|---|---|---|
| gather | T x ... own rows | all rows | all_gather over tp, cp_tp | none: no gradient |
| sum_over_shards | counts | sums over a sequence's ranks | all_reduce over tp, cp_tp | none |
| sum_over_ranks, max_over_ranks | counts | sums, maxima | all_reduce over stage | none |
"""

from __future__ import annotations

from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.comm.transfers import all_gather, all_reduce, all_reduce_
from moemesh.config.context import context_runs, context_sizes
from moemesh.config.layout import shard_range, shard_sizes
from moemesh.model.visibility import Runs


class ShardedTokens:
    """Positions are spread over cp (:mod:`moemesh.config.context`); the flattened tokens of a
    rank's positions are cut over tp in contiguous, balanced blocks, in rank order.

    `stage`: the axis of all ranks that run the same layers.
    """

    def __init__(self, mesh: Mesh, stage: str = "stage") -> None:
        self.axis, self.context, self.stage = mesh["tp"], mesh["cp"], mesh[stage]
        #: The ranks that share sequences.
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
