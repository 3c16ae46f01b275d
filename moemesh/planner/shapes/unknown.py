"""Families, layers and switches without a formula in the planner, refused by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from moemesh.config.errors import Problem
from moemesh.planner.shapes.keys import NAMES, Config, Record
from moemesh.planner.shapes.windows import FULL_LAYERS, WINDOW_LAYERS

_STATE_SPACE = "state-space (Mamba) layers"
_LINEAR = "linear attention"
_INDEXER = "attention with an indexer"
_ENCODER = "an encoder"
_RECURRENT = "recurrent layers"
_CONVOLUTION = "convolution layers"

#: Families of which it is known what they have that the planner has no formula for.
REFUSED_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _STATE_SPACE),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "nemotron_h"), _STATE_SPACE),
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "plamo2"), _STATE_SPACE),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear"), _LINEAR),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _LINEAR),
    **dict.fromkeys(("minimax_text_01", "MiniMaxText01", "minimax_m1", "MiniMaxM1"), _LINEAR),
    **dict.fromkeys(("bailing_moe_linear", "bailing_hybrid"), _LINEAR),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "deepseek_v4"), _INDEXER),
    **dict.fromkeys(("rwkv", "xlstm", "recurrent_gemma"), _RECURRENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTION),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper"), _ENCODER),
    **dict.fromkeys(("switch_transformers", "nllb-moe", "m2m_100", "bert", "roberta"), _ENCODER),
    "longcat_flash": "layers of two attention blocks, and experts that compute nothing",
    "jetmoe": "experts of attention heads",
    "gemma3n": "layers with embeddings of their own",
    "gemma3n_text": "layers with embeddings of their own",
    "mllama": "cross-attention layers",
    "ernie4_5_vl_moe": "experts of two widths",
}

#: Keys that say: there are layers here that the planner has no formula for.
_UNKNOWN_LAYERS: dict[str, str] = {
    "hybrid_override_pattern": _STATE_SPACE,
    "layers_block_type": _STATE_SPACE,
    "attn_layer_period": _STATE_SPACE,
    "attn_layer_indices": _STATE_SPACE,
    "mamba_d_state": _STATE_SPACE,
    "mamba_num_heads": _STATE_SPACE,
    "ssm_cfg": _STATE_SPACE,
    "ssm_state_size": _STATE_SPACE,
    "linear_attn_config": _LINEAR,
    "linear_num_value_heads": _LINEAR,
    "full_attention_interval": _LINEAR,
    "index_n_heads": _INDEXER,
    "block_types": "recurrent blocks",
    "conv_L_cache": _CONVOLUTION,
    "encoder_layers": _ENCODER,
    "cross_attention_layers": "cross-attention layers",
    "zero_expert_num": "experts that compute nothing",
    "use_cla": "layers that share the keys and values of others",
    "num_kv_shared_layers": "layers that share the keys and values of others",
    "add_cross_attention": "cross-attention layers",
    "altup_num_inputs": "layers with several residual streams",
}
_KNOWN = "known are attention (GQA, MLA), MLPs and experts"

#: Switches that add parameters in the families whose code has them.
_SWITCHES = (
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias",
    "attention_out_bias", "lm_head_bias", "use_attn_output_gate",
    "moe_latent_size", "shared_expert_intermediate_size",
)  # fmt: skip
_NORM_SWITCHES = ("qk_layernorm", "use_qk_norm")
_LATENT = ("kv_lora_rank", "q_lora_rank")


def unknown_layers(config: Config, kind: str) -> list[Problem]:
    """Every key of `config` that stands for layers without a formula."""
    problems: list[Problem] = []
    for key, what in _UNKNOWN_LAYERS.items():
        if config.get(key):
            message = f"{what} are not known; {_KNOWN}"
            problems.append(_unknown(key, config[key], message))
    patterns = config.get("attn_type_list")
    if patterns and any(item != 1 for item in _items(patterns)):
        message = f"0 stands for {_LINEAR}, which is not known; known: 1 (softmax attention)"
        problems.append(_unknown("attn_type_list", patterns, message))
    projection = config.get("word_embed_proj_dim")
    if projection and projection != config.get("hidden_size"):
        message = "an embedding narrower than the model is not known"
        problems.append(_unknown("word_embed_proj_dim", projection, message))
    kinds: Any = config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        listed = {str(item) for item in cast("Sequence[object]", kinds)}
        for layer in sorted(listed - {*FULL_LAYERS, *WINDOW_LAYERS}):
            message = f"`{layer}` is no layer kind that the planner has a formula for"
            problems.append(_unknown("layer_types", layer, message))
    if kind == "minimax" and not patterns:
        message = f"without it the layers of this family alternate with {_LINEAR}"
        problems.append(_unknown("attn_type_list", None, message))
    return problems


def unread_parameters(config: Record, kind: str, *, has_norm: bool) -> list[Problem]:
    """Keys that stand for parameters where there are any, and that this family's reading never
    asked for: dropping them would count another model.

    `has_norm`: queries and keys have their norms by the family's code, whatever a key says.
    """
    problems: list[Problem] = []
    for size in ("num_experts", "num_shared", "expert_intermediate_size"):
        least = 2 if size == "num_experts" else 1
        problems += _unread(config, NAMES[size], f"no experts of a {kind} model are known", least)
    problems += _unread(config, NAMES["num_mtp_layers"], f"a {kind} model has no such layers")
    problems += _unread(config, _LATENT, f"no latent attention of a {kind} model is known")
    switches = (*_SWITCHES, *(() if has_norm else _NORM_SWITCHES))
    return problems + _unread(config, switches, f"no such switch of a {kind} model is known")


def _unread(config: Record, keys: Collection[str], message: str, least: float = 1) -> list[Problem]:
    found: list[Problem] = []
    for key in sorted(set(keys) & set(config) - config.read):
        value = dict(config).get(key)
        if isinstance(value, (bool, int, float)) and value >= least:
            found.append(_unknown(key, value, message))
        elif isinstance(value, (list, tuple)) and value:
            found.append(_unknown(key, cast("object", value), message))
    return found


def _items(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (value,)


def _unknown(key: str, value: object, message: str) -> Problem:
    return Problem(code="unknown-layer", key=key, value=value, message=message)
