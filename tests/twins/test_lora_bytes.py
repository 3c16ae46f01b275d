"""Adapters beside frozen weights: ledger and model states of real steps are the predicted ones."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.lora import LoraConfig
from moemesh.config.tuning import Tuning
from tests.twins.test_planner_runs import FULL, HALVES, Case, check, name_of

ADAPTED: dict[str, Any] = {"num_layers": 4, "first_dense_layers": 1, "lora": {"rank": 4}}
WIDE: dict[str, Any] = ADAPTED | {"lora": {"rank": 32}}
SOME: dict[str, Any] = ADAPTED | {"lora": {"rank": 4, "targets": ("q_proj", "down_proj")}}
CASES: list[Case] = [
    (ADAPTED, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "bfloat16", 5),
    (ADAPTED, HALVES | {"dp": 2, "schedule": "zb_h1"}, "float32", 4),
    (WIDE, HALVES | {"dp": 2, "ep": 2, "schedule": "zb_h1"}, "float32", 4),
    (ADAPTED, {"dp": 4, "etp": 2, "data": "zero3"}, "float32", 5),
    (ADAPTED, {"dp": 4, "ep": 2, "data": "zero2", "shard_group": 2}, "bfloat16", 5),
    (ADAPTED, FULL | HALVES | {"dp": 2, "ep": 2, "schedule": "dualpipe"}, "float32", 9),
    (SOME, {"tp": 2, "cp": 2, "ep": 2, "data": "zero1"}, "float32", 4),
    (SOME, {"dp": 2, "tp": 2, "ep": 2, "combine": "exact"}, "float32", 4),
    (SOME, {"recompute": "selective", "tp": 2, "dp": 2}, "bfloat16", 4),
    (
        ADAPTED,
        HALVES | {"dp": 2, "tp": 2, "schedule": "zb_h1", "attention_exit": "all_to_all"},
        "float32",
        4,
    ),
]


@pytest.mark.representative(
    "num_layers=4-first_dense_layers=1-lora={'rank': 32}-pp=2-microbatches=4-dp=2-ep=2"
    "-schedule=zb_h1-dtype=float32",
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_predicted_is_measured_with_adapters(case: Case) -> None:
    model = case[0]
    check(case, tuning=Tuning(train_only=LoraConfig(**model["lora"]).trains))
