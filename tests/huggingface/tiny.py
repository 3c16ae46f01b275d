"""Tiny random models of every family, made and saved by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

#: Sizes that no dim shares with another, where a family lets them be chosen.
COMMON: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 56,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_SIGMOID: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
#: model_type -> keys of its configuration besides COMMON.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
    },
    "olmoe": {
        "num_experts_per_tok": 2,
        "num_experts": 8,
        "norm_topk_prob": False,
        "clip_qkv": 0.9,
        "head_dim": 12,
    },
    "deepseek_v2": {
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **_LATENT,
        **_SIGMOID,
        "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    },
    "glm4_moe": {
        **_SIGMOID,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {**_LATENT, **_SIGMOID, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "solar_open": {**_SIGMOID, "first_k_dense_replace": 0},
    "hy_v3": {
        **_EXPERTS,
        "num_experts": 8,
        "num_shared_experts": 2,
        "router_scaling_factor": 1.8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "dots1": {**_SIGMOID},
    "gpt_oss": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "minimax_m2": {"num_experts_per_tok": 2, "num_local_experts": 8, "rotary_dim": 8},
    "granitemoe": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": 12},
    "qwen3": {},
    "granite": {
        "head_dim": 12,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
    "ernie4_5_moe": {
        "moe_k": 2,
        "moe_num_experts": 8,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "use_bias": False,
    },
}

#: Families without experts: plans with expert parallelism are not for them.
DENSE = ("llama", "mistral", "qwen2", "qwen3", "granite")


@cache
def build(kind: str) -> Any:
    """The model of the family `kind` that most tests share: do not change its weights."""
    return make(kind)


def make(kind: str, **changes: Any) -> Any:
    """A model of the family `kind`, with `changes` of its configuration: weights from a fixed seed,
    matrices three times as large, so that routing is spread; biases and buffers are not zero.
    Float32, eager, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**COMMON, **FAMILIES[kind], **changes}
    config = AutoConfig.for_model(kind, **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "correction_bias" in name:
                tensor.copy_(0.2 * torch.rand(tensor.shape, generator=generator))
            elif tensor.ndim < 2 or name.endswith("_bias") or "sinks" in name:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
            else:
                tensor.mul_(3)
    return model


def load(folder: Path, **options: Any) -> Any:
    """The model of transformers of a folder, eager and in evaluation mode."""
    from transformers import AutoModelForCausalLM

    given = {"attn_implementation": "eager", "experts_implementation": "eager"} | options
    return AutoModelForCausalLM.from_pretrained(folder, **given).eval()


@torch.no_grad()
def logits(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of a model of transformers."""
    return model(tokens_BS).logits


def load_complete(folder: Path) -> Any:
    """The same, of a folder that has every tensor of the model and no other."""
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return load(folder)


def save(kind: str, folder: Path, **options: Any) -> Path:
    """A folder with the weights of :func:`build`, as transformers writes it."""
    build(kind).save_pretrained(folder, **options)
    return folder
