"""One MoE layer under every dispatcher, combine, chunk count, mesh and imbalance W0-W7 equals one
device in float64: outputs, input gradients, router-weight gradients, expert gradients."""

from functools import cache
from typing import Any

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from tests.parity.layer import TOKENS, Case, Result, layer_on_rank, run_layer, together
from tests.ranks import mesh_on_ranks

DISPATCHERS = ["all_to_all", "all_gather", "hierarchical", "low_latency"]
WORKLOADS = ["W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7"]
MESHES: list[dict[str, Any]] = [
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4, "ranks_per_node": 2},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
]
#: Every dispatcher with every workload; combine and chunks change along the way.
CASES = [
    Case(dispatcher, ("fast", "exact")[(d + w) % 2], 1 + (d + 2 * w) % 3, name)
    for d, dispatcher in enumerate(DISPATCHERS)
    for w, name in enumerate(WORKLOADS)
]
ALL_CASES = [
    Case(dispatcher, combine, chunks, name)
    for dispatcher in DISPATCHERS
    for combine in ("fast", "exact")
    for chunks in (1, 3)
    for name in WORKLOADS
]


@cache
def one_device(name: str) -> Result:
    return together([run_layer(Mesh.single("cpu"), Plan(), range(TOKENS), name)])


def assert_equal(keys: dict[str, Any], cases: list[Case]) -> None:
    ranks = mesh_on_ranks(Plan(**keys).layout, layer_on_rank, keys, cases, timeout=280)
    for index, case in enumerate(cases):
        got, expected = together([rank[index] for rank in ranks]), one_device(case.workload)
        for field in Result._fields:
            ours, theirs = getattr(got, field), getattr(expected, field)
            worst = float((ours - theirs).abs().max() / theirs.abs().max())
            assert worst <= 1e-10, f"{case}: {field} differs by {worst:.1e}"


@pytest.mark.representative("{'dp': 4, 'ep': 4, 'ranks_per_node': 2}")
@pytest.mark.parametrize("keys", MESHES, ids=str)
def test_a_layer_equals_one_device(keys: dict[str, Any]) -> None:
    assert_equal(keys, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [*MESHES, {"dp": 8, "ep": 8, "ranks_per_node": 4}], ids=str)
def test_every_combination_equals_one_device(keys: dict[str, Any]) -> None:
    assert_equal(keys, ALL_CASES)


def test_the_lists_are_long_enough() -> None:
    assert len(CASES) * len(MESHES) >= 60
    assert {case.combine for case in CASES} == {"fast", "exact"}
    assert {case.chunks for case in CASES} == {1, 2, 3}
