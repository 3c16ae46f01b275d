"""Numbers of stored tensors as numpy arrays: which are finite, and how two checkpoints differ.

numpy has no bfloat16 and no 8-bit floats; they are taken apart by their bits.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from moemesh.checkpoint.manifest import ITEM_BYTES
from moemesh.checkpoint.stored import Bits, StoredCheckpoint

#: Numbers that are looked at together.
_BLOCK = 1 << 16
#: Dtypes of floats: bits of the exponent, and the bits that are compared with them. A number whose
#: exponent has all bits set is infinite or NaN; float8_e4m3fn has one NaN, all bits but the sign.
_EXPONENTS = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}


def num_nonfinite(content: bytes | memoryview, dtype: str) -> int:
    """The number of infinities and NaN in `content`, of torch's `dtype`."""
    if dtype not in _EXPONENTS:
        return 0
    bits = np.frombuffer(content, f"<u{ITEM_BYTES[dtype]}")
    mask = bits.dtype.type(_EXPONENTS[dtype])
    # In blocks that stay in a cache: their intermediate results cost four times as much elsewhere.
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in blocks)


class NumberDifference(NamedTuple):
    """Difference of two tensors of one name, shape and dtype, over the numbers finite in both.

    `num_different` counts numbers whose bits differ, all of them; `largest` is the largest absolute
    difference, `relative` the same over the largest magnitude of the first tensor.
    """

    num_different: int
    num_elements: int
    largest: float
    relative: float
    num_nonfinite: tuple[int, int]


def difference(first: StoredCheckpoint, second: StoredCheckpoint, name: str) -> NumberDifference:
    """Compare the tensor `name` of two checkpoints, in which it has one shape and dtype."""
    entry = first.entry(name)
    a_bits, b_bits = first.read_bits(name), second.read_bits(name)
    num_bad = tuple(num_nonfinite(x.tobytes(), entry.dtype) for x in (a_bits, b_bits))
    a, b = (_values(x, entry.dtype) for x in (a_bits, b_bits))
    usable = np.isfinite(a) & np.isfinite(b)
    a, b = a[usable], b[usable]
    largest = float(np.max(np.abs(a - b), initial=0.0))
    magnitude = float(np.max(np.abs(a), initial=0.0))
    return NumberDifference(
        num_different=int(np.count_nonzero(a_bits != b_bits)),
        num_elements=prod(entry.shape),
        largest=largest,
        relative=largest / magnitude if magnitude else (0.0 if largest == 0 else float("inf")),
        num_nonfinite=(num_bad[0], num_bad[1]),
    )


def _values(bits: Bits, dtype: str) -> Bits:
    """The numbers, in float64 (of integers: their nearest)."""
    match dtype:
        case "bfloat16":
            return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
        case "float8_e4m3fn":
            # A float16 has one bit of exponent more, and a bias that is larger by 8.
            sign, rest = bits.astype("<u2") & np.uint16(0x80), bits.astype("<u2") & np.uint16(0x7F)
            half = (sign << np.uint16(8) | rest << np.uint16(7)).view("<f2")
            return np.where(rest == 0x7F, np.nan, half.astype(np.float64) * 256)
        case "float8_e5m2":
            return (bits.astype("<u2") << np.uint16(8)).view("<f2").astype(np.float64)
        case "bool" | "uint8":
            return bits.astype(np.float64)
    native = f"<{'f' if dtype.startswith('float') else 'i'}{ITEM_BYTES[dtype]}"
    return bits.view(native).astype(np.float64)
