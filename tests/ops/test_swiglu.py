"""SwiGLU in one pass equals the plain form in float64, bad numbers included."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moemesh.ops import swiglu as module
from moemesh.ops.fusion import MOST_THREADS
from moemesh.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_torch,
    swiglu_torch,
    unweighted_swiglu_backward,
)

#: Relative to the largest of each result: one rounding of bfloat16, a few of float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True, params=[1, 3, MOST_THREADS + 1])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def _numbers(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    h = (4 * torch.randn(rows, 2 * width, generator=generator)).to(dtype)
    grad = torch.randn(rows, width, generator=generator).to(dtype)
    return h, torch.rand(rows, generator=generator), grad


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(300, 256), (67, 1001), (70000, 1)])
def test_one_pass_equals_the_plain_form_in_float64(
    dtype: torch.dtype, rows: int, width: int
) -> None:
    h, weights, grad = _numbers(rows, width, dtype)
    assert module._is_fused(h, weights), "this test is about the compiled form"
    expected = [swiglu_torch(h.double(), weights.double())]
    expected += swiglu_backward_torch(grad.double(), h.double(), weights.double())
    got = [swiglu(h, weights), *swiglu_backward(grad, h, weights)]
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_dense_mlp_leaves_the_gradient_to_others(dtype: torch.dtype) -> None:
    """Autograd may hand the same tensor to another function, too."""
    h, _, grad = _numbers(300, 256, dtype)
    before = grad.clone()
    product, grad_h = unweighted_swiglu_backward(grad, h)
    assert torch.equal(grad, before)
    leaf = h.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    (wanted,) = torch.autograd.grad(expected, leaf, before.double())
    tolerance = TOLERANCE.get(dtype, 1e-12)
    for ours, theirs in ((product, expected), (grad_h, wanted)):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_extremes_and_nan_stay_what_they_are(dtype: torch.dtype) -> None:
    rows, width = 1 << 13, 8
    gates = torch.tensor([0.0, -0.0, 100.0, -100.0, float("inf"), float("nan"), 1e30, -1e30])
    h = torch.cat([gates.expand(rows, width), torch.ones(rows, width)], dim=1).to(dtype)
    weights, grad = torch.ones(rows), torch.ones(rows, width, dtype=dtype)
    got = swiglu(h.contiguous(), weights)
    assert module._is_fused(h, weights)
    expected = swiglu_torch(h, weights)
    assert_close(got, expected, rtol=0.01, atol=1e-6, equal_nan=True)
    ours = swiglu_backward(grad.clone(), h, weights)
    theirs = swiglu_backward_torch(grad.clone(), h, weights)
    finite = gates.isfinite() & (gates.abs() < 1e29)
    for mine, plain in zip(ours[:2], theirs[:2], strict=True):
        kept = finite if mine.shape[1] == width else finite.repeat(2)
        assert_close(mine[:, kept], plain[:, kept], rtol=0.01, atol=1e-6)
    assert ours[1][:, 5].isnan().all() and ours[2].isnan().all(), "a NaN must be seen"


def test_small_blocks_and_other_types_are_left_to_torch() -> None:
    h, weights, _ = _numbers(300, 256, torch.float32)
    assert not module._is_fused(h[:8], weights[:8])
    assert not module._is_fused(h.double(), weights.double())
    assert not module._is_fused(h[:, ::2], weights)
