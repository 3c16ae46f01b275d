"""The search finds the best layout of its space; no layout that it skips is better."""

from __future__ import annotations

import shlex
from collections import Counter
from functools import cache
from unittest import mock

import numpy as np
import pytest

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search import search
from moemesh.planner.search.command import plan, plan_named, to_json, train_command
from moemesh.planner.search.search import SearchSpace, choose
from moemesh.planner.search.space import Space, families
from moemesh.planner.shapes.load_shape import load_model
from moemesh.sharding.load_run import load_run


def cluster(nodes: int, memory_gib: float = 80.0) -> Cluster:
    loaded = load_cluster("dgx_h100")
    return loaded.model_copy(update={"nodes": nodes, "memory_bytes": int(memory_gib * 2**30)})


def space(machine: Cluster, seq_len: int = 4096, batch: int = 64, **more: object) -> Space:
    return Space(
        num_devices=machine.num_devices,
        node_size=machine.gpus_per_node,
        seq_len=seq_len,
        global_batch=batch,
        **more,  # type: ignore[arg-type]
    )


@cache
def search_space(
    model: str, nodes: int, memory_gib: float = 80.0, seq_len: int = 4096
) -> SearchSpace:
    machine = cluster(nodes, memory_gib)
    return SearchSpace(load_model(model).shape, machine, space(machine, seq_len))


CASES = [("mixtral-8x7b", 4), ("llama3-8b", 2), ("deepseek-v2-lite", 2), ("qwen3-30b-a3b", 2)]


@pytest.mark.representative("llama3-8b-2", "deepseek-v2-lite-2")
@pytest.mark.parametrize(("model", "nodes"), CASES)
def test_columns_and_single_layouts_need_the_same_memory(model: str, nodes: int) -> None:
    layouts = search_space(model, nodes)
    rows = np.random.default_rng(0).choice(layouts.examined, 150, replace=False)
    for index in map(int, rows):
        exact = layouts.memory(index).needed
        assert layouts.needed[index] == pytest.approx(exact, rel=1e-9), layouts.layout(index).key


@pytest.mark.representative("llama3-8b-2", "deepseek-v2-lite-2")
@pytest.mark.parametrize(("model", "nodes"), CASES)
def test_the_bound_of_the_time_is_below_the_price_and_close(model: str, nodes: int) -> None:
    layouts = search_space(model, nodes)
    rows = np.random.default_rng(1).choice(layouts.examined, 80, replace=False)
    floor = layouts.certificate(1.0).compute_floor_seconds
    for index in map(int, rows):
        bound, price = layouts.bounds[index], layouts.seconds(index)
        assert floor <= bound <= price * (1 + 1e-9), layouts.layout(index).key
        assert bound >= 0.6 * price, layouts.layout(index).key


def test_many_layouts_at_once_have_the_prices_of_one_by_one() -> None:
    layouts = search_space("qwen3-30b-a3b", 2)
    rows = np.random.default_rng(2).choice(layouts.examined, 70, replace=False)
    many = [layouts.layout(index) for index in map(int, rows)]
    prices = layouts.pricing.seconds_of_all(layouts.shape, many)
    for layout, price in zip(many, prices, strict=True):
        assert price == pytest.approx(layouts.pricing.seconds(layouts.shape, layout), rel=1e-12)


@pytest.mark.representative("llama3-8b-80.0")
@pytest.mark.parametrize("memory_gib", [50.0, 80.0])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "llama3-8b"])
def test_the_roles_are_those_of_a_plain_loop_over_all_layouts(
    model: str, memory_gib: float
) -> None:
    machine = cluster(1, memory_gib)
    narrow = space(machine, batch=16, schedules=("1f1b", "zb_v"), largest_microbatch=4)
    layouts = SearchSpace(load_model(model).shape, machine, narrow)
    safe = 0.7 * machine.memory_bytes
    fits = [i for i in range(layouts.examined) if layouts.needed[i] <= layouts.capacity]
    seconds = {index: layouts.seconds(index) for index in fits}
    least = min(seconds.values())
    rows = choose(layouts, 6, safe)
    of_role = {role: number for number, row in rows.items() for role in row.roles}
    assert seconds[of_role["fastest"]] == least
    near = [index for index in fits if seconds[index] <= 1.1 * least]
    pool = [index for index in near if layouts.needed[index] <= safe]
    tie = 1.02 * min((seconds[index] for index in pool), default=least)
    ties = [index for index in pool or near if seconds[index] <= tie]
    first = of_role["recommended"]
    assert next(iter(rows)) == first and first in ties
    assert words(layouts, first) == min(words(layouts, index) for index in ties)
    # Where the leanest within 10 % alone is safe it is recommended, however many mechanisms it has.
    least_memory = min(layouts.needed[i] for i in near)
    (lean, *_), safe_one = choose(layouts, 6, least_memory), layouts.needed[first]
    assert layouts.needed[lean] == least_memory <= safe_one
    simplest = min(words(layouts, i) for i in fits if seconds[i] <= 1.05 * least)
    assert words(layouts, of_role["simplest"]) == simplest
    if "safest" in of_role:
        fastest_safe = min(seconds[i] for i in fits if layouts.needed[i] <= safe)
        assert layouts.needed[of_role["safest"]] <= safe
        assert seconds[of_role["safest"]] <= fastest_safe * 1.02
    else:
        assert all(layouts.needed[i] > safe for i in fits)
    times = [seconds[number] for number in list(rows)[1:]]
    assert times == sorted(times) and len(rows) <= 6
    assert (
        list(choose(layouts, 1, safe)) == list(dict.fromkeys([first, of_role["fastest"]]))
        or first == of_role["fastest"]
    )


def test_a_small_model_has_microbatches_of_more_than_16_sequences() -> None:
    """One of 64 sequences takes less than half the time of four of 16, whose launches dominate."""
    machine = load_cluster("one_h100")
    tiny = SearchSpace(load_model("tiny").shape, machine, space(machine))
    (first,) = tiny.fitting(tiny.capacity, 1)
    few = SearchSpace(tiny.shape, machine, space(machine, largest_microbatch=16))
    (first_of_few,) = few.fitting(few.capacity, 1)
    assert tiny.layout(first).microbatch == 64
    assert tiny.seconds(first) < few.seconds(first_of_few) / 2
    large = load_model("llama3-8b").shape
    assert [space(machine, seq_len=s).most_sequences(large) for s in (4096, 512)] == [16, 64]


def test_parts_of_an_answer_add_up() -> None:
    """Memory to the bytes that a device needs, time to the step, for every printed layout."""
    request = PlanRequest(
        model="deepseek-v2-lite", cluster=cluster(1), seq_len=4096, global_batch=64
    )
    for row in to_json(plan_named(request))["plans"]:
        parts = {**row["memory"], "rank": 0}
        assert sum(parts.values()) == pytest.approx(row["memory_bytes"])
        assert sum(row["breakdown"].values()) == pytest.approx(row["seconds"])


def test_ties_with_more_mechanisms_than_the_pick_are_not_priced() -> None:
    machine, texts = cluster(2), list[str]()
    shape = load_model("deepseek-v2-lite").shape
    layouts = SearchSpace(shape, machine, space(machine, batch=256), texts.append)
    rows = choose(layouts, 2, machine.memory_bytes)
    limit = 1.02 * min(row.seconds for row in rows.values())
    ties = (layouts.bounds <= limit) & (layouts.needed <= layouts.capacity)
    assert sum("priced" in text for text in texts) < np.count_nonzero(ties)


def test_a_pick_as_fast_as_any_is_the_fastest() -> None:
    """The pick has the fewest mechanisms of layouts of equal time, another one the least memory."""
    machine = cluster(1)
    narrow = space(machine, batch=16, schedules=("1f1b",), largest_microbatch=2)
    layouts = SearchSpace(load_model("llama3-8b").shape, machine, narrow)
    with (
        mock.patch.object(layouts, "bounds", np.ones(layouts.examined)),
        mock.patch.object(layouts, "seconds", lambda index: 1.0),
    ):
        rows = choose(layouts, 3, machine.memory_bytes)
        smallest = layouts.fitting(layouts.capacity, 1)[0]
    first, *others = rows
    assert first != smallest and "fastest" in rows[first].roles
    assert not any("fastest" in rows[index].roles for index in others)


def words(layouts: SearchSpace, index: int) -> int:
    """Mechanisms, counted by hand."""
    one = layouts.layout(index)
    degrees = sum(getattr(one, axis) > 1 for axis in ("pp", "dp", "cp", "tp", "ep", "etp"))
    of_schedule = {"zb_v": 2}.get(one.schedule, 0)
    spans_nodes = one.ep * one.etp > layouts.space.node_size
    return degrees + of_schedule + bool(one.recompute) + spans_nodes


@pytest.mark.parametrize(
    ("model", "ep", "dispatcher"),
    [
        # 8 of 128 experts: a token visits 5.3 of 8 ranks, and 1.99 of 2.
        ("qwen3-30b-a3b", 8, "hierarchical"),
        ("qwen3-30b-a3b", 2, "hierarchical"),
        # No exchange at all.
        ("qwen3-30b-a3b", 1, "all_to_all"),
        # 2 of 8 experts: 2 ranks with one expert a rank, 1.86 of 4 ranks.
        ("mixtral-8x7b", 8, "all_to_all"),
        ("mixtral-8x7b", 4, "all_to_all"),
        # 6 of 64 experts: 4.4 of 8 ranks.
        ("deepseek-v2-lite", 8, "hierarchical"),
    ],
)
def test_a_clearly_smaller_exchange_inside_a_node_is_proposed(
    model: str, ep: int, dispatcher: str
) -> None:
    machine = cluster(1)
    layouts = SearchSpace(load_model(model).shape, machine, space(machine, fixed={"ep": ep}))
    assert layouts.examined > 100
    chosen = layouts.layout(layouts.fitting(float("inf"), 1)[0])
    assert chosen.dispatcher == dispatcher
    other = {"hierarchical": "all_to_all", "all_to_all": "hierarchical"}[dispatcher]
    seconds = layouts.pricing.seconds(layouts.shape, chosen)["experts"]
    changed = layouts.pricing.seconds(layouts.shape, chosen.changed(dispatcher=other))["experts"]
    assert changed > seconds / 0.8 if dispatcher == "hierarchical" else changed >= 0.8 * seconds


def test_rows_are_different_answers() -> None:
    """Layouts that cut the weights alike, by the same schedule and recomputation, are one row."""
    layouts = search_space("qwen3-30b-a3b", 2)
    rows = choose(layouts, 5, 0.7 * layouts.cluster.memory_bytes)
    keys = ("pp", "tp", "ep", "etp", "schedule", "stages_per_rank", "recompute")
    others = [row.layout for row in rows.values() if not row.roles]
    answers = {(one.zero > 1, *(getattr(one, key) for key in keys)) for one in others}
    assert len(answers) == len(others)
    assert sum(row.alike for row in rows.values()) > 0


def test_every_layout_is_legal_and_unique() -> None:
    machine = cluster(2)
    shape, rejected = load_model("mixtral-8x7b").shape, Counter[str]()
    keys: list[str] = []
    for family in families(shape, space(machine), rejected):
        for number in range(0, family.size, 7):
            layout = family.layout(number)
            assert layout.world_size == machine.num_devices
            assert layout.microbatches in family.columns.microbatches
            keys.append(layout.key)
    assert len(keys) == len(set(keys)) > 100
    assert rejected["ZeRO-2 or 3 with a pipeline"] > 0


@pytest.mark.slow
def test_more_memory_is_never_slower_and_the_binding_constraint_says_so() -> None:
    times = []
    for memory in (20.0, 45.0, 160.0):
        layouts = search_space("deepseek-v2-lite", 1, memory)
        best = layouts.fitting(layouts.capacity, 1)
        times.append(layouts.seconds(best[0]) if best else float("inf"))
    assert times == sorted(times, reverse=True) and times[-1] < times[1]
    small = plan(load_model("deepseek-v2-lite"), cluster(1, 45.0), space(cluster(1, 45.0)), 2)
    assert small.advice.binding.startswith("memory of pipeline rank")
    seconds = [then for _, then in small.advice.sensitivity]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < small.candidates[0].seconds


def test_what_cannot_be_trained_is_said_and_can_be_left_out() -> None:
    """A sequence longer than the positions of the model's RoPE."""
    longer = ("qwen3-30b-a3b", "dgx_h100", 65536, 32)
    for row in to_json(plan_named(PlanRequest(*longer)))["plans"]:
        assert row["not_trained"][0].startswith("data.seq_len = 65536") and row["command"] is None
    with pytest.raises(ConfigError) as caught:
        plan_named(PlanRequest(*longer, trainable=True))
    assert "max_position_embeddings (40960)" in str(caught.value)
    trained = to_json(
        plan_named(PlanRequest("deepseek-v2-lite", "dgx_h100", 4096, 32, trainable=True))
    )
    assert [row["not_trained"] for row in trained["plans"]] == [[]] * len(trained["plans"])


def test_the_train_command_gives_back_the_layout(tmp_path: object) -> None:
    trained = space(cluster(1), 128, 32, trainable=True)
    answer = plan(load_model("tiny"), cluster(1), trained, 5)
    for candidate in answer.candidates:
        words = shlex.split(train_command(candidate.layout, load_model("tiny")))[2:]
        config = load_run([], [word for word in words if word != "--set"]).config
        again = from_plan(config.plan, seq_len=128, global_batch=32)
        assert again.changed(ranks_per_node=8) == candidate.layout


def test_json_keeps_the_contract() -> None:
    answer = to_json(plan_named(PlanRequest("tiny", "dgx_a100", 128, 32, top=2)))
    assert {"plans", "lower_bound_seconds", "examined", "rejected"} <= answer.keys()
    assert len(answer["plans"]) == 2
    for row in answer["plans"]:
        assert {"plan", "seconds", "memory_bytes", "breakdown"} <= row.keys()
        assert sum(row["breakdown"].values()) == pytest.approx(row["seconds"], rel=0.02)
    assert answer["lower_bound_seconds"] <= answer["plans"][0]["seconds"]
    roles = [role for row in answer["plans"] for role in row["roles"]]
    assert sorted(roles) == ["fastest", "recommended", "safest", "simplest"]
    times = [row["seconds"] for row in answer["plans"]]
    assert times == sorted(times) and answer["lower_bound_seconds"] == times[0]
    assert "fastest" in answer["plans"][0]["roles"]
    (recommended,) = [row for row in answer["plans"] if "recommended" in row["roles"]]
    assert recommended["plan"] == answer["recommended"]


def test_layouts_come_in_order_however_few_are_sorted_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.array([3.0, 1.0, 2.0, 1.0, 2.0, 9.0, 1.0, 0.5, 3.0])
    numbers = np.array([0, 1, 2, 3, 4, 6, 7, 8])
    expected = [7, 1, 3, 6, 2, 4, 0, 8]
    for first in (1, 2, 3, 5, 7, 8, 100):
        monkeypatch.setattr(search, "_FIRST", first)
        assert list(search._ascending(numbers, values)) == expected
