"""Sequence parallelism: which tokens of a microbatch a tensor-parallel rank's stream holds."""

from __future__ import annotations

from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Axis
from moemesh.config.layout import shard_range


class ShardedTokens:
    """Contiguous, balanced blocks of the flattened B*S tokens, in rank order."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def local(self, num_tokens: int) -> range:
        return shard_range(num_tokens, self.axis.size, self.axis.index)

    def sum_over_shards(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        all_reduce_(total, self.axis, caller="moe.balance", phase="forward")
        return total
