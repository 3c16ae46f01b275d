"""Ring attention: keys and values travel once round the ranks while these compute.

Liu et al., "Ring Attention with Blockwise Transformers", 2023 (arXiv:2310.01889). c ranks; a block
is the keys and values that one rank holds.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| attend | own queries, own block | own outputs | c-1 blocks | c-1 blocks, c-1 gradients of them |

In the backward a block collects its gradient on its way: it leaves the rank behind its owner with
that rank's part, and the last rank hands it to the owner. Sums are at least fp32. A message is
under way while the block before it is computed. Ranks skip the queries that see nothing of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.comm.mesh import Axis
from moemesh.comm.point_to_point import exchange
from moemesh.config.context import context_runs, context_sizes
from moemesh.model.attention_core import (
    attend_to,
    gradients_of,
    output_of,
    sink_gradient,
    with_sinks,
)
from moemesh.model.visibility import Visibility
from moemesh.ops.attention import Partial, merge, nothing_seen, wide

#: Messages of blocks and of their gradients meet on the same pairs of ranks.
_KEYS_TAG, _GRADIENTS_TAG = 1, 2


class RingKeyValues:
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
        scale = query_BNSD.shape[-1] ** -0.5 if scale is None else scale
        ring = _Ring(self.axis, visible, key_BMCD, value_BMCD)
        inputs = (query_BNSD, key_BMCD, value_BMCD)
        return _RingAttention.apply(*inputs, sinks_N, visible, scale, ring)


class _Ring:
    """The messages of one attention: who holds which positions, and how large the blocks are."""

    def __init__(
        self, axis: Axis, visible: Visibility, key_BMCD: Tensor, value_BMCD: Tensor
    ) -> None:
        self.axis, self.visible = axis, visible
        self.num_sequences, self.num_heads = key_BMCD.shape[:2]
        self.key_size, self.value_size = key_BMCD.shape[3], value_BMCD.shape[3]
        self.sizes = context_sizes(visible.length, axis.size)

    def source(self, step: int) -> int:
        """The rank whose block is here at `step`."""
        return (self.axis.index - step) % self.axis.size

    def seen(self, step: int) -> Visibility:
        runs = context_runs(self.visible.length, self.axis.size, self.source(step))
        return self.visible.between(self.visible.queries, runs)

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
        """Start to send `block`, which is here at `step`, to the next rank, and to receive what
        comes then; keep both until all works have been waited for."""
        axis = self.axis
        rows = self.num_sequences * self.num_heads * self.sizes[self.source(step + 1)]
        into = block.new_empty(rows * (self.key_size + self.value_size))
        sends = [(block, (axis.index + 1) % axis.size)] if len(block) else []
        receives = [(into, (axis.index - 1) % axis.size)] if len(into) else []
        return into, exchange(sends, receives, axis, phase=phase, caller=caller, tag=tag)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BNSD: Tensor,
        key_BMCD: Tensor,
        value_BMCD: Tensor,
        sinks_N: Tensor | None,
        visible: Visibility,
        scale: float,
        ring: _Ring,
    ) -> Tensor:
        found = nothing_seen(query_BNSD, ring.value_size)
        last = ring.axis.size - 1
        block = ring.pack(key_BMCD, value_BMCD)
        for step in range(last + 1):
            following, works = block, []
            if step < last:
                following, works = ring.send_on(
                    block, step, phase="forward", caller="context.keys", tag=_KEYS_TAG
                )
            part = attend_to(query_BNSD, *ring.unpack(block, step), ring.seen(step), scale=scale)
            found = merge(found, part)
            for work in works:
                work.wait()
            block = following
        whole = with_sinks(found, sinks_N)
        y_BNSD = output_of(whole, query_BNSD.dtype)
        ctx.save_for_backward(query_BNSD, key_BMCD, value_BMCD, sinks_N, y_BNSD, whole.lse_BNS)
        ctx.scale, ctx.ring = scale, ring
        return y_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        query_BNSD, key_BMCD, value_BMCD, sinks_N, *saved = ctx.saved_tensors
        whole, ring = Partial(*saved), ctx.ring
        last = ring.axis.size - 1
        by_query = torch.zeros_like(query_BNSD, dtype=wide(query_BNSD.dtype))
        block = ring.pack(key_BMCD, value_BMCD)
        own, collected, on_the_way = block, block, []
        for step in range(last + 1):
            following, works = block, []
            if step < last:
                following, works = ring.send_on(
                    block, step, phase="backward", caller="context.keys", tag=_KEYS_TAG
                )
            found = gradients_of(
                gradient_BNSD,
                whole,
                query_BNSD,
                *ring.unpack(block, step),
                ring.seen(step),
                scale=ctx.scale,
            )
            by_query += found.query_BNSD
            gradient = ring.pack(found.key_BMCD, found.value_BMCD)
            if step == 0:
                own = gradient
            else:
                # What the ranks before have collected for this block has arrived meanwhile.
                for work in on_the_way:
                    work.wait()
                collected = gradient if step == 1 else gradient.add_(collected)
                sent = collected
                collected, on_the_way = ring.send_on(
                    sent, step, phase="backward", caller="context.gradients", tag=_GRADIENTS_TAG
                )
            for work in works:
                work.wait()
            block = following
        for work in on_the_way:
            work.wait()
        if last:
            own += collected
        by_key, by_value = ring.unpack(own, 0)
        return (
            by_query.to(query_BNSD.dtype),
            by_key.to(key_BMCD.dtype),
            by_value.to(value_BMCD.dtype),
            sink_gradient(gradient_BNSD, whole, sinks_N),
            None,
            None,
            None,
        )
