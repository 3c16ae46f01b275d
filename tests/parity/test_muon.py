"""Muon gives every plan the updates of one device, and on one device those of the formula."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.models import ALL, TRAIN
from tests.parity.training import alone, assert_same, rows, train

MUON = TRAIN | {"optimizer": "muon", "lr": 0.05, "weight_decay": 0.1, "steps": 3}

CASES = rows(
    """
    *moe | tp=2 dp=2 ep=4
    *moe | tp=2 dp=2 ep=2 etp=2 data=zero1
    *moe | dp=2 ep=2 data=zero3
    *moe | dp=4 ep=2 data=zero2 microbatches=2
    moe | tp=4
    moe | dp=2 etp=2 dispatcher=all_gather
    moe | pp=2 dp=2 ep=2 microbatches=2
    *moe | pp=2 tp=2 microbatches=4 schedule=zb_h1 data=zero1
    moe | pp=2 dp=2 schedule=chimera microbatches=2
    moe | dp=2 data=parameter_server
    grouped | tp=4 dp=2 ep=8
    dense | tp=2 dp=2
    """
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_every_plan_updates_as_one_device(model: str, plan: dict[str, Any], shape: Any) -> None:
    expected = alone(ALL[model], MUON, shape, 1)
    assert_same(train(ALL[model], plan, MUON, shape, predicts=False), expected)
