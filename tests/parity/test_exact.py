"""`combine = exact`: the same bits for every ep, dispatcher and chunk count."""

from typing import Any

import pytest
import torch

from tests.parity.models import MODELS, TRAIN
from tests.parity.training import Shape, Trained, train

SHAPE = Shape(global_batch=6, seq_len=9)
FEW: list[dict[str, Any]] = [
    {"ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2},
    {"ep": 4, "dispatch_chunks": 3},
]
MORE: list[dict[str, Any]] = [
    {"ep": 2},
    {"ep": 4},
    {"ep": 2, "dispatcher": "all_gather"},
    {"ep": 4, "dispatcher": "all_gather"},
    {"ep": 2, "dispatcher": "hierarchical"},
]
#: Every run of a comparison has the same ranks for everything but the experts.
BASES: list[dict[str, Any]] = [{"dp": 4}, {"dp": 2, "tp": 2}]


def assert_same_bits(got: Trained, expected: Trained) -> None:
    assert (got.losses, got.aux, got.norms) == (expected.losses, expected.aux, expected.norms)
    for name, tensor in expected.weights.items():
        assert torch.equal(got.weights[name], tensor), name
        assert torch.equal(got.gradients[name], expected.gradients[name]), name


@pytest.mark.representative("few-float32-{'dp': 4}")
@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plans", [FEW, MORE], ids=["few", "more"])
def test_exact_is_bitwise_the_same(
    base: dict[str, Any], dtype: str, plans: list[dict[str, Any]]
) -> None:
    keys = TRAIN | {"dtype": dtype, "steps": 1}
    exact = {**base, "combine": "exact"}
    expected = train(MODELS["moe"], exact, keys, SHAPE)
    for plan in plans:
        assert_same_bits(train(MODELS["moe"], exact | plan, keys, SHAPE), expected)
