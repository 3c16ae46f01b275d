"""The dispatcher contract, one test for all siblings: dispatch, compute, combine."""

import pytest
import torch
from torch.testing import assert_close

from moemesh.config.layout import Layout
from tests.parallel.dispatching import NUM_EXPERTS, dispatch_on_rank, expected, routed
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
    "all_to_all-dp2tp2ep2etp2node0",
    "all_gather_dense-dp4tp1ep2etp1node0",
    "all_gather_uneven-dp4tp1ep4etp1node0",
    "all_gather_fewest_bytes-dp2tp1ep1etp2node0",
    "hierarchical-dp4tp1ep4etp1node2",
    "low_latency-dp2tp2ep2etp2node0",
    "low_latency_overflowing-dp4tp1ep4etp1node0",
    "all_to_all+exact-dp4tp1ep2etp1node0",
    "all_gather_fewest_bytes+exact-dp2tp1ep1etp2node0",
    "hierarchical+exact-dp4tp1ep4etp1node2",
    "low_latency+exact-dp2tp1ep1etp2node0",
)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda x: f"dp{x.dp}tp{x.tp}ep{x.ep}etp{x.etp}node{x.ranks_per_node}"
)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_every_dispatcher_gives_the_sum_over_experts(name: str, layout: Layout) -> None:
    ranks = mesh_on_ranks(layout, dispatch_on_rank, name)
    for rank, got in enumerate(ranks):
        for key, tensor in expected(rank).items():
            assert_close(got[key], tensor, rtol=1e-12, atol=1e-12, msg=f"{key} of rank {rank}")
        assert torch.equal(got["rows"], got["replayed"])


@pytest.mark.representative("all_to_all", "all_gather_uneven", "low_latency", "hierarchical+exact")
@pytest.mark.parametrize("name", DISPATCHERS)
def test_rows_are_grouped_by_expert_in_token_order(name: str) -> None:
    """Inside an expert, rows ascend by owner rank and token: sums do not depend on the layout."""
    layout = Layout(dp=2, tp=2, ep=2, etp=2)
    ranks = mesh_on_ranks(layout, dispatch_on_rank, name)
    per_expert = NUM_EXPERTS // layout.ep
    for rank, got in enumerate(ranks):
        first = layout.coordinates(rank)["ep"] * per_expert
        rows = [
            routed(owner).x_TH[token]
            for expert in range(first, first + per_expert)
            for owner in range(layout.world_size)
            for token in (routed(owner).experts_TK == expert).any(1).nonzero().flatten().tolist()
        ]
        assert torch.equal(got["rows"], torch.stack(rows))
        assert int(got["counts"].sum()) == len(rows)


def test_the_local_dispatcher_keeps_the_contract_too() -> None:
    (got,) = mesh_on_ranks(Layout(), dispatch_on_rank, "local")
    for key, tensor in expected(0).items():
        assert_close(got[key], tensor, rtol=1e-12, atol=1e-12)
    assert got["ledger"] == []
