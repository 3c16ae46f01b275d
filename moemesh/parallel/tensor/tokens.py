"""Sequence parallelism: the tokens of a microbatch that a tensor-parallel rank holds.

| call | in | out | forward comm | backward comm |
|---|---|---|---|---|
| gather | T x ... own rows | all rows | all_gather over tp | none: no gradient |
| sum_over_shards | counts | sums over a sequence's ranks | all_reduce over tp | none |
| sum_over_ranks, max_over_ranks | counts | sums, maxima | all_reduce over stage | none |
"""

from __future__ import annotations

from torch import Tensor

from moemesh.comm import transfers
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Axis
from moemesh.config.layout import shard_range, shard_sizes


class ShardedTokens:
    """Contiguous, balanced blocks of the flattened B*S tokens, in rank order.

    `axis` are the ranks that share sequences (tp), `stage` all ranks that run the same layers.
    """

    def __init__(self, axis: Axis, stage: Axis) -> None:
        self.axis, self.stage = axis, stage

    def local(self, num_tokens: int) -> range:
        return shard_range(num_tokens, self.axis.size, self.axis.index)

    def gather(self, x_T: Tensor, num_tokens: int) -> Tensor:
        sizes = shard_sizes(num_tokens, self.axis.size)
        return transfers.all_gather(x_T, self.axis, sizes, phase="forward", caller="moe.choose")

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        all_reduce_(total, self.axis, caller="moe.balance", phase="forward")
        return total

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        all_reduce_(total, self.stage, caller="moe.balance", phase="forward")
        return total

    def max_over_ranks(self, number: Tensor) -> Tensor:
        largest = number.clone()
        all_reduce_(largest, self.stage, op="max", caller="moe.choose", phase="forward")
        return largest
