"""Advice for a layout that does not fit: the smallest change that makes it fit."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.cli.plan_text import estimate_text
from moemesh.config.cluster import Cluster, load_cluster
from moemesh.planner.estimate import estimate, estimate_named
from moemesh.planner.layout_sources import read_plan
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search import command
from moemesh.planner.search.rival import edits, nearest_that_fits
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.timing.price import pricing
from tests.test_cli import Invoke

CLUSTER = load_cluster("dgx_h100")


def layout(text: str, model: str = "mixtral-8x7b", batch: int = 32) -> PlannedLayout:
    return read_plan(text, seq_len=4096, global_batch=batch, model=load_model(model)).layout


def needed(model: str, cluster: Cluster, changed: PlannedLayout) -> tuple[float, float]:
    memory, seconds = pricing(cluster).price(load_model(model).shape, changed)
    return memory.needed, seconds["total"]


CASES = [
    "tp=2,dp=8,ep=8,microbatch=1",
    "tp=8,dp=2,microbatch=2",
    "pp=2,dp=8,ep=4,microbatch=1,data=zero1",
]


@pytest.mark.parametrize("text", CASES)
def test_the_nearest_is_the_fastest_of_all_single_changes_that_fit(text: str) -> None:
    """Against a plain loop over all of them; two keys only where no single one helps."""
    start, model = layout(text), "mixtral-8x7b"
    shape = load_model(model).shape
    capacity = CLUSTER.memory_bytes * pricing(CLUSTER).usable_share
    assert needed(model, CLUSTER, start)[0] > capacity
    near = nearest_that_fits(shape, CLUSTER, start)
    assert near is not None and near.memory.needed <= capacity
    assert near.layout.world_size == start.world_size
    for count in (1, 2):
        prices = [
            needed(model, CLUSTER, other) for other in edits(shape, start, count, node_size=8)
        ]
        fitting = [seconds for size, seconds in prices if size <= capacity]
        if fitting:
            assert near.seconds == pytest.approx(min(fitting))
            assert near.change.count("->") - ("dp " in near.change) == count
            return
    pytest.fail("the answer changes more than two keys")


def test_edits_change_as_many_keys_and_keep_the_devices() -> None:
    start = layout("tp=2,dp=4,ep=8,microbatch=1")
    shape = load_model("mixtral-8x7b").shape
    seen: set[str] = set()
    for other in edits(shape, start, 1, node_size=8):
        assert other.world_size == start.world_size and other.global_batch == start.global_batch
        assert other.key not in seen
        seen.add(other.key)
    assert any("recompute=full" in key for key in seen) and any("data=zero1" in key for key in seen)


@pytest.mark.parametrize(
    "text",
    [
        "pp=2,dp=8,layers_per_stage=[15, 17],microbatch=2,recompute=norm+moe",
        "pp=2,dp=4,tp=2,schedule=zb_v,data=zero1,recompute=selective,microbatch=1",
        "tp=4,dp=4,sequence_parallel=false,zero=3,zero_group=2,precision=float8,microbatch=1",
    ],
)
def test_a_layout_can_be_read_back_from_its_text(text: str) -> None:
    start = layout(text)
    assert layout(start.text) == start


def estimated(text: str, **keys: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"cluster": "dgx_h100", "seq_len": 4096, "global_batch": 32} | keys
    return estimate_named("mixtral-8x7b", plan=text, **settings).to_json()


def test_estimate_says_it_as_json_and_in_words() -> None:
    document = estimated(CASES[0])
    assert not document["memory"]["fits"]
    near = document["nearest_that_fits"]
    assert near["memory_bytes"] < document["memory"]["device_bytes"] and "->" in near["change"]
    again = estimate(load_model("mixtral-8x7b"), layout(near["plan"]), CLUSTER)
    assert again.fits(again.peak.needed) and again.seconds["total"] == pytest.approx(
        near["seconds"]
    )
    text = estimate_text(estimate_named("mixtral-8x7b", "dgx_h100", CASES[0], 4096, 32))
    assert f"nearest that fits: {near['change']}" in text and "does NOT fit" in text


def test_where_nothing_fits_the_smallest_is_told() -> None:
    document = estimated("dp=2,microbatch=1")
    assert document["nearest_that_fits"]["plan"] is None
    assert "more than there is" in document["nearest_that_fits"]["reason"]


def test_a_layout_that_fits_needs_no_advice() -> None:
    document = estimate_named("tiny", "dgx_h100", "tp=2,ep=2", 128, 8).to_json()
    assert document["memory"]["fits"] and document["nearest_that_fits"] is None


def test_plan_says_that_nothing_fits_with_exit_code_2(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "remedies", lambda *_: ())  # searches with other options
    words = "plan --model deepseek-v3 --cluster dgx_h100 --nodes 1 --seq-len 4096 --global-batch 64"
    code, out, err = invoke(*words.split(), "--json")
    assert (code, out) == (2, "")
    assert "fits in 80.0 GiB" in err and "more than there is" in err
