"""Row formats on the wire: the dtype of the run, or 8-bit floats with block scales."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
