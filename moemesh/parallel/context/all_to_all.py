"""Heads for positions: every rank attends with some heads to whole sequences.

Jacobs et al., "DeepSpeed Ulysses", 2023 (arXiv:2309.14509). c ranks, N query heads.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| attend | own positions, N heads | all positions, N/c heads | all_to_all | all_to_all |
| return | all positions, N/c heads | own positions, N heads | all_to_all | all_to_all |

Where the query heads of several ranks read one key/value head, it goes to each of them: its
gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.config.context import context_sizes, head_share
from moemesh.model.attention_core import attention
from moemesh.model.visibility import Visibility
from moemesh.parallel.context.order import in_position_order, in_rank_order


class HeadShards:
    """:class:`~moemesh.model.seams.KeyValues` over `axis`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def attend(
        self,
        query_BNSD: Tensor,
        key_BMCD: Tensor,
        value_BMCD: Tensor,
        visible: Visibility,
        *,
        sinks_N: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
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
        # The query heads of a rank need not be whole groups of one key/value head each.
        group = num_heads // num_kv_heads
        if not share.is_even(group):
            reads = [head // group - share.keys.start for head in share.queries]
            key, value = key[:, reads], value[:, reads]
        if sinks_N is not None:
            sinks_N = sinks_N[share.queries.start : share.queries.stop]
        whole = (range(visible.length),)
        seen = visible.between(whole, whole)
        y = attention(query, key, value, seen, sinks_N=sinks_N, scale=scale)
        return self._to_positions(y, visible.length)

    def _to_heads(self, parts: Sequence[tuple[Tensor, list[range]]], length: int) -> list[Tensor]:
        """[B, heads, own positions, D] each -> [B, heads of this rank, all positions, D] each.

        ``parts``: a tensor, and which of its heads each rank gets.
        """
        sizes, index = context_sizes(length, self.axis.size), self.axis.index
        # Rows of one exchange are equally wide: all head sizes are whole numbers of them.
        width = gcd(*(x.shape[3] for x, _ in parts))

        def num_rows(x: Tensor, heads: range, positions: int) -> int:
            return len(heads) * len(x) * positions * (x.shape[3] // width)

        sent: list[Tensor] = []
        for rank in range(self.axis.size):
            for x, heads in parts:
                own = x[:, heads[rank].start : heads[rank].stop]
                sent.append(own.transpose(0, 1).reshape(-1, width))
        received = collectives.all_to_all(
            torch.cat(sent),
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
        found: list[Tensor] = []
        for place, (x, heads) in enumerate(parts):
            # Of every rank [heads, B, its positions, D]; positions first, to put them in order.
            shape = (len(heads[index]), len(x), -1, x.shape[3])
            shards = [
                block.view(shape[0], shape[1], size, shape[3]).permute(2, 1, 0, 3)
                for block, size in zip(blocks[place :: len(parts)], sizes, strict=True)
            ]
            ordered = in_position_order(torch.cat(shards), self.axis.size)
            found.append(ordered.permute(1, 2, 0, 3))
        return found

    def _to_positions(self, y: Tensor, length: int) -> Tensor:
        """[B, heads of this rank, all positions, D] -> [B, heads, own positions, D]."""
        sizes, index = context_sizes(length, self.axis.size), self.axis.index
        num_sequences, num_heads, _, width = y.shape
        rows = num_sequences * num_heads
        ordered = in_rank_order(y.permute(2, 0, 1, 3), self.axis.size)
        received = collectives.all_to_all(
            ordered.reshape(-1, width),
            self.axis,
            [size * rows for size in sizes],
            [sizes[index] * rows] * self.axis.size,
            caller="context.positions",
        )
        # Blocks of own positions, one a rank, whose heads follow one another.
        shape = (self.axis.size, sizes[index], num_sequences, num_heads, width)
        return received.view(shape).permute(2, 0, 3, 1, 4).flatten(1, 2)
