"""The models of the parity tests, by the names that they have in the tables of plans."""

from __future__ import annotations

from typing import Any

TRAIN: dict[str, Any] = {
    "steps": 2, "dtype": "float64", "optimizer": "sgd", "lr": 0.2, "warmup_steps": 0,
    "weight_decay": 0.01, "clip": 0.5,
}  # fmt: skip

MODEL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 4,
    "intermediate_size": 48,
    "first_dense_layers": 1,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_intermediate_size": 16,
    "num_shared_experts": 1,
    "init_std": 0.3,  # large enough that routing is far from a tie
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": MODEL,
    "grouped": MODEL | {"num_kv_heads": 4, "qk_norm": True, "tied_embeddings": True},
    "sigmoid": MODEL
    | {
        "router_score": "sigmoid",
        "router_selection_bias": True,
        "router_bias_rate": 0.05,
        "router_scale": 1.5,
        "router_groups": 4,
        "router_groups_kept": 2,
        "z_loss_coefficient": 1e-2,
    },
    "no_shared": MODEL | {"num_shared_experts": 0, "first_dense_layers": 0, "num_layers": 2},
    "dense": MODEL | {"num_experts": 0, "num_shared_experts": 0},
}
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
KINDS: dict[str, dict[str, Any]] = {
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
#: Stages with experts and one without, extra prediction layers among those with.
TOGETHER: dict[str, Any] = MODEL | {"aux_loss_layers": "together", "num_layers": 4}
LOSSES: dict[str, dict[str, Any]] = {
    "microbatch": MODEL | {"aux_loss_scope": "microbatch", "z_loss_coefficient": 1e-2},
    "sequence": MODEL | {"aux_loss_scope": "sequence", "z_loss_coefficient": 1e-2},
    "global": MODEL | {"aux_loss_scope": "global", "z_loss_coefficient": 1e-2},
    # One loss over the choices of all layers.
    "together": TOGETHER | {"aux_loss_scope": "global"},
    "together_microbatch": TOGETHER | {"aux_loss_scope": "microbatch"},
    "together_sequence": TOGETHER | {"aux_loss_scope": "sequence", "z_loss_coefficient": 1e-2},
    "expert_choice": MODEL | {"router_selection": "expert_choice", "capacity_factor": 1.25},
    "sinkhorn": MODEL | {"router_selection": "sinkhorn"},
    "sinkhorn_capacity": MODEL | {"router_selection": "sinkhorn", "capacity_factor": 1.0},
    "jitter": MODEL | {"router_jitter": 0.3, "router_logit_bias": True},
    "probability": MODEL | {"capacity_factor": 0.8, "capacity_renormalize": True},
    "position": MODEL
    | {
        "capacity_factor": 0.8,
        "capacity_policy": "position",
        "router_score": "sqrtsoftplus",
        "router_scale": 1.5,
        "router_scale_on": "output",
        "shared_combine": "average",
    },
}
OSS: dict[str, Any] = {"swiglu_limit": 0.3, "swiglu_alpha": 1.702, "swiglu_offset": 1.0}
KNOBS: dict[str, dict[str, Any]] = {
    # Three ranks cut the width of experts evenly, their output channels unevenly.
    "bias": MODEL
    | {"expert_bias": True, "expert_intermediate_size": 12, "router_logit_bias": True},
    "oss": MODEL | OSS | {"expert_bias": True, "router_when": "after", "num_shared_experts": 0},
    "gate": MODEL | OSS | {"shared_gate": True, "shared_intermediate_size": 24},
    "granite": MODEL
    | {
        "router_when": "after",
        "tied_embeddings": True,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "router_scale": 2.0,
        "router_scale_on": "output",
    },
    "pattern": MODEL | {"num_layers": 4, "moe_layers": (0, 2), "shared_gate": True},
}
ONE: dict[str, Any] = MODELS["moe"] | {"num_mtp_layers": 1}
AHEAD: dict[str, dict[str, Any]] = {
    "ahead_one": ONE,
    "ahead_two": ONE | {"num_mtp_layers": 2, "mtp_loss_weight": 0.5},
    "ahead_tied": MODELS["grouped"] | {"num_mtp_layers": 2},
    "ahead_biased": MODELS["sigmoid"] | {"num_mtp_layers": 1, "capacity_factor": 1.0},
    "ahead_dense": MODELS["dense"] | {"num_mtp_layers": 1},
    # Experts in every other layer, none in the last: prediction layers are dense.
    "ahead_pattern": ONE | {"num_layers": 4, "moe_layers": (0, 2), "num_mtp_layers": 2},
    "ahead_granite": ONE
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}
#: Noise in the choices, and both auxiliary losses, for stages of two layers and more.
NOISY: dict[str, Any] = {"z_loss_coefficient": 1e-2, "router_jitter": 0.2, "num_layers": 4}
DEEP: dict[str, dict[str, Any]] = {
    "deep": MODEL | NOISY | {"aux_loss_scope": "sequence"},
    "deep_microbatch": MODEL | NOISY | {"aux_loss_scope": "microbatch"},
    "deep_global": MODEL | NOISY | {"aux_loss_scope": "global"},
    # Fewer key/value heads than heads, norms of queries and keys, first and last stage share a
    # weight; biases that move by the loads; no auxiliary loss, no experts.
    "deep_tied": MODELS["grouped"] | NOISY,
    "deep_sigmoid": MODELS["sigmoid"] | NOISY,
    "deep_dense": MODELS["dense"] | {"num_layers": 4},
    "deep_ahead_two": AHEAD["ahead_two"] | {"num_layers": 4},
    "deep_ahead_tied": AHEAD["ahead_tied"] | {"num_layers": 4},
}
HEADS: dict[str, dict[str, Any]] = {
    # One key/value head for all query heads; groups of two of which a rank has one and a half.
    "one_kv_head": MODEL | {"num_kv_heads": 1},
    "across": MODEL | {"num_heads": 12, "num_kv_heads": 6},
}


def _joined(*models: dict[str, Any]) -> dict[str, Any]:
    """`MODEL` with every option in which one of the models differs from it."""
    return MODEL | {
        key: value for model in models for key, value in model.items() if MODEL.get(key) != value
    }


#: Options of several of the tables above in one model each.
COMBINED: dict[str, dict[str, Any]] = {
    "windows_oss": _joined(KINDS["windows"], KNOBS["bias"], LOSSES["global"]) | OSS,
    "multiplied_position": _joined(KINDS["multiplied"], LOSSES["position"], KNOBS["bias"]),
    "over_choice": _joined(KINDS["over_projection"], LOSSES["expert_choice"]),
    "latent_gate": _joined(KINDS["latent_plain"], KNOBS["gate"]),
    "noisy_sinkhorn": _joined(LOSSES["sinkhorn"], LOSSES["jitter"]),
    "windows_ahead": _joined(KINDS["windows"], AHEAD["ahead_two"], LOSSES["microbatch"]),
}
ALL = MODELS | KINDS | LOSSES | KNOBS | AHEAD | DEEP | HEADS | COMBINED
