"""Predictions of `auto`: rows copied as the dispatchers really copy them, and the fastest one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.crossing import rows_between
from moemesh.comm.mesh import Mesh
from moemesh.config.dispatcher_table import PREDICTED
from moemesh.config.layout import Layout
from moemesh.ops import permute as permute_module
from moemesh.ops.permute import gather_rows
from moemesh.parallel.expert.all_gather import AllGatherDispatcher
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher
from moemesh.parallel.expert.choose import (
    CallSite,
    Link,
    choose,
    fastest,
    measure_copying,
    predict_seconds,
)
from moemesh.parallel.expert.hierarchical import HierarchicalDispatcher
from tests.ranks import mesh_on_ranks

SITE = CallSite(
    tokens=256,
    experts_per_token=4,
    num_experts=16,
    row_bytes=4096,
    result_bytes=4096,
    ranks=4,
    ranks_per_node=2,
)
FREE = Link()
FAST = Link(latency=1e-5, seconds_per_byte=1e-11)
SLOW = Link(latency=1e-3, seconds_per_byte=1e-8)


def _best(predicted: dict[str, float]) -> str:
    return min(predicted, key=lambda name: predicted[name])


def test_a_slow_link_between_nodes_wants_few_rows_across() -> None:
    site = replace(SITE, tokens=4096, experts_per_token=8, num_experts=64)
    assert _best(predict_seconds(site, FAST, SLOW, 1e-10)) == "hierarchical"


def test_with_free_links_the_fewest_copies_win() -> None:
    """All_gather copies K + d + 1 rows a token, the others more."""
    predicted = predict_seconds(SITE, FREE, FREE, 1e-10)
    for name, seconds in predicted.items():
        assert seconds == pytest.approx(2 * SITE.rows[name].copied * 4096 * 1e-10)
    assert _best(predicted) == "all_gather"


def test_many_ranks_make_all_gather_lose() -> None:
    site = replace(SITE, ranks=64, num_experts=64, ranks_per_node=64, tokens=1024)
    assert _best(predict_seconds(site, FAST, FREE, 1e-11)) != "all_gather"


def test_two_hops_must_win_clearly() -> None:
    assert fastest({"all_gather": 1.0, "all_to_all": 1.5, "hierarchical": 0.9}) == "all_gather"
    assert fastest({"all_gather": 1.0, "all_to_all": 1.5, "hierarchical": 0.7}) == "hierarchical"
    assert fastest({"all_gather": 1.0, "all_to_all": 0.8}) == "all_to_all"


def _copied_on_rank(mesh: Mesh, name: str) -> int:
    """Rows that the dispatcher gathers or sums, on the larger side, in dispatch and combine."""
    ep, etp, experts = mesh["ep"], mesh["etp"], SITE.num_experts
    makers: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: AllToAllDispatcher(ep, etp, experts),
        "all_gather": lambda: AllGatherDispatcher(ep, mesh["ep_etp"], experts),
        "hierarchical": lambda: HierarchicalDispatcher(
            ep, mesh["ep_rail"], mesh["ep_node"], etp, experts
        ),
    }
    dispatcher = makers[name]()
    generator = torch.Generator().manual_seed(mesh.rank)
    spread = torch.rand(SITE.tokens, experts, generator=generator).argsort(1)
    experts_TK = spread[:, : SITE.experts_per_token]
    plan = dispatcher.plan(experts_TK)
    if name == "hierarchical":  # rows sent and sent on, there and back, and those of the experts
        return 2 * (plan.relay.sent.num_rows + plan.relay.forwarded.num_rows) + int(
            plan.counts_L.sum()
        )
    counted = 0

    def counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, rows: Any) -> Tensor:
            nonlocal counted
            y = function(x, rows)
            if x.shape[1] == 8:  # token rows; ids and weights are narrower
                counted += max(len(x), len(y))
            return y

        return run

    x_TH = torch.ones(SITE.tokens, 8)
    saved = permute_module.gather_rows, permute_module.sum_rows
    permute_module.gather_rows, permute_module.sum_rows = map(counting, saved)
    try:
        rows = dispatcher.dispatch(x_TH, torch.ones(experts_TK.shape), plan).wait()
        y_RH = gather_rows(rows.source_NH, rows.map)
        dispatcher.combine(y_RH, plan).wait()
    finally:
        permute_module.gather_rows, permute_module.sum_rows = saved
    return counted + (SITE.tokens if name == "all_gather" else 0)  # its own rows, into their place


@pytest.mark.representative("hierarchical")
@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "hierarchical"])
def test_the_rows_that_are_copied_are_those_of_the_table(name: str) -> None:
    layout = Layout(dp=4, ep=4, ranks_per_node=2)
    counted = mesh_on_ranks(layout, _copied_on_rank, name)
    assert sum(counted) / 4 == pytest.approx(SITE.rows[name].copied, rel=0.03)


def _choose_on_rank(mesh: Mesh) -> tuple[str, dict[str, float], float]:
    return *choose(replace(SITE, capacity=64), mesh), measure_copying(4096, mesh)


def test_all_ranks_hear_the_same_choice_and_copying_costs_time() -> None:
    ranks = mesh_on_ranks(Layout(dp=4, ep=4, ranks_per_node=2), _choose_on_rank)
    assert all(rank[:2] == ranks[0][:2] for rank in ranks)
    name, predicted, _ = ranks[0]
    assert set(predicted) == set(PREDICTED)
    assert name == fastest(predicted)
    assert all(1e-12 < rank[2] < 1e-6 for rank in ranks)


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "hierarchical", "low_latency"])
def test_the_rows_of_the_table_are_those_of_a_routing(name: str) -> None:
    """Against the benchmark's count from chosen experts; rows to a rank itself are among both."""
    draw = torch.Generator().manual_seed(0)
    shape = (4000, SITE.num_experts)
    chosen = [
        torch.rand(shape, generator=draw).topk(SITE.experts_per_token).indices
        for _ in range(SITE.ranks)
    ]
    node, slots = SITE.ranks_per_node, 40_000
    rows_sent = rows_between(
        name, chosen, num_experts=SITE.num_experts, ranks_per_node=node, num_slots=slots
    ).dispatch_RR
    rows = replace(SITE, tokens=4000, capacity=slots).rows[name].by_axis
    everywhere = rows.get("ep", 0.0) + rows.get("ep_etp", 0.0)
    inside = everywhere * node / SITE.ranks + rows.get("ep_node", 0.0)
    # Both hops of a hierarchical exchange may stay on the rank, and then share a place.
    across = everywhere * (SITE.ranks - node) / SITE.ranks
    across += rows.get("ep_rail", 0.0) * (1 - node / SITE.ranks)
    same = torch.arange(SITE.ranks) // node == 0
    own_hop = rows.get("ep_rail", 0.0) * node / SITE.ranks
    assert rows_sent[0][~same].sum() == pytest.approx(across, rel=0.03)
    assert rows_sent[0][same].sum() == pytest.approx(inside + own_hop, rel=0.03)
