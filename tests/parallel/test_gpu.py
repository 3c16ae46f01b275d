"""One CUDA device gives the losses and gradients of the CPU."""

from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from tests.parity.test_parity import MODELS, TRAIN
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
