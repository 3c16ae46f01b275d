"""Sharded states (plan.data) give what one device gives, whatever axes they meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.config.rules import DEFERRING_SCHEDULES
from tests.parallel import post_validating
from tests.parallel.post_validating import Case
from tests.parallel.test_post_validation import DEEP, FAULTS, SHAPE, after
from tests.parallel.test_post_validation import TRAIN as STEPS
from tests.parallel.test_post_validation import assert_same as assert_same_outcome
from tests.parity import balancing
from tests.parity.asynchronous import stream
from tests.parity.models import MODEL, MODELS, TRAIN
from tests.parity.test_asynchronous import ADAMW, AMPNET, STREAM, TWO
from tests.parity.test_asynchronous import DEEP as DEEP_MODEL
from tests.parity.test_asynchronous import SHAPE as EIGHT
from tests.parity.test_balancing import ADAM, EQUAL, MOVES, REPLICAS, SKEWED
from tests.parity.training import Shape, assert_equals_one_device, rows, train

STRATEGIES = ("zero1", "zero2", "zero3", "parameter_server")
#: Momentum keeps a state, which must be the one of the numbers that a rank owns.
MOMENTUM = TRAIN | {"momentum": 0.7}

#: Extra prediction layers, which also use the units of embedding and head.
AHEAD = MODEL | {"num_mtp_layers": 2}
TRAINED = MODELS | {
    "ahead": AHEAD,
    # The last norm has fewer numbers than there are ranks: some own nothing of its unit.
    "thin": MODEL | {"hidden_size": 3},
    "ahead_tied": AHEAD | {"tied_embeddings": True},
}

#: A step of zero3 that keeps its weights to the end is called "step" in the tables.
SERVER = "parameter_server"
EVERY = f"data=zero1/zero2/zero3/step/{SERVER}"
GROUPED = "data=zero1/zero2/zero3/step"  # servers have no group
CASES = rows(
    f"""
    grouped | pp=2 dp=2 schedule=chimera microbatches=4 data=zero1
    moe | dp=4 ep=2 combine=exact microbatches=2 data=zero2
    sigmoid | tp=2 dp=2 ep=2 data=zero2 | padded
    *grouped | pp=2 dp=2 microbatches=2 data=zero3
    moe | dp=4 ep=4 data=zero3 | 1x5
    *moe | dp=4 ep=2 shard_group=2 microbatches=2 data=zero3
    *moe | tp=2 dp=2 ep=2 data=parameter_server
    *moe | dp=2 ep=2 recompute=full microbatches=2 data=step
    moe | dp=4 {EVERY}
    moe | dp=2 ep=2 microbatches=2 {EVERY}
    moe | dp=4 ep=2 {EVERY}
    moe | dp=3 {EVERY} | padded
    moe | dp=4 ep=2 servers=3 {EVERY}
    moe | tp=2 dp=2 ep=2 {EVERY}
    moe | tp=2 dp=2 etp=2 microbatches=2 {EVERY}
    moe | tp=2 dp=2 ep=4 attention_exit=all_to_all {EVERY}
    moe | dp=4 ep=2 combine=exact microbatches=2 {EVERY}
    moe | dp=4 ep=4 {EVERY} | 1x5
    moe | dp=2 ep=2 recompute=full microbatches=2 {EVERY}
    grouped | pp=2 dp=2 microbatches=2 {EVERY}
    grouped | dp=2 tp=2 ep=2 {EVERY}
    sigmoid | tp=2 dp=2 ep=2 {EVERY} | padded
    moe | pp=2 dp=2 ep=2 microbatches=3 {EVERY}
    grouped | pp=2 dp=2 schedule=chimera microbatches=4 {EVERY}
    moe | pp=2 dp=2 schedule=interleaved_1f1b stages_per_rank=1 microbatches=2 {EVERY}
    moe | pp=2 dp=2 schedule=gpipe microbatches=4 {EVERY}
    moe | dp=4 ep=2 shard_group=2 microbatches=2 {GROUPED}
    moe | dp=4 ep=2 shard_group=2 combine=exact {GROUPED} | padded
    grouped | dp=2 tp=2 shard_group=1 {GROUPED}
    ahead | dp=2 ep=2 microbatches=2 {EVERY}
    thin | dp=4 ep=2 {EVERY}
    ahead_tied | pp=2 dp=2 microbatches=2 recompute=full {EVERY}
    moe | pp=2 dp=2 ep=2 schedule=terapipe microbatches=2 {EVERY}
    # Schedules that defer weight gradients, or take turns between a forward and a backward.
    moe | pp=2 dp=2 schedule=zb_h1 microbatches=4 data=zero1/zero2/{SERVER}
    grouped | pp=2 dp=2 schedule=zb_h2/zb_v microbatches=4 data=zero1/zero2/{SERVER}
    moe | pp=2 dp=2 ep=2 schedule=dualpipe/dualpipe_v microbatches=4 data=zero1/zero2/{SERVER}
    """
)


def under(plan: dict[str, Any], data: str) -> dict[str, Any]:
    """`plan` with its states kept by `data`. A server needs a worker: in a plan without
    data-parallel ranks, half of the tensor-parallel ranks become data-parallel."""
    if data == "parameter_server" and plan.get("dp", 1) == 1:
        plan = plan | {"dp": 2, "tp": plan["tp"] // 2}
    return plan | {"data": data}


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_sharded_states_equal_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    keys = TRAINED[model] | ({"num_layers": 4} if plan.get("pp", 1) > 1 else {})
    if plan["data"] == "step":
        plan = plan | {"data": "zero3", "reshard": "step"}
    assert_equals_one_device(keys, plan, MOMENTUM, shape)


@pytest.mark.slow
@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize(
    ("workload", "plan", "keys"),
    [
        pytest.param(workload, plan, keys, id=f"{kind}: {one.id}")
        for kind, table, keys in (
            ("replicas", REPLICAS, TRAIN),
            ("moves", MOVES, ADAM | {"steps": 7, "rebalance_every": 3}),
        )
        for one in table
        for workload, plan, _ in [one.values]
    ],
)
def test_balanced_experts_with_sharded_states(
    workload: str, plan: dict[str, Any], keys: dict[str, Any], data: str
) -> None:
    if data == "zero3" and plan.get("schedule") in DEFERRING_SCHEDULES:
        pytest.skip("refused")
    plain = keys | {"rebalance_every": 0}
    expected = balancing.train(balancing.Case(SKEWED, {}, plain, workload=workload))
    got = balancing.train(balancing.Case(SKEWED, under(plan, data), keys, workload=workload))
    assert balancing.difference(got, expected) <= EQUAL
    assert got.num_moved > 0 or not keys.get("rebalance_every")


@pytest.mark.representative("plan0-zero1")
@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "1f1b", "microbatches": 2},
        {"pp": 2, "tp": 2, "ep": 2, "schedule": "1f1b", "microbatches": 3},
    ],
)
def test_a_step_taken_back_takes_back_sharded_states(plan: dict[str, Any], data: str) -> None:
    plan = under(plan, data)
    before = post_validating.train(Case(DEEP["moe"], plan, STEPS, SHAPE, FAULTS))
    got = post_validating.train(Case(DEEP["moe"], after(plan), STEPS, SHAPE, FAULTS))
    assert_same_outcome(got, before)
    assert any(got.redone(rank) for rank in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    "plan",
    [STREAM | {"pp": 2}, TWO | {"pp": 2, "update_window": 2}, AMPNET | {"pp": 2}],
    ids=lambda plan: plan["schedule"],
)
def test_versions_of_weights_whose_states_are_sharded(plan: dict[str, Any], dtype: str) -> None:
    """Sums over two ranks have the same bits in any order; what AMPNet runs depends on time.
    Clipping is off, because a norm is added up from other parts."""
    keys = ADAMW | {"dtype": dtype, "clip": 0.0, "steps": 2}
    case = DEEP_MODEL, plan | {"dp": 2, "ep": 2}, keys, EIGHT
    expected = stream(*case)
    case = DEEP_MODEL, plan | {"dp": 2, "ep": 2, "data": "zero1"}, keys, EIGHT
    recorded = expected.schedule if plan["schedule"] == "ampnet" else None
    streamed = stream(*case, recorded=recorded)
    assert streamed.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(streamed.weights[name], weight), name
    assert streamed.copies == expected.copies


@pytest.mark.representative("zero2-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
def test_two_ranks_give_the_bits_of_replicated_states(data: str, dtype: str) -> None:
    """Two operands have one sum: AdamW, momentum and rounding see the same numbers. Clipping is
    off, because a norm is added up from other parts."""
    keys = TRAIN | {"optimizer": "adamw", "dtype": dtype, "lr": 0.01, "clip": 0.0}
    plan = {"dp": 2, "ep": 1}
    expected, got = train(MODEL, plan, keys), train(MODEL, plan | {"data": data}, keys)
    assert got.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight), name
