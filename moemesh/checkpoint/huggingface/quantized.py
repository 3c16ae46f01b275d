"""Stored tensors of fewer bits, turned into numbers slice by slice.

Only the blocks that a slice touches are read. Two formats:

    fp8     NAME.weight [R, C] of e4m3, and NAME.weight_scale_inv [ceil(R / r), ceil(C / c)]: the
            number is weight * scale of its block of r x c (DeepSeek-V3, section 3.3 of its report)
    mxfp4   NAME_blocks [E, R, G, 16] and NAME_scales [E, R, G] of uint8, for NAME [E, 32 G, R]: two
            e2m1 numbers a byte, the low half first, times 2 ** (scale - 127) (OCP Microscaling
            Formats 1.0; the layout is that of gpt-oss)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moemesh.config.huggingface.quantization import Quantization

Shape = tuple[int, ...]
#: (name of a stored tensor, a range of each of its dims) -> these numbers, as stored.
Read = Callable[[str, Sequence[range]], Tensor]
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_FP8 = torch.float8_e4m3fn
#: Numbers that share an exponent, and the bytes that hold them.
_GROUP, _GROUP_BYTES = 32, 16
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: The two numbers of every byte; the scale of every exponent, of which the last is not a number.
_PAIRS = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
_E8M0 = torch.tensor([*(2.0**exponent for exponent in range(-127, 128)), torch.nan])


class Entry(Protocol):
    """What is known of a stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Shape: ...


class Quantized(Protocol):
    """A tensor that other tensors stand for."""

    @property
    def shape(self) -> Shape: ...
    @property
    def sources(self) -> tuple[str, ...]: ...

    def read(self, box: Sequence[range], read: Read) -> Tensor:
        """The part `box`, in float32."""
        ...


class Fp8Blocks(NamedTuple):
    """A matrix (or a stack of them) of e4m3 with a scale for each block of its last two dims."""

    weight: str
    shape: Shape
    block: tuple[int, int]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.weight, self.weight + _SCALE

    @property
    def scale_shape(self) -> Shape:
        *stack, num_rows, num_columns = self.shape
        rows, columns = self.block
        return (*stack, -(-num_rows // rows), -(-num_columns // columns))

    def read(self, box: Sequence[range], read: Read) -> Tensor:
        *stack, rows, columns = box
        found = read(self.weight, box).float()
        blocks = [_blocks(part, size) for part, size in zip(box[-2:], self.block, strict=True)]
        scales = read(self.weight + _SCALE, [*stack, *blocks]).float()
        of_column = torch.arange(columns.start, columns.stop) // self.block[1] - blocks[1].start
        # Block by block of rows, so that no second tensor of this size is made.
        for index, block in enumerate(blocks[0]):
            first = max(block * self.block[0], rows.start) - rows.start
            last = min((block + 1) * self.block[0], rows.stop) - rows.start
            found[..., first:last, :] *= scales[..., index : index + 1, :][..., of_column]
        return found


class Mxfp4(NamedTuple):
    """A stack of matrices [E, C, R] whose columns lie in groups of 32."""

    name: str
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        return self.name + _BLOCKS, self.name + _SCALES

    def read(self, box: Sequence[range], read: Read) -> Tensor:
        stack, columns, rows = box
        groups = _blocks(columns, _GROUP)
        packed = read(self.name + _BLOCKS, [stack, rows, groups, range(_GROUP_BYTES)])
        exponents = read(self.name + _SCALES, [stack, rows, groups])
        found = _PAIRS.index_select(0, packed.reshape(-1).int()).view(*exponents.shape, _GROUP)
        found *= _E8M0.index_select(0, exponents.reshape(-1).int()).view(*exponents.shape, 1)
        found = found.flatten(2)
        start = columns.start - groups.start * _GROUP
        return found[..., start : start + len(columns)].transpose(1, 2)


def quantized_tensors(
    stored: Mapping[str, Entry], quantization: Quantization
) -> tuple[dict[str, Quantized], list[str]]:
    """The tensors of `stored` in this format, by name, and a line for each that is not whole."""
    if quantization.method == "fp8":
        return _fp8(stored, quantization.block)
    return _mxfp4(stored)


def _fp8(
    stored: Mapping[str, Entry], block: tuple[int, int]
) -> tuple[dict[str, Quantized], list[str]]:
    found: dict[str, Quantized] = {}
    problems: list[str] = []
    for name, entry in stored.items():
        if entry.dtype != _FP8 or name.endswith(_SCALE):
            continue
        if len(entry.shape) < 2:
            problems.append(f"{name} {list(entry.shape)} is in fp8 and no matrix")
            continue
        tensor = Fp8Blocks(name, entry.shape, block)
        problems += _partner(stored, name, name + _SCALE, tensor.scale_shape)
        found[name] = tensor
    return found, problems


def _mxfp4(stored: Mapping[str, Entry]) -> tuple[dict[str, Quantized], list[str]]:
    found: dict[str, Quantized] = {}
    problems: list[str] = []
    for blocks, entry in stored.items():
        if not blocks.endswith(_BLOCKS):
            continue
        name = blocks.removesuffix(_BLOCKS)
        if entry.dtype != torch.uint8 or len(entry.shape) != 4 or entry.shape[-1] != _GROUP_BYTES:
            problems.append(
                f"{blocks} {list(entry.shape)} of {entry.dtype} is not [experts, rows, groups, "
                f"{_GROUP_BYTES}] of bytes"
            )
            continue
        stack, rows, groups, _ = entry.shape
        problems += _partner(stored, blocks, name + _SCALES, (stack, rows, groups), torch.uint8)
        found[name] = Mxfp4(name, (stack, groups * _GROUP, rows))
    return found, problems


def _partner(
    stored: Mapping[str, Entry],
    name: str,
    scales: str,
    shape: Shape,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """What is wrong with the scales of the tensor `name`; floats where no dtype is given."""
    entry = stored.get(scales)
    if entry is None:
        return [f"{scales} is missing, the scales of {name}"]
    fits = entry.dtype.is_floating_point if dtype is None else entry.dtype == dtype
    if entry.shape != shape or not fits:
        dtype_name = str(entry.dtype).removeprefix("torch.")
        return [f"{scales} is {list(entry.shape)} of {dtype_name}; {name} needs {list(shape)}"]
    return []


def _blocks(part: range, size: int) -> range:
    """The blocks of `size` that hold `part`."""
    return range(part.start // size, -(-part.stop // size))
