"""Parameters that do not train: ledger and model states of real steps are the predicted ones."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.tuning import Tuning
from tests.parity.test_tuning import TUNINGS
from tests.twins.test_planner_runs import AFTER, FULL, HALVES, SLICED, SPARE, Case, check, name_of

DEEP: dict[str, Any] = {"num_layers": 4, "first_dense_layers": 1}
AHEAD: dict[str, Any] = DEEP | {"num_mtp_layers": 2}
CASES: list[tuple[str, Case]] = [
    ("experts", (DEEP, {"dp": 2, "ep": 2}, "bfloat16", 5)),
    ("late", (DEEP, HALVES | {"tp": 2, "ep": 2}, "bfloat16", 4)),
    ("late", (DEEP, {"dp": 4, "ep": 2, "data": "zero3"}, "float32", 5)),
    ("head", (DEEP, HALVES | {"dp": 2, "schedule": "zb_h1"}, "float32", 4)),
    ("late", (DEEP, FULL | HALVES | {"dp": 2, "ep": 2, "schedule": "dualpipe"}, "float32", 9)),
    ("attention", (DEEP, {"dp": 2, "tp": 2, "ep": 2, "data": "zero2"}, "bfloat16", 4)),
    ("ahead", (AHEAD, {"dp": 2, "tp": 2, "ep": 2, "data": "zero3"}, "float32", 4)),
    ("second_ahead", (AHEAD, HALVES | {"tp": 2}, "bfloat16", 4)),
    ("down", (DEEP, {"dp": 4, "ep": 2, "shard_group": 2, "data": "zero1"}, "float32", 5)),
    ("routers", (DEEP, AFTER | {"dp": 2, "ep": 2}, "float32", 6)),
    ("late", (DEEP, SLICED | {"tp": 2, "ep": 2}, "float32", 3)),
    ("no_experts", (DEEP, SPARE, "float32", 6)),
    ("late", (DEEP, SPARE, "float32", 6)),
    ("late", (DEEP, {"dp": 2, "data": "zero3", "reshard": "step", "cp": 2}, "float32", 4)),
    ("head", (DEEP, {"dp": 4, "ep": 2, "data": "parameter_server"}, "float32", 5)),
    ("layer", (DEEP, {"dp": 2, "data": "zero3"} | HALVES, "float32", 4)),
    ("uneven_experts", (DEEP, {"dp": 4, "ep": 4, "data": "zero3"}, "bfloat16", 6)),
    ("some_experts", (DEEP, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "float32", 4)),
    ("frozen_experts", (DEEP, {"dp": 4, "ep": 2, "data": "zero1"}, "bfloat16", 4)),
    ("some_downs", (DEEP | {"expert_bias": True}, HALVES | {"dp": 2, "ep": 2}, "float32", 4)),
]


def case_name(value: object) -> str:
    return value if isinstance(value, str) else name_of(value)


@pytest.mark.representative(
    "experts-num_layers=4-first_dense_layers=1-dp=2-ep=2-dtype=bfloat16",
    "uneven_experts-num_layers=4-first_dense_layers=1-dp=4-ep=4-data=zero3-dtype=bfloat16",
)
@pytest.mark.parametrize(("tuning", "case"), CASES, ids=case_name)
def test_predicted_is_measured_where_little_trains(tuning: str, case: Case) -> None:
    check(case, tuning=Tuning(**TUNINGS[tuning]), activations="spare_slots" not in case[1])
