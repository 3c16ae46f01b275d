"""Every `plan.data` on gloo ranks: its ledger and model states, rank by rank, are the predicted."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.trainable import refusals
from tests.twins.test_planner_runs import AFTER, EXACT, FULL, HALVES, STREAM, Case, check, name_of

SERVED: dict[str, Any] = {"data": "parameter_server"}
#: Strategies, each with the other keys that it has.
STRATEGIES: list[dict[str, Any]] = [
    {"data": "zero1"},
    {"data": "zero2"},
    {"data": "zero3"},
    {"data": "zero3", "reshard": "step"},
    SERVED,
    SERVED | {"servers": 2},
]
#: Plans with at least three data-parallel ranks or none that a third server would change.
WIDE: list[Case] = [
    ({}, {"dp": 4}, "float32", 5),
    ({}, {"dp": 4, "ep": 2, "microbatches": 2}, "bfloat16", 8),
    ({}, {"dp": 3}, "bfloat16", 4),
    ({}, {"dp": 4, "ep": 2, "shard_group": 2, "microbatches": 2}, "bfloat16", 8),
    ({}, EXACT | {"ep": 2, "shard_group": 2}, "float32", 5),
    ({"num_mtp_layers": 2}, {"dp": 4, "ep": 2}, "float32", 5),
    ({}, EXACT | {"ep": 2}, "float64", 5),
]
NARROW: list[Case] = [
    ({}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "bfloat16", 3),
    ({}, {"dp": 2, "tp": 2, "ep": 4, "attention_exit": "all_to_all"}, "float32", 4),
    ({"tied_embeddings": True, "qk_norm": True}, HALVES | {"dp": 2}, "bfloat16", 8),
    ({}, HALVES | {"dp": 2, "ep": 2, "schedule": "dualpipe"}, "float32", 9),
    ({}, HALVES | FULL | {"dp": 2, "tp": 2, "schedule": "zb_h1"}, "bfloat16", 4),
    ({"num_mtp_layers": 2}, {"dp": 2, "ep": 2, "microbatches": 2}, "float32", 4),
    ({"num_mtp_layers": 1, "expert_bias": True}, HALVES | {"dp": 2}, "bfloat16", 8),
    ({}, AFTER | {"dp": 2, "ep": 2}, "float32", 6),
    ({}, STREAM | {"dp": 2, "ep": 2}, "bfloat16", 5),
    ({"num_experts": 0, "num_shared_experts": 0}, {"dp": 2, "tp": 2}, "float32", 3),
]


def trains(plan: dict[str, Any]) -> bool:
    """Whether no rule of plans refuses this mix."""
    config = RunConfig(model=ModelConfig(), plan=Plan(**plan))
    return not config.plan.check() and not refusals(config)


CASES: list[Case] = [
    (model, plan | strategy, dtype, batch)
    for cases in (WIDE, NARROW)
    for model, plan, dtype, batch in cases
    for strategy in STRATEGIES
    if (cases is WIDE or "servers" not in strategy) and trains(plan | strategy)
]


@pytest.mark.representative(
    "dp=4-ep=2-microbatches=2-data=zero1-dtype=bfloat16",
    "dp=4-ep=2-microbatches=2-data=parameter_server-servers=2-dtype=bfloat16",
    "dp=4-ep=2-microbatches=2-data=zero3-reshard=step-dtype=bfloat16",
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_predicted_is_measured_under_every_strategy(case: Case) -> None:
    check(case, activations=False)
