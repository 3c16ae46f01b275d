"""Rules of a model: sizes, routers, layers with experts, and the losses that depend on a plan."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan


def test_a_dense_or_latent_model_drops_the_rules_it_does_not_need() -> None:
    latent = ModelConfig(
        attention="mla",
        num_kv_heads=3,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rotary_head_dim=4,
        v_head_dim=8,
    )
    assert latent.check() == []
    assert Plan(tp=8).check(latent) == []
    no_dense = ModelConfig(first_dense_layers=0, intermediate_size=3)
    assert Plan(tp=4).check(no_dense) == []


BROKEN_MODELS = [
    ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
    ({"num_layers": -3}, "num_layers must be at least 1, not -3"),
    ({"num_heads": 6}, "num_kv_heads (4) must divide num_heads (6)"),
    ({"head_dim": 15}, "head_dim (15) must be even"),
    ({"experts_per_token": 9}, "experts_per_token (9) exceeds num_experts (8)"),
    ({"experts_per_token": 0}, "experts_per_token must be at least 1"),
    ({"router_groups": 3}, "router_groups (3) must divide num_experts (8)"),
    (
        {"router_groups": 2, "router_groups_kept": 3},
        "router_groups_kept (3) exceeds router_groups (2)",
    ),
    (
        {"router_groups": 4, "experts_per_token": 3},
        "experts_per_token (3) exceeds the 2 experts of the kept groups (1 of 4 groups of 2)",
    ),
    (
        {"router_groups": 8, "router_groups_kept": 2},
        'router_group_score = "top2" needs groups of at least 2 experts',
    ),
    ({"first_dense_layers": 9}, "first_dense_layers (9) exceeds num_layers (8)"),
    ({"attention": "mla"}, 'attention = "mla" needs kv_lora_rank'),
    (
        {"num_shared_experts": 0, "shared_intermediate_size": 64},
        "shared_intermediate_size (64) has no use",
    ),
    ({"rope_theta": 0.0}, "rope_theta must be above 0, not 0.0"),
    ({"norm_eps": -1.0}, "norm_eps must be above 0"),
    ({"router_scale": 0.0}, "router_scale must be above 0"),
    ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647"),
    ({"capacity_factor": -0.5}, "capacity_factor must be at least 0, not -0.5"),
    ({"router_jitter": 1.0}, "router_jitter must be below 1, not 1.0"),
    (
        {"router_normalize": False, "router_normalize_min": 0.1},
        "router_normalize_min has no use: router_normalize is false",
    ),
    (
        {"router_normalize_eps": 1e-9, "router_normalize_min": 0.1},
        "router_normalize_min and router_normalize_eps are two ways to one end",
    ),
    (
        {"router_selection": "sinkhorn", "router_selection_bias": True},
        'router_selection = "sinkhorn" does not go with router_selection_bias = true',
    ),
    (
        {"router_selection": "expert_choice", "router_groups": 2},
        'router_selection = "expert_choice" does not go with router_groups = 2',
    ),
    (
        {"router_selection": "expert_choice", "router_when": "after"},
        'router_selection = "expert_choice" does not go with router_when = "after"',
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), BROKEN_MODELS)
def test_broken_model(fields: dict, sentence: str) -> None:
    found = ModelConfig(**fields).check()
    assert any(sentence in str(problem) for problem in found), found
    assert all(problem.fix for problem in found)


def test_group_routing_of_a_good_model() -> None:
    fields = {
        "num_experts": 16,
        "router_groups": 4,
        "router_groups_kept": 2,
        "experts_per_token": 8,
    }
    assert ModelConfig(**fields).check() == []


def test_a_loss_that_depends_on_the_layout_is_told() -> None:
    assert ModelConfig().layout_warning == ""
    warning = ModelConfig(aux_loss_scope="microbatch").layout_warning
    assert 'aux_loss_scope = "microbatch"' in warning and "plan.dp" in warning
    assert "plan.microbatches" in ModelConfig(aux_loss_scope="global").layout_warning
    assert ModelConfig(aux_loss_scope="global", aux_loss_coefficient=0.0).layout_warning == ""
    assert ModelConfig(aux_loss_scope="global", num_experts=0).layout_warning == ""


def test_layers_and_shared_width() -> None:
    model = ModelConfig(first_dense_layers=2, num_layers=4, num_shared_experts=2)
    assert [model.is_moe_layer(index) for index in range(4)] == [False, False, True, True]
    assert (model.num_moe_layers, model.num_dense_layers) == (2, 2)
    assert model.shared_width == 256
    assert ModelConfig(shared_intermediate_size=40).shared_width == 40
    assert ModelConfig(num_shared_experts=0).shared_width == 0
    dense = ModelConfig(num_experts=0)
    assert dense.num_moe_layers == 0
    assert not dense.is_moe_layer(3)


def test_layers_with_experts_by_pattern() -> None:
    model = ModelConfig(num_layers=6, moe_layers=(1, 3, 5), num_mtp_layers=2)
    assert model.check() == []
    assert model.routed_layers == (1, 3, 5, 6, 7)  # extra layers are as the last one
    assert (model.num_moe_layers, model.num_dense_layers) == (3, 3)
    dense_end = ModelConfig(num_layers=6, moe_layers=(0, 2), num_mtp_layers=2)
    assert dense_end.routed_layers == (0, 2)
    assert not dense_end.is_moe_layer(6)
    windows = ModelConfig(
        num_layers=4,
        num_mtp_layers=1,
        sliding_window=8,
        layer_types=("full_attention", "sliding_attention"),
    )
    assert windows.window(4) == windows.window(3) == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"moe_layers": (0, 8)}, "from 0 to num_layers - 1 (7)"),
        ({"moe_layers": (3, 1)}, "ascending"),
        ({"moe_layers": ()}, "different layers"),
        ({"moe_layers": (1, 2), "first_dense_layers": 2}, "both say which layers have experts"),
        ({"shared_gate": True, "num_shared_experts": 0}, "nothing to multiply"),
    ],
    ids=str,
)
def test_mistakes_of_layers_and_experts(keys: dict[str, Any], words: str) -> None:
    (problem,) = ModelConfig(**keys).check()
    assert words in problem.message and problem.fix
