"""One CUDA device gives the losses and gradients of the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.ops.grouped_gemm import grouped_gemm, grouped_weight_gradient
from tests.device import test_attention
from tests.parity.models import MODELS, TRAIN
from tests.parity.training import PADDED, Shape, assemble, train_on_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def run(device: str, model: str, train: dict[str, Any], shape: Shape) -> dict[str, Any]:
    return train_on_rank(Mesh.single(device), MODELS[model], {"microbatches": 2}, train, shape)


def worst(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    left, right = assemble([ours]), assemble([theirs])
    return max(
        float((left[name].cpu() - right[name]).abs().max() / right[name].abs().max())
        for name in right
    )


@pytest.mark.parametrize("model", ["moe", "grouped", "sigmoid", "dense"])
@pytest.mark.parametrize("shape", [Shape(), PADDED], ids=["full", "padded"])
def test_float64_on_cuda_equals_the_cpu(model: str, shape: Shape) -> None:
    got, expected = (run(device, model, TRAIN, shape) for device in ("cuda", "cpu"))
    assert worst(got["gradients"], expected["gradients"]) <= 1e-9
    assert worst(got["weights"], expected["weights"]) <= 1e-9


def test_float32_on_cuda_equals_the_cpu() -> None:
    train = TRAIN | {"dtype": "float32", "steps": 1}
    got, expected = (run(device, "moe", train, Shape()) for device in ("cuda", "cpu"))
    assert worst(got["gradients"], expected["gradients"]) <= 1e-3


def test_bfloat16_trains_on_cuda() -> None:
    train = TRAIN | {"dtype": "bfloat16", "steps": 20, "optimizer": "adamw", "lr": 1e-2}
    losses = [step[0] for step in run("cuda", "moe", train, Shape())["steps"]]
    assert losses[-1] < losses[0]


#: Rows of each expert, rows after the last expert's, channels in and out.
PRODUCTS = {
    "empty experts": ([0, 5, 0, 0, 32, 0], 0, 64, 48),
    "rows for nobody": ([7, 0, 9], 21, 64, 48),
    "no rows": ([0, 0, 0], 0, 64, 48),
    "many": ([257, 1, 0, 1030, 3, 129], 0, 512, 256),
    "rows that are no multiple of 16 bytes": ([3, 0, 11], 0, 12, 20),
}


def products(name: str, device: str) -> list[Tensor]:
    """Rows times weights, and both gradients, of the rows that an expert has."""
    counts, rest, inner, outer = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(counts)
    shapes = ((num_rows + rest, inner), (num_rows + rest, outer), (len(counts), inner, outer))
    drawn = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    x, grad, weight = (one.to(device) for one in drawn)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    tensors = [
        grouped_gemm(x, weight, ends)[:num_rows],
        # The weights of the backward are transposed without a copy.
        grouped_gemm(grad, weight.transpose(1, 2), ends)[:num_rows],
        grouped_weight_gradient(grad, x, ends),
    ]
    return [one.cpu() for one in tensors]


@pytest.mark.parametrize("name", PRODUCTS)
def test_grouped_products_in_bfloat16_equal_the_cpu(name: str) -> None:
    found, expected = products(name, "cuda"), products(name, "cpu")
    for have, want in zip(found, expected, strict=True):
        scale = float(want.float().abs().max()) if want.numel() else 1.0
        torch.testing.assert_close(have.float(), want.float(), rtol=0.02, atol=0.02 * scale)
    empty = [expert for expert, count in enumerate(PRODUCTS[name][0]) if not count]
    assert not found[2][empty].any(), "gradients of experts without rows are zeros"


@pytest.mark.parametrize("name", test_attention.CASES)
def test_documents_and_windows_equal_the_cpu(name: str) -> None:
    packed, window, has_sinks, value_size = test_attention.CASES[name]
    found, expected = (
        test_attention.results(
            test_attention.visibility(packed, window, device), has_sinks, value_size, device
        )
        for device in ("cuda", "cpu")
    )
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have.float().cpu(), want.float(), rtol=0.03, atol=0.03)
