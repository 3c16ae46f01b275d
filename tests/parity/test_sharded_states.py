"""Sharded states (plan.data) give what one device gives, whatever axes they meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moemesh.config.trainable import DEFERRING_SCHEDULES
from tests.parallel import post_validating
from tests.parallel.post_validating import Case
from tests.parallel.test_post_validation import DEEP, FAULTS, SHAPE, after
from tests.parallel.test_post_validation import TRAIN as STEPS
from tests.parallel.test_post_validation import assert_same as assert_same_outcome
from tests.parity import balancing
from tests.parity.asynchronous import stream
from tests.parity.test_asynchronous import ADAMW, AMPNET, STREAM, TWO
from tests.parity.test_asynchronous import DEEP as DEEP_MODEL
from tests.parity.test_asynchronous import SHAPE as EIGHT
from tests.parity.test_balancing import ADAM, EQUAL, MOVES, REPLICAS, SKEWED
from tests.parity.test_parity import LONELY, MODEL, MODELS, PADDED, TRAIN
from tests.parity.training import Shape, alone, assert_same, name_of, train

STRATEGIES = ("zero1", "zero2", "zero3", "parameter_server")
#: Momentum keeps a state, which must be the one of the numbers that a rank owns.
MOMENTUM = TRAIN | {"momentum": 0.7}
TIED = MODEL | {"tied_embeddings": True, "qk_norm": True, "num_kv_heads": 4}

#: Extra prediction layers, which use the units of embedding and head once more.
AHEAD = MODEL | {"num_mtp_layers": 2}
TRAINED = MODELS | {
    "tied": TIED,
    "ahead": AHEAD,
    # The last norm has fewer numbers than there are ranks: some own nothing of its unit.
    "thin": MODEL | {"hidden_size": 3},
    "ahead_tied": AHEAD | {"tied_embeddings": True},
}

PLANS: list[tuple[str, dict[str, Any], Shape]] = [
    ("moe", {"dp": 4}, Shape()),
    ("moe", {"dp": 2, "ep": 2, "microbatches": 2}, Shape()),
    ("moe", {"dp": 4, "ep": 2}, Shape()),
    ("moe", {"dp": 3}, PADDED),
    ("moe", {"dp": 4, "ep": 2, "servers": 3}, Shape()),
    ("moe", {"tp": 2, "dp": 2, "ep": 2}, Shape()),
    ("moe", {"tp": 2, "dp": 2, "etp": 2, "microbatches": 2}, Shape()),
    ("moe", {"tp": 2, "dp": 2, "ep": 4, "attention_exit": "all_to_all"}, Shape()),
    ("moe", {"dp": 4, "ep": 2, "combine": "exact", "microbatches": 2}, Shape()),
    ("moe", {"dp": 4, "ep": 4}, LONELY),
    ("moe", {"dp": 2, "ep": 2, "recompute": "full", "microbatches": 2}, Shape()),
    ("tied", {"pp": 2, "dp": 2, "microbatches": 2}, Shape()),
    ("tied", {"dp": 2, "tp": 2, "ep": 2}, Shape()),
    ("sigmoid", {"tp": 2, "dp": 2, "ep": 2}, PADDED),
    ("moe", {"pp": 2, "dp": 2, "ep": 2, "microbatches": 3}, Shape()),
    ("tied", {"pp": 2, "dp": 2, "schedule": "chimera", "microbatches": 4}, Shape()),
    (
        "moe",
        {
            "pp": 2,
            "dp": 2,
            "schedule": "interleaved_1f1b",
            "stages_per_rank": 1,
            "microbatches": 2,
            "recompute": "full",
        },
        Shape(),
    ),
    ("moe", {"pp": 2, "dp": 2, "schedule": "gpipe", "microbatches": 4}, Shape()),
    ("moe", {"dp": 4, "ep": 2, "shard_group": 2, "microbatches": 2}, Shape()),
    ("moe", {"dp": 4, "ep": 2, "shard_group": 2, "combine": "exact"}, PADDED),
    ("tied", {"dp": 2, "tp": 2, "shard_group": 1}, Shape()),
    ("ahead", {"dp": 2, "ep": 2, "microbatches": 2}, Shape()),
    ("thin", {"dp": 4, "ep": 2}, Shape()),
    ("ahead_tied", {"pp": 2, "dp": 2, "microbatches": 2, "recompute": "full"}, Shape()),
    ("moe", {"pp": 2, "dp": 2, "ep": 2, "schedule": "terapipe", "microbatches": 2}, Shape()),
]
#: Schedules that defer weight gradients, or take turns between a forward and a backward.
DEFERRING: list[tuple[str, dict[str, Any], Shape]] = [
    ("moe", {"pp": 2, "dp": 2, "schedule": "zb_h1", "microbatches": 4}, Shape()),
    ("tied", {"pp": 2, "dp": 2, "schedule": "zb_h2", "microbatches": 4}, Shape()),
    ("tied", {"pp": 2, "dp": 2, "schedule": "zb_v", "microbatches": 4, "num_layers": 4}, Shape()),
    ("moe", {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe", "microbatches": 4}, Shape()),
    ("moe", {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe_v", "microbatches": 4}, Shape()),
]


def _model(name: str, plan: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    model = TRAINED[name]
    plan = dict(plan)
    if layers := plan.pop("num_layers", None) or (4 if plan.get("pp", 1) > 1 else None):
        model = model | {"num_layers": layers}
    return model, plan


def _skip_refused(plan: dict[str, Any], data: str) -> None:
    if data == "zero3" and plan.get("schedule") in DEFERRING_SCHEDULES:
        pytest.skip("refused")
    if data == "parameter_server" and "shard_group" in plan:
        pytest.skip("refused")


def under(plan: dict[str, Any], data: str) -> dict[str, Any]:
    """`plan` with its states kept by `data`. A server needs a worker beside it: where there is no
    data-parallel rank, half of the tensor-parallel ranks become some."""
    if data == "parameter_server" and plan.get("dp", 1) == 1:
        plan = plan | {"dp": 2, "tp": plan["tp"] // 2}
    return plan | {"data": data}


def check(data: dict[str, Any], case: tuple[str, dict[str, Any], Shape]) -> None:
    name, keys, shape = case
    model, plan = _model(name, keys)
    expected = alone(model, MOMENTUM, shape, plan.get("microbatches", 1))
    assert_same(train(model, plan | data, MOMENTUM, shape), expected)


@pytest.mark.representative(
    "moe-tp=2-dp=2-etp=2-microbatches=2-zero1",
    "tied-pp=2-dp=2-schedule=chimera-microbatches=4-zero1",
    "moe-dp=4-ep=2-combine=exact-microbatches=2-zero2",
    "sigmoid-tp=2-dp=2-ep=2-padded-zero2",
    "tied-pp=2-dp=2-microbatches=2-zero3",
    "moe-dp=4-ep=4-lonely-zero3",
    "moe-dp=4-ep=2-shard_group=2-microbatches=2-zero3",
    "moe-tp=2-dp=2-ep=2-parameter_server",
)
@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize("case", PLANS, ids=name_of)
def test_sharded_states_equal_one_device(
    case: tuple[str, dict[str, Any], Shape], data: str
) -> None:
    _skip_refused(case[1], data)
    check({"data": data}, case)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["zero1", "zero2", "parameter_server"])
@pytest.mark.parametrize("case", DEFERRING, ids=name_of)
def test_sharded_states_with_deferred_weight_gradients(
    case: tuple[str, dict[str, Any], Shape], data: str
) -> None:
    check({"data": data}, case)


@pytest.mark.representative("moe-dp=2-ep=2-recompute=full-microbatches=2")
@pytest.mark.parametrize("case", PLANS, ids=name_of)
def test_weights_that_stay_for_a_step_change_nothing(
    case: tuple[str, dict[str, Any], Shape],
) -> None:
    check({"data": "zero3", "reshard": "step"}, case)


@pytest.mark.slow
@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize(("workload", "plan"), MOVES, ids=map(name_of, MOVES))
def test_experts_move_with_their_sharded_states(
    workload: str, plan: dict[str, Any], data: str
) -> None:
    _skip_refused(plan, data)
    keys = ADAM | {"steps": 7, "rebalance_every": 3}
    expected = balancing.train(
        balancing.Case(SKEWED, {}, keys | {"rebalance_every": 0}, workload=workload)
    )
    case = balancing.Case(SKEWED, under(plan, data), keys, workload=workload)
    got = balancing.train(case)
    assert balancing.difference(got, expected) <= EQUAL
    assert got.num_moved > 0


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
@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize(("workload", "plan"), REPLICAS, ids=map(name_of, REPLICAS))
def test_replicas_of_experts_with_sharded_states(
    workload: str, plan: dict[str, Any], data: str
) -> None:
    _skip_refused(plan, data)
    expected = balancing.train(balancing.Case(SKEWED, {}, TRAIN, workload=workload))
    got = balancing.train(balancing.Case(SKEWED, under(plan, data), TRAIN, workload=workload))
    assert balancing.difference(got, expected) <= EQUAL


@pytest.mark.representative("pipedream-bfloat16")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    "plan",
    [STREAM | {"pp": 2}, TWO | {"pp": 2, "update_window": 2}, AMPNET | {"pp": 2}],
    ids=lambda plan: plan["schedule"],
)
def test_versions_of_weights_whose_states_are_sharded(plan: dict[str, Any], dtype: str) -> None:
    """Sums over two ranks have the same bits in any order; what AMPNet runs depends on time.
    Clipping is off, because a norm is added up from other parts."""
    keys = ADAMW | {"dtype": dtype, "clip": 0.0}
    case = DEEP_MODEL, plan | {"dp": 2, "ep": 2}, keys, EIGHT
    expected = stream(*case)
    case = DEEP_MODEL, plan | {"dp": 2, "ep": 2, "data": "zero1"}, keys, EIGHT
    recorded = expected.schedule if plan["schedule"] == "ampnet" else None
    found = stream(*case, recorded=recorded)
    assert found.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    assert found.copies == expected.copies


@pytest.mark.representative("zero2-bfloat16", "zero3-float32")
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
