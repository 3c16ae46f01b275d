"""`benchmarks.load`: every rank reads the bytes that it needs, and takes no further memory."""

from __future__ import annotations

import pytest

from benchmarks.load import measure
from benchmarks.settings import LoadSettings
from benchmarks.text import load_text
from moemesh.comm.mesh import Mesh
from tests.ranks import run_on_ranks


def _measure(rank: int, settings: LoadSettings) -> dict[str, object]:
    return measure(Mesh.create(settings.plan.layout, "cpu"), settings)


@pytest.mark.representative("2")
@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_and_memory_of_a_load(tp: int) -> None:
    settings = LoadSettings(megabytes=32, ranks=2, tp=tp, rounds=1)
    result = run_on_ranks(2, _measure, settings)[0]
    assert 24 << 20 < result["folder_bytes"] < 64 << 20
    for rank in result["ranks"]:
        # Columns of one rank of tp are shorter than a page: their rows are read in full.
        most = 1.0 if tp == 1 else 1.4
        assert rank["needed_bytes"] <= rank["read_bytes"] <= most * rank["needed_bytes"]
        assert rank["peak_bytes_beyond_model"] < 32 << 20
    text = load_text(result)
    assert "warm" in text and "cold" in text and "2 ranks" in text
