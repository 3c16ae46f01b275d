"""`benchmarks.balance` on a small case: all tables, and what they must say."""

from __future__ import annotations

import json

import pytest

from benchmarks.balance import run
from benchmarks.settings import BalancersSettings
from benchmarks.text import balancers_text
from moemesh.config.errors import UserError

SMALL = BalancersSettings(
    layers=2, experts=32, replicas=40, groups=4, nodes=2, gpus=8, ranks=8, spare_slots=2, rounds=1
)


def test_tables() -> None:
    found = json.loads(json.dumps(run(SMALL)))
    assert len(found["static"]) == 2 * 12 and len(found["exact"]) == len(found["drift"]) == 12
    for row in found["static"]:
        assert row["worse"] == 0
        assert row["quality_gap"] <= row["fast_gap"] + 2e-3 <= row["published_gap"] + 1.3e-2
    for row in found["exact"]:
        assert row["quotas"] <= row["nothing"] and row["shadowed"] <= row["nothing"] + 1e-9
    assert sum(row["incremental"] for row in found["drift"]) < sum(
        row["scratch"] for row in found["drift"]
    )
    shown = balancers_text(found)
    assert "published in torch / ours" in shown and "one hot" in shown


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r"ranks \(5\) must divide experts \(32\)"):
        BalancersSettings(experts=32, ranks=5)
