"""Tokens find the places that the quotas give them, and moved experts theirs."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.balance import plan_quotas
from moemesh.balance.compiled import plain_loops
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.parallel.expert.homes import move_experts, rank_tokens
from moemesh.parallel.expert.replicas import in_fetched_order, own_places
from tests.ranks import mesh_on_ranks


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(2, 5),
    lanes=st.integers(1, 3),
    local=st.integers(1, 4),
    spare=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_place_gets_its_quota(
    seed: int, ranks: int, lanes: int, local: int, spare: int
) -> None:
    random = np.random.default_rng(seed)
    experts = ranks * local
    counts = random.integers(0, 12, (ranks, lanes, experts))
    counts[:, :, random.integers(experts)] *= 9
    counts[random.integers(ranks)] = 0  # a rank without tokens
    home = np.arange(experts) // local
    with plain_loops():
        quotas = in_fetched_order(plan_quotas(counts.sum(axis=1), home, spare))
        got = np.zeros(experts + ranks * spare, np.int64)
        for rank in range(ranks):
            for lane in range(lanes):
                place_S = own_places(quotas, counts, rank, lane)
                # Sorted by expert, like the tokens: the count of each expert is that of its tokens.
                expert_S = quotas.place_expert[place_S]
                expected = np.repeat(np.arange(experts), counts[rank, lane])
                assert expert_S.tolist() == expected.tolist()
                np.add.at(got, place_S, 1)
    wanted = np.concatenate([quotas.home_quota, quotas.spare_quota.reshape(-1)])
    assert got.tolist() == wanted.tolist()
    for row in quotas.spare_expert.tolist():
        used = [expert for expert in row if expert >= 0]
        assert used == sorted(used), "weights arrive in the order of their homes"
        assert row == used + [-1] * (spare - len(used))


def _tensors(ids: list[int]) -> list[torch.Tensor]:
    """Three tensors with the numbers of each expert, which encode its id; 3 bf16 misalign."""
    ids_L = torch.tensor(ids)
    return [
        ids_L[:, None].expand(-1, 3).to(torch.bfloat16).clone(),
        (ids_L[:, None, None] + torch.arange(10).view(2, 5) / 16).to(torch.float64),
        ids_L[:, None].expand(-1, 1).to(torch.float32).clone(),
    ]


def _move(mesh: Mesh, before: list[int], after: list[int]) -> bool:
    axis = mesh["ep"]
    own = slice(axis.index * 4, axis.index * 4 + 4)
    tensors = _tensors(before[own])
    move_experts(tensors, before, after, axis)
    return all(torch.equal(a, b) for a, b in zip(tensors, _tensors(after[own]), strict=True))


def _moves(mesh: Mesh) -> list[bool]:
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(12, generator=generator).tolist() for _ in range(4)]
    # All in a circle: no expert can move before another one has.
    orders += [list(range(12)), [(place + 4) % 12 for place in range(12)]]
    return [_move(mesh, *pair) for pair in pairwise(orders)]


def test_all_that_belongs_to_an_expert_moves_with_it() -> None:
    assert mesh_on_ranks(Layout(dp=3, ep=3), _moves) == [[True] * 5] * 3


def test_tokens_count_where_their_expert_lives() -> None:
    counts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert rank_tokens(counts, [2, 3], {}, 2).tolist() == [[3, 7], [11, 15]]
    assert rank_tokens(counts, [2, 3], {3: (3, 0, 1, 2)}, 2).tolist() == [[3, 7], [13, 13]]
    assert rank_tokens(counts[:0], [], {}, 2).shape == (0, 2)
