"""Between the token-sharded residual stream and head- or width-sharded blocks: three exits.

Legend: N = tp, T all tokens of the microbatch, A attention (or MLP) width, H hidden. Every rank
holds about T/N rows of the stream; rows need not divide evenly, a rank may hold none.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| enter | T/N x H | T x H | all_gather | reduce_scatter |
| total | T x X partial sums | T x X | all_reduce | all_reduce |
| exit reduce_scatter | T x A/N | T/N x H | reduce_scatter of partial sums | all_gather |
| exit all_reduce | T x A/N | T/N x H | all_reduce of partial sums, slice | all_gather |
| exit all_to_all | T x A/N | T/N x H | all_to_all heads -> tokens | all_to_all |

X: 2, the squares of queries and of keys where a norm is over all heads. What enters is H wide, or
as wide as the latents of MLA. The first two exits shard the output weight by columns of its input
(row parallelism); the third keeps it whole on every rank, and its gradient becomes partial over tp.
Per rank and direction they send (N-1)/N T H, 2(N-1)/N T H and (N-1)/N^2 T A numbers.
"""

from __future__ import annotations

from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.config.layout import shard_sizes
from moemesh.ops.linear import Weight, linear


class ReduceScatterBoundary:
    """Megatron's sequence parallelism (Korthikanti et al., 2022). The default."""

    def __init__(self, axis: Axis, caller: str) -> None:
        self.axis, self.caller = axis, caller

    def enter(self, x_TH: Tensor, num_tokens: int) -> Tensor:
        return enter(x_TH, num_tokens, self.axis, self.caller)

    def total(self, sums_TX: Tensor) -> Tensor:
        return collectives.all_reduce_both(sums_TX, self.axis, caller=f"{self.caller}.norm")

    def leave(self, y_TA: Tensor, weight_HA: Weight) -> Tensor:
        partial_TH = linear(y_TA, weight_HA)
        sizes = shard_sizes(len(partial_TH), self.axis.size)
        return collectives.reduce_scatter(
            partial_TH, self.axis, sizes, caller=f"{self.caller}.leave"
        )


class AllReduceBoundary(ReduceScatterBoundary):
    """Sum everywhere, then keep the own rows: twice the bytes of a reduce-scatter. For comparison,
    and for consumers that want all tokens."""

    def leave(self, y_TA: Tensor, weight_HA: Weight) -> Tensor:
        caller = f"{self.caller}.leave"
        total_TH = collectives.all_reduce(linear(y_TA, weight_HA), self.axis, caller=caller)
        sizes = shard_sizes(len(total_TH), self.axis.size)
        return collectives.take_shard(total_TH, self.axis, sizes, caller=caller)


class AllToAllBoundary(ReduceScatterBoundary):
    """Swap heads for tokens, then project the own rows with the whole weight.

    Moves N times fewer bytes than a reduce-scatter (for A = H), pays with the weight's memory and
    with the sum of its gradient over tp once per step. Nothing is summed in low precision.
    """

    def leave(self, y_TA: Tensor, weight_HA: Weight) -> Tensor:
        sizes = shard_sizes(len(y_TA), self.axis.size)
        own = sizes[self.axis.index]
        # Arrives as one block of own rows per source rank; source rank = place in the width.
        blocks = collectives.all_to_all(
            y_TA, self.axis, sizes, [own] * self.axis.size, caller=f"{self.caller}.leave"
        )
        rows = blocks.view(self.axis.size, own, y_TA.shape[1]).transpose(0, 1).flatten(1)
        return linear(rows, weight_HA)


#: `plan.attention_exit` -> boundary.
ATTENTION_BOUNDARIES = {
    "reduce_scatter": ReduceScatterBoundary,
    "all_reduce": AllReduceBoundary,
    "all_to_all": AllToAllBoundary,
}


def enter(x_TH: Tensor, num_tokens: int, axis: Axis, caller: str) -> Tensor:
    """Own rows of the stream -> all rows. Backward: the partial gradients are reduce-scattered."""
    sizes = shard_sizes(num_tokens, axis.size)
    return collectives.all_gather(x_TH, axis, sizes, caller=f"{caller}.enter")
