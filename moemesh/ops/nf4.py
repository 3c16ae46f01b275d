"""Frozen weights in NF4 (Dettmers et al., 2023, arXiv:2305.14314): 4 bits a number, one fp32 scale
per block of 64.

Legend: I inputs of a weight [..., I], K = ceil(I / 64) blocks of a row. A packed weight is uint8
[..., packed_bytes(I)]. Its bytes for each block: the largest absolute value in fp32 (the scale),
then two codes a byte, the first in the high bits. The last block of a row may be shorter. Blocks
are whole bytes, so that a packed row can be sharded between blocks.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.config.lora import NF4_BLOCK, NF4_BLOCK_BYTES, packed_bytes

#: Values of the codes 0 to 15: quantiles of a normal distribution, scaled to [-1, 1] (appendix E).
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: Bytes of a scale.
_SCALE = 4


def quantize(weight: Tensor) -> Tensor:
    """The packed form of `weight` [..., I], I even: each number becomes the nearest value of the
    table times the scale of its block, in fp32; the same bits on every device."""
    padded = F.pad(weight.float(), (0, -weight.shape[-1] % NF4_BLOCK))
    blocks = padded.unflatten(-1, (-1, NF4_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True)
    table = torch.tensor(TABLE, device=weight.device)
    # A product with the reciprocal, as in bitsandbytes: a quotient rounds differently.
    scaled = (blocks * (1.0 / scale.clamp(min=1e-38))).clamp(-1, 1)
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    packed = torch.cat([scale.view(torch.uint8), codes[..., ::2] << 4 | codes[..., 1::2]], dim=-1)
    return packed.flatten(-2)[..., : packed_bytes(weight.shape[-1])].contiguous()


def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., I] that :func:`quantize` packed: products in fp32, rounded to `dtype`."""
    with torch._C.DisableTorchFunction():  # a mode may widen fp32 (moemesh.model.hub.precision)
        row = packed.shape[-1]
        blocks = F.pad(packed, (0, -row % NF4_BLOCK_BYTES)).unflatten(-1, (-1, NF4_BLOCK_BYTES))
        scale, codes = blocks[..., :_SCALE], blocks[..., _SCALE:]
        if packed.is_cuda and row % NF4_BLOCK_BYTES == 0 and dtype.itemsize < 8 and _has_kernels():
            return by_kernel(scale, codes, dtype)
        values = F.embedding(codes.int(), _pairs(packed.device)).flatten(-2)
        values = values.mul_(_numbers(scale)).to(dtype).flatten(-2)
        return values[..., : 2 * (row - _SCALE * blocks.shape[-2])].contiguous()


def by_kernel(scale: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of whole blocks, from the bytes of their scales [..., K, 4] and of their codes
    [..., K, 32], by the kernel of bitsandbytes: the same bits."""
    shape = (*codes.shape[:-2], codes.shape[-2] * NF4_BLOCK)
    kernel, scales = torch.ops.bitsandbytes.dequantize_4bit, _numbers(scale).flatten()
    return kernel(codes.reshape(-1, 1), scales, NF4_BLOCK, "nf4", shape, dtype)


def _numbers(scale: Tensor) -> Tensor:
    """Scales [..., K, 1] of blocks from their bytes [..., K, 4]; a copy, since fp32 must be
    aligned."""
    return scale.clone(memory_format=torch.contiguous_format).view(torch.float32)


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight itself, or unpacked to `dtype` if it is packed."""
    return dequantize(weight, dtype) if weight.dtype == torch.uint8 else weight


class PackedMatrices:
    """Packed experts [E, ..., I] as a sequence of matrices [O, I] (`is_transposed`: [I, O]), each
    dequantized when it is read."""

    def __init__(self, packed: Tensor, dtype: torch.dtype, *, is_transposed: bool) -> None:
        self._packed, self._dtype, self._is_transposed = packed, dtype, is_transposed

    def __getitem__(self, expert: int) -> Tensor:
        weight_OI = dequantize(self._packed[expert], self._dtype).flatten(0, -2)
        return weight_OI.t() if self._is_transposed else weight_OI


def matrices(stack: Tensor, dtype: torch.dtype, *, is_transposed: bool) -> Tensor | PackedMatrices:
    """Stacked experts [E, ..., I], packed or not, as matrices by expert: [O, I], or
    `is_transposed` [I, O]."""
    if stack.dtype == torch.uint8:
        return PackedMatrices(stack, dtype, is_transposed=is_transposed)
    stack_EOI = stack.flatten(1, -2)
    return stack_EOI.transpose(1, 2) if is_transposed else stack_EOI


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of every byte of codes, [256, 2]."""
    table = torch.tensor(TABLE, device=device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)


@cache
def _has_kernels() -> bool:
    """Whether bitsandbytes is installed; loads its kernels."""
    if find_spec("bitsandbytes") is None:
        return False
    import_module("bitsandbytes")
    return True
