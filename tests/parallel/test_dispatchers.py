"""The dispatcher contract, one test for all siblings: dispatch, compute, combine."""

import pytest

from moemesh.config.layout import Layout
from tests.parallel.dispatching import assert_contract, dispatch_on_rank
from tests.ranks import mesh_on_ranks

DISPATCHERS = [
    "all_to_all", "all_gather_dense", "all_gather_uneven", "all_gather_fewest_bytes",
    "hierarchical", "low_latency", "low_latency_overflowing", "all_to_all+exact",
    "all_gather_fewest_bytes+exact", "hierarchical+exact", "low_latency+exact",
]  # fmt: skip
LAYOUTS = [
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4, ranks_per_node=2),
    Layout(dp=2, tp=2, ep=2, etp=2),
    Layout(dp=2, etp=2),
]


@pytest.mark.representative(
    "all_gather_dense-dp4tp1ep2etp1node0",
    "all_gather_uneven-dp4tp1ep4etp1node0",
    "all_gather_fewest_bytes-dp2tp1ep1etp2node0",
    "low_latency-dp2tp2ep2etp2node0",
    "low_latency_overflowing-dp4tp1ep4etp1node0",
    "all_to_all+exact-dp4tp1ep2etp1node0",
    "all_gather_fewest_bytes+exact-dp2tp1ep1etp2node0",
    "hierarchical+exact-dp4tp1ep4etp1node2",
)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda x: f"dp{x.dp}tp{x.tp}ep{x.ep}etp{x.etp}node{x.ranks_per_node}"
)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_every_dispatcher_gives_the_sum_over_experts(name: str, layout: Layout) -> None:
    assert_contract(mesh_on_ranks(layout, dispatch_on_rank, name), layout)


def test_the_local_dispatcher_keeps_the_contract_too() -> None:
    ranks = mesh_on_ranks(Layout(), dispatch_on_rank, "local")
    assert_contract(ranks, Layout())
    assert ranks[0]["ledger"] == []
