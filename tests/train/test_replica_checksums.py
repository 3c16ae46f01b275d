"""A bit that flips in one copy of a weight is found by the next vote, its rank by a majority."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import parallelize
from moemesh.train.numerics.replica_checksums import (
    CopiesDiffer,
    Mismatch,
    ReplicaChecksums,
    digest,
)
from moemesh.train.optimizer import Optimizer
from tests.ranks import mesh_on_ranks
from tests.train.injecting import MODEL, SHAPE

NORM, EXPERTS = "layers.1.attention_norm.weight", "layers.1.feed_forward.experts.gate_up"
QKV = "layers.2.attention.qkv"


def flip_on_rank(
    mesh: Mesh, plan_keys: dict[str, Any], flips: list[tuple[int, str]]
) -> list[tuple[list[Mismatch], bool, list[Mismatch]]]:
    """Of each flip: what the vote says, whether it was repaired, what the next vote says."""
    plan = Plan(**plan_keys)
    parallel = parallelize(
        ModelConfig(**MODEL),
        plan,
        mesh,
        seed=1,
        dtype=torch.float32,
        tokens_per_rank=plan.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch),
    )
    optimizer = Optimizer.of(parallel, TrainConfig())
    vote = ReplicaChecksums(parallel, optimizer, TrainConfig(), lambda text, kind: None)
    assert not vote.compare(), "copies differ from the start"
    entries = mesh.ledger.entries()
    found: list[tuple[list[Mismatch], bool, list[Mismatch]]] = []
    for number, (rank, name) in enumerate(flips):
        held = dict(parallel.model.named_parameters()).get(name)
        before = None if held is None else held.detach().clone()
        if mesh.rank == rank:
            assert held is not None
            bits = held.data.view(torch.int32).view(-1)
            bits[number % len(bits)] ^= 1 << (number % 31)
        said = vote.compare()
        repaired = bool(said) and vote.take_majority(said)
        left = vote.compare()
        if repaired:
            assert held is None or torch.equal(held, before)
        elif held is not None:
            held.data.copy_(before)
        found.append((said, repaired, left))
    assert mesh.ledger.entries() == entries, "votes are not entered"
    return found


@pytest.mark.representative("0")
@pytest.mark.parametrize(
    ("plan", "flips"),
    [
        (
            {"dp": 4, "ep": 2},
            {(2, NORM): (2,), (3, QKV): (3,), (0, NORM): (0,), (1, EXPERTS): ()},
        ),
        ({"dp": 2, "tp": 2, "ep": 2}, {(3, NORM): (3,), (1, QKV): (), (0, EXPERTS): ()}),
        ({"dp": 3, "data": "zero1"}, {(1, QKV): (1,), (2, EXPERTS): (2,)}),
        ({"dp": 3, "data": "zero2"}, {(1, QKV): (1,), (0, EXPERTS): (0,)}),
        (
            {"pp": 2, "dp": 3},
            {(4, "layers.3.attention.qkv"): (4,), (0, QKV.replace("2", "0")): (0,)},
        ),
        ({"dp": 3, "cp": 1, "tp": 1, "ep": 3}, {(1, QKV): (1,), (2, EXPERTS): None}),
    ],
    ids=["0", "tp", "zero1", "zero2", "pp", "stored once"],
)
def test_one_bit_is_found(
    plan: dict[str, Any], flips: dict[tuple[int, str], tuple[int, ...] | None]
) -> None:
    """None: it cannot be, for it is stored once; (): two copies, neither of which is right."""
    ranks = mesh_on_ranks(Plan(**plan).layout, flip_on_rank, plan, list(flips))
    assert all(rank == ranks[0] for rank in ranks)
    for ((rank, name), culprits), (said, repaired, left) in zip(
        flips.items(), ranks[0], strict=True
    ):
        if culprits is None:
            assert not said
            continue
        (mismatch,) = said
        assert mismatch.parameter == name and rank in mismatch.ranks
        assert mismatch.culprits == culprits and repaired == bool(culprits)
        assert bool(left) != repaired
        facts = CopiesDiffer(7, said).facts
        assert facts["parameter"] == name and rank in facts["ranks"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_sees_every_bit(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype).view(2, 3)
    whole = int(digest(x))
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    for place in range(6):
        for bit in range(8 * x.element_size() - 1):
            other = x.clone()
            other.view(words).view(-1)[place] ^= 1 << bit
            assert int(digest(other)) != whole
