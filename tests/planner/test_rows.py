"""Spellings of other teams' tables."""

from __future__ import annotations

import pytest

from moemesh.planner.accuracy.published import parse_run, told_row, uniform_row
from tests.planner.published_rows import ARCHS, llama


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


def test_a_table_of_nobody_says_in_columns_what_known_sources_imply() -> None:
    """Every quirk of a known source is a column that any table may have; its own cell wins."""
    known = parse_run(llama(1, 2, 2, 1, 34.8), ARCHS)
    columns = {"balanced": "1", "scatter_gather": "0", "slow_startup": "1", "stack": "ours"}
    other = parse_run(llama(1, 2, 2, 1, 34.8, src="somebody", **columns), ARCHS)
    assert (other.software, other.layout) == (known.software, known.layout)
    assert other.cluster == "ours/A100-80G" != known.cluster
    masked = parse_run(llama(1, 1, 1, 1, 26.5, kernel="masked", dedup="1"), ARCHS).software
    assert (masked.kernel, masked.deduplicated) == ("masked", True)
    assert told_row({"src": "mpf_tab3", "dedup": "1"}, "")["dedup"] == "1"
    assert told_row({"src": "mpf_tab3"}, "") | {"generation": ""} == {
        "src": "mpf_tab3", "generation": "", "stack": "mpf", "token_drop": "1", "dedup": "0",
        "kernel": "flash",
    }  # fmt: skip
