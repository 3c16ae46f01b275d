"""Spellings of other teams' tables."""

from __future__ import annotations

import pytest

from moemesh.planner.accuracy.row_words import uniform_row


@pytest.mark.parametrize(
    ("column", "said", "meant"),
    [
        ("status", "oom", "OOM"),
        ("status", "Out of memory", "OOM"),
        ("status", "success", "ok"),
        ("status", "error", "error"),
        ("zero", "ZeRO-1", "1"),
        ("zero", "stage 2", "2"),
        ("zero", "1.0", "1"),
        ("zero", "FULL_SHARD", "3"),
        ("zero", "FSDP2", "3"),
        ("zero", "1(shard within 8)", "1(shard within 8)"),
        ("zero", "ZeRO-1 (within 16)", "1(shard within 16)"),
        ("zero", "n/a", ""),
        ("sp", "True", "1"),
        ("sp", "no", "0"),
        ("vpp", "-", ""),
        ("vpp", "DualPipe", "DualPipe"),
        ("recompute", "FULL", "full"),
        ("recompute", "0", "none"),
        ("recompute", "full (all layers)", "full"),
        ("recompute", "selective(op)", "selective(op)"),
        ("seq", "4k", "4096"),
        ("seq", "131,072", "131072"),
        ("gpus", "n/a", ""),
        ("gbs", "abc", "abc"),
    ],
)
def test_a_cell_means_what_it_says(column, said, meant):
    assert uniform_row({column: said, "notes": "As It Is"}) == {column: meant, "notes": "As It Is"}
