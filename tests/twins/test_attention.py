"""Predicted = measured for every kind of attention: traffic and states to the byte, activations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.twins.test_planner_runs import Case, check, name_of

LATENT: dict[str, Any] = {
    "attention": "mla",
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rotary_head_dim": 8,
    "v_head_dim": 16,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_sinks": True,
    "qkv_bias": True,
    "output_bias": True,
}
OVER_ALL: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "projection"}
TWO = {"tp": 2, "ep": 2}
CASES: list[Case] = [
    (LATENT, TWO, "float32", 4),
    (LATENT | {"v_head_dim": 24}, {"dp": 2, "microbatches": 2}, "float32", 5),
    (LATENT | {"q_lora_rank": 0}, TWO | {"attention_exit": "all_to_all"}, "bfloat16", 3),
    (LATENT | {"qkv_bias": True, "attention_sinks": True}, TWO | {"dp": 2}, "float64", 5),
    (WINDOWS, TWO | {"attention_exit": "all_reduce"}, "float32", 3),
    (WINDOWS | {"qk_norm": True, "clip_qkv": 1.0}, {"dp": 2, "ep": 2}, "bfloat16", 4),
    (OVER_ALL, TWO | {"dp": 2}, "float32", 5),
    (OVER_ALL | {"clip_qkv": 1.0, "partial_rotary_factor": 0.5}, TWO, "bfloat16", 4),
    ({"clip_qkv": 1.0}, {"tp": 4}, "float32", 4),
]
#: Recomputed parts and slices: their traffic.
AGAIN: list[Case] = [
    (LATENT, TWO | {"recompute": "full"}, "float32", 4),
    (OVER_ALL, TWO | {"recompute": "full"}, "float32", 4),
    (OVER_ALL, TWO | {"recompute": "selective"}, "float32", 4),
    (
        LATENT | {"num_mtp_layers": 1},
        TWO | {"pp": 2, "microbatches": 2, "recompute": "full"},
        "float32",
        5,
    ),
    (LATENT, {"tp": 2, "cp": 2, "ep": 2, "context": "ring"}, "bfloat16", 3),
    (LATENT | {"q_lora_rank": 0}, {"tp": 2, "cp": 2, "context": "all_gather"}, "float32", 3),
    (OVER_ALL, {"tp": 2, "cp": 2, "context": "all_to_all"}, "float32", 3),
    (
        LATENT | {"q_lora_rank": 0},
        {"tp": 2, "pp": 2, "schedule": "terapipe", "slices": 3, "microbatches": 2},
        "float32",
        5,
    ),
]


@pytest.mark.representative(
    name_of((LATENT | {"q_lora_rank": 0}, TWO | {"attention_exit": "all_to_all"}, "bfloat16", 3)),
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_predicted_is_measured(case: Case) -> None:
    check(case)


@pytest.mark.representative(name_of((LATENT, TWO | {"recompute": "full"}, "float32", 4)))
@pytest.mark.parametrize("case", AGAIN, ids=name_of)
def test_predicted_traffic_of_recomputation_and_slices_is_measured(case: Case) -> None:
    check(case, activations=False)
