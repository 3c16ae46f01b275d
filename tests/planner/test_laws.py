"""Laws that predictions obey for any layout: what needs no more memory, and what takes no less."""

from __future__ import annotations

import random
from math import gcd
from typing import Any

import pytest

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError
from moemesh.config.plan import RECOMPUTED
from moemesh.planner.layout_sources import read_plan
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import plan_keys, plan_named, to_json
from moemesh.planner.search.search import SearchSpace
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.price import pricing

H100 = load_cluster("dgx_h100")
BATCH: dict[str, Any] = {"seq_len": 4096, "global_batch": 8}
ADAPTERS: dict[str, Any] = {"adapters": True, "trained_dense": 0.01, "trained_experts": 0.01}


def shape_of(model: str) -> ModelShape:
    return load_model(model).shape


def needed(shape: ModelShape, **values: Any) -> float:
    layout = PlannedLayout(**BATCH, **values)
    return pricing(H100).memory(shape, layout).needed


@pytest.mark.parametrize(
    ("degrees", "less", "more"),
    [
        # One layer: all its tensors are recomputed, and its kept input is one of them.
        ({}, {"recompute": RECOMPUTED["full"]}, {}),
        ({"tp": 8, "ep": 2}, {"recompute": RECOMPUTED["full"]}, {}),
        # Nothing is cut on one replica, so that nothing is gathered.
        ({"tp": 8, "ep": 8}, {"zero": 3}, {}),
        ({"tp": 8, "ep": 8, "recompute": RECOMPUTED["full"]}, {}, {"zero": 3}),
        # Frozen weights are gathered in their stored form and have no gradients.
        ({"dp": 8, "zero": 3, **ADAPTERS}, {"base": "nf4"}, {}),
        ({"dp": 8, "zero": 3, "reshard": "step", **ADAPTERS}, {"base": "nf4"}, {}),
        ({"dp": 8, "zero": 3}, ADAPTERS, {}),
    ],
)
def test_what_saves_memory_never_needs_more(degrees, less, more) -> None:
    shape = shape_of("qwen3-30b-a3b").truncated(1)
    smaller, larger = needed(shape, **degrees, **less), needed(shape, **degrees, **more)
    assert smaller <= larger * (1 + 1e-9)


def test_zero3_gathers_experts_alone_where_only_these_have_replicas() -> None:
    """tp = 8, ep = 2: the four copies of an expert are cut, dense weights are not."""
    shape, layout = shape_of("mixtral-8x7b").truncated(1), {"tp": 8, "ep": 2}
    assert needed(shape, **layout, zero=1) < needed(shape, **layout)
    weights = 4 * 3 * 4096 * 14336  # of the experts of a rank
    # 2 + 4 bytes of weights and gradients are cut by 4; three units of 2 bytes are gathered.
    gathered = needed(shape, **layout, zero=3) - needed(shape, **layout, zero=1)
    exchanged = 2 * 2 * 4096 * 4096  # two inputs of a block, gathered over tp
    assert gathered - exchanged == pytest.approx(weights * (3 * 2 - 6 * 3 / 4), rel=1e-6)


def test_gradients_of_experts_are_summed_without_replicas_of_dense_weights() -> None:
    """An all-reduce of four bytes a weight over four ranks: twice 3/4 of it over NVLink."""
    price, shape = pricing(H100), shape_of("mixtral-8x7b")
    layout = PlannedLayout(tp=8, ep=2, microbatch=8, **BATCH)
    alone = price.seconds(shape, layout.changed(ep=8))
    summed = price.seconds(shape, layout)
    assert alone["data"] == 0.0
    wire = 2 * 3 / 4 * 4 * (32 * 4 * 3 * 4096 * 14336) / H100.intra_node_bandwidth
    assert 0 < summed["data"] < 2 * wire
    dense = [price.seconds(shape_of("llama3-8b"), layout.changed(ep=1, zero=z)) for z in (0, 3)]
    assert dense[0] == dense[1]
    waits = [price.seconds(shape, layout.changed(zero=zero))["data"] for zero in (1, 3)]
    assert min(waits) > 0


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_and_update_of_adapters_follow_their_size(zero: int) -> None:
    """Up to those of all weights; none without any."""
    price, shape = pricing(H100), shape_of("mixtral-8x7b").truncated(8)
    layout = PlannedLayout(dp=8, ep=2, zero=zero, **BATCH)
    whole = price.seconds(shape, layout)
    rows: list[dict[str, float]] = []
    for share in (0.0, 0.01, 0.02, 1.0):
        adapted = layout.changed(adapters=True, trained_dense=share, trained_experts=share)
        rows.append(price.seconds(shape, adapted))
    assert rows[0]["data"] == rows[0]["optimizer"] == 0
    assert rows[2]["optimizer"] == pytest.approx(2 * rows[1]["optimizer"])
    assert rows[3]["optimizer"] == pytest.approx(whole["optimizer"])
    assert 0 < rows[1]["data"] < rows[2]["data"] < rows[3]["data"]
    assert rows[1]["total"] < rows[2]["total"] < rows[3]["total"]


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen2-57b-a14b", "mixtral-8x7b"])
def test_no_part_of_a_step_is_negative(model) -> None:
    """Slow links: a shared expert's input is gathered once, not a second time in the backward."""
    slow = H100.model_copy(update={"intra_node_bandwidth": 1e8})
    layout = PlannedLayout(tp=4, dp=2, microbatch=4, **BATCH)
    parts = pricing(slow).seconds(shape_of(model), layout)
    total = parts.pop("total")
    assert min(parts.values()) >= 0 and sum(parts.values()) == pytest.approx(total)


def faster(cluster: Cluster, part: str, factor: float) -> Cluster:
    """The cluster with `factor` times the rate of one part."""
    rate = getattr(cluster, part)
    if part == "peak_flops":
        return cluster.model_copy(update={part: {key: factor * it for key, it in rate.items()}})
    return cluster.model_copy(update={part: factor * rate})


#: Layouts of a random question, by key.
OPTIONS: dict[str, list[Any]] = {
    "pp": [2, 4, 8],
    "dp": [1, 2, 4],
    "tp": [1, 2],
    "ep": [1, 2, 4, 8],
    "schedule": ["1f1b", "zb_h1", "zb_h2", "zb_v", "gpipe", "dualpipe", "dualpipe_v"],
    "seq_len": [16, 128, 1024, 4096],
    "zero": [0, 1, 2],
    "recompute": [frozenset(), frozenset({"full"}), frozenset({"experts"})],
    "adapters": [False, False, True],
}


@pytest.mark.parametrize(
    ("seed", "questions"), [(10, 40), pytest.param(1, 600, marks=pytest.mark.slow)]
)
def test_a_faster_part_never_slows_a_step(seed: int, questions: int) -> None:
    """Not even where launches and slow parts hide each other, and in schedules that defer the
    weight gradients."""
    chance, slower = random.Random(seed), list[Any]()
    for _ in range(questions):
        keys = {key: chance.choice(values) for key, values in OPTIONS.items()}
        name = chance.choice(("qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b", "llama3-8b"))
        shape = shape_of(name).truncated(chance.choice((16, 24)))
        keys["ep"] = gcd(keys["ep"], keys["dp"] * keys["tp"]) if shape.is_moe else 1
        batch = chance.choice((2, 4)) * keys["pp"] * keys["dp"]
        layout = PlannedLayout(**keys, global_batch=batch)
        parts = ("peak_flops", "memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth")
        part, factor = chance.choice(parts), chance.choice((1.05, 1.5, 4, 30))
        cluster = load_cluster(chance.choice(("dgx_h100", "dgx_a100", "hgx_h800")))
        before, after = (
            pricing(one).seconds(shape, layout)["total"]
            for one in (cluster, faster(cluster, part, factor))
        )
        if after > before * (1 + 1e-9):
            slower.append((after / before, part, factor, name, layout))
    assert not slower


def test_the_search_cuts_states_of_experts_without_replicas_of_dense_weights() -> None:
    shape = shape_of("mixtral-8x7b")
    space = Space(
        num_devices=8, node_size=8, fixed={"tp": 8, "pp": 1, "etp": 1, "microbatch": 8}, **BATCH
    )
    search = SearchSpace(shape, H100, space)
    layouts = [search.layout(index) for index in range(search.examined)]
    assert {layout.zero for layout in layouts if layout.edp > 1} == {0, 1, 2, 3}
    assert {layout.zero for layout in layouts if layout.edp == 1} == {0}
    assert len({layout.key for layout in layouts}) == len(layouts)
    for index, layout in enumerate(layouts):
        assert search.needed[index] == pytest.approx(search.memory(index).needed, rel=1e-9), layout
        assert search.bounds[index] <= search.seconds(index) * (1 + 1e-9), layout


def test_one_layout_is_the_recommended_one() -> None:
    request = PlanRequest("tiny", "laptop_cpu", 512, 4, top=1)
    planned = plan_named(request)
    (row,) = to_json(planned)["plans"]
    assert row["plan"] == to_json(planned)["recommended"] == plan_keys(planned.candidates[0].layout)
    assert "fastest" not in row["roles"]


@pytest.mark.parametrize(
    "values",
    [{"imbalance": 1e300}, {"capacity_factor": 2**63}, {"optimizer_bytes": 10**30}, {"dtype": []}],
)
def test_numbers_beyond_all_machines_are_refused(values) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan({"dp": 2, **values}, **BATCH)
    (problem,) = caught.value.problems
    assert problem.key == f"plan.{next(iter(values))}"
