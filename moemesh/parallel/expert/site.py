"""Arguments from which dispatchers are built, and the codec of their rows."""

from __future__ import annotations

from typing import NamedTuple

from moemesh.comm.mesh import Mesh
from moemesh.comm.overlap import Codec
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Payload, Plan
from moemesh.ops.fp8 import dequantize, quantize

#: Rows on the wire as e4m3 values with one fp32 scale per 128 channels.
FP8_CODEC = Codec(quantize, dequantize)


def codec_of(payload: Payload) -> Codec | None:
    """The codec of dispatched rows; None sends them in the dtype of the run."""
    return FP8_CODEC if payload == "fp8" else None


class DispatcherSite(NamedTuple):
    """Arguments of `DispatcherRow.make`; buffers are made for `tokens_per_rank` tokens."""

    config: ModelConfig
    plan: Plan
    mesh: Mesh
    tokens_per_rank: int

    @property
    def codec(self) -> Codec | None:
        return codec_of(self.plan.payload)
