"""Measured collectives in the step time: the value of the table if it has one, else α and β."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.config.cluster import Cluster, LinkCurve, load_cluster
from moemesh.planner.estimate import estimate_named
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.search.search import SearchSpace
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.timing.links import Links
from moemesh.planner.timing.price import pricing

#: Latency next to none: closed forms are then linear in the size, and so is the table between its
#: points.
NO_LATENCY = {"collective_latency_us": 1e-9}
NODE = 8


def cluster(**keys: Any) -> Cluster:
    known: dict[str, Any] = {"constants": NO_LATENCY, "nodes": 4}
    return load_cluster("dgx_h100").model_copy(update=known | keys)


def curve(operation: str, ranks: int, members: int, *points: tuple[float, float]) -> LinkCurve:
    sizes, seconds = zip(*points, strict=True)
    return LinkCurve(
        operation=operation,  # type: ignore[arg-type]
        ranks=ranks,
        members_per_node=members,
        bytes=sizes,
        seconds=seconds,
    )


def closed_curves(machine: Cluster) -> tuple[LinkCurve, ...]:
    """The closed forms of the time model for every shape of group on `machine`, as if measured."""
    constants = pricing(machine).constants
    intra = machine.intra_node_bandwidth * constants.intra_node_efficiency
    inter = machine.inter_node_bandwidth * constants.inter_node_efficiency
    loss = constants.network_contention
    links = Links(node_size=NODE, intra=intra, inter=inter, contention=loss)
    curves: list[LinkCurve] = []
    for ranks in (2, 4, 8, 16, 32):
        for stride in (1, 2, 4, 8, 16):
            if ranks * stride > machine.num_devices:
                continue
            members = min(max(NODE // stride, 1), ranks)
            rate = links.bandwidth(ranks, stride)
            share, across = (ranks - 1) / ranks, 1 - members / ranks
            times = {
                "all_gather": share / rate,
                "reduce_scatter": share / rate,
                "all_reduce": 2 * share / rate,
                "all_to_all": max(across / float(links.network(ranks / members)), share / intra),
            }
            for name, per_byte in times.items():
                points = [(size, size * float(per_byte)) for size in (1e3, 1e9)]
                curves.append(curve(name, ranks, members, *points))
    for members, rate in ((2, intra), (1, inter)):
        curves.append(curve("send", 2, members, (1e3, 1e3 / rate), (1e9, 1e9 / rate)))
    unique = {(c.operation, c.ranks, c.members_per_node): c for c in curves}
    return tuple(unique.values())


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 4, "dp": 8},
    {"tp": 8, "dp": 4, "zero": 1, "recompute": frozenset({"full"})},
    {"tp": 8, "dp": 4, "sequence_parallel": False},
    {"tp": 2, "dp": 8, "cp": 2, "ep": 8},
    {"dp": 16, "tp": 2, "ep": 8, "etp": 2, "sequence_parallel": False},
    {"dp": 32, "ep": 8, "zero": 1, "attention_exit": "reduce_scatter"},
    {"dp": 32, "ep": 4, "dispatcher": "hierarchical"},
    {"tp": 2, "dp": 16, "ep": 16, "attention_exit": "all_to_all"},
    {"pp": 4, "tp": 2, "dp": 4, "ep": 4},
    {"pp": 2, "tp": 4, "dp": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
]


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_a_table_of_slow_links_gives_the_time_of_a_cluster_with_slow_links(
    keys: dict[str, Any],
) -> None:
    """The closed forms of one machine, handed to another as its measurements."""
    fast = cluster()
    slow = cluster(
        intra_node_bandwidth=fast.intra_node_bandwidth / 7,
        inter_node_bandwidth=fast.inter_node_bandwidth / 3,
    )
    measured = cluster(links=closed_curves(slow))
    shape = load_model("mixtral-8x7b").shape
    if keys.get("ep") == 16:
        shape = load_model("qwen3-30b-a3b").shape
    layout = PlannedLayout(seq_len=4096, global_batch=64, **keys)
    wanted, measured_seconds, bare = (
        pricing(one).price(shape, layout)[1] for one in (slow, measured, fast)
    )
    assert measured_seconds["total"] == pytest.approx(wanted["total"], rel=1e-9)
    assert wanted["total"] > 1.02 * bare["total"], "too small a difference for this test"
    for part in ("tensor", "context", "experts", "data", "pipeline"):
        assert measured_seconds[part] == pytest.approx(wanted[part], rel=1e-6, abs=1e-9), part


def test_the_time_of_a_collective_is_the_value_of_the_table(tmp_path: Path) -> None:
    """Through the file and the verb, between two measured sizes and beyond them."""
    tokens, hidden = 4096, 4096
    stream = tokens * hidden * 2
    gather = curve("all_gather", 4, 4, (stream / 4, 1e-3), (stream * 4, 9e-3))
    scatter = curve("reduce_scatter", 4, 4, (stream / 16, 2e-3), (stream / 4, 4e-3))
    file = tmp_path / "cluster.toml"
    file.write_text(cluster(links=(gather, scatter)).to_toml("Two curves."))
    plan = "tp=4,dp=8,microbatch=1"
    seconds = estimate_named("llama3-8b", str(file), plan, tokens, 64).seconds
    # The geometric mean in between; beyond the last size at least proportional to it.
    once = 3e-3 + 4e-3 * 4
    # The backward gathers inputs of blocks a second time.
    gathered = pricing(load_cluster(str(file))).constants.sequence_parallel_regather
    layers, microbatches, blocks, passes = 32, 8, 2, 2 + gathered
    assert seconds["tensor"] == pytest.approx(layers * microbatches * blocks * passes * once)


def test_what_was_not_measured_keeps_its_closed_form() -> None:
    shape = load_model("llama3-8b").shape
    layout = PlannedLayout(seq_len=4096, global_batch=64, tp=4, dp=8)
    other = curve("all_gather", 8, 8, (1e3, 1.0), (1e9, 2.0))
    half = curve("all_gather", 4, 4, (1e3, 1.0), (1e9, 2.0))  # its pair is missing
    bare = pricing(cluster()).price(shape, layout)[1]
    assert pricing(cluster(links=(other, half))).price(shape, layout)[1] == bare


def test_the_search_prices_columns_with_the_table() -> None:
    machine = cluster(nodes=2, links=closed_curves(cluster(inter_node_bandwidth=1e9)))
    space = Space(num_devices=16, node_size=NODE, seq_len=4096, global_batch=64)
    search = SearchSpace(load_model("mixtral-8x7b").shape, machine, space)
    bare = SearchSpace(load_model("mixtral-8x7b").shape, cluster(nodes=2), space)
    assert search.examined == bare.examined
    for index in map(int, np.random.default_rng(0).choice(search.examined, 30, replace=False)):
        assert search.bounds[index] <= search.seconds(index) * (1 + 1e-9)
    best, then = (one.fitting(one.capacity, 1)[0] for one in (search, bare))
    assert search.seconds(best) > bare.seconds(then)
