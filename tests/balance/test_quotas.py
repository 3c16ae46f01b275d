"""Quotas from exact counts: integers that add up, near the mean, and tokens that follow them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import load_shapes
from moemesh.balance import (
    BalanceError,
    QuotaPlan,
    assign_tokens,
    homes_of,
    permute_experts,
    plan_quotas,
    shadow_experts,
)
from tests.balance.cases import Ints


def check(plan: QuotaPlan, counts: Ints, ranks_per_node: int | None = None) -> Ints:
    """Quotas add up, places are sound, and the tokens follow the quotas. Returns the tokens."""
    num_ranks = len(counts)
    spent = plan.home_quota.copy()
    for rank in range(num_ranks):
        experts = [expert for expert in plan.spare_expert[rank] if expert >= 0]
        assert len(set(experts)) == len(experts), "one expert twice on a rank"
        assert all(plan.home[expert] != rank for expert in experts), "a replica at home"
    used = plan.spare_expert >= 0
    assert (plan.spare_quota[~used] == 0).all() and plan.spare_quota.min(initial=0) >= 0
    np.add.at(spent, plan.spare_expert[used], plan.spare_quota[used])
    assert (spent == counts.sum(axis=0)).all() and plan.home_quota.min() >= 0
    assert plan.rank_tokens.sum() == counts.sum()
    tokens = assign_tokens(plan, counts, ranks_per_node=ranks_per_node)
    assert tokens.min() >= 0
    quota = np.concatenate([plan.home_quota, plan.spare_quota.reshape(-1)])
    assert (tokens.sum(axis=0) == quota).all()
    by_expert = np.zeros_like(counts)
    for place, expert in enumerate(plan.place_expert):
        if expert >= 0:
            by_expert[:, expert] += tokens[:, place]
            # Locality first: a rank sends only those tokens that its own copy has no room for.
            own = int(plan.place_rank[place])
            others = counts[own, expert] - tokens[own, place]
            assert others == 0 or tokens[own, place] == quota[place]
    assert (by_expert == counts).all()
    return tokens


@given(st.data())
@settings(max_examples=120)
def test_invariants(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    experts = data.draw(st.integers(1, 12))
    spare = data.draw(st.integers(0, 3))
    number = st.integers(0, 5) | st.integers(0, 5000)
    counts = np.array(
        data.draw(
            st.lists(
                st.lists(number, min_size=experts, max_size=experts), min_size=ranks, max_size=ranks
            )
        )
    )
    home = np.array(
        data.draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    )
    plan = plan_quotas(counts, home, spare)
    check(plan, counts, ranks_per_node=data.draw(st.sampled_from([None, 1, 2, ranks])))
    bare = plan_quotas(counts, home, 0)
    assert plan.rank_tokens.max() <= bare.rank_tokens.max()
    assert plan.rank_tokens.max() >= -(-counts.sum() // ranks)
    sums = plan_quotas(counts.sum(axis=0), home, spare, num_ranks=ranks)
    assert np.array_equal(sums.spare_quota, plan.spare_quota)
    check(shadow_experts(counts, home, shadow_rows=data.draw(st.floats(0, 100))), counts)


def test_by_hand() -> None:
    """Rank 0 has 12 of 16 tokens: 8 go to rank 1, in two replicas of the hotter experts."""
    counts = np.array([[4, 4, 1, 1], [2, 2, 1, 1]])
    plan = plan_quotas(counts, [0, 0, 1, 1], 1)
    assert plan.rank_tokens.tolist() == [8, 8]
    assert plan.spare_expert.tolist() == [[-1], [0]] and plan.spare_quota.tolist() == [[0], [4]]
    # Rank 1 keeps its own 2 of expert 0; rank 0 keeps 2 at home and sends 2.
    tokens = check(plan, counts)
    assert tokens[:, 0].tolist() == [2, 0] and tokens[:, 5].tolist() == [2, 2]


def test_nodes_come_second() -> None:
    """Expert 0 at home on rank 0 and replicated on rank 2: rank 3 sends to its own node first."""
    plan = QuotaPlan(
        home=np.array([0]),
        spare_expert=np.array([[-1], [-1], [0], [-1]]),
        spare_quota=np.array([[0], [0], [8], [0]]),
        home_quota=np.array([8]),
    )
    counts = np.full((4, 1), 4)
    anywhere = assign_tokens(plan, counts)
    near = assign_tokens(plan, counts, ranks_per_node=2)
    assert near[:, 0].tolist() == [4, 4, 0, 0] and near[:, 3].tolist() == [0, 0, 4, 4]
    assert anywhere[:, 0].tolist() == [4, 4, 0, 0]


@pytest.mark.parametrize("spare", [1, 2])
def test_near_the_mean_on_every_shape(spare: int) -> None:
    """64 ranks, 256 experts: 1.5 % over the mean on average, with two spare slots."""
    random = np.random.default_rng(0)
    home = np.arange(256) // 4
    excesses = []
    for loads in load_shapes(4, 256, seed=1).values():
        for row in loads:
            counts = random.multinomial(4096, row / row.sum(), size=64)
            excesses.append(plan_quotas(counts, home, spare).balance - 1)
    assert np.mean(excesses) <= (0.015 if spare == 2 else 0.06)


def test_shadows_pay_or_are_not_made() -> None:
    """One hot expert: shadowing takes 300 rows off its home, at the price of `shadow_rows`."""
    counts = np.full((4, 4), 10)
    counts[:, 1] = 100
    home = np.arange(4)
    plan = shadow_experts(counts, home, shadow_rows=50)
    check(plan, counts)
    assert plan.spare_expert.tolist() == [[1], [-1], [1], [1]]
    assert plan.rank_tokens.tolist() == [140, 100, 140, 140]
    assert shadow_experts(counts, home, shadow_rows=300).num_replicas == 0
    assert shadow_experts(counts, home, shadow_rows=0, max_shadows=0).num_replicas == 0


def test_permuted_homes() -> None:
    loads = load_shapes(1, 16, seed=2)["uniform"]
    slots = permute_experts(loads, 4)
    home = homes_of(slots, 4)
    assert all(home[0, slots[0, slot]] == slot // 4 for slot in range(16))
    before = plan_quotas(loads[0].astype(int), np.arange(16) // 4, 0)
    after = plan_quotas(loads[0].astype(int), home[0], 0)
    assert after.balance < before.balance


@pytest.mark.parametrize(
    ("counts", "home", "message"),
    [
        ([[1, -2]], [0, 0], "must not be negative, and hold -2"),
        ([[1, 0.5]], [0, 0], "counts must hold whole numbers"),
        ([[1, float("inf")]], [0, 0], "counts must hold whole numbers"),
        ([[1, 2]], [0], "a rank for each of 2 experts, and has 1"),
        ([[1, 2]], [0, 1], "home names rank 1: there are ranks 0 to 0"),
        ([[1, 2]], [0, -1], "home names rank -1"),
        ([], [], "counts must be ranks x experts"),
        ([[[1]]], [0], "3 dims"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_mistakes(counts: list, home: list, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        plan_quotas(counts, home, 1)


def test_mistakes_of_the_assignment() -> None:
    plan = plan_quotas([[4, 0], [2, 2]], [0, 1], 1)
    with pytest.raises(BalanceError, match="not those that the plan was made for"):
        assign_tokens(plan, [[4, 1], [2, 2]])
    with pytest.raises(BalanceError, match="2 ranks x 2 experts, and are 1 x 2"):
        assign_tokens(plan, [[6, 2]])
    with pytest.raises(BalanceError, match="shadow_rows"):
        shadow_experts([[1]], [0], shadow_rows=-1)
