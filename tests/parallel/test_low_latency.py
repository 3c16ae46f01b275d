"""Fixed-size buffers: bytes known before the routing is, and an overflow that loses nothing."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout
from moemesh.ops.permute import permute
from moemesh.parallel.expert.low_latency import LowLatencyDispatcher
from moemesh.parallel.expert.site import FP8_CODEC
from moemesh.sharding.dispatchers import slots_per_pair
from tests.ranks import mesh_on_ranks

NUM_EXPERTS, NUM_SLOTS, HIDDEN, MAX_TOKENS = 8, 2, 16, 6
LAYOUTS = [Layout(dp=4, ep=4), Layout(dp=2, tp=2, ep=2, etp=2)]


def choices(rank: int, routing: str) -> torch.Tensor:
    """experts [T, K] of `rank`: as even as can be, none at all, or all tokens to two experts of
    which only rank 1's are more than its slots hold."""
    count = {"even": 4, "none": 0, "rank 1 overflows": MAX_TOKENS if rank == 1 else 1}[routing]
    if routing == "rank 1 overflows":
        return torch.tensor([[0, 1]]).expand(count, NUM_SLOTS)
    return (torch.arange(count * NUM_SLOTS) + rank).view(count, NUM_SLOTS) % NUM_EXPERTS


def train_once(mesh: Mesh, routing: str, fp8: bool, factor: float) -> dict[str, Any]:
    dispatcher = LowLatencyDispatcher(
        mesh["ep"],
        mesh["etp"],
        NUM_EXPERTS,
        experts_per_token=NUM_SLOTS,
        max_tokens=MAX_TOKENS,
        capacity_factor=factor,
        codec=FP8_CODEC if fp8 else None,
    )
    experts_TK = choices(mesh.rank, routing)
    x_TH = torch.full((len(experts_TK), HIDDEN), float(mesh.rank + 1), requires_grad=True)
    weights_TK = torch.ones(experts_TK.shape, requires_grad=True)
    plan = dispatcher.plan(experts_TK)
    rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    x_RH = permute(rows.source_NH, rows.map)
    y_RH = x_RH * rows.weights_R[:, None] / mesh["etp"].size
    y_TH = dispatcher.combine(y_RH, plan).wait()
    y_TH.sum().backward()
    return {
        "ledger": mesh.ledger,
        "slots": dispatcher.num_slots,
        "plans": (dispatcher.num_plans, dispatcher.num_fallbacks),
        "received": len(rows.source_NH),
        "computed": len(x_RH),
        "x": x_TH.detach(),
        "y": y_TH.detach(),
        "grad_x": x_TH.grad,
    }


@pytest.mark.representative("fp8")
@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_bytes_are_the_same_for_any_routing(fp8: bool) -> None:
    """That they are the predicted ones is held by the twins and the benchmark of dispatchers."""
    layout, books = LAYOUTS[1], []
    for routing in ("even", "none"):
        ranks = mesh_on_ranks(layout, train_once, routing, fp8, 4.0)
        num_rows = sum(choices(rank, routing).numel() for rank in range(4)) * layout.etp
        assert sum(rank["computed"] for rank in ranks) == num_rows, "empty slots were computed"
        for rank in ranks:
            assert rank["plans"] == (1, 0)
            assert rank["received"] == layout.etp * layout.ep * rank["slots"]
            books.append(rank["ledger"])
    assert all(book == books[0] for book in books), "some rank or routing moved other bytes"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_that_overflows_sends_its_group_the_two_phase_way(layout: Layout) -> None:
    ranks = mesh_on_ranks(layout, train_once, "rank 1 overflows", False, 1.0)
    for rank, got in enumerate(ranks):
        assert len(choices(rank, "rank 1 overflows")) * NUM_SLOTS > got["slots"] or rank != 1
        assert got["plans"] == (1, 1), f"rank {rank} did not fall back"
        assert_close(got["y"], NUM_SLOTS * got["x"])
        assert_close(got["grad_x"], torch.full_like(got["x"], NUM_SLOTS))


def test_groups_without_an_overflow_keep_their_slots() -> None:
    """Two ep groups of two ranks: rank 1 belongs to the first."""
    ranks = mesh_on_ranks(Layout(dp=4, ep=2), train_once, "rank 1 overflows", False, 1.0)
    assert [got["plans"][1] for got in ranks] == [1, 1, 0, 0]


@given(
    st.integers(1, 4096),
    st.integers(1, 8),
    st.sampled_from([8, 64]),
    st.sampled_from([1, 2, 8]),
    st.floats(0.01, 64),
)
def test_slots_hold_uniform_routing_and_never_more_than_can_come(
    tokens: int, slots: int, num_experts: int, ep: int, factor: float
) -> None:
    count = slots_per_pair(tokens, slots, num_experts, ep, factor)
    most = tokens * min(slots, num_experts // ep)
    assert 1 <= count <= most
    if factor >= 1:
        assert count * ep >= min(tokens * slots, most * ep)
    if factor >= ep:
        assert count == most


@pytest.mark.parametrize(("tokens", "factor"), [(0, 2.0), (4, 0.0), (4, float("inf"))])
def test_sizes_without_a_slot_are_refused(tokens: int, factor: float) -> None:
    mesh, sizes = Mesh.single("cpu"), {"experts_per_token": 2, "max_tokens": tokens}
    with pytest.raises(UserError, match=r"max_tokens >= 1 and a capacity factor > 0, got"):
        LowLatencyDispatcher(mesh["ep"], mesh["etp"], 8, capacity_factor=factor, **sizes)
