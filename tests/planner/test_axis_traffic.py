"""Traffic by axis of any pipeline rank, the KV cache of a batch, and arithmetic intensity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moemesh.cli.plan_text import estimate_text
from moemesh.config.cluster import load_cluster
from moemesh.planner.estimate import Estimate, by_axis, estimate_named, pipeline_rank
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.speed import (
    CacheSize,
    decoding_intensity,
    device_balance,
    kv_cache_bytes,
    layer_intensities,
    product_intensity,
)
from moemesh.trace.ledger import Ledger

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/seed_examples.json").read_text())
MIB, GIB = 2**20, 2**30
#: The axes of the table, in ours; sequence parallelism runs over the ranks of tp.
AXES = {"DP": "edp", "PP": "pp", "TP": "tp", "SP": "tp", "EP": "ep"}
OPERATIONS = {"p2p": "send_receive"}


@pytest.fixture(scope="module")
def inner() -> Estimate:
    return estimate_named("traffic-table", "dgx_h100", "traffic-table", None, None, rank="inner")


@pytest.mark.parametrize("row", GOLDEN["traffic_table"]["rows"], ids=lambda row: row["axis"])
def test_the_table_of_the_source_text_is_that_of_an_inner_rank(inner: Estimate, row) -> None:
    sizes = row["per_transfer_MB"] if isinstance(row["per_transfer_MB"], list) else [
        row["per_transfer_MB"]
    ]  # fmt: skip
    transfers = row["transfers"] if isinstance(row["transfers"], list) else [row["transfers"]]
    axis, op = AXES[row["axis"]], OPERATIONS.get(row["op"], row["op"])
    rows = [one for one in by_axis(inner.traffic) if (one.axis, one.op) == (axis, op)]
    entries = [next(one for one in rows if one.transfers == count) for count in transfers]
    assert [one.bytes_each / MIB for one in entries] == pytest.approx(sizes)
    total = sum(one.total_bytes for one in entries)
    assert total / GIB == pytest.approx(row["total_GB"], abs=0.01)
    # The table leaves out the sums of norms, and cuts its shares instead of rounding them.
    assert sum(one.share for one in entries) == pytest.approx(row["share"], abs=1e-4)


def test_shares_add_up_and_ranks_differ(inner: Estimate) -> None:
    rows = by_axis(inner.traffic)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.total_bytes for row in rows) == inner.traffic.total().wire_bytes
    first = estimate_named("traffic-table", "dgx_h100", "traffic-table", None, None, rank=0)
    sends = [one.transfers for one in by_axis(first.traffic) if one.axis == "pp"]
    assert sends == [13]
    assert by_axis(Ledger()) == []


@pytest.mark.parametrize(
    ("rank", "number"), [("first", 0), ("inner", 4), ("last", 7), ("worst", 3), ("5", 5), (0, 0)]
)
def test_names_of_pipeline_ranks(rank: str | int, number: int) -> None:
    assert pipeline_rank(rank, 8, worst=3) == number


def test_a_rank_of_our_own_ledger_is_the_one_that_is_asked_for() -> None:
    plan = "pp=4,microbatches=8,schedule=1f1b"
    first, last = (
        estimate_named("tiny", "laptop_cpu", plan, 32, 8, rank=rank) for rank in ("first", "last")
    )
    phases = [
        {row.phase for row in estimate.traffic.entries() if row.axis == "pp" and row.wire_bytes}
        for estimate in (first, last)
    ]
    assert "forward" in phases[0] and "backward" not in phases[0]
    assert "backward" in phases[1] and "forward" not in phases[1]


def test_a_window_bounds_the_cache() -> None:
    windowed = load_model("gpt-oss-20b").shape
    short, long = (kv_cache_bytes(windowed, 1, tokens) for tokens in (100, 100_000))
    per_layer = short / 100 / windowed.num_layers
    kept = sum(min(100_000, kind.window or 100_000) for kind in windowed.kinds)
    assert long == pytest.approx(per_layer * kept)
    assert long < 1000 * short


def test_the_text_names_cache_intensity_and_the_rank(inner: Estimate) -> None:
    text = estimate_text(inner, CacheSize(32, 2048))
    assert "pipeline rank 2 of 4" in text
    assert "32 sequences of 2,048 tokens" in text
    assert "FLOP/byte" in text
    assert inner.to_json(CacheSize(1, 1))["memory"]["kv_cache_bytes"] == 4 * 128 * 24576


def test_intensity_of_a_product() -> None:
    assert product_intensity(2, 3, 5, 2) == 2 * 2 * 3 * 5 / (2 * (6 + 15 + 10))
    # One row leaves the weights, each read once for two operations.
    assert product_intensity(1, 1e6, 1e6, 2) == pytest.approx(1, rel=1e-4)
    assert decoding_intensity(32, 2) == 32
    machine = load_cluster("dgx_h100")
    assert device_balance(machine, "bfloat16") == pytest.approx(989.4e12 / 3.35e12)


def test_experts_see_fewer_rows_than_dense_layers() -> None:
    shape = load_model("deepseek-v2-lite").shape
    layout = PlannedLayout(dp=8, ep=8, seq_len=4096, global_batch=8)
    intensities = layer_intensities(shape, layout)
    assert set(intensities) == {"attention", "mlp", "experts"}
    rows = shape.experts_per_token * 4096 * 8 / shape.num_experts
    width = 2 * shape.expert_intermediate_size
    assert intensities["experts"] == product_intensity(rows, shape.hidden_size, width, 2)
    wider = layer_intensities(shape, layout.changed(microbatch=1, seq_len=8192))
    assert wider["experts"] > intensities["experts"]


def test_below_adapters_the_text_has_the_operations_of_the_json() -> None:
    """Those of two forwards, and of a third one of the attention core."""
    plan = "dp=2,adapters=true,trained_dense=0.01,trained_experts=0.01"
    priced = estimate_named("llama3-8b", "dgx_h100", plan, 2048, 2)
    flops = priced.to_json()["flops"]
    training = flops["full_training_per_token"]
    assert training == 2 * flops["full_forward_per_token"] + priced.full.attention
    assert f"{training / 1e9:.2f} (full attention)" in estimate_text(priced)
