"""One rank computes its experts in bounded pieces: exchanges stay in order, results the same.

A rank is bounded by its load alone, which no other rank knows. Whatever it does about it must not
change which collectives it takes part in, nor their order.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.parallel.parallelize import RankModel
from tests.parity import training
from tests.parity.test_parity import MODEL as THREE_LAYERS
from tests.parity.test_parity import TRAIN, assert_same
from tests.parity.training import Shape, Trained, assemble
from tests.ranks import mesh_on_ranks

MODEL = THREE_LAYERS | {"num_layers": 4}
SHAPE = Shape(global_batch=6, seq_len=8, padding=True)
RECOMPUTE = ("none", "selective", "full")
#: Name -> (keys of the plan, whether it runs by default under `recompute = full`).
PLANS: dict[str, tuple[dict[str, Any], bool]] = {
    "all_to_all": ({"dp": 4, "ep": 4, "dispatch_chunks": 3}, False),
    "all_gather": ({"dp": 2, "ep": 2, "dispatcher": "all_gather"}, False),
    "hierarchical": (
        {"dp": 4, "ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2},
        True,
    ),
    "low_latency": ({"tp": 2, "dp": 2, "ep": 4, "dispatcher": "low_latency"}, False),
    "exact": ({"dp": 2, "ep": 2, "combine": "exact"}, False),
    "etp": ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, False),
    "spare_slots": ({"dp": 4, "ep": 4, "spare_slots": 2}, True),
    "spare_slots_chunks": ({"dp": 2, "ep": 2, "spare_slots": 1, "dispatch_chunks": 2}, False),
    "zb_h1": ({"pp": 2, "dp": 2, "ep": 2, "schedule": "zb_h1", "microbatches": 3}, False),
    "dualpipe_v": (
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe_v", "microbatches": 4},
        False,
    ),
}


def bounded_on_rank(
    mesh: Mesh, bounded: tuple[int, ...], plan_keys: dict[str, Any]
) -> dict[str, Any]:
    """As `training.train_on_rank`; on the ranks `bounded` experts take three rows at a time."""
    parallelize = training.parallelize

    def with_bound(*arguments: Any, **keys: Any) -> RankModel:
        parallel = parallelize(*arguments, **keys)
        for moe in parallel.model.moe_layers().values():
            moe.experts.max_rows = 3 if mesh.rank in bounded else None
        return parallel

    with mock.patch.object(training, "parallelize", with_bound):
        return training.train_on_rank(mesh, MODEL, plan_keys, TRAIN, SHAPE)


def cases() -> list[Any]:
    found = []
    for name, (keys, is_default) in PLANS.items():
        for recompute in RECOMPUTE:
            marks = () if is_default and recompute == "full" else (pytest.mark.slow,)
            found.append(pytest.param(keys | {"recompute": recompute}, id=f"{name}-{recompute}",
                                      marks=marks))  # fmt: skip
    return found


@pytest.mark.parametrize("plan", cases())
def test_pieces_on_one_rank_change_no_exchange_and_no_result(plan: dict[str, Any]) -> None:
    checked = Plan(**plan)
    assert checked.check(ModelConfig(**MODEL)) == []
    alone = training.train(MODEL, {"microbatches": checked.microbatches}, TRAIN, SHAPE)
    ranks = mesh_on_ranks(checked.layout, bounded_on_rank, (1,), plan)
    losses, aux, norms, loads, mtp = zip(*ranks[0]["steps"], strict=True)
    got = Trained(
        losses=list(losses),
        aux=list(aux),
        norms=list(norms),
        loads=list(loads),
        gradients=assemble([rank["gradients"] for rank in ranks]),
        weights=assemble([rank["weights"] for rank in ranks]),
        biases=[],
        mtp=list(mtp),
        frozen=[],
    )
    assert_same(got, alone)
