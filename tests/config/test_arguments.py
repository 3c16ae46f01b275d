"""Arguments of public functions that are words or numbers: refusals name the legal values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import moemesh as mm

PLAN: dict[str, Any] = {"model": "tiny", "cluster": "dgx_h100", "seq_len": 128, "global_batch": 32}
PRECISIONS = "choices: bfloat16, float8, float4"


@pytest.mark.parametrize("precision", ["banana", 3, None, "float32"])
def test_the_precision_of_a_plan(precision: Any) -> None:
    with pytest.raises(ValueError, match=PRECISIONS):
        mm.plan(**PLAN, precision=precision)


def test_the_name_of_another_program_has_its_own_here() -> None:
    with pytest.raises(ValueError, match=r"did you mean float8\?"):
        mm.plan(**PLAN, precision="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "changed", "words"),
    [
        (mm.plan, {"trainable": 1}, "trainable must be True or False"),
        (mm.plan, {"seq_len": True}, "seq_len must be a whole number, not True"),
        (mm.plan, {"why": 3}, "why must be a text or a list, not 3"),
        (mm.plan, {"cluster": None}, "cluster must be a text or a path or a Cluster, not None"),
        (mm.estimate, {"plan": "dp=8", "rank": 1.5}, "rank must be a text or a whole number"),
        (mm.partition, {"method": "banana"}, "choices: dp, ilp"),
        (mm.partition, {"seed": 1.5}, "seed must be a whole number, not 1.5"),
    ],
)
def test_a_plan_refuses(call: Callable[..., Any], changed: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words.replace("(", "\\(")):
        call(**(PLAN | changed))


def test_other_functions_refuse() -> None:
    schedule = mm.schedules.zb_h1(2, 4)
    for call, words in (
        (lambda: mm.simulate(schedule, unit="hours"), "choices: seconds"),  # type: ignore[arg-type]
        (lambda: mm.simulate(schedule, costs=3), "costs must be a Costs or None, not 3"),  # type: ignore[arg-type]
        (lambda: mm.simulate(3), "schedule must be a Schedule, not int"),  # type: ignore[arg-type]
        (lambda: mm.schedules.check("x"), "schedule must be a Schedule, not str"),  # type: ignore[arg-type]
        (lambda: mm.schedules.to_text("x"), "schedule must be a Schedule, not str"),  # type: ignore[arg-type]
        (lambda: mm.Mesh.single("gpu"), "device cannot be 'gpu': cpu, or cuda:0"),
        (lambda: mm.MoELayer(8, 8, 2, 1, device="gpu"), "device cannot be 'gpu'"),
        (lambda: mm.schedules.zb_h1("4", 8), "num_ranks must be a whole number, not '4'"),  # type: ignore[arg-type]
        (lambda: mm.load(3), "path must be a text or a path or None, not 3"),  # type: ignore[arg-type]
        (lambda: mm.load(overrides=3), "overrides must be a list or a dict, not 3"),  # type: ignore[arg-type]
        (lambda: mm.train(mm.load(), out=3), "out must be a text or a path or None"),  # type: ignore[arg-type]
        (lambda: mm.save_checkpoint("x", {}, step="1"), "step must be an integer of at least 0"),  # type: ignore[arg-type]
        (
            lambda: mm.rebalance_experts([[1.0, 2.0]], 2, 1, 1, 1, policy="best"),  # type: ignore[arg-type]
            "policy cannot be 'best'",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
