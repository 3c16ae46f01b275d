"""Rules of a model: sizes, routers, layers with experts, and the losses that depend on a plan."""

from __future__ import annotations

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
