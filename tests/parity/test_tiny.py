"""Rows in eight bits train half of the preset `tiny` to losses close to those of plain rows."""

from typing import Any

import pytest

from moemesh.sharding.load_run import load_run
from tests.parity.training import Shape, train

TINY = load_run([], []).config.model.model_dump()
HALF = TINY | {"num_layers": TINY["num_layers"] // 2}
SHAPE = Shape(global_batch=8, seq_len=32)
TRAIN: dict[str, Any] = {"steps": 2, "lr": 3e-3, "warmup_steps": 1}
MESH: dict[str, Any] = {"tp": 2, "dp": 2, "ep": 4, "ranks_per_node": 2}


@pytest.mark.slow
def test_fp8_rows_train_tiny_close_to_the_same_losses() -> None:
    plan = MESH | {"dispatcher": "hierarchical"}
    plain = train(HALF, plan, TRAIN, SHAPE).losses
    coded = train(HALF, plan | {"payload": "fp8"}, TRAIN, SHAPE).losses
    differences = [abs(a / b - 1) for a, b in zip(coded, plain, strict=True)]
    assert 0 < max(differences) <= 5e-3, differences
