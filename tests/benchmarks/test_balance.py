"""`benchmarks.balance` on a small case: all tables, and the order of their numbers."""

from __future__ import annotations

import json

import pytest

from benchmarks.balance import run
from benchmarks.settings import BalancersSettings
from benchmarks.text import balance_text

SMALL = BalancersSettings(
    layers=1, experts=16, replicas=20, groups=4, nodes=2, gpus=4, ranks=4, spare_slots=2,
    rounds=1, drift_layers=1, drift_steps=2, next_layers=1,
)  # fmt: skip


@pytest.mark.slow
def test_tables() -> None:
    tables = json.loads(json.dumps(run(SMALL)))
    assert len(tables["static"]) == 2 * 12 and len(tables["exact"]) == len(tables["drift"]) == 12
    for row in tables["static"]:
        assert row["worse"] == 0
        assert row["quality_gap"] <= row["fast_gap"] + 2e-3 <= row["published_gap"] + 1.3e-2
    for row in tables["exact"]:
        assert row["quotas"] <= row["nothing"] and row["shadowed"] <= row["nothing"] + 1e-9
    assert sum(row["incremental"] for row in tables["drift"]) < sum(
        row["scratch"] for row in tables["drift"]
    )
    shown = balance_text(tables)
    assert "published in torch / ours" in shown and "one hot" in shown
