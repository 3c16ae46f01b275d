"""NF4 against the definition, by hand, and against bitsandbytes."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moemesh.config.lora import packed_bytes
from moemesh.ops.nf4 import TABLE, by_kernel, dense, dequantize, quantize

SHAPES = [(3, 64), (2, 5, 192), (4, 2, 3, 128), (7, 96), (3, 10)]


def nearest(block: list[float]) -> list[float]:
    """The obvious form: the nearest value of the table times the largest absolute value."""
    scale = max(map(abs, block))
    return [min(TABLE, key=lambda value: abs(value * scale - x)) * scale for x in block]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_number_becomes_the_nearest_value_of_its_block(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    packed = quantize(weight)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape[:-1], packed_bytes(shape[-1]))
    rows = [
        [x for block in row.split(64) for x in nearest(block.tolist())]
        for row in weight.reshape(-1, shape[-1])
    ]
    back = dequantize(packed, torch.float32)
    assert_close(back, torch.tensor(rows).view(shape), rtol=1e-6, atol=0)
    # The packed form of these values is the same.
    assert torch.equal(quantize(back), packed)


def test_a_block_by_hand() -> None:
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([2.0, -2.0, 0.17, 1.4])
    packed = quantize(weight)[0].tolist()
    # 2.0 in fp32, then codes 15, 0, 8 (0.0796 is nearer to 0.085 than 0), 14 (0.723), 7 (zero).
    assert packed[:6] == [0, 0, 0, 64, 0xF0, 0x8E] and set(packed[6:]) == {0x77}
    assert len(packed) == 36


def test_zeros_and_no_rows() -> None:
    assert torch.equal(dequantize(quantize(torch.zeros(2, 64)), torch.bfloat16), torch.zeros(2, 64))
    assert dequantize(quantize(torch.empty(0, 64)), torch.float32).shape == (0, 64)


def test_a_cut_between_blocks_is_a_cut_between_bytes() -> None:
    weight = torch.randn(4, 256)
    packed = quantize(weight)
    for start, stop in ((0, 64), (64, 256), (128, 192)):
        part = packed[:, packed_bytes(start) : packed_bytes(stop)]
        assert torch.equal(part, quantize(weight[:, start:stop]))
    assert torch.equal(quantize(weight[1:3]), packed[1:3])


def test_at_most_16_percent_of_the_bytes_of_fp32() -> None:
    weight = torch.randn(128, 768)
    assert quantize(weight).nbytes <= 0.16 * weight.nbytes


def test_other_weights_pass_unchanged() -> None:
    weight = torch.randn(2, 64)
    assert dense(weight, torch.bfloat16) is weight
    assert dense(quantize(weight), torch.float64).dtype == torch.float64


def of_bitsandbytes(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, largest absolute values and dequantized numbers."""
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    return codes.flatten(), state.absmax, functional.dequantize_4bit(codes, state).to(dtype)


@pytest.mark.parametrize("scale", [1e-6, 0.02, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_bitsandbytes(dtype: torch.dtype, scale: float) -> None:
    weight = (torch.randn(96, 320, generator=torch.Generator().manual_seed(5)) * scale).to(dtype)
    weight[7] = 0
    # Numbers at the borders of two codes, where a product and a quotient round to other sides.
    table = torch.tensor(TABLE)
    borders = ((table[:-1] + table[1:]) / 2).repeat(20, 1)
    largest = weight[40:60].view(20, 5, 64).abs().amax(2)
    for block in range(5):
        start = 64 * block
        weight[40:60, start + 20 : start + 35] = (borders * largest[:, block, None]).to(dtype)
    codes, absmax, values = of_bitsandbytes(weight, dtype)
    packed = quantize(weight).view(-1, 36)
    assert torch.equal(packed[:, :4].contiguous().view(torch.float32).flatten(), absmax)
    assert torch.equal(packed[:, 4:].flatten(), codes)
    assert torch.equal(dequantize(packed.view(96, -1), dtype), values)
    blocks = packed.view(96, 5, 36)
    assert torch.equal(by_kernel(blocks[..., :4], blocks[..., 4:], dtype), values)
