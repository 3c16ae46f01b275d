"""Layouts from plans of our own: what a key of [plan] means in the planner's words."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.plan import Plan
from moemesh.planner.accuracy.published import recompute_from_words
from moemesh.planner.activations import layer_kept
from moemesh.planner.layout_sources import from_plan, plan_of
from moemesh.planner.planned_layout import RECOMPUTED, PlannedLayout
from moemesh.planner.search.command import plan_keys
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.shapes.shape import LayerKind

BATCH: dict[str, Any] = {"seq_len": 512, "global_batch": 8}


def layout(**keys: Any) -> PlannedLayout:
    return from_plan(Plan(**keys), **BATCH)


def test_selective_recomputes_the_core_and_the_product_of_a_swiglu() -> None:
    """As `moemesh.parallel.recompute`: silu(gate) * up not kept."""
    shape = load_model("llama3-8b").shape
    kind = LayerKind(window=0, moe=False)
    none, selective = (layer_kept(shape, kind, layout(recompute=r)) for r in ("none", "selective"))
    assert none.width - selective.width == 2 * shape.intermediate_size
    assert none.tokens == selective.tokens and none.routed == selective.routed


def test_selective_keeps_of_experts_what_its_switch_says() -> None:
    shape = load_model("qwen3-30b-a3b").shape
    kind = LayerKind(window=0, moe=True)
    none, selective, attention = (
        layer_kept(shape, kind, layout(**keys))
        for keys in (
            {},
            {"recompute": "selective"},
            {"recompute": "selective", "recompute_experts": False},
        )
    )
    width = shape.experts_per_token * shape.expert_intermediate_size
    assert attention.routed - selective.routed == 2 * 2 * width  # gate and up, bfloat16
    assert none.routed - attention.routed == 2 * width


@pytest.mark.parametrize("part", ["attention", "experts"])
def test_a_switch_comes_back(part: str) -> None:
    plan = Plan(recompute="selective", **{f"recompute_{part}": False})
    assert plan_of(from_plan(plan, **BATCH)) == plan


def test_a_published_selective_is_the_attention_core_alone() -> None:
    assert recompute_from_words("selective") == {"attention"}
    assert recompute_from_words("selective") != RECOMPUTED["selective"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_word_comes_back(recompute: str) -> None:
    assert plan_keys(layout(recompute=recompute))["recompute"] == recompute
