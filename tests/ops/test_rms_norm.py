"""RMSNorm in one pass, and its backward in one, equal torch's in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.ops import rms_norm as module
from moemesh.ops.fusion import MOST_THREADS, run_in_one_pass
from moemesh.ops.rms_norm import rms_norm

#: Relative to the largest of each result: one rounding of bfloat16, a few of float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True, params=[1, 3, MOST_THREADS + 1])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def results(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of the weight."""
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = rms_norm(*leaves, 1e-3)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(300, 256), (67, 1001), (3, 41, 8, 70), (70000, 1)])
def test_one_pass_equals_torch_in_float64(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def spied(function: str, *arguments: object) -> None:
        calls.append(function)
        run_in_one_pass(function, *arguments)

    monkeypatch.setattr(module, "run_in_one_pass", spied)
    generator = torch.Generator().manual_seed(shape[0])
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(shape[-1], generator=generator)).to(dtype)
    tensors = results(3 * x, weight, grad)
    assert calls == ["rms_norm", "rms_norm_backward"], "this test is about the compiled form"
    expected = results((3 * x).double(), weight.double(), grad.double())
    assert len(calls) == 2, "float64 is left to torch"
    assert [one.dtype for one in tensors] == [dtype] * 3
    for ours, theirs in zip(tensors, expected, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_of_zeros_and_one_with_a_nan(dtype: torch.dtype) -> None:
    x = torch.randn(1 << 10, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3], x[5, 7] = 0.0, float("nan")
    weight = torch.ones(64, dtype=dtype)
    y, grad_x, grad_weight = results(x, weight, torch.ones_like(x))
    leaf = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(F.rms_norm(leaf, (64,), eps=1e-3).sum(), leaf)[0]
    torch.testing.assert_close(grad_x[3].double(), wanted[3], rtol=0.01, atol=0.0)
    assert grad_x[5].isnan().all() and y[5].isnan().all() and grad_weight.isnan().all()
    assert grad_x[4].isfinite().all() and grad_x[6:].isfinite().all(), "rows do not mix"


def test_the_memory_of_a_weight_can_be_freed_afterwards() -> None:
    """The way in which zero3 frees the weights that it has gathered."""
    x, weight = torch.randn(1024, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    rms_norm(x, weight, 1e-3).sum().backward()
    weight.untyped_storage().resize_(0)
