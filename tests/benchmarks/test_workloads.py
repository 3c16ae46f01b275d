"""W0 to W7: the table's loads, purity, and the exact oracle through every dispatcher on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.routing_shape import WORKLOADS, WorkloadError
from benchmarks.workloads import rank_tokens, source_sizes, workload
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.ops.permute import gather_rows
from moemesh.parallel.expert.build import make_dispatcher
from tests.benchmarks.oracle import multiplier, oracle, oracle_experts
from tests.ranks import mesh_on_ranks

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
    with pytest.raises(ValueError, match="top-k <= 10"):
        oracle(range(1), torch.zeros(1, 11, dtype=torch.int64), 4, dtype=torch.float32)


def test_the_oracle_is_exact_in_bfloat16_in_any_order() -> None:
    """The worst case: ten slots of the largest multiplier and the largest digits."""
    gids = range(4**4 - 2, 4**4)  # gid + 1 = 255: every digit 3
    experts = torch.full((2, 10), 2)
    experts[1, 5:] = 5  # minus four: sums rise, then fall
    made = oracle(gids, experts, 4, dtype=torch.bfloat16)
    terms = multiplier(experts).bfloat16() * made.weights_TK.bfloat16()
    for order in (torch.arange(10), torch.arange(9, -1, -1), torch.randperm(10)):
        total = torch.zeros(2, 4, dtype=torch.bfloat16)
        for slot in order:
            total += terms[:, slot, None] * made.x_TH
        assert torch.equal(total, made.y_TH)
    assert float(made.y_TH.abs().max()) * 8 == 180  # (5/8 + 5/4) * 4 * 3
    assert {float(value) for value in multiplier(torch.arange(-1, 6))} == {0, 1, 2, 4, -1, -2, -4}


DISPATCHERS = ["all_to_all", "all_gather", "hierarchical", "low_latency"]
NUM_EXPERTS, TOP_K, HIDDEN, NUM_TOKENS = 16, 3, 8, 96


def routed_on_rank(mesh: Mesh, dispatcher: str, combine: str) -> list[str]:
    """Differences from the oracle on this rank, over all workloads and both number types."""
    config = ModelConfig(num_experts=NUM_EXPERTS, experts_per_token=TOP_K)
    plan = Plan(
        dp=mesh.world_size,
        ep=mesh.world_size,
        combine=combine,  # type: ignore[arg-type]
        ranks_per_node=2,
    )
    made = make_dispatcher(dispatcher, config, plan, mesh, NUM_TOKENS // 2)
    wrong: list[str] = []
    for name in WORKLOADS:
        for step in (0, 33) if name == "W7" else (1,):
            tokens = rank_tokens(name, num_ranks=mesh.world_size, num_tokens=NUM_TOKENS)
            for dtype in (torch.float32, torch.bfloat16):
                where = f"{name} step {step} {dtype} rank {mesh.rank}: "
                differing = differences(mesh, made, name, step, tokens, dtype)
                wrong += [where + what for what in differing]
    return wrong


def routing_of(name: str, step: int, tokens: range) -> Tensor:
    return workload(
        name,
        seed=4,
        step=step,
        gids=tokens,
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        num_groups=8,
    )


def differences(
    mesh: Mesh, dispatcher: Any, name: str, step: int, tokens: tuple[range, ...], dtype: torch.dtype
) -> list[str]:
    own = tokens[mesh.rank]
    experts_TK = routing_of(name, step, own)
    want = oracle(own, experts_TK, HIDDEN, dtype=dtype)
    x_TH, weights_TK = want.x_TH.requires_grad_(), want.weights_TK.requires_grad_()
    plan = dispatcher.plan(experts_TK)
    rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    num_local = NUM_EXPERTS // mesh.world_size
    local_L = torch.arange(num_local) + mesh.rank * num_local
    experts_R = torch.repeat_interleave(local_L, rows.counts_L)
    x_RH = rows.source_NH.index_select(0, rows.map.source_R)
    y_RH = oracle_experts(x_RH, rows.weights_R, experts_R)
    y_TH = dispatcher.combine(y_RH, plan).wait()
    y_TH.backward(want.gradient_TH)
    all_experts = routing_of(name, step, range(NUM_TOKENS))
    arrived = torch.cat([(all_experts == e).any(1).nonzero().flatten() for e in local_L])
    all_x = oracle(range(NUM_TOKENS), all_experts, HIDDEN, dtype=dtype).x_TH
    assert x_TH.grad is not None and weights_TK.grad is not None
    pairs = {
        "output": (y_TH, want.y_TH),
        "gradient of x": (x_TH.grad, want.grad_x_TH),
        "gradient of weights": (weights_TK.grad, want.grad_weights_TK),
        "rows": (gather_rows(rows.source_NH, rows.map), all_x[arrived]),
        "counts": (rows.counts_L, loads(all_experts, NUM_EXPERTS).long()[local_L]),
    }
    return [what for what, (got, expected) in pairs.items() if not torch.equal(got, expected)]


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["fast", "exact"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_every_dispatcher_equals_the_oracle(dispatcher: str, combine: str) -> None:
    """Outputs, both gradients, rows and counts, bit for bit, in float32 and bfloat16."""
    layout = Layout(dp=4, ep=4, ranks_per_node=2)
    for wrong in mesh_on_ranks(layout, routed_on_rank, dispatcher, combine):
        assert wrong == []
