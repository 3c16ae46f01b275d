"""Every dispatcher, schedule and form of training runs on a device and never mixes in the CPU.

The simulated device raises where tensors meet that are not in one place; ranks must agree on the
losses, which must fall within what the model can give.
"""

import math
from typing import Any, get_args

import pytest

from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.plan import Context, DataStrategy
from moemesh.config.schedule_table import SCHEDULES
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import RankModel
from moemesh.train.inference.generation import chooser, continuation
from moemesh.train.step import evaluate
from tests.device.stepping import Counted, steps_on_rank
from tests.device.test_waits import PLANS, SLOW_PLANS, SMALL
from tests.parity.training import Shape
from tests.ranks import run_on_ranks

EP = {"dp": 4, "ep": 4}
PP = {"pp": 2, "microbatches": 4}
V = PP | {"stages_per_rank": 2}
LORA = {"lora": {"rank": 2}}
ESFT = Tuning(experts=tuple((layer, (0, 3, 5)) for layer in (1, 2, 3)))
#: Name -> (plan, more keys of the model, what trains).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Tuning]] = {
    "one": ({}, {}, FULL),
    "lora": ({}, LORA, FULL),
    "lora ep": ({"dp": 2, "ep": 2}, LORA, FULL),
    "esft": ({"dp": 2, "ep": 2}, {}, ESFT),
    "exact": (EP | {"combine": "exact"}, {}, FULL),
    "all_gather": (EP | {"dispatcher": "all_gather"}, {}, FULL),
    "low_latency": (EP | {"dispatcher": "low_latency"}, {}, FULL),
    "hierarchical": (EP | {"dispatcher": "hierarchical", "ranks_per_node": 2}, {}, FULL),
    "auto": (EP | {"dispatcher": "auto"}, {}, FULL),
    "fp8": (EP | {"payload": "fp8"}, {}, FULL),
    "spare_slots": (EP | {"spare_slots": 1}, {}, FULL),
    "etp": ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {}, FULL),
    "tp": ({"tp": 2, "ep": 2}, {}, FULL),
    "tp all_reduce": ({"tp": 2, "attention_exit": "all_reduce"}, {}, FULL),
    "tp all_to_all": ({"tp": 2, "attention_exit": "all_to_all"}, {}, FULL),
    "selective": ({"dp": 2, "ep": 2, "recompute": "selective"}, {}, FULL),
    "zero1 ep": ({"dp": 4, "ep": 2, "data": "zero1"}, {}, FULL),
    "zero2 ep": ({"dp": 4, "ep": 2, "data": "zero2", "microbatches": 2}, {}, FULL),
    "zero3 ep": ({"dp": 4, "ep": 2, "data": "zero3", "microbatches": 2}, {}, FULL),
    "parameter_server": ({"dp": 2, "data": "parameter_server"}, {}, FULL),
    "context": ({"cp": 2, "tp": 2, "ep": 4}, {}, FULL),
    "gpipe": (PP | {"schedule": "gpipe"}, {}, FULL),
    "chimera": (PP | {"schedule": "chimera"}, {}, FULL),
    "terapipe": (PP | {"schedule": "terapipe"}, {}, FULL),
    "zb_h2": (PP | {"schedule": "zb_h2"}, {}, FULL),
    "zb_v ep": (V | {"schedule": "zb_v", "dp": 2, "ep": 2}, {}, FULL),
    "search": (PP | {"schedule": "search"}, {}, FULL),
    "latent": (
        {"tp": 2, "ep": 2},
        {"attention": "mla", "num_kv_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
         "qk_rotary_head_dim": 8, "v_head_dim": 16},
        FULL,
    ),
    "prediction": ({"dp": 2, "ep": 2}, {"num_mtp_layers": 1}, FULL),
    "sigmoid": (
        {"dp": 2, "ep": 2}, {"router_score": "sigmoid", "router_bias_rate": 0.01}, FULL
    ),
    "capacity": ({"dp": 2, "ep": 2}, {"capacity_factor": 1.0}, FULL),
}  # fmt: skip
QUICK = "one", "lora"
#: Schedules that test_asynchronous covers.
ASYNCHRONOUS = "pipedream", "pipedream_2bw", "ampnet"


def use(parallel: RankModel, batches: list[Batch]) -> None:
    """Validation, and where a sequence is whole on a rank generation."""
    assert math.isfinite(evaluate(parallel, batches))
    if parallel.mesh["pp"].size == parallel.mesh["cp"].size == 1:
        choose, device = chooser(), parallel.mesh.device
        tokens = continuation(parallel.model, [1, 2, 3], choose, device)
        assert len([next(tokens) for _ in range(3)]) == 3


def ranks_of(plan: dict[str, Any]) -> int:
    return math.prod(plan.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES]
)
def test_it_trains_validates_and_generates_on_a_device(name: str) -> None:
    plan, model, tuning = CASES[name]
    shape = Shape(global_batch=4, seq_len=8)
    args = SMALL | model, plan, shape, 1, None, use, tuning
    counted: list[Counted]
    if ranks_of(plan) == 1:
        counted = [steps_on_rank(0, *args)]
    else:
        counted = run_on_ranks(ranks_of(plan), steps_on_rank, *args)
    losses = {tuple(one.losses) for one in counted}
    assert len(losses) == 1 and all(3.0 < loss < 4.0 for loss in losses.pop())


def test_no_case_is_left_out() -> None:
    """Those of `Plan` are here, or in the tables of test_waits."""
    plans = [plan for plan, *_ in CASES.values()] + [plan for plan, _ in PLANS + SLOW_PLANS]
    for key, names in (
        ("schedule", set(SCHEDULES) - set(ASYNCHRONOUS)),
        ("data", set(get_args(DataStrategy)) - {"replicate"}),
        ("context", set(get_args(Context))),
        # A build of its own, which no one has here.
        ("dispatcher", {*DISPATCHERS, "auto"} - {"deepep"}),
    ):
        assert names <= {plan.get(key) for plan in plans}, key
