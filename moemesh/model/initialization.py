"""Initial weights as a pure function of (seed, parameter name, row): the same in every layout.

Rows (all dims but the last, flattened; the global expert id is one of these dims) are drawn in
blocks, each from its own counter of a Philox generator. A shard draws the blocks of its rows and
keeps its rows of them: it equals the slice of the whole tensor bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from moemesh.model.transformer import Transformer
from moemesh.ops.nf4 import quantize

#: (parameter name, logical shape) -> the range of each dim to allocate.
Slices = Callable[[str, tuple[int, ...]], Sequence[range]]

#: Random numbers in a block: large blocks start fewer generators, small ones draw fewer numbers
#: that a shard does not keep.
BLOCK_NUMBERS = 1 << 14


def whole(name: str, shape: tuple[int, ...]) -> Sequence[range]:
    """Whole dims, for one device."""
    return [range(size) for size in shape]


def starts_at_zero(name: str) -> bool:
    """Whether the parameter `name` starts at zero: biases, and the factors B of adapters."""
    return name.endswith(("bias", "_lora_B"))


def normal_slice(
    seed: int, name: str, shape: tuple[int, ...], slices: Sequence[range]
) -> torch.Tensor:
    """The `slices` of the standard normal tensor `name` of logical `shape`, float32."""
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "<u8")
    width = shape[-1]
    block_rows = max(1, BLOCK_NUMBERS // max(width, 1))
    rows = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])
    rows = rows[np.ix_(*slices[:-1])].reshape(-1)
    columns = slice(slices[-1].start, slices[-1].stop)
    out = np.empty((len(rows), columns.stop - columns.start), dtype=np.float32)
    blocks, starts = np.unique(rows // block_rows, return_index=True)  # rows ascend
    stops = [*starts[1:], len(rows)] if len(rows) else []
    for block, start, stop in zip(blocks, starts, stops, strict=True):
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, int(block), 0]))
        drawn = generator.standard_normal((block_rows, width), dtype=np.float32)
        out[start:stop] = drawn[rows[start:stop] % block_rows, columns]
    return torch.from_numpy(out).reshape([len(part) for part in slices])


def adapter_slice(
    seed: int, name: str, shape: tuple[int, ...], slices: Sequence[range]
) -> torch.Tensor:
    """The `slices` of an adapter's initial factor A [rank, in], with PEFT's variance 1 / (3 in)."""
    return normal_slice(seed, name, shape, slices) * (1 / math.sqrt(3 * shape[-1]))


def initialize(
    model: Transformer,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    slices: Slices = whole,
    is_packed: Callable[[str], bool] = lambda name: False,
) -> None:
    """Allocate and initialize every parameter of `model`, in place.

    Norms are ones, biases, the factors B of adapters and buffers zeros. The router stays in fp32 in
    a bfloat16 model; its selection bias is fp32 in every run. `is_packed`: whether a parameter is
    held in NF4, by its name.
    """
    for name, parameter in list(model.named_parameters()):
        shape = tuple(parameter.shape)
        parts = slices(name, shape)
        if starts_at_zero(name):
            value = torch.zeros([len(part) for part in parts])
        elif len(shape) == 1 and not name.endswith(".sinks"):  # a norm
            value = torch.ones([len(part) for part in parts])
        elif name.endswith("_lora_A"):
            value = adapter_slice(seed, name, shape, parts)
        else:
            deviation = model.config.init_std
            if name.endswith((".output", ".down")):  # writes to the residual stream
                deviation /= math.sqrt(2 * model.config.num_layers)
            value = normal_slice(seed, name, shape, parts) * deviation
        value_dtype = torch.float32 if ".router." in name and dtype == torch.bfloat16 else dtype
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        # Packed on the host: a device may lack memory for the unpacked numbers.
        stored = quantize(value).to(device) if is_packed(name) else value.to(device, value_dtype)
        setattr(owner, leaf, nn.Parameter(stored, requires_grad=stored.is_floating_point()))
    for name, buffer in list(model.named_buffers()):
        module, _, leaf = name.rpartition(".")
        zeros = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        setattr(model.get_submodule(module), leaf, zeros)
