"""Quantized tensors of a folder, recognised by their names and shapes.

Two formats:

    fp8     NAME.weight [R, C] of e4m3, and NAME.weight_scale_inv [ceil(R / r), ceil(C / c)]: the
            number is weight * scale of its block of r x c (DeepSeek-V3, section 3.3 of its report)
    mxfp4   NAME_blocks [E, R, G, 16] and NAME_scales [E, R, G] of uint8, for NAME [E, 32 G, R]: two
            e2m1 numbers a byte, the low half first, times 2 ** (scale - 127) (OCP Microscaling
            Formats 1.0; the layout is that of gpt-oss)

:mod:`moemesh.checkpoint.huggingface.weight_folder` reads their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from moemesh.config.huggingface.model import Quantization

Shape = tuple[int, ...]
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
#: Numbers that share an exponent, and the bytes that hold them.
GROUP, GROUP_BYTES = 32, 16
_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class PackedEntry(Protocol):
    """A stored tensor as far as it is known; `dtype` is torch's name of it."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


class Fp8Blocks(NamedTuple):
    """A matrix (or a stack of them) of e4m3 with a scale for each block of its last two dims."""

    weight: str
    shape: Shape
    block: tuple[int, int]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.weight, self.weight + SCALE


class Mxfp4(NamedTuple):
    """A stack of matrices [E, C, R] whose columns lie in groups of 32."""

    name: str
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        return self.name + BLOCKS, self.name + SCALES


Packed = Fp8Blocks | Mxfp4


def packed_tensors(
    stored: Mapping[str, PackedEntry], quantization: Quantization
) -> tuple[dict[str, Packed], list[str]]:
    """The tensors of `stored` in this format, by name, and a line for each that is not whole."""
    if quantization.method == "fp8":
        return _fp8(stored, quantization.block)
    return _mxfp4(stored)


def _fp8(
    stored: Mapping[str, PackedEntry], block: tuple[int, int]
) -> tuple[dict[str, Packed], list[str]]:
    found: dict[str, Packed] = {}
    problems: list[str] = []
    for name, entry in stored.items():
        if entry.dtype != "float8_e4m3fn" or name.endswith(SCALE):
            continue
        if len(entry.shape) < 2:
            problems.append(f"{name} {list(entry.shape)} is in fp8 and no matrix")
            continue
        tensor = Fp8Blocks(name, entry.shape, block)
        *stack, num_rows, num_columns = entry.shape
        scales = (*stack, -(-num_rows // block[0]), -(-num_columns // block[1]))
        problems += _partner(stored, name, name + SCALE, scales)
        found[name] = tensor
    return found, problems


def _mxfp4(stored: Mapping[str, PackedEntry]) -> tuple[dict[str, Packed], list[str]]:
    found: dict[str, Packed] = {}
    problems: list[str] = []
    for blocks, entry in stored.items():
        if not blocks.endswith(BLOCKS):
            continue
        name = blocks.removesuffix(BLOCKS)
        if entry.dtype != "uint8" or len(entry.shape) != 4 or entry.shape[-1] != GROUP_BYTES:
            problems.append(
                f"{blocks} {list(entry.shape)} of {entry.dtype} is not [experts, rows, groups, "
                f"{GROUP_BYTES}] of bytes"
            )
            continue
        if name in stored:
            problems.append(f"{name} is there twice: as it is, and as {blocks}")
        stack, rows, groups, _ = entry.shape
        problems += _partner(stored, blocks, name + SCALES, (stack, rows, groups), "uint8")
        found[name] = Mxfp4(name, (stack, groups * GROUP, rows))
    return found, problems


def _partner(
    stored: Mapping[str, PackedEntry],
    name: str,
    scales: str,
    shape: Shape,
    dtype: str | None = None,
) -> list[str]:
    """Faults of the scales of the tensor `name`; floats where no dtype is given."""
    entry = stored.get(scales)
    if entry is None:
        return [f"{scales} is missing, the scales of {name}"]
    fits = entry.dtype in _FLOATS if dtype is None else entry.dtype == dtype
    if entry.shape != shape or not fits:
        return [f"{scales} is {list(entry.shape)} of {entry.dtype}; {name} needs {list(shape)}"]
    return []
