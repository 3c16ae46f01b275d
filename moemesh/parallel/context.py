"""Context parallelism: the positions of a sequence are spread, attention reads all keys.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| all_gather | own queries, keys, values | own outputs | all_gather | all_gather, reduce_scatter |
| all_to_all: attend | own positions, N heads | all positions, N/c heads | all_to_all | all_to_all |
| all_to_all: return | all positions, N/c heads | own positions, N heads | all_to_all | all_to_all |
| ring | own queries, own block | own outputs | c-1 blocks | c-1 blocks, c-1 gradients of them |

The steps of ``plan.context`` over c ranks; a block: keys and values that one rank holds.

Legend: B sequences, N query heads, M key/value heads, S queries and C keys of a rank (or of all
ranks), D head size (of keys and values together where they travel as one), L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm import collectives, transfers
from moemesh.comm.mesh import Axis
from moemesh.comm.point_to_point import exchange
from moemesh.model.attention_core import (
    attend_to,
    attention,
    attention_with_lse,
    gradients_of,
)
from moemesh.model.batch import position_ids
from moemesh.model.seams import KeyValues
from moemesh.model.visibility import Visibility
from moemesh.ops.attention import Gradients, Partial, Qkv, merge, nothing_seen, wide
from moemesh.ops.host_copy import constant
from moemesh.sharding.context import context_runs, context_sizes, head_share

# Rows of all positions of a sequence: in their order, or in that of the ranks that hold them.


def _order(length: int, ranks: int, device: torch.device) -> Tensor:
    """Positions [L] in the order of the ranks that hold them."""
    runs = [run for index in range(ranks) for run in context_runs(length, ranks, index)]
    return position_ids(tuple(runs), device)


def in_rank_order(x_L: Tensor, ranks: int) -> Tensor:
    """[L, ...] by position -> the rows of rank 0, then those of rank 1, ..."""
    return x_L[_order(len(x_L), ranks, x_L.device)]


def in_position_order(x_L: Tensor, ranks: int) -> Tensor:
    """The inverse of :func:`in_rank_order`."""
    return x_L[torch.argsort(_order(len(x_L), ranks, x_L.device))]


# Keys and values gathered: every rank attends with its own queries to all of them.
#
# No data of other ranks is kept: the backward repeats the gather, then scatters the gradients.


class SpreadKeyValues(KeyValues):
    """:class:`~moemesh.model.seams.KeyValues` over `axis`, by a kind of :class:`AttentionPass`."""

    def __init__(self, kind: type[GatheredPass | RingPass], axis: Axis) -> None:
        self.kind, self.axis = kind, axis

    def attend(
        self, qkv: Qkv, visible: Visibility, *, sinks_N: Tensor | None, scale: float
    ) -> Tensor:
        return attention_with_lse(qkv, self.kind(visible, scale, self.axis), sinks_N).y_BNSD


class GatheredPass:
    """An :class:`~moemesh.model.attention_core.AttentionPass` over the gathered keys."""

    def __init__(self, visible: Visibility, scale: float, axis: Axis) -> None:
        self.visible = visible.between(visible.queries, (range(visible.length),))
        self.scale, self.axis = scale, axis

    def forward(self, qkv: Qkv) -> Partial:
        pair = _gather(*qkv[1:], self.visible.length, self.axis, "forward")
        return attend_to((qkv[0], *pair), self.visible, scale=self.scale)

    def backward(self, gradient_BNSD: Tensor, whole: Partial, qkv: Qkv) -> Gradients:
        query_BNSD, key_BMCD, value_BMCD = qkv
        visible, axis = self.visible, self.axis
        pair = _gather(key_BMCD, value_BMCD, visible.length, axis, "backward")
        inputs = query_BNSD, *pair
        by_query, *by_pair = gradients_of(gradient_BNSD, whole, inputs, visible, scale=self.scale)
        del inputs, pair
        # Gradients of all keys and values -> sums over the ranks, for this rank's positions. Each
        # form of them is freed before the next is complete, as far as operations allow.
        all_BMCD = torch.cat(by_pair, dim=3).to(key_BMCD.dtype)
        by_pair.clear()
        rows_CBMD = in_rank_order(all_BMCD.permute(2, 0, 1, 3), axis.size)
        del all_BMCD
        num_sequences, _, num_own, width = key_BMCD.shape
        sizes = [size * num_sequences for size in context_sizes(visible.length, axis.size)]
        own_rows = transfers.reduce_scatter(
            rows_CBMD.flatten(0, 1), axis, sizes, phase="backward", caller="context.keys"
        )
        own_BMCD = own_rows.view(num_own, *rows_CBMD.shape[1:]).permute(1, 2, 0, 3)
        by_key, by_value = own_BMCD.split([width, rows_CBMD.shape[3] - width], dim=3)
        return Gradients(by_query, by_key, by_value)


def _gather(
    key_BMCD: Tensor, value_BMCD: Tensor, length: int, axis: Axis, phase: str
) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions, in their order."""
    own_CBMD = torch.cat([key_BMCD, value_BMCD], dim=3).permute(2, 0, 1, 3)
    num_sequences = len(key_BMCD)
    # A row is a token: the number of rows may be 0, their width is not.
    sizes = [size * num_sequences for size in context_sizes(length, axis.size)]
    rows = transfers.all_gather(
        own_CBMD.flatten(0, 1), axis, sizes, phase=phase, caller="context.keys"
    )
    all_CBMD = rows.view(length, *own_CBMD.shape[1:])
    all_BMCD = in_position_order(all_CBMD, axis.size).permute(1, 2, 0, 3)
    key_BMCD, value_BMCD = all_BMCD.split([key_BMCD.shape[3], value_BMCD.shape[3]], dim=3)
    return key_BMCD, value_BMCD


# Heads for positions: every rank computes some heads over whole sequences.
#
# Jacobs et al., "DeepSpeed Ulysses", 2023 (arXiv:2309.14509). A key/value head that query heads of
# several ranks read is sent to each of these ranks, and its gradient is the sum of their gradients.


class HeadShards(KeyValues):
    """:class:`~moemesh.model.seams.KeyValues` over `axis`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def attend(
        self, qkv: Qkv, visible: Visibility, *, sinks_N: Tensor | None, scale: float
    ) -> Tensor:
        query_BNSD, key_BMCD, value_BMCD = qkv
        ranks, index = self.axis.size, self.axis.index
        num_heads, num_kv_heads = query_BNSD.shape[1], key_BMCD.shape[1]
        shares = [head_share(num_heads, num_kv_heads, ranks, i) for i in range(ranks)]
        share = shares[index]
        parts = (
            (query_BNSD, [each.queries for each in shares]),
            (key_BMCD, [each.keys for each in shares]),
            (value_BMCD, [each.keys for each in shares]),
        )
        query, key, value = self._to_heads(parts, visible.length)
        # If the key/value heads of a rank are not read by equally many of its query heads, every
        # query head gets a copy of its key/value head.
        group = num_heads // num_kv_heads
        if not share.is_even(group):
            reads = [head // group - share.keys.start for head in share.queries]
            heads = constant(reads, key.device)
            key, value = key.index_select(1, heads), value.index_select(1, heads)
        if sinks_N is not None:
            sinks_N = sinks_N[share.queries.start : share.queries.stop]
        all_positions = (range(visible.length),)
        seen = visible.between(all_positions, all_positions)
        y = attention((query, key, value), seen, sinks_N=sinks_N, scale=scale)
        # [B, heads of this rank, all positions, D] -> [B, heads, own positions, D].
        sizes = context_sizes(visible.length, ranks)
        num_sequences, own_heads, _, width = y.shape
        ordered = in_rank_order(y.permute(2, 0, 1, 3), ranks)
        received = collectives.all_to_all(
            ordered.reshape(-1, width),
            self.axis,
            [size * num_sequences * own_heads for size in sizes],
            [sizes[index] * num_sequences * own_heads] * ranks,
            caller="context.positions",
        )
        # From each rank a block of its heads for this rank's positions, in the order of the heads.
        shape = (ranks, sizes[index], num_sequences, own_heads, width)
        return received.view(shape).permute(2, 0, 3, 1, 4).flatten(1, 2)

    def _to_heads(self, parts: Sequence[tuple[Tensor, list[range]]], length: int) -> list[Tensor]:
        """[B, heads, own positions, D] each -> [B, heads of this rank, all positions, D] each.
        ``parts``: a tensor, and which of its heads each rank gets."""
        sizes, index = context_sizes(length, self.axis.size), self.axis.index
        # All rows of an exchange have one width: a common divisor of the head sizes.
        width = gcd(*(x.shape[3] for x, _ in parts))

        def num_rows(x: Tensor, heads: range, positions: int) -> int:
            return len(heads) * len(x) * positions * (x.shape[3] // width)

        sent: list[Tensor] = []
        for rank in range(self.axis.size):
            for x, heads in parts:
                heads_of_rank = x[:, heads[rank].start : heads[rank].stop]
                sent.append(heads_of_rank.transpose(0, 1).reshape(-1, width))
        rows_to_send = torch.cat(sent)
        sent.clear()
        received = collectives.all_to_all(
            rows_to_send,
            self.axis,
            [
                sum(num_rows(x, heads[rank], x.shape[2]) for x, heads in parts)
                for rank in range(self.axis.size)
            ],
            [sum(num_rows(x, heads[index], size) for x, heads in parts) for size in sizes],
            caller="context.heads",
        )
        rows = [num_rows(x, heads[index], size) for size in sizes for x, heads in parts]
        blocks = received.split(rows)
        gathered: list[Tensor] = []
        for i, (x, heads) in enumerate(parts):
            # A block of a rank is [heads, B, its positions, D]; positions go first, to order them.
            shards = [
                block.view(len(heads[index]), len(x), size, x.shape[3]).permute(2, 1, 0, 3)
                for block, size in zip(blocks[i :: len(parts)], sizes, strict=True)
            ]
            ordered = in_position_order(torch.cat(shards), self.axis.size)
            gathered.append(ordered.permute(1, 2, 0, 3))
        return gathered


# Ring attention: keys and values travel once round the ranks while these compute.
#
# Liu et al., "Ring Attention with Blockwise Transformers", 2023 (arXiv:2310.01889). In the backward
# the gradient of a block travels one step after the block: each rank after the owner adds its part,
# and the last one sends the sum to the owner. Sums are at least fp32. A message is in flight while
# the previous block is computed. Ranks skip the queries that see nothing of a block.


#: Tags of messages with blocks, and with their gradients, between the same two ranks.
_KEYS_TAG, _GRADIENTS_TAG = 1, 2


class _Ring:
    """Sends blocks of keys and values, or their gradients, to the next rank of `axis`; a block is
    one flat tensor."""

    def __init__(
        self, axis: Axis, visible: Visibility, key_BMCD: Tensor, value_BMCD: Tensor
    ) -> None:
        self.axis, self.visible = axis, visible
        self.num_sequences, self.num_heads = key_BMCD.shape[:2]
        self.key_size, self.value_size = key_BMCD.shape[3], value_BMCD.shape[3]
        self.sizes = context_sizes(visible.length, axis.size)

    def source(self, step: int) -> int:
        """The rank whose block is local at `step`."""
        return (self.axis.index - step) % self.axis.size

    def blocks(
        self, key_BMCD: Tensor, value_BMCD: Tensor, phase: str
    ) -> Iterator[tuple[Tensor, Tensor, Visibility]]:
        """Keys, values and their visibility for the queries, block after block, the local block
        first; the next block is in flight meanwhile."""
        block = self.pack(key_BMCD, value_BMCD)
        for step in range(self.axis.size):
            following, works = block, []
            if step < self.axis.size - 1:
                following, works = self.send_on(
                    block, step, phase=phase, caller="context.keys", tag=_KEYS_TAG
                )
            runs = context_runs(self.visible.length, self.axis.size, self.source(step))
            seen = self.visible.between(self.visible.queries, runs)
            yield *self.unpack(block, step), seen
            for work in works:
                work.wait()
            block = following

    def pack(self, key_BMCD: Tensor, value_BMCD: Tensor) -> Tensor:
        return torch.cat([key_BMCD.flatten(), value_BMCD.flatten()])

    def unpack(self, block: Tensor, step: int) -> tuple[Tensor, Tensor]:
        size = (self.num_sequences, self.num_heads, self.sizes[self.source(step)])
        rows = size[0] * size[1] * size[2]
        key, value = block.split([rows * self.key_size, rows * self.value_size])
        return key.view(*size, self.key_size), value.view(*size, self.value_size)

    def send_on(
        self, block: Tensor, step: int, *, phase: str, caller: str, tag: int
    ) -> tuple[Tensor, list[dist.Work]]:
        """Start to send `block` (of `step`) to the next rank, and to receive the block of the next
        step; the caller keeps both until it has waited for all works."""
        axis = self.axis
        rows = self.num_sequences * self.num_heads * self.sizes[self.source(step + 1)]
        into = block.new_empty(rows * (self.key_size + self.value_size))
        sends = [(block, (axis.index + 1) % axis.size)] if len(block) else []
        receives = [(into, (axis.index - 1) % axis.size)] if len(into) else []
        return into, exchange(sends, receives, axis, phase=phase, caller=caller, tag=tag)


class RingPass:
    """An :class:`~moemesh.model.attention_core.AttentionPass` over the blocks of a ring."""

    def __init__(self, visible: Visibility, scale: float, axis: Axis) -> None:
        self.visible, self.scale, self.axis = visible, scale, axis

    def forward(self, qkv: Qkv) -> Partial:
        query_BNSD, *pair = qkv
        ring = _Ring(self.axis, self.visible, *pair)
        partial = nothing_seen(query_BNSD, ring.value_size)
        for key, value, seen in ring.blocks(*pair, "forward"):
            partial = merge(partial, attend_to((query_BNSD, key, value), seen, scale=self.scale))
            del key, value  # before the next block is received
        return partial

    def backward(self, gradient_BNSD: Tensor, whole: Partial, qkv: Qkv) -> Gradients:
        query_BNSD, *pair = qkv
        ring = _Ring(self.axis, self.visible, *pair)
        by_query = torch.zeros_like(query_BNSD, dtype=wide(query_BNSD.dtype))
        own = collected = query_BNSD  # replaced at the first two steps
        pending: list[dist.Work] = []
        for step, block in enumerate(ring.blocks(*pair, "backward")):
            key, value, seen = block
            inputs = query_BNSD, key, value
            gradients = gradients_of(gradient_BNSD, whole, inputs, seen, scale=self.scale)
            del block, key, value, inputs
            by_query += gradients.query_BNSD
            gradient = ring.pack(gradients.key_BMCD, gradients.value_BMCD)
            del gradients  # before those of the next block
            if step == 0:
                own = gradient
            else:
                # Wait for the sum of earlier ranks' gradients of this block, then add ours.
                for work in pending:
                    work.wait()
                collected = gradient if step == 1 else gradient.add_(collected)
                sent = collected  # keeps its memory until the next wait
                collected, pending = ring.send_on(
                    sent, step, phase="backward", caller="context.gradients", tag=_GRADIENTS_TAG
                )
        for work in pending:
            work.wait()
        if ring.axis.size > 1:
            own += collected
        return Gradients(by_query, *ring.unpack(own, 0))


#: `plan.context` -> attention over positions of other ranks.
CONTEXTS: dict[str, Callable[[Axis], KeyValues]] = {
    "ring": partial(SpreadKeyValues, RingPass),
    "all_gather": partial(SpreadKeyValues, GatheredPass),
    "all_to_all": HeadShards,
}
