"""The rotation and its backward, beside the plain product with a rotation matrix."""

import math

import pytest
import torch
from torch import Tensor

from moemesh.config.model import ModelConfig
from moemesh.model.rope import Tables, frequencies, rotary_tables, rotate
from moemesh.ops import fusion


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
    leaves = x.clone().requires_grad_(), x[:, :, :1].clone().requires_grad_()
    for y, leaf in zip(rotate(*leaves, tables), leaves, strict=True):
        wanted = obvious(leaf.detach(), config, interleaved)
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(leaf, x[:, :, : leaf.shape[2]], rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda *both: rotate(*both, tables), leaves)


@pytest.mark.parametrize("threads", [1, 3, fusion.MOST_THREADS + 1])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
def test_one_pass_equals_float64(
    dtype: torch.dtype,
    tolerance: float,
    interleaved: bool,
    documents: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(threads)
    calls: list[object] = []
    run = fusion.run_in_one_pass
    monkeypatch.setattr(
        fusion, "run_in_one_pass", lambda *given: (calls.append(given[-2]), run(*given))
    )
    config = ModelConfig(head_dim=40, rope_interleave=interleaved, partial_rotary_factor=0.8)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(4, 9, 100, 40, generator=generator).to(dtype) for _ in range(2))
    positions = torch.randint(1000, (4, 100) if documents else (100,), generator=generator)
    tables = rotary_tables(config, positions).to(dtype)
    exact = tables.to(torch.float64)

    def rotated(x: Tensor, grad: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Outputs and gradients, with heads after positions in memory: not contiguous."""
        leaf = x.requires_grad_()
        key = leaf.detach().transpose(1, 2)[:, :, :1]  # few numbers: left to torch
        y, _ = rotate(leaf.transpose(1, 2), key, tables)
        return y.transpose(1, 2).detach(), torch.autograd.grad(y.transpose(1, 2), leaf, grad)[0]

    tensors = rotated(x, grad, tables)
    assert calls == [1, -1], "this test is about the compiled form"
    for ours, theirs in zip(tensors, rotated(x.double(), grad.double(), exact), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)
    assert len(calls) == 2, "float64 is left to torch"
