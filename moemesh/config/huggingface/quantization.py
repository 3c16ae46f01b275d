"""The number formats of released weights, as `quantization_config` of a ``config.json`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from moemesh.config.huggingface.keys import Config, table, wrong

Method = Literal["fp8", "mxfp4"]
_KEY = "quantization_config"


class Quantization(NamedTuple):
    """How matrices are stored: fp8 (e4m3) with a scale for each block of ``block`` rows and
    columns, or MXFP4 (OCP Microscaling Formats 1.0: 32 numbers of e2m1 and an exponent)."""

    method: Method
    block: tuple[int, int]

    def __str__(self) -> str:
        if self.method == "mxfp4":
            return "MXFP4 (4 bits, an exponent for every 32 numbers)"
        return f"fp8 (a scale for every {self.block[0]} x {self.block[1]} numbers)"


def quantization_of(config: Config) -> Quantization | None:
    """The format of the weights; None where they are stored as they are.

    Raises ConfigError naming a format that cannot be read.
    """
    given = table(config, _KEY)
    if not given:
        return None
    method = given.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4", (1, 32))
    if method != "fp8":
        message = f"weights in the format {method} cannot be read (known: fp8 in blocks, mxfp4)"
        fix = "take the folder of the original weights, or convert them to bfloat16"
        raise wrong("not-available", f"{_KEY}.quant_method", method, message, fix)
    if (fmt := given.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise wrong("not-available", f"{_KEY}.fmt", fmt, "fp8 weights are read in e4m3 only")
    block: object = given.get("weight_block_size")
    sizes = cast("Sequence[object]", block) if isinstance(block, (list, tuple)) else ()
    numbers = [one for one in sizes if isinstance(one, int) and not isinstance(one, bool)]
    if len(sizes) != 2 or len(numbers) != 2 or min(numbers) < 1:
        key, given_block = f"{_KEY}.weight_block_size", cast("object", block)
        message = "fp8 weights are read with a scale for each block of [rows, columns] only"
        raise wrong("not-available", key, given_block, message, "[128, 128]")
    return Quantization("fp8", (numbers[0], numbers[1]))
