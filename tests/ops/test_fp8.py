"""fp8 rows: error bounds, exact cases, and the bytes on the wire."""

import pytest
import torch
from torch.testing import assert_close

from moemesh.ops.fp8 import BLOCK, LARGEST, dequantize, quantize
from moemesh.sharding.dispatchers import packed_bytes


@pytest.mark.parametrize("hidden", [1, 7, 128, 130, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_keeps_the_stated_error(hidden: int, dtype: torch.dtype) -> None:
    x = (torch.randn(37, hidden) * torch.logspace(-6, 6, 37)[:, None]).to(dtype)
    packed = quantize(x)
    assert packed.shape == (37, packed_bytes(hidden)) and packed.dtype == torch.uint8
    back = dequantize(packed, hidden, torch.float32)
    pad = torch.nn.functional.pad(x.float(), (0, -hidden % BLOCK)).view(37, -1, BLOCK)
    scale = (pad.abs().amax(2) / LARGEST).repeat_interleave(BLOCK, 1)[:, :hidden]
    assert bool(((back - x.float()).abs() <= x.float().abs() / 16 + scale * 2**-10).all())


def test_zeros_powers_of_two_and_no_rows() -> None:
    x = torch.zeros(2, 256)
    x[1, :128] = 448.0
    x[1, 128:] = torch.tensor([-448.0, 1.0, 2.0, -16.0]).repeat(32)
    assert_close(dequantize(quantize(x), 256, torch.float32), x, rtol=0, atol=0)
    for hidden in (1, 16, 130, 256):
        none = torch.empty(0, hidden)
        assert dequantize(quantize(none), hidden, torch.bfloat16).shape == (0, hidden)


@pytest.mark.parametrize("hidden", [512, 1024, 7168])
def test_bytes_against_bfloat16(hidden: int) -> None:
    assert packed_bytes(hidden) <= 0.52 * 2 * hidden
