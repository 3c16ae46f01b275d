"""What each model family's code fixes and its configuration does not say: a table of families.

Which projections have biases, which norms there are, where the experts stand, what a left-out key
means: from the published model code of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from moemesh.config.errors import ConfigError, Problem

Config = Mapping[str, Any]
Reader = Callable[[Config], dict[str, Any]]

#: Our size -> the names it goes by; the first that is there counts.
NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": (
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
    ),
    "experts_per_token": (
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "moe_top_k",
    ),
    "expert_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "num_shared": (
        "n_shared_experts",
        "num_shared_experts",
        "moe_num_shared_experts",
        "num_shared_expert",
    ),
    "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers"),
}


def first(config: Config, size: str, default: int | None = None) -> int:
    """The first of a size's names that the configuration has. Raises KeyError with them."""
    for name in NAMES[size]:
        if name in config and config[name] is not None:
            return scalar(name, config[name])
    if default is None:
        raise KeyError(" or ".join(NAMES[size]))
    return default


def scalar(name: str, value: Any) -> int:
    """One number; a list must hold the same for every layer."""
    if isinstance(value, (list, tuple)):
        values = set(cast("Sequence[Any]", value))
        if len(values) != 1:
            message = f"{name} differs between layers; known are models with the same for all"
            shown = cast("object", value)
            problem = Problem(code="unknown-layer", key=name, value=shown, message=message)
            raise ConfigError([problem])
        value = values.pop()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        message = f"{name} must be a whole number"
        problem = Problem(code="wrong-type", key=name, value=cast("object", value), message=message)
        raise ConfigError([problem])
    return int(value)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model family's code fixes. `details` are fields of ModelShape that hold for all of its
    models, `read` those that depend on the configuration, `defaults` keys that a configuration may
    leave out."""

    details: dict[str, Any] = field(default_factory=dict[str, Any])
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    read: Sequence[Reader] = ()


def _flag(key: str, *fields: str) -> Reader:
    """Fields that one key switches on."""

    def read(config: Config) -> dict[str, Any]:
        return dict.fromkeys(fields, bool(config.get(key)))

    return read


def _attention_bias(config: Config) -> dict[str, Any]:
    """On all four projections."""
    has = bool(config.get("attention_bias", False))
    return {"qkv_bias": has, "output_bias": has}


def _input_bias(config: Config) -> dict[str, Any]:
    """On query, key and value alone."""
    return {"qkv_bias": bool(config.get("attention_bias", False))}


def _mlp_bias(config: Config) -> dict[str, Any]:
    return {"mlp_bias": bool(config.get("mlp_bias", False))}


def _use_bias(config: Config) -> dict[str, Any]:
    has = bool(config.get("use_bias", False))
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "expert_bias"), has)


def _head_norm(key: str) -> Reader:
    """A norm over each head where the key says so."""

    def read(config: Config) -> dict[str, Any]:
        return {"qk_norm": "head" if config.get(key) else "none"}

    return read


def _mla(config: Config) -> dict[str, Any]:
    return {
        "attention": "mla",
        "q_lora_rank": int(config.get("q_lora_rank") or 0),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_nope_head_dim": config["qk_nope_head_dim"],
        "qk_rotary_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "qkv_bias": bool(config.get("attention_bias", False)),
        "output_bias": bool(config.get("attention_bias", False)),
        # Decompressed heads: the per-head width has no key of its own.
        "head_dim": config["qk_nope_head_dim"],
        "num_kv_heads": first(config, "num_heads"),
    }


def _groups(config: Config) -> dict[str, Any]:
    kept = int(config.get("topk_group") or 1)
    return {"router_groups": int(config.get("n_group") or 1), "router_groups_kept": kept}


def _every(num_layers: int, step: int, last: int) -> tuple[int, ...]:
    """Layers whose number (from 1) is a multiple of `step`, or one in `step` in general."""
    return tuple(index for index in range(num_layers) if index % step == last)


def _first_dense(config: Config) -> dict[str, Any]:
    layers, dense = first(config, "num_layers"), int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("moe_layer_freq") or 1)
    return {"moe_layers": tuple(i for i in range(dense, layers) if i % step == 0)}


def _sparse_step(config: Config) -> dict[str, Any]:
    layers, step = first(config, "num_layers"), int(config.get("decoder_sparse_step") or 1)
    dense = cast("Sequence[int]", config.get("mlp_only_layers") or ())
    return {"moe_layers": tuple(i for i in _every(layers, step, step - 1) if i not in dense)}


def _qwen2_shared(config: Config) -> dict[str, Any]:
    width = int(config.get("shared_expert_intermediate_size") or 0)
    return {"shared_intermediate_size": width, "shared_gate": width > 0}


def _experts_in_mlp_key(config: Config) -> dict[str, Any]:
    """`intermediate_size` is the width of one expert and every layer has experts."""
    return {
        "expert_intermediate_size": first(config, "intermediate_size"),
        "moe_layers": tuple(range(first(config, "num_layers"))),
        "intermediate_size": 0,
    }


def _llama4(config: Config) -> dict[str, Any]:
    layers = first(config, "num_layers")
    step = int(config.get("interleave_moe_layer_step") or 1)
    moe = config.get("moe_layers") or _every(layers, step, step - 1)
    width = int(config["intermediate_size"])
    return {
        "moe_layers": tuple(cast("Sequence[int]", moe)),
        "expert_intermediate_size": width,
        "shared_intermediate_size": width,
        "intermediate_size": int(config["intermediate_size_mlp"]),
    }


def _ernie(config: Config) -> dict[str, Any]:
    layers = first(config, "num_layers")
    step = int(config.get("moe_layer_interval") or 1)
    start = int(config.get("moe_layer_start_index") or 0)
    end = int(config.get("moe_layer_end_index", -1))
    end = layers - 1 if end < 0 else min(end, layers - 1)
    found = (i for i in range(start, end + 1) if (i + 1) % step == 0)
    return {"moe_layers": tuple(found)}


def _hunyuan(config: Config) -> dict[str, Any]:
    width = first(config, "intermediate_size")
    moe = config.get("moe_intermediate_size")
    expert = scalar("moe_intermediate_size", moe) if moe else width
    shared = scalar("num_shared_expert", config.get("num_shared_expert", 1))
    if not config.get("use_mixed_mlp_moe", True):
        shared = 0
    return {
        "moe_layers": tuple(range(first(config, "num_layers"))),
        "expert_intermediate_size": expert,
        "shared_intermediate_size": width * shared,
    }


def _minimax_m2(config: Config) -> dict[str, Any]:
    norm = "full" if config.get("qk_norm_type", "per_layer") == "per_layer" else "head"
    shared = int(config.get("shared_intermediate_size") or 0)
    return _experts_in_mlp_key(config) | {
        "qk_norm": norm if config.get("use_qk_norm", True) else "none",
        "shared_intermediate_size": shared,
    }


def _granite_shared(config: Config) -> dict[str, Any]:
    return {"shared_intermediate_size": int(config.get("shared_intermediate_size") or 0)}


def _learned_positions(*names: str, extra: int = 0) -> Reader:
    def read(config: Config) -> dict[str, Any]:
        found = next((config[name] for name in names if name in config), 0)
        return {"learned_positions": int(found) + extra}

    return read


def _dbrx(config: Config) -> dict[str, Any]:
    attention = cast("Config", config.get("attn_config") or {})
    experts = cast("Config", config.get("ffn_config") or {})
    return {
        "num_kv_heads": int(attention.get("kv_n_heads", 1)),
        "num_experts": int(experts.get("moe_num_experts", 4)),
        "experts_per_token": int(experts.get("moe_top_k", 1)),
        "expert_intermediate_size": int(experts.get("ffn_hidden_size", 3584)),
        "moe_layers": tuple(range(first(config, "num_layers"))),
    }


def _bailing(config: Config) -> dict[str, Any]:
    """Ling: one bias key for the inputs of attention, one for its output."""
    norm = "head" if config.get("use_qk_norm") else "none"
    return {
        "qkv_bias": bool(config.get("use_qkv_bias", False)),
        "output_bias": bool(config.get("use_bias", False)),
        "qk_norm": norm,
    }


_BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_LAYER_NORM = {"norm": "layer_bias"}
_PLAIN_GELU = {"activation": "gelu"}
_HEAD_NORM = {"qk_norm": "head"}
_HEADS_OF_128 = {"head_dim": 128}
_TIED = {"tie_word_embeddings": True}
_DEEPSEEK = Family(read=(_first_dense, _mla, _groups), details={"router_selection_bias": False})
_DEEPSEEK_V3 = Family(read=(_first_dense, _mla, _groups), details={"router_selection_bias": True})

FAMILIES: dict[str, Family] = {
    # Dense.
    "llama": Family(read=(_attention_bias, _mlp_bias)),
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(details={"qkv_bias": True}),
    "qwen3": Family(details=_HEAD_NORM, read=(_attention_bias,), defaults=_HEADS_OF_128),
    "gemma": Family(read=(_attention_bias,), defaults=_TIED | {"head_dim": 256}),
    "gemma2": Family(
        read=(_attention_bias,), details={"norms_per_layer": 4}, defaults=_TIED | {"head_dim": 256}
    ),
    "gemma3_text": Family(
        read=(_attention_bias,),
        details={"norms_per_layer": 4, "qk_norm": "head"},
        defaults=_TIED | {"head_dim": 256},
    ),
    "phi3": Family(),
    "phi": Family(
        details=_BIASED | _LAYER_NORM | _PLAIN_GELU | {"norms_per_layer": 1, "head_bias": True}
    ),
    "gpt2": Family(
        details=_BIASED | _LAYER_NORM | _PLAIN_GELU | {"dropout": True},
        defaults=_TIED | {"n_positions": 1024},
        read=(_learned_positions("n_positions", "n_ctx"),),
    ),
    "gpt_neox": Family(details=_BIASED | _LAYER_NORM | _PLAIN_GELU),
    "opt": Family(
        details=_BIASED | _LAYER_NORM | _PLAIN_GELU | {"dropout": True},
        defaults=_TIED,
        # Two rows in front of the first position are never used.
        read=(_learned_positions("max_position_embeddings", extra=2),),
    ),
    "starcoder2": Family(
        details=_LAYER_NORM | _PLAIN_GELU,
        defaults=_TIED | {"use_bias": True},
        read=(_use_bias,),
    ),
    "stablelm": Family(details=_LAYER_NORM, read=(_flag("use_qkv_bias", "qkv_bias"),)),
    "nemotron": Family(details=_LAYER_NORM | _PLAIN_GELU, read=(_attention_bias, _mlp_bias)),
    "granite": Family(read=(_attention_bias, _mlp_bias)),
    "olmo": Family(details={"norm": "plain"}, read=(_attention_bias,)),
    "olmo2": Family(details={"qk_norm": "full"}, read=(_attention_bias,)),
    "olmo3": Family(details={"qk_norm": "full"}, read=(_attention_bias,)),
    "cohere": Family(
        details={"norm": "layer", "norms_per_layer": 1}, defaults=_TIED, read=(_attention_bias,)
    ),
    "cohere2": Family(
        details={"norm": "layer", "norms_per_layer": 1}, defaults=_TIED, read=(_attention_bias,)
    ),
    "glm": Family(read=(_input_bias,), defaults={"attention_bias": True}),
    "glm4": Family(
        read=(_input_bias,), defaults={"attention_bias": True}, details={"norms_per_layer": 4}
    ),
    "internlm2": Family(read=(_flag("bias", "qkv_bias", "output_bias"),)),
    "internlm3": Family(read=(_flag("qkv_bias", "qkv_bias"),)),
    "baichuan": Family(),
    "smollm3": Family(read=(_attention_bias, _mlp_bias), defaults=_TIED),
    "seed_oss": Family(
        read=(
            _input_bias,
            _flag("attention_out_bias", "output_bias"),
            _mlp_bias,
        ),
        defaults={"attention_bias": True},
    ),
    "arcee": Family(details=_PLAIN_GELU, read=(_attention_bias, _mlp_bias)),
    "mimo": Family(details={"qkv_bias": True}),
    "exaone4": Family(details={"qk_norm": "head"}),
    "ernie4_5": Family(read=(_use_bias,), defaults=_TIED),
    "hunyuan_v1_dense": Family(details={"qk_norm": "head"}, read=(_attention_bias,)),
    # Mixture of experts.
    "mixtral": Family(read=(_experts_in_mlp_key,)),
    "qwen2_moe": Family(details={"qkv_bias": True}, read=(_sparse_step, _qwen2_shared)),
    "qwen3_moe": Family(
        details=_HEAD_NORM, read=(_sparse_step, _attention_bias), defaults=_HEADS_OF_128
    ),
    "qwen3_vl_moe_text": Family(
        details=_HEAD_NORM, read=(_sparse_step, _attention_bias), defaults=_HEADS_OF_128
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "deepseek": Family(read=(_first_dense, _attention_bias)),
    "olmoe": Family(details={"qk_norm": "full"}, read=(_experts_in_mlp_key, _attention_bias)),
    "flex_olmo": Family(details={"qk_norm": "full"}, read=(_experts_in_mlp_key, _attention_bias)),
    "gpt_oss": Family(
        details={
            "qkv_bias": True,
            "output_bias": True,
            "attention_sinks": True,
            "expert_bias": True,
            "router_logit_bias": True,
        },
        read=(_experts_in_mlp_key,),
        defaults={"head_dim": 64},
    ),
    "granitemoe": Family(read=(_experts_in_mlp_key, _attention_bias)),
    "granitemoeshared": Family(read=(_experts_in_mlp_key, _attention_bias, _granite_shared)),
    "dbrx": Family(details={"norm": "layer"}, read=(_dbrx,)),
    "phimoe": Family(
        details=_LAYER_NORM,
        read=(
            _experts_in_mlp_key,
            _attention_bias,
            _flag("lm_head_bias", "head_bias"),
        ),
    ),
    "glm4_moe": Family(
        details={"router_selection_bias": True},
        read=(_first_dense, _input_bias, _head_norm("use_qk_norm"), _groups),
    ),
    "dots1": Family(
        details={"qk_norm": "head", "router_selection_bias": True},
        read=(_first_dense, _attention_bias, _groups),
    ),
    "minimax_m2": Family(read=(_minimax_m2,), details={"router_selection_bias": True}),
    "hunyuan_v1_moe": Family(read=(_hunyuan, _attention_bias, _head_norm("use_qk_norm"))),
    "ernie4_5_moe": Family(
        read=(_ernie, _use_bias), details={"router_selection_bias": True}, defaults=_TIED
    ),
    "llama4_text": Family(read=(_llama4, _attention_bias)),
    "bailing_moe": Family(read=(_first_dense, _bailing)),
    "bailing_moe_v2": Family(
        read=(_first_dense, _bailing, _groups), details={"router_selection_bias": True}
    ),
}  # fmt: skip

#: Names under which the same code is published.
SAME = {
    "yi": "llama",
    "hunyuan": "hunyuan_v1_moe",
    "deepseek_v2_lite": "deepseek_v2",
    "minimax": "minimax_m2",
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
