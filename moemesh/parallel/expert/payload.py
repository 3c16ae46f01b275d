"""What a dispatched row looks like on the wire: as it is, or as 8-bit floats with block scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moemesh.comm import collectives, transfers
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec
from moemesh.ops.fp8 import dequantize, quantize

Payload = Literal["same", "fp8"]


class Fp8Codec:
    """e4m3 values and one fp32 scale per 128 channels. Gradients pass straight through."""

    def encode(self, x_RH: Tensor) -> Tensor:
        return quantize(x_RH)

    def decode(self, packed: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        return dequantize(packed, hidden, dtype)


def codec_of(payload: Payload) -> Codec | None:
    return Fp8Codec() if payload == "fp8" else None


class _GatherCoded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, axis: Axis, sizes: Sequence[int], codec: Codec, caller: str
    ) -> Tensor:
        ctx.axis, ctx.sizes, ctx.caller = axis, sizes, caller
        packed = transfers.all_gather(
            codec.encode(x_TH), axis, sizes, phase="forward", caller=caller
        )
        return codec.decode(packed, x_TH.shape[1], x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        summed = transfers.reduce_scatter(
            gradient, ctx.axis, ctx.sizes, phase="backward", caller=ctx.caller
        )
        return summed, None, None, None, None


def gather_rows(
    x_TH: Tensor, axis: Axis, sizes: Sequence[int], codec: Codec | None, *, caller: str
) -> Tensor:
    """all_gather of rows through `codec`; backward: reduce_scatter, not coded."""
    if codec is None or axis.size == 1:
        return collectives.all_gather(x_TH, axis, sizes, caller=caller)
    return _GatherCoded.apply(x_TH, axis, sizes, codec, caller)
