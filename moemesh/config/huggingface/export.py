"""The ``config.json`` of one of our models, for a family of transformers that computes the same.

The file has the keys that the family reads, and a few that only others read. A family computes the
same model if the written ``config.json`` reads back as the same configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.folder import SAME_WINDOWS
from moemesh.config.huggingface.keys import class_rows, known_families, names, wrong
from moemesh.config.huggingface.model import (
    ABOVE_0,
    ROPE_KEYS,
    ROPE_NEEDS,
    model_values,
    trained_families,
)
from moemesh.config.model import ModelConfig
from moemesh.config.toml import format_value

#: Keys that only training reads: they do not change the output of a trained model.
TRAINING_KEYS = frozenset(
    {
        "init_std", "router_selection", "router_jitter", "router_bias_rate", "capacity_factor",
        "capacity_policy", "capacity_renormalize", "aux_loss_scope", "aux_loss_coefficient",
        "aux_loss_layers", "aux_loss_probabilities", "z_loss_coefficient", "mtp_loss_weight",
        "router_dtype",
    }
)  # fmt: skip
#: model_type -> prefix of transformers' class, if it is not the CamelCase of the type.
_CLASSES = {
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss",
    "minimax_m2": "MiniMaxM2", "granitemoe": "GraniteMoe", "ernie4_5_moe": "Ernie4_5_Moe",
    "kimi_k2": "DeepseekV3", "hy_v3": "HYV3",
}  # fmt: skip
#: Keys whose presence differs between versions of transformers.
VERSION_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "num_experts", "num_local_experts")
#: Key of the number of extra prediction layers after the last.
AHEAD_KEY = "num_nextn_predict_layers"
#: Keys that are written even if they are null, because transformers' classes have other defaults.
_NULLS = ("sliding_window", "q_lora_rank")
#: Number of positions that is written for a model without a limit.
_NO_LIMIT = 1 << 17


def families_for(model: ModelConfig) -> list[str]:
    """The families of transformers that compute the same as `model`, in the order of
    ``trained.toml``: the simplest first."""
    return [kind for kind in trained_families()["family"] if not differences(model, kind)]


def equivalents(model: ModelConfig) -> list[ModelConfig]:
    """`model`, and models that compute the same from rearranged weights: RoPE's pairs (i, i + half)
    as (2i, 2i + 1) or back, and a selection bias of zero."""
    models = [model]
    # A norm over the channels of a head has weights that would have to move, too.
    if model.attention == "gqa" and not model.qk_norm and not model.lora.rank:
        models.append(model.model_copy(update={"rope_interleave": not model.rope_interleave}))
    if model.num_experts and not model.router_selection_bias:
        models += [each.model_copy(update={"router_selection_bias": True}) for each in models]
    return models


def exported(model: ModelConfig) -> ModelConfig:
    """The first of :func:`equivalents` that a family computes: `model` itself, if possible. Raises
    ConfigError if there is none, naming the nearest family."""
    for equivalent in equivalents(model):
        if families_for(equivalent):
            return equivalent
    family_or_refusal(model)
    return model


def differences(
    model: ModelConfig, kind: str, values: Mapping[str, object] | None = None
) -> dict[str, tuple[object, object]]:
    """Key -> (value in `model`, other value) for each difference between `model` and what is read
    back after it was written as one of the family `kind`; or the model with the keys `values`.
    A key with which the file cannot be read has the pair (None, the message)."""
    try:
        values = model_values(config_json(model, kind)) if values is None else values
    except ConfigError as error:
        return dict[str, tuple[object, object]](
            (problem.key, (None, problem.message)) for problem in error.problems
        )
    other = ModelConfig.model_validate(values)
    ours, theirs = _meaning(model), _meaning(other)
    if trained_families()["family"][kind].get("predicts_ahead"):
        # The number of trained prediction layers is the run's choice.
        theirs["num_mtp_layers"] = ours["num_mtp_layers"]
    return {
        key: (ours.get(key), theirs.get(key))
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    }


def family_or_refusal(model: ModelConfig) -> str:
    """The family to write a model as. Raises ConfigError naming the nearest and its differences."""
    if families := families_for(model):
        return families[0]
    options = {kind: differences(model, kind) for kind in trained_families()["family"]}
    nearest = min(options, key=lambda kind: len(options[kind]))
    words = [
        f"{key} = {format_value(theirs)}" if ours is not None else f"{key}: {theirs}"
        for key, (ours, theirs) in options[nearest].items()
    ]
    message = f"no family of transformers computes this model; the nearest is {nearest}, with "
    fix = f"train with these keys, or choose a preset of a family such as {nearest}"
    raise wrong("not-available", "model", None, message + ", ".join(words), fix)


def config_json(model: ModelConfig, kind: str, dtype: str = "float32") -> dict[str, Any]:
    """``config.json`` of `model` as one of the family `kind`, for old and new transformers."""
    values: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings or _NO_LIMIT,
    }
    if model.num_mtp_layers:
        values[AHEAD_KEY] = model.num_mtp_layers
    values |= _attention(model, kind) | {"rope_theta": model.rope_theta}
    table: dict[str, Any] = {"rope_type": model.rope_type, "rope_theta": model.rope_theta}
    if model.rope_type != "default":
        written = {*ROPE_NEEDS[model.rope_type], "beta_fast", "beta_slow"}
        for key, ours in ROPE_KEYS.items():
            value = getattr(model, ours)
            if value != ModelConfig.model_fields[ours].default or key in written:
                table[key] = value
        values["rope_scaling"] = {k: v for k, v in table.items() if k != "rope_theta"}
    usual = class_rows()[kind]["rope"].get("partial_rotary_factor", 1)
    if model.partial_rotary_factor != 1 or usual != 1:
        share = model.partial_rotary_factor
        table["partial_rotary_factor"] = share
        values |= {"partial_rotary_factor": share, "rotary_dim": round(model.head_dim * share)}
    values["rope_parameters"] = table
    name = _CLASSES.get(kind, "".join(word.capitalize() for word in kind.split("_")))
    if model.num_experts:
        values |= _experts(model, kind)
    values |= {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "dtype": dtype,
        "tie_word_embeddings": model.tied_embeddings,
    }
    reads = class_rows()[kind]["reads"]
    for key, names_of_key in trained_families()["keys"].items():
        name = next((name for name in names_of_key if name in reads), None)
        if name is not None and name not in values:
            value = model.attention_scale if name == "attention_multiplier" else getattr(model, key)
            # Our 0 means off; the code of the family would take it as a bound or a factor.
            values[name] = None if key in ABOVE_0 and not value else value
    return {key: value for key, value in values.items() if value is not None or key in _NULLS}


def _meaning(model: ModelConfig) -> dict[str, object]:
    """The keys that define what a model computes, equal for equal models: lists of layers in full,
    and without keys that have no effect."""
    meaning: dict[str, object] = {
        key: getattr(model, key) for key in type(model).model_fields if key not in TRAINING_KEYS
    }
    layers = range(model.num_layers)
    meaning["moe_layers"] = moe = [index for index in layers if model.is_moe_layer(index)]
    meaning["layer_types"] = [model.window(index) for index in layers]
    meaning["shared_intermediate_size"] = model.shared_width
    meaning["attention_multiplier"] = model.attention_scale
    meaning["max_position_embeddings"] = model.max_position_embeddings or _NO_LIMIT
    stretched = {key for key in meaning if key.startswith(("rope_beta", "rope_low", "rope_high"))}
    experts = {"experts_per_token", "expert_intermediate_size", "num_experts"}
    without_effect = {"first_dense_layers", "num_shared_experts", "implementation"}
    # Condition -> keys that have no effect under it.
    for applies, keys in (
        (not moe, experts.union(key for key in meaning if key.startswith("router_"))),
        (len(moe) == model.num_layers, {"intermediate_size"}),
        (not model.sliding_window, {"layer_types"}),
        (not model.qk_norm, {"qk_norm_over"}),
        (model.attention == "mla", {"head_dim", "num_kv_heads"}),
        (model.router_groups == 1, {"router_group_score"}),
        (model.router_when == "after", {"router_normalize"}),
        (not model.router_normalize, {"router_normalize_eps", "router_normalize_min"}),
        (model.rope_type == "default", {*stretched, "rope_truncate"}),
    ):
        without_effect |= keys if applies else set()
    return {key: value for key, value in meaning.items() if key not in without_effect}


def _attention(model: ModelConfig, kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {"num_attention_heads": model.num_heads}
    if model.attention == "mla":
        values |= {
            "num_key_value_heads": model.num_heads,
            "q_lora_rank": model.q_lora_rank or None,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_nope_head_dim": model.qk_nope_head_dim,
            "qk_rope_head_dim": model.qk_rotary_head_dim,
            "v_head_dim": model.v_head_dim,
            "head_dim": model.qk_rotary_head_dim,
            "attention_bias": model.qkv_bias,
        }
    else:
        values |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    values |= {
        key: model.qkv_bias if "bias" in key else model.qk_norm
        for key in ("attention_bias", "qkv_bias", "use_qk_norm")
        if key in known_families()["family"][kind].get("when", {})
    }
    if model.sliding_window:
        kinds = [
            "sliding_attention" if model.window(index) else "full_attention"
            for index in range(model.num_layers)
        ]
        values |= {"sliding_window": model.sliding_window, "use_sliding_window": True}
        if kind != SAME_WINDOWS:
            values["layer_types"] = kinds
    else:
        values |= {"sliding_window": None, "use_sliding_window": False}
    return values


def _experts(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Keys of experts: sizes under all names of the family, and layers with experts."""
    moe = [index for index in range(model.num_layers) if model.is_moe_layer(index)]
    row = class_rows()[kind]
    keys = {
        size: [name for name in names(size) if name in row["reads"] or name in row["aliases"]]
        for size in ("num_experts", "experts_per_token", "num_shared")
    }
    values: dict[str, Any] = dict.fromkeys(keys["num_experts"], model.num_experts)
    values |= dict.fromkeys(keys["experts_per_token"], model.experts_per_token)
    family = known_families()["family"][kind]
    reads = set(family.get("read", ()))
    if reads & {"experts_in_mlp_key", "minimax_m2"}:
        values["intermediate_size"] = model.expert_intermediate_size
    else:
        values["moe_intermediate_size"] = model.expert_intermediate_size
    if model.shared_width:
        count = model.num_shared_experts
        if "gated_shared" in reads:
            values["shared_expert_intermediate_size"] = model.shared_width
        elif "shared_experts" in reads:
            values |= dict.fromkeys(keys["num_shared"], count)
        else:
            values["shared_intermediate_size"] = model.shared_width
    elif "shared_experts" in reads:
        values |= dict.fromkeys(keys["num_shared"], 0)
    if "first_dense" in reads:
        values |= {"first_k_dense_replace": moe[0], "moe_layer_freq": 1}
        # Some families read only the list.
        kinds = ["sparse" if index in moe else "dense" for index in range(model.num_layers)]
        values["mlp_layer_types"] = kinds
    if "sparse_step" in reads:
        dense = [index for index in range(model.num_layers) if index not in moe]
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if "ernie" in reads:
        values |= {"moe_layer_start_index": moe[0], "moe_layer_end_index": moe[-1]}
        # Layers with experts are those whose numbers, from 1, are multiples of the interval.
        values["moe_layer_interval"] = moe[1] - moe[0] if len(moe) > 1 else moe[0] + 1
    if "router_groups" in reads:
        values |= {"n_group": model.router_groups, "topk_group": model.router_groups_kept}
        if kind == "deepseek_v2":
            greedy = model.router_groups == 1
            values["topk_method"] = "greedy" if greedy else "group_limited_greedy"
    if kind == "minimax_m2":
        values["qk_norm_type"] = "per_layer"
    return values
