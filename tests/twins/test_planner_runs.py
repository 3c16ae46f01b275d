"""The planner against real training steps of the tiny preset on gloo ranks, rank by rank: see
:mod:`tests.twins.predictions`. By default those that no run of `tests/parity`, which are all held
to the same predictions, stands for: activations, shorter numbers, other kinds of steps.
"""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL as ALL
from moemesh.config.tuning import Tuning
from moemesh.planner.traffic.ledger import predict_ledger
from tests.parity.training import model_of
from tests.twins.planned import SEQ_LEN, measure
from tests.twins.predictions import assert_predicted

#: (model keys over tiny, plan, dtype, global batch). Odd batches leave ranks with uneven shares.
Case = tuple[dict[str, Any], dict[str, Any], str, int]

CASES: list[Case] = [
    ({}, {}, "float32", 3),
    ({}, {"dp": 2, "ep": 2}, "float32", 5),
    ({}, {"tp": 2, "ep": 2}, "bfloat16", 4),
    ({}, {"tp": 2, "etp": 2, "attention_exit": "all_reduce"}, "float32", 3),
    ({}, {"tp": 4, "ep": 4, "attention_exit": "all_to_all"}, "float64", 3),
    ({}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "microbatches": 2}, "float32", 7),
    ({}, {"dp": 4, "ep": 4, "dispatcher": "all_gather"}, "float32", 6),
    (
        {},
        {"dp": 4, "ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2, "dispatch_chunks": 2},
        "bfloat16",
        6,
    ),
    ({}, {"dp": 2, "tp": 2, "ep": 4, "dispatcher": "low_latency"}, "float32", 4),
    ({}, {"dp": 2, "ep": 2, "payload": "fp8", "dispatch_chunks": 3}, "bfloat16", 4),
    ({}, {"dp": 4, "ep": 2, "combine": "exact"}, "float32", 4),
    ({}, {"pp": 2, "dp": 2, "ep": 2, "microbatches": 3}, "float32", 6),
    ({"aux_loss_layers": "together"}, {"pp": 2, "tp": 2, "microbatches": 2}, "float32", 5),
    ({"num_experts": 0, "num_shared_experts": 0}, {"dp": 2, "tp": 2}, "float32", 3),
    ({}, {"recompute": "full"}, "float32", 3),
    ({"num_mtp_layers": 2}, {"recompute": "selective"}, "bfloat16", 3),
    ({}, {"recompute": "selective", "dp": 2, "ep": 2}, "float32", 5),
]

DISPATCHERS = ("all_to_all", "all_gather", "hierarchical", "low_latency")
TWO_NODES = {"dp": 4, "tp": 2, "ep": 4, "etp": 2, "ranks_per_node": 4}
EXACT = {"dp": 4, "ep": 4, "combine": "exact", "ranks_per_node": 2}
HALVES = {"pp": 2, "microbatches": 4}
#: One auxiliary loss of all layers.
TOGETHER: dict[str, Any] = {"aux_loss_layers": "together", "aux_loss_scope": "global"}
BIASES: dict[str, Any] = {"expert_bias": True, "router_logit_bias": True, "shared_gate": True}
GATED: dict[str, Any] = {"shared_gate": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
CASES += [
    ({"num_mtp_layers": 2}, {"tp": 2, "ep": 2}, "float32", 3),
    ({"num_mtp_layers": 1, "tied_embeddings": True}, {"pp": 2, "microbatches": 2}, "bfloat16", 4),
    (BIASES, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "float32", 4),
    (BIASES, {"dp": 4, "ep": 2, "combine": "exact"}, "float32", 4),
    (GATED, {"tp": 2, "ep": 2}, "bfloat16", 3),
    (GATED, {"dp": 2, "ep": 2}, "float64", 3),
    *(({}, TWO_NODES | {"dispatcher": name}, "float32", 9) for name in DISPATCHERS),
    *(({}, TWO_NODES | {"dispatcher": name}, "bfloat16", 9) for name in DISPATCHERS),
    *(({}, EXACT | {"dispatcher": name}, "float64", 5) for name in DISPATCHERS),
    ({"aux_loss_scope": "global", "z_loss_coefficient": 1e-3}, {"dp": 2, "tp": 2}, "float32", 4),
    ({"aux_loss_scope": "microbatch"}, {"dp": 2, "tp": 2, "microbatches": 2}, "float32", 4),
    ({"router_score": "sigmoid"}, {"dp": 2, "tp": 2, "ep": 4}, "float32", 4),
    ({"capacity_factor": 1.0}, {"dp": 2, "tp": 2, "ep": 4}, "float32", 4),
    ({"tied_embeddings": True, "qk_norm": True}, HALVES | {"dp": 2}, "float32", 8),
    ({"router_logit_bias": True, "num_shared_experts": 0}, {"tp": 2, "ep": 2}, "bfloat16", 4),
    ({}, HALVES | {"stages_per_rank": 2, "schedule": "interleaved_1f1b"}, "float32", 4),
    ({}, HALVES | {"schedule": "dualpipe", "dp": 2, "ep": 2}, "float32", 9),
    ({}, HALVES | {"schedule": "dualpipe_v"}, "float32", 4),
    ({}, {"pp": 4, "schedule": "gpipe", "microbatches": 4}, "bfloat16", 5),
    ({"hidden_size": 256, "num_layers": 3}, {"tp": 4, "ep": 2, "etp": 2}, "bfloat16", 2),
    ({}, {"recompute": "full", "dp": 2, "ep": 2, "dispatcher": "low_latency"}, "float32", 5),
    ({}, {"recompute": "selective", "recompute_attention": False}, "float32", 3),
    ({}, {"recompute": "selective", "recompute_experts": False}, "float64", 3),
    ({}, {"cp": 2, "context": "all_gather", "recompute": "selective"}, "float32", 4),
    ({}, {"cp": 2, "tp": 2, "ep": 4}, "float32", 4),
    # What deferred weight gradients keep.
    ({}, HALVES | {"schedule": "zb_h1", "recompute": "full"}, "bfloat16", 4),
    ({}, HALVES | {"schedule": "zb_h2", "recompute": "selective"}, "float32", 4),
    ({"router_score": "sigmoid", "z_loss_coefficient": 1e-3}, {}, "bfloat16", 3),
    (TOGETHER, {"dp": 2, "tp": 2}, "bfloat16", 4),
    (TOGETHER | {"aux_loss_scope": "sequence"}, HALVES | {"tp": 2, "ep": 2}, "float32", 5),
    (TOGETHER | {"z_loss_coefficient": 1e-3}, {"recompute": "full"}, "float32", 3),
    (
        TOGETHER | {"router_score": "sigmoid", "aux_loss_probabilities": "softmax"},
        {"dp": 2, "ep": 2},
        "float32",
        4,
    ),
]
#: Selections and schedules whose activations the planner does not count tensor by tensor (whole
#: sequences that are compared; the weight gradients that a split backward still owes); the other
#: ends of a step, slices, forwards that run again, experts on several ranks.
TRAFFIC_ONLY: list[Case] = [
    ({"router_selection": "expert_choice"}, {"dp": 2, "tp": 2, "ep": 2}, "float32", 4),
    ({"router_selection": "sinkhorn", "capacity_factor": 1.0}, {"tp": 2, "ep": 2}, "float32", 4),
    ({}, HALVES | {"schedule": "zb_h1", "tp": 2}, "float32", 4),
]


FULL: dict[str, Any] = {"recompute": "full"}
#: Extra prediction layers, and experts in some layers only.
AHEAD: dict[str, Any] = {"num_mtp_layers": 2, "moe_layers": (1, 4, 7)}
AFTER = HALVES | {"schedule": "zb_h2", "optimizer_validation": "after"}
SLICED: dict[str, Any] = {"pp": 2, "schedule": "terapipe", "slices": 3, "microbatches": 2}
SPARE: dict[str, Any] = {"dp": 4, "ep": 4, "spare_slots": 1}
STREAM: dict[str, Any] = {"pp": 2, "schedule": "pipedream", "microbatches": 4}
MESSAGES: dict[str, Any] = {"pp": 2, "schedule": "ampnet", "microbatches": 3}
TRAFFIC_ONLY += [
    ({}, FULL | {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "float32", 4),
    ({"first_dense_layers": 2}, FULL | HALVES | {"tp": 2, "ep": 2}, "bfloat16", 4),
    ({}, AFTER | {"dp": 2, "ep": 2}, "float32", 6),
    ({}, SLICED | {"tp": 2, "ep": 2}, "float32", 3),
    ({}, SPARE | {"spare_slots": 2}, "float32", 6),
    ({}, STREAM | {"dp": 2, "ep": 2}, "float32", 5),
    ({}, MESSAGES | {"tp": 2, "ep": 2}, "float32", 4),
    (AHEAD, HALVES | {"tp": 2, "ep": 2}, "bfloat16", 4),
    *(({}, FULL | TWO_NODES | {"dispatcher": name}, "bfloat16", 9) for name in DISPATCHERS),
    *(({}, FULL | EXACT | {"dispatcher": name}, "float64", 5) for name in DISPATCHERS),
    (
        {},
        FULL | HALVES | {"schedule": "zb_h1", "tp": 2, "attention_exit": "all_to_all"},
        "float32",
        4,
    ),
    (
        {},
        FULL | HALVES | {"schedule": "dualpipe", "dp": 2, "ep": 2, "dispatch_chunks": 2},
        "float32",
        9,
    ),
    ({"capacity_factor": 1.0}, FULL | {"dp": 2, "tp": 2, "ep": 4}, "float32", 4),
    ({}, {"recompute": "selective", "dp": 2, "tp": 2, "ep": 2}, "float32", 4),
    ({"capacity_factor": 1.0, "aux_loss_scope": "global"}, AFTER | {"tp": 2}, "float32", 4),
    ({}, AFTER | {"pp": 4, "recompute": "full"}, "float32", 4),
    ({"tied_embeddings": True}, AFTER | {"schedule": "zb_v"}, "float32", 4),
    ({}, AFTER | {"schedule": "1f1b", "dp": 2, "ep": 2, "spare_slots": 1}, "float32", 6),
    ({"aux_loss_scope": "global"}, SLICED | {"dp": 2, "ep": 2}, "float32", 5),
    ({}, SLICED | FULL | {"tp": 2, "ep": 2, "slices": 5}, "bfloat16", 3),
    ({}, SPARE | {"dispatch_chunks": 2, "spare_policy": "shadow"}, "float32", 6),
    ({}, SPARE | FULL | {"payload": "fp8"}, "bfloat16", 6),
    ({}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "spare_slots": 2}, "float32", 5),
    ({}, SPARE | {"ep": 2, "ranks_per_node": 2, "microbatches": 2}, "float32", 9),
    ({"router_score": "sigmoid", "router_selection_bias": True}, STREAM | {"tp": 2}, "float32", 4),
    ({}, STREAM | {"schedule": "pipedream_2bw", "update_window": 2, "dp": 2}, "float32", 8),
    ({}, STREAM | FULL | {"tp": 2, "ep": 2}, "float32", 4),
    ({}, MESSAGES | {"pp": 4, "ampnet_backward": "live"}, "float32", 4),
    ({}, MESSAGES | FULL | {"dp": 2, "ep": 2}, "float32", 6),
    (BIASES, SPARE, "float32", 6),
    (BIASES, SPARE | {"ep": 2, "etp": 2, "spare_slots": 2}, "bfloat16", 6),
    (AHEAD | {"tied_embeddings": True}, FULL | HALVES | {"dp": 2, "ep": 2}, "float32", 4),
    ({"num_mtp_layers": 1}, AFTER | {"dp": 2, "ep": 2}, "float32", 6),
    ({"num_mtp_layers": 1}, SLICED | {"tp": 2, "ep": 2}, "float32", 3),
    (TOGETHER, SLICED | {"tp": 2, "ep": 2}, "float32", 3),
    (TOGETHER | {"aux_loss_scope": "sequence"}, HALVES | {"schedule": "zb_h1"}, "float32", 5),
    (TOGETHER, STREAM | {"dp": 2, "ep": 2}, "float32", 4),
    (TOGETHER, MESSAGES | {"tp": 2}, "float32", 3),
    (TOGETHER, HALVES | {"schedule": "dualpipe", "dp": 2, "ep": 2}, "float32", 9),
    ({"num_mtp_layers": 1}, {"schedule": "pipedream", "microbatches": 4, "tp": 2}, "float32", 4),
    (AHEAD | {"aux_loss_scope": "global"}, HALVES | {"schedule": "zb_v"}, "float32", 4),
    ({"num_mtp_layers": 1, "moe_layers": (0, 2)}, SPARE, "float32", 6),
]


def name_of(case: Case) -> str:
    model, plan, dtype, _ = case
    return "-".join(f"{key}={value}" for key, value in {**model, **plan, "dtype": dtype}.items())


def check(
    case: Case, *, activations: bool = True, seq_len: int = SEQ_LEN, tuning: Tuning = ALL
) -> None:
    model, plan, dtype, batch = case
    config, checked = model_of(model), Plan(**plan)
    ranks = measure(model, plan, dtype, batch, seq_len, count_saved=activations, tuning=tuning)
    assert_predicted(
        config,
        checked,
        ranks,
        TrainConfig(dtype=dtype),
        batch=batch,
        seq_len=seq_len,
        activations=activations,
        tuning=tuning,
    )


@pytest.mark.representative(
    "dp=4-ep=4-dispatcher=hierarchical-ranks_per_node=2-dispatch_chunks=2-dtype=bfloat16",
    "dp=2-tp=2-ep=4-dispatcher=low_latency-dtype=float32",
    "dp=2-ep=2-payload=fp8-dispatch_chunks=3-dtype=bfloat16",
    "dp=4-ep=2-combine=exact-dtype=float32",
    "recompute=full-dtype=float32",
    "num_mtp_layers=2-recompute=selective-dtype=bfloat16",
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_predicted_is_measured(case: Case) -> None:
    check(case)


@pytest.mark.representative(
    "first_dense_layers=2-recompute=full-pp=2-microbatches=4-tp=2-ep=2-dtype=bfloat16",
    "pp=2-microbatches=4-schedule=zb_h2-optimizer_validation=after-dp=2-ep=2-dtype=float32",
    "dp=4-ep=4-spare_slots=2-dtype=float32",
    "pp=2-schedule=ampnet-microbatches=3-tp=2-ep=2-dtype=float32",
)
@pytest.mark.parametrize("case", TRAFFIC_ONLY, ids=name_of)
def test_predicted_traffic_is_measured(case: Case) -> None:
    check(case, activations=False)


def test_uniform_routing_is_near_a_run() -> None:
    """Without the choices of a run, bytes are expected ones: the same lines, the same counts."""
    plan = {"dp": 2, "ep": 2}
    config, checked = ModelConfig(), Plan(**plan)
    measured = measure({}, plan, batch=4)[0]["ledger"]
    expected = predict_ledger(
        config, checked, seq_len=SEQ_LEN, global_batch=4, dtype="float32", rank=0
    )
    keys = [(e.axis, e.op, e.phase, e.caller, e.count) for e in expected.entries()]
    assert keys == [(e.axis, e.op, e.phase, e.caller, e.count) for e in measured.entries()]
    rows = {"caller": "moe.dispatch", "phase": "forward"}
    sent, ran = (ledger.total(**rows).wire_bytes for ledger in (expected, measured))
    assert sent == pytest.approx(ran, rel=0.25)
