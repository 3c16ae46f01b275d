"""The rotation and its backward, beside the plain product with a rotation matrix."""

import math

import pytest
import torch
from torch import Tensor

from moemesh.config.model import ModelConfig
from moemesh.model.rope import frequencies, rotary_tables, rotate


def obvious(x: Tensor, config: ModelConfig, interleaved: bool) -> Tensor:
    """Pair by pair as complex numbers."""
    size = config.rotary_dim
    half = size // 2
    firsts = range(0, size, 2) if interleaved else range(half)
    y = x.clone()
    for pair, (first, frequency) in enumerate(zip(firsts, frequencies(config), strict=True)):
        second = first + 1 if interleaved else pair + half
        for position in range(x.shape[1]):
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            one, other = x[:, position, :, first], x[:, position, :, second]
            y[:, position, :, first] = (one * c - other * s) * config.rope_scale
            y[:, position, :, second] = (one * s + other * c) * config.rope_scale
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation_and_its_backward(interleaved: bool, partial: float) -> None:
    config = ModelConfig(head_dim=8, rope_interleave=interleaved, partial_rotary_factor=partial)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(config, torch.arange(5))
    leaf = x.clone().requires_grad_()
    y = rotate(leaf, *tables, interleaved=interleaved)
    torch.testing.assert_close(y, obvious(x, config, interleaved), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *tables, interleaved=interleaved), leaf)
    torch.testing.assert_close(leaf, x, rtol=0, atol=0)
