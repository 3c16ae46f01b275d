"""Every kind of attention, in any plan, gives the numbers of one device: float64, SGD, clipping on.

Latent attention with and without compressed queries, and each knob of grouped-query attention,
under tensor parallelism (all three exits), pipelines with deferred weight gradients, slices,
context parallelism, experts on several ranks and recomputation; with odd counts, padding, and ranks
without a token.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.test_parity import MODEL, TRAIN
from tests.parity.training import Shape, assert_equals_one_device, rows

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_beta_fast": 2.0,
    "rope_beta_slow": 0.2,
}
LATENT: dict[str, Any] = MODEL | {
    "attention": "mla",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rotary_head_dim": 2,
    "v_head_dim": 3,
    "rope_interleave": True,
}
MIXED: dict[str, Any] = {
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GROUPED = MODEL | {"num_kv_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "latent": LATENT
    | YARN
    | {"rope_mscale": 0.8, "rope_mscale_all_dim": 1.2, "output_bias": True, "qkv_bias": True},
    # The shape of DeepSeek-V3: extra prediction layers, groups of experts, a selection bias.
    "deepseek": LATENT
    | YARN
    | {"rope_mscale": 1.0, "rope_mscale_all_dim": 1.0, "num_mtp_layers": 1}
    | {"router_score": "sigmoid", "router_selection_bias": True, "router_bias_rate": 0.05}
    | {"router_groups": 4, "router_groups_kept": 2, "router_scale": 1.5},
    "latent_plain": LATENT | {"q_lora_rank": 0, "v_head_dim": 8, "attention_sinks": True},
    "windows": GROUPED | MIXED | {"attention_sinks": True, "qkv_bias": True, "output_bias": True},
    "over_projection": GROUPED
    | {
        "qk_norm": True,
        "qk_norm_over": "projection",
        "clip_qkv": 1.5,
        "partial_rotary_factor": 0.5,
    },
    "multiplied": GROUPED
    | YARN
    | {"qk_norm": True, "attention_multiplier": 0.4, "rope_interleave": True},
}
CASES = rows(
    """
    # Every kind under every exit.
    *latent ... | tp=2 ep=2 attention_exit=reduce_scatter
    *latent_plain ... | tp=2 ep=2 attention_exit=all_to_all
    ... | tp=2 ep=2 attention_exit=all_reduce
    # Recomputation, padding, several microbatches.
    *over_projection ... | tp=2 ep=2 dp=2 recompute=full microbatches=2 | padded
    ... | tp=2 ep=2 dp=2 recompute=selective | padded
    # Pipelines whose weight gradients are deferred; slices of sequences.
    *latent ... | pp=2 microbatches=3 schedule=zb_h1 tp=2
    *windows ... | pp=2 schedule=terapipe slices=3 tp=2 | 4x7
    latent | pp=2 microbatches=4 schedule=dualpipe ep=2 dp=2
    over_projection | pp=2 microbatches=3 schedule=zb_h2 tp=2 recompute=full
    # Context parallelism.
    *latent_plain ... | cp=2 tp=2 ep=2 context=ring
    ... | cp=2 tp=2 context=all_gather | padded
    ... | cp=4 ep=2 context=all_to_all
    latent | cp=2 pp=2 schedule=zb_h1 microbatches=2 tp=2
    over_projection | cp=2 tp=2 dp=2 ep=8 recompute=full | padded
    # Sharded states.
    latent | tp=2 dp=2 ep=4 data=zero3 microbatches=2 | padded
    over_projection | dp=4 ep=2 data=zero2
    windows | tp=2 dp=2 data=zero3 recompute=selective
    deepseek | pp=2 microbatches=3 dp=2 tp=2 ep=4 data=zero1 | padded
    *deepseek | tp=2 cp=2 ep=4 data=zero3 context=ring
    # More ranks than tokens, and mixtures of axes.
    *multiplied ... | tp=4 ep=2 etp=2 | 1x5
    latent | tp=2 dp=4 ep=8 dispatcher=all_gather | padded
    latent_plain | tp=8 ep=4 attention_exit=all_to_all | 1x5
    windows | dp=4 ep=4 combine=exact | padded
    """,
    MODELS,
)


@pytest.mark.parametrize(("model", "plan", "shape"), CASES)
def test_plan_equals_one_device(model: str, plan: dict[str, Any], shape: Shape) -> None:
    assert_equals_one_device(MODELS[model], plan, TRAIN, shape)
