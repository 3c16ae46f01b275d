"""Context parallelism: predicted traffic equals the measured one on every rank, to the byte;
activations within 2 %."""

from __future__ import annotations

from typing import Any

import pytest

from tests.twins.test_planner_runs import Case, check, name_of

CONTEXTS = ("ring", "all_gather", "all_to_all")
FULL: dict[str, Any] = {"recompute": "full"}
SELECTIVE: dict[str, Any] = {"recompute": "selective"}
PIPES: dict[str, Any] = {"pp": 2, "cp": 2, "microbatches": 3}
CHOICE = {"router_selection": "expert_choice", "aux_loss_scope": "global"}
LATENT: dict[str, Any] = {
    "attention": "mla",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rotary_head_dim": 2,
    "v_head_dim": 3,
}
CASES: list[Case] = [
    *(({}, {"cp": cp, "context": name}, "float32", 3) for cp in (2, 4) for name in CONTEXTS),
    *(({}, {"cp": 2, "tp": 2, "ep": 4, "context": name}, "bfloat16", 3) for name in CONTEXTS),
    *(({}, FULL | {"cp": 2, "dp": 2, "ep": 2, "context": n}, "float64", 3) for n in CONTEXTS),
    *(({}, SELECTIVE | {"cp": 2, "tp": 2, "context": n}, "float32", 3) for n in CONTEXTS),
    ({}, SELECTIVE | {"cp": 2, "recompute_attention": False}, "float32", 3),
    *(({}, PIPES | {"ep": 2, "context": name}, "bfloat16", 4) for name in CONTEXTS),
    ({"qk_norm": True}, {"cp": 2, "context": "all_to_all"}, "bfloat16", 3),
    *((LATENT, {"cp": 2, "tp": 2, "context": name}, "float32", 3) for name in CONTEXTS),
    ({"num_kv_heads": 1}, {"cp": 4, "context": "all_to_all"}, "float32", 2),
    ({"num_kv_heads": 2}, {"cp": 8, "context": "all_to_all"}, "float32", 2),
    (CHOICE, {"cp": 2, "tp": 2, "ep": 2}, "float32", 3),
    ({"capacity_factor": 1.0}, {"cp": 4, "ep": 2}, "float32", 3),
    ({}, PIPES | {"schedule": "zb_h1", "recompute": "full"}, "float32", 4),
    ({"num_experts": 12}, {"dp": 3, "cp": 2, "ep": 6, "combine": "exact"}, "float32", 2),
]


@pytest.mark.representative("cp=2-tp=2-ep=4-context=all_gather-dtype=bfloat16")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_predicted_traffic_is_measured(case: Case) -> None:
    _, plan, *_ = case
    # Nothing is counted of choices that compare tokens; of ranks without a sequence, too little.
    counted = case[0] != CHOICE and "combine" not in plan
    # 13 positions: chunks of one and of two.
    check(case, activations=counted, seq_len=13)
