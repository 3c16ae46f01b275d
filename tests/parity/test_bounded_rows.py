"""One rank computes its experts in bounded pieces: exchanges stay in order, results the same.

A rank is bounded by its load alone, which no other rank knows. Whatever it does about it must not
change which collectives it takes part in, nor their order.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.parallel.parallelize import RankModel
from tests.parity import training
from tests.parity.models import MODEL, TRAIN
from tests.parity.training import Shape, alone, assert_same, rows

DEEP = MODEL | {"num_layers": 4}
EVERY = "recompute=none/selective/full"
CASES = rows(
    f"""
    moe | dp=4 ep=4 dispatch_chunks=3 {EVERY} | 6x8 padded
    moe | dp=2 ep=2 dispatcher=all_gather {EVERY} | 6x8 padded
    moe | dp=4 ep=4 dispatcher=hierarchical ranks_per_node=2 {EVERY} | 6x8 padded
    moe | tp=2 dp=2 ep=4 dispatcher=low_latency {EVERY} | 6x8 padded
    moe | dp=2 ep=2 combine=exact {EVERY} | 6x8 padded
    moe | dp=2 tp=2 ep=2 etp=2 {EVERY} | 6x8 padded
    moe | dp=4 ep=4 spare_slots=2 recompute=full | 6x8 padded
    moe | dp=4 ep=4 spare_slots=2 {EVERY} | 6x8 padded
    *moe | dp=2 ep=2 spare_slots=1 dispatch_chunks=2 recompute=full | 6x8 padded
    moe | dp=2 ep=2 spare_slots=1 dispatch_chunks=2 {EVERY} | 6x8 padded
    moe | pp=2 dp=2 ep=2 schedule=zb_h1 microbatches=3 {EVERY} | 6x8 padded
    moe | pp=2 dp=2 ep=2 schedule=dualpipe_v microbatches=4 {EVERY} | 6x8 padded
    """
)


def bounded_on_rank(mesh: Mesh, *arguments: Any) -> dict[str, Any]:
    """`training.train_on_rank`, but on rank 1 experts take three rows at a time."""
    parallelize = training.parallelize

    def with_bound(*arguments: Any, **keys: Any) -> RankModel:
        parallel = parallelize(*arguments, **keys)
        for moe in parallel.model.moe_layers().values():
            moe.experts.max_rows = 3 if mesh.rank == 1 else None
        return parallel

    with mock.patch.object(training, "parallelize", with_bound):
        return training.train_on_rank(mesh, *arguments)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_pieces_on_one_rank_change_no_exchange_and_no_result(
    model: str, plan: dict[str, Any], shape: Shape
) -> None:
    got = training.train(DEEP, plan, TRAIN, shape, on_rank=bounded_on_rank, predicts=False)
    assert_same(got, alone(DEEP, TRAIN, shape, plan.get("microbatches", 1)))
