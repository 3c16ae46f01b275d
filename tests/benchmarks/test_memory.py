"""`benchmarks.memory` measures the predicted states and the predicted traffic."""

from __future__ import annotations

from typing import get_args

import pytest

from benchmarks import memory
from benchmarks.settings import STRATEGIES, MemorySettings
from benchmarks.text import memory_text
from moemesh.config.layout import Layout
from moemesh.config.plan import DataStrategy
from tests.ranks import mesh_on_ranks

SETTINGS = MemorySettings(
    ranks=2, strategy="all", layers=4, hidden=64, width=96, sequences=2, seq_len=8, rounds=1
)


@pytest.mark.slow
def test_strategies_beside_their_predictions() -> None:
    result, other = mesh_on_ranks(Layout(dp=2), memory.measure, SETTINGS)
    assert result == other
    rows = result["strategies"]
    assert list(rows) == list(SETTINGS.wanted)
    for row in rows.values():
        assert row["state_bytes"] == row["predicted_state_bytes"]
        for name in ("wire_bytes", "received_bytes"):
            assert row[name] == row[f"predicted_{name}"]
        assert max(row["state_bytes"]) < max(row["peak_bytes"])
        assert max(row["predicted_peak_bytes"]) == pytest.approx(max(row["peak_bytes"]), rel=0.07)
        assert row["seconds"] > 0 and row["seconds_ratio"] > 0
    assert rows["replicate"]["peak_ratio"] == rows["replicate"]["seconds_ratio"] == 1
    fullest = {name: max(row["peak_bytes"]) for name, row in rows.items()}
    assert fullest["zero3"] < fullest["zero1"] < fullest["replicate"]
    assert fullest["zero2"] < fullest["replicate"]
    # The server keeps all of the optimizer and sends all of the weights, its worker neither.
    states, sent = rows["parameter_server"]["state_bytes"], rows["parameter_server"]["wire_bytes"]
    assert states[0] == rows["replicate"]["state_bytes"][0] == 2 * states[1]
    assert sent[0] == 4 * result["parameters"] == sent[1]
    lines = memory_text(result).splitlines()
    assert len(lines) == 2 + len(rows) and f"{result['parameters']:,}" in lines[0]


def test_all_strategies_are_there() -> None:
    assert get_args(DataStrategy) == STRATEGIES


def test_wanted_begins_with_what_others_are_compared_with() -> None:
    assert MemorySettings(strategy="parameter_server").wanted == ("replicate", "parameter_server")
