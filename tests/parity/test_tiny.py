"""Every dispatcher trains the preset `tiny` to the same losses; exact: to the same bits.

By default with half of its layers, which differ in nothing but their numbers.
"""

from typing import Any

import pytest
import torch

from moemesh.sharding.load_run import load_run
from tests.parity.training import Shape, train

TINY = load_run([], []).config.model.model_dump()
HALF = TINY | {"num_layers": TINY["num_layers"] // 2}
SHAPE = Shape(global_batch=8, seq_len=32)
TRAIN: dict[str, Any] = {"steps": 2, "lr": 3e-3, "warmup_steps": 1}
MESH: dict[str, Any] = {"tp": 2, "dp": 2, "ep": 4, "ranks_per_node": 2}
DISPATCHERS = ["all_gather", "hierarchical", "low_latency", "auto"]


@pytest.mark.representative("fast")
@pytest.mark.parametrize("combine", ["fast", "exact"])
def test_every_dispatcher_trains_tiny_to_the_same_losses(combine: str) -> None:
    model, plan = HALF if combine == "fast" else TINY, MESH | {"combine": combine}
    expected = train(model, plan | {"dispatcher": "all_to_all"}, TRAIN, SHAPE)
    assert len(set(expected.losses)) == TRAIN["steps"]  # something is trained
    for dispatcher in DISPATCHERS:
        got = train(model, plan | {"dispatcher": dispatcher}, TRAIN, SHAPE)
        if combine == "exact":
            assert got.losses == expected.losses, dispatcher
            for name, weight in expected.weights.items():
                assert torch.equal(got.weights[name], weight), f"{dispatcher}: {name}"
        else:
            ratios = [a / b - 1 for a, b in zip(got.losses, expected.losses, strict=True)]
            assert max(map(abs, ratios)) <= 1e-5, f"{dispatcher}: {ratios}"


def test_fp8_rows_train_tiny_close_to_the_same_losses() -> None:
    plan = MESH | {"dispatcher": "hierarchical"}
    plain = train(HALF, plan, TRAIN, SHAPE).losses
    coded = train(HALF, plan | {"payload": "fp8"}, TRAIN, SHAPE).losses
    differences = [abs(a / b - 1) for a, b in zip(coded, plain, strict=True)]
    assert 0 < max(differences) <= 5e-3, differences
