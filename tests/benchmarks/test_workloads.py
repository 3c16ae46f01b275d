"""W0 to W7: the loads of the table, purity, golden rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.routing_shape import WORKLOADS, WorkloadError
from benchmarks.workloads import rank_tokens, source_sizes, workload

TOKENS = 4096
#: (workload, step): expert max/mean, group max/mean (None = by chance), experts without a token.
TABLE: dict[tuple[str, int], tuple[float, float | None, int]] = {
    ("W0", 0): (1.0, 1.0, 0),
    ("W0", 7): (1.0, 1.0, 0),
    ("W1", 0): (4.0, None, 0),
    ("W2", 0): (4.0, 4.0, 0),
    ("W3", 0): (4.0, 1.0, 0),
    ("W4", 0): (1.0, 1.0, 0),
    ("W5", 0): (1.23, 1.23, 12),
    ("W6", 3): (4.0, 4.0, 0),
    ("W6p16", 20): (4.0, 4.0, 0),
    ("W7", 31): (1.0, 1.0, 0),
    ("W7", 32): (8.0, 8.0, 56),
    ("W7", 35): (8.0, 8.0, 56),
    ("W7", 36): (1.0, 1.0, 0),
    ("W7", 96): (8.0, 8.0, 56),
}


def loads(experts_TK: Tensor, num_experts: int = 64) -> Tensor:
    return torch.bincount(experts_TK.flatten(), minlength=num_experts).double()


@pytest.mark.parametrize(("name", "step"), TABLE, ids=str)
def test_the_loads_are_those_of_the_table(name: str, step: int) -> None:
    expert, group, idle = TABLE[name, step]
    # Heat is drawn: 2048 of 4096 tokens with a deviation of 32, and a maximum over eight of them.
    tolerance = 1e-9 if expert == 1.0 else 0.05
    for seed in (0, 5):
        counts = loads(workload(name, seed=seed, step=step, gids=range(TOKENS)))
        assert float(counts.max() / counts.mean()) == pytest.approx(expert, rel=tolerance)
        assert int((counts == 0).sum()) == idle
        groups = counts.view(8, 8).sum(1)
        if group is not None:
            assert float(groups.max() / groups.mean()) == pytest.approx(group, rel=tolerance)


def test_hot_groups_are_where_the_table_says() -> None:
    def hottest(name: str, seed: int, step: int) -> int:
        counts = loads(workload(name, seed=seed, step=step, gids=range(512)))
        return int(counts.view(8, 8).sum(1).argmax())

    assert [hottest("W2", seed, 9) for seed in (0, 5, 11)] == [0, 5, 3]
    assert [hottest("W6", 4, step) for step in (0, 1, 9)] == [0, 1, 1]
    assert [hottest("W6p16", 4, step) for step in (0, 15, 16, 130)] == [0, 0, 1, 0]
    assert hottest("W7", 6, 33) == 6
    idle = loads(workload("W5", seed=0, step=0, gids=range(TOKENS))).view(8, 8)
    assert idle[0].sum() == 0 and (idle[1, 1::2] == 0).all() and (idle[1, ::2] > 0).all()
    spread = loads(workload("W3", seed=0, step=0, gids=range(TOKENS))).view(8, 8)
    assert (spread.argmax(1) == 0).all()


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("experts", "top_k", "groups"), [(64, 8, 8), (8, 2, 4), (16, 3, 4)])
def test_every_token_gets_distinct_experts_that_exist(
    name: str, experts: int, top_k: int, groups: int
) -> None:
    for step in (0, 33):
        chosen = workload(
            name,
            seed=1,
            step=step,
            gids=range(100),
            num_experts=experts,
            experts_per_token=top_k,
            num_groups=groups,
        )
        assert chosen.shape == (100, top_k) and chosen.dtype == torch.int64
        assert int(chosen.min()) >= 0 and int(chosen.max()) < experts
        assert (chosen.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_routing_does_not_depend_on_how_tokens_are_spread(name: str) -> None:
    whole = workload(name, seed=2, step=33, gids=range(64))
    parts = [workload(name, seed=2, step=33, gids=part) for part in (range(5), range(5, 64))]
    assert torch.equal(torch.cat(parts), whole)
    shuffled = torch.randperm(64)
    assert torch.equal(workload(name, seed=2, step=33, gids=shuffled), whole[shuffled])
    assert workload(name, seed=2, step=33, gids=range(0)).shape == (0, 8)


def test_routing_depends_on_seed_and_step() -> None:
    def routing(seed: int, step: int) -> Tensor:
        return workload("W1", seed=seed, step=step, gids=range(64))

    assert torch.equal(routing(0, 0), routing(0, 0))
    assert not torch.equal(routing(0, 0), routing(1, 0))
    assert not torch.equal(routing(0, 0), routing(0, 1))


def test_routings_are_fixed() -> None:
    """Golden rows: figures of different versions stay comparable."""
    rows = {
        name: workload(name, seed=1, step=33, gids=range(7, 8))[0].tolist() for name in WORKLOADS
    }
    assert rows == GOLDEN


GOLDEN = {
    "W0": [9, 1, 35, 31, 25, 43, 53, 30],
    "W1": [31, 1, 9, 53, 43, 0, 3, 6],
    "W2": [11, 9, 8, 13, 31, 0, 3, 6],
    "W3": [0, 56, 32, 40, 8, 31, 3, 6],
    "W4": [9, 1, 35, 31, 25, 43, 53, 30],
    "W5": [26, 35, 36, 50, 60, 57, 52, 40],
    "W6": [11, 9, 8, 13, 31, 0, 3, 6],
    "W6p16": [17, 20, 18, 22, 21, 31, 0, 3],
    "W7": [11, 9, 8, 13, 14, 15, 10, 12],
}


def test_ragged_sources() -> None:
    sizes = source_sizes("W4")
    assert sum(sizes) == TOKENS and sizes[:4] == (0, 0, 0, 0)
    assert sizes[4:] == (52, 105, 157, 210, 263, 315, 368, 420, 473, 525, 578, 630)
    assert source_sizes("W0", num_tokens=10, num_sources=4) == (3, 3, 2, 2)
    ranks = [len(tokens) for tokens in rank_tokens("W4", num_ranks=8)]
    assert ranks[:2] == [0, 0] and max(ranks) / (TOKENS / 8) == pytest.approx(2.4, abs=0.05)
    for name in ("W0", "W4"):
        for num_ranks in (1, 2, 3, 8, 16):
            tokens = rank_tokens(name, num_ranks=num_ranks, num_tokens=100)
            assert [gid for part in tokens for gid in part] == list(range(100))


def test_numbers_that_cannot_be_are_named() -> None:
    with pytest.raises(WorkloadError, match=r"(?s)W9.*W6p16"):
        workload("W9", seed=0, step=0, gids=range(1))
    with pytest.raises(WorkloadError, match=r"top-k \(9\).*experts \(8\)"):
        workload("W0", seed=0, step=0, gids=range(1), num_experts=8, experts_per_token=9)
    with pytest.raises(WorkloadError, match=r"groups \(8\) must divide experts \(12\)"):
        workload("W0", seed=0, step=0, gids=range(1), num_experts=12, experts_per_token=2)
    with pytest.raises(WorkloadError, match="leaves 6 of 8"):
        workload(
            "W5", seed=0, step=0, gids=range(1), num_experts=8, experts_per_token=7, num_groups=8
        )
