"""Keys and values gathered: every rank attends with its own queries to all of them.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| attend | own queries, keys, values | own outputs | all_gather | all_gather, reduce_scatter |

Nothing of the other ranks is kept: the backward gathers again, then scatters the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.comm import transfers
from moemesh.comm.mesh import Axis
from moemesh.config.context import context_sizes
from moemesh.model.attention_core import (
    attend_to,
    gradients_of,
    output_of,
    sink_gradient,
    with_sinks,
)
from moemesh.model.visibility import Visibility
from moemesh.ops.attention import Partial
from moemesh.parallel.context.order import in_position_order, in_rank_order


class GatheredKeyValues:
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
        inputs = (query_BNSD, key_BMCD, value_BMCD)
        return _GatheredAttention.apply(*inputs, sinks_N, visible, scale, self.axis)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BNSD: Tensor,
        key_BMCD: Tensor,
        value_BMCD: Tensor,
        sinks_N: Tensor | None,
        visible: Visibility,
        scale: float,
        axis: Axis,
    ) -> Tensor:
        everywhere = visible.between(visible.queries, (range(visible.length),))
        pair = _gather(key_BMCD, value_BMCD, visible.length, axis, "forward")
        part = attend_to(query_BNSD, *pair, everywhere, scale=scale)
        whole = with_sinks(part, sinks_N)
        y_BNSD = output_of(whole, query_BNSD.dtype)
        ctx.save_for_backward(query_BNSD, key_BMCD, value_BMCD, sinks_N, y_BNSD, whole.lse_BNS)
        ctx.visible, ctx.scale, ctx.axis = everywhere, scale, axis
        return y_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        query_BNSD, key_BMCD, value_BMCD, sinks_N, *saved = ctx.saved_tensors
        whole, visible = Partial(*saved), ctx.visible
        pair = _gather(key_BMCD, value_BMCD, visible.length, ctx.axis, "backward")
        found = gradients_of(gradient_BNSD, whole, query_BNSD, *pair, visible, scale=ctx.scale)
        # Gradients of all keys and values -> their sums over the ranks, of the own ones.
        all_BMCD = torch.cat([found.key_BMCD, found.value_BMCD], dim=3).to(key_BMCD.dtype)
        rows_CBMD = in_rank_order(all_BMCD.permute(2, 0, 1, 3), ctx.axis.size)
        num_sequences, _, num_own, width = key_BMCD.shape
        sizes = [size * num_sequences for size in context_sizes(visible.length, ctx.axis.size)]
        own = transfers.reduce_scatter(
            rows_CBMD.flatten(0, 1), ctx.axis, sizes, phase="backward", caller="context.keys"
        )
        own_BMCD = own.view(num_own, *rows_CBMD.shape[1:]).permute(1, 2, 0, 3)
        by_key, by_value = own_BMCD.split([width, rows_CBMD.shape[3] - width], dim=3)
        by_sinks = sink_gradient(gradient_BNSD, whole, sinks_N)
        return found.query_BNSD.to(query_BNSD.dtype), by_key, by_value, by_sinks, None, None, None


def _gather(
    key_BMCD: Tensor, value_BMCD: Tensor, length: int, axis: Axis, phase: str
) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions, in their order."""
    own_CBMD = torch.cat([key_BMCD, value_BMCD], dim=3).permute(2, 0, 1, 3)
    num_sequences = len(key_BMCD)
    # A row is a token: there may be none, but none is empty.
    sizes = [size * num_sequences for size in context_sizes(length, axis.size)]
    rows = transfers.all_gather(
        own_CBMD.flatten(0, 1), axis, sizes, phase=phase, caller="context.keys"
    )
    all_CBMD = rows.view(length, *own_CBMD.shape[1:])
    all_BMCD = in_position_order(all_CBMD, axis.size).permute(1, 2, 0, 3)
    key_BMCD, value_BMCD = all_BMCD.split([key_BMCD.shape[3], value_BMCD.shape[3]], dim=3)
    return key_BMCD, value_BMCD
