"""Stored tensors of fewer bits, turned into numbers slice by slice.

Only the blocks that a slice touches are read. :mod:`moemesh.checkpoint.huggingface.packed` has the
formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.packed import (
    BLOCKS,
    GROUP,
    GROUP_BYTES,
    SCALE,
    SCALES,
    Fp8Blocks,
    Mxfp4,
    Packed,
)

#: (name of a stored tensor, a range of each of its dims) -> these numbers, as stored.
Read = Callable[[str, Sequence[range]], Tensor]
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: The two numbers of every byte; the scale of every exponent, of which the last is not a number.
_PAIRS = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
_E8M0 = torch.tensor([*(2.0**exponent for exponent in range(-127, 128)), torch.nan])


def read_packed(tensor: Packed, box: Sequence[range], read: Read) -> Tensor:
    """The part `box` of a tensor, in float32."""
    return _fp8(tensor, box, read) if isinstance(tensor, Fp8Blocks) else _mxfp4(tensor, box, read)


def _fp8(tensor: Fp8Blocks, box: Sequence[range], read: Read) -> Tensor:
    *stack, rows, columns = box
    found = read(tensor.weight, box).float()
    blocks = [_blocks(part, size) for part, size in zip(box[-2:], tensor.block, strict=True)]
    scales = read(tensor.weight + SCALE, [*stack, *blocks]).float()
    of_column = torch.arange(columns.start, columns.stop) // tensor.block[1] - blocks[1].start
    # Block by block of rows, so that no second tensor of this size is made.
    for index, block in enumerate(blocks[0]):
        first = max(block * tensor.block[0], rows.start) - rows.start
        last = min((block + 1) * tensor.block[0], rows.stop) - rows.start
        found[..., first:last, :] *= scales[..., index : index + 1, :][..., of_column]
    return found


def _mxfp4(tensor: Mxfp4, box: Sequence[range], read: Read) -> Tensor:
    stack, columns, rows = box
    groups = _blocks(columns, GROUP)
    packed = read(tensor.name + BLOCKS, [stack, rows, groups, range(GROUP_BYTES)])
    exponents = read(tensor.name + SCALES, [stack, rows, groups])
    found = _PAIRS.index_select(0, packed.reshape(-1).int()).view(*exponents.shape, GROUP)
    found *= _E8M0.index_select(0, exponents.reshape(-1).int()).view(*exponents.shape, 1)
    found = found.flatten(2)
    start = columns.start - groups.start * GROUP
    return found[..., start : start + len(columns)].transpose(1, 2)


def _blocks(part: range, size: int) -> range:
    """The blocks of `size` that hold `part`."""
    return range(part.start // size, -(-part.stop // size))
