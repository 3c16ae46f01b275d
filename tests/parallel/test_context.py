"""Which positions and heads of a sequence a rank of a context holds, and in which order."""

from __future__ import annotations

import pytest
import torch

from moemesh.parallel.context import in_position_order, in_rank_order
from moemesh.sharding.context import context_runs, context_sizes, head_share


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 37, 1000])
def test_every_position_is_held_once(length: int, ranks: int) -> None:
    runs = [context_runs(length, ranks, index) for index in range(ranks)]
    positions = [position for held in runs for run in held for position in run]
    assert sorted(positions) == list(range(length))
    sizes = context_sizes(length, ranks)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-length // ranks)
    for held in runs:
        assert all(run for run in held)
        assert [run.start for run in held] == sorted(run.start for run in held)
    x = torch.arange(length)
    assert in_rank_order(x, ranks).tolist() == positions
    assert torch.equal(in_position_order(in_rank_order(x, ranks), ranks), x)


def test_zigzag() -> None:
    assert [context_runs(16, 4, index) for index in range(4)] == [
        (range(2), range(14, 16)),
        (range(2, 4), range(12, 14)),
        (range(4, 6), range(10, 12)),
        (range(6, 10),),
    ]


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize(("length", "window"), [(4096, None), (4099, None), (32768, 1024)])
def test_attention_is_balanced(length: int, window: int | None, cp: int) -> None:
    """The busiest rank does at most 5 % more than the mean, in pairs of a query and a key."""
    pairs = [
        sum(min(p + 1, window or length) for run in context_runs(length, cp, index) for p in run)
        for index in range(cp)
    ]
    assert max(pairs) <= 1.05 * sum(pairs) / cp


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (12, 6, 4)]
)
def test_heads_find_their_keys(heads: int, kv_heads: int, ranks: int) -> None:
    shares = [head_share(heads, kv_heads, ranks, index) for index in range(ranks)]
    assert [head for share in shares for head in share.queries] == list(range(heads))
    for share in shares:
        assert set(share.keys) == {head * kv_heads // heads for head in share.queries}
