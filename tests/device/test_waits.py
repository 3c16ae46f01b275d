"""Waits of the host for its device: for sizes that depend on the routing, and once a step."""

import functools
from collections import Counter
from typing import Any

import pytest

from moemesh.config.plan import Plan
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.trace.ledger import Ledger
from tests.device.stepping import Counted, dispatch_on_rank, steps_on_rank
from tests.parity.training import Shape, model_of
from tests.ranks import run_on_ranks

#: Forward, backward: the fewest sizes that the host has to know (docs/gpu.md lists them).
DISPATCHERS = {
    "all_to_all": (1, 0),
    "all_gather_dense": (1, 0),
    "all_gather_uneven": (1, 0),
    "all_gather_spare": (0, 0),
    "low_latency": (1, 0),
    "hierarchical": (1, 0),
}

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "first_dense_layers": 1,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_intermediate_size": 16,
    "aux_loss_coefficient": 0.01,
}
#: (plan, waits of a step outside of the metrics: one a MoE layer, microbatch and plan of rows).
PLANS: list[tuple[dict[str, Any], int]] = [
    ({"pp": 2, "microbatches": 4, "schedule": "1f1b"}, 0),
]
SLOW_PLANS: list[tuple[dict[str, Any], int]] = [
    ({"dp": 2, "data": "zero3"}, 0),
    ({"microbatches": 2, "recompute": "full"}, 0),
    ({"cp": 2, "context": "ring"}, 0),
    (
        {"dp": 2, "ep": 2, "dispatcher": "hierarchical", "ranks_per_node": 1, "dispatch_chunks": 2},
        3,
    ),
    ({"microbatches": 2}, 0),
    ({"tp": 2, "ep": 2, "dispatcher": "all_gather"}, 0),
    ({"dp": 2, "ep": 2, "dispatcher": "all_to_all", "recompute": "full"}, 3),
    ({"dp": 2, "data": "zero1"}, 0),
    ({"dp": 2, "data": "zero2"}, 0),
    ({"cp": 2, "context": "all_gather"}, 0),
    ({"cp": 2, "context": "all_to_all"}, 0),
    ({"tp": 2, "etp": 2}, 3),
    ({"pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2}, 0),
    ({"pp": 2, "microbatches": 4, "schedule": "zb_h1"}, 0),
    ({"pp": 2, "microbatches": 4, "schedule": "zb_v", "stages_per_rank": 2}, 0),
    ({"pp": 2, "microbatches": 4, "schedule": "dualpipe"}, 0),
    ({"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "dualpipe_v"}, 12),
    ({"dp": 4, "ep": 4, "dispatcher": "all_to_all", "dispatch_chunks": 3}, 3),
    ({"dp": 4, "ep": 4, "dispatcher": "all_gather", "dispatch_chunks": 2}, 0),
    # The counts that replicas are planned from, and the sizes of the exchange.
    ({"dp": 4, "ep": 4, "spare_slots": 1, "dispatch_chunks": 2}, 6),
]


def predicted(plan: dict[str, Any], shape: Shape, rank: int) -> Ledger:
    """The ledger of two steps."""
    step = predict_ledger(
        model_of(SMALL),
        Plan(**plan),
        seq_len=shape.seq_len,
        global_batch=shape.global_batch,
        dtype="bfloat16",
        rank=rank,
        on_accelerator=True,
    )
    return step + step


def check_step(plan: dict[str, Any], routing_waits: int, shape: Shape) -> None:
    ranks = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("cp", 1) * plan.get("pp", 1)
    args = SMALL, plan, shape, 2
    counted: list[Counted]
    counted = [steps_on_rank(0, *args)] if ranks == 1 else run_on_ranks(ranks, steps_on_rank, *args)
    assert len({tuple(one.losses) for one in counted}) == 1
    for rank, one in enumerate(counted):
        is_local = plan.get("ep", 1) * plan.get("etp", 1) == 1
        if is_local or plan.get("dispatcher") == "all_gather":  # nothing depends on the routing
            assert predicted(plan, shape, rank) == Ledger.from_rows(one.ledger)
        waits = one.waits["gradients"]
        metrics = {line: n for line, n in waits.items() if "train/step.py" in line}
        assert sum(metrics.values()) == 1, waits
        assert sum(waits.values()) - 1 <= routing_waits, waits
        assert not one.waits["update"]


#: Counts of the ranks of a dispatcher, by its name: one run for several tests.
_dispatched = functools.cache(lambda name: run_on_ranks(4, dispatch_on_rank, name, 4, 1))


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dispatcher_waits_for_sizes_only(name: str) -> None:
    for one in _dispatched(name):
        forward, backward = one.waits["forward"], one.waits["backward"]
        assert (sum(forward.values()), sum(backward.values())) == DISPATCHERS[name], forward


def test_rows_that_nobody_computes_change_no_number() -> None:
    """The simulated device has NaN there."""
    found, expected = _dispatched("all_gather_spare"), _dispatched("all_gather_dense")
    assert [one.losses for one in found] == [one.losses for one in expected]


@pytest.mark.parametrize(("plan", "waits"), PLANS, ids=lambda x: str(x))
def test_a_step_waits_once(plan: dict[str, Any], waits: int) -> None:
    check_step(plan, waits, Shape(global_batch=4, seq_len=8))


def test_heads_that_read_a_part_of_a_group_wait_no_more() -> None:
    model = SMALL | {"num_layers": 2, "num_heads": 6, "num_kv_heads": 3}
    plan = {"cp": 2, "context": "all_to_all"}
    for one in run_on_ranks(2, steps_on_rank, model, plan, Shape(4, 8), 1):
        assert sum(one.waits["gradients"].values()) == 1, one.waits


def test_packed_and_padded_sequences_wait_no_more() -> None:
    plan = {"microbatches": 2, "recompute": "full"}
    check_step(plan, 0, Shape(4, 8, packed=True, padding=True))


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "waits"), SLOW_PLANS, ids=lambda x: str(x))
def test_other_plans_wait_once(plan: dict[str, Any], waits: int) -> None:
    check_step(plan, waits, Shape(global_batch=4, seq_len=8))


def test_losses_are_those_of_the_cpu_but_for_rounding() -> None:
    (device,) = [steps_on_rank(0, SMALL, {"microbatches": 2}, Shape(4, 8), 2)]
    assert all(3.0 < loss < 4.0 for loss in device.losses)
    assert device.losses[0] != device.losses[1]
    assert not Counter(device.waits["update"])
