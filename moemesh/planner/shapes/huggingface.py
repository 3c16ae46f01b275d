"""The shape of a model from a Hugging Face ``config.json``, by model family, without torch.

A configuration names most sizes and leaves the rest to its family's code: which projections have
biases, which norms exist, whether the table is tied. Those facts are written down here per family,
from the published model code. What would change the counts and is not understood (a layer kind, a
family) is an error that names the key, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.suggest import nearest_choice
from moemesh.planner.shapes.families import FAMILIES, SAME, Config, Family, first
from moemesh.planner.shapes.shape import ModelShape

#: Keys that say: there are layers here that the planner has no formula for.
_UNKNOWN_LAYERS: dict[str, str] = {
    "hybrid_override_pattern": "state-space layers",
    "layers_block_type": "state-space layers",
    "attn_layer_period": "state-space layers",
    "mamba_d_state": "state-space layers",
    "ssm_cfg": "state-space layers",
    "linear_attn_config": "linear attention",
    "linear_num_value_heads": "linear attention",
    "index_n_heads": "attention with an indexer",
    "block_types": "recurrent blocks",
    "conv_L_cache": "convolution layers",
    "encoder_layers": "an encoder",
}
_FULL_LAYERS = ("full_attention", "attention", "global", "full")
_WINDOW_LAYERS = ("sliding_attention", "sliding_window", "local", "chunked_attention")


def read_huggingface(config: Config, name: str = "model") -> ModelShape:
    """The shape of a parsed ``config.json``.

    Of a multimodal model the text part, which `notes` say. Raises ConfigError naming every key
    that is missing or stands for layers without a formula.
    """
    notes: tuple[str, ...] = ()
    if isinstance(config.get("text_config"), Mapping):
        text = cast("Config", config["text_config"])
        config = {"model_type": config.get("model_type", ""), **text}
        notes = ("only the text model is counted",)
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(SAME.get(kind, kind))
    if family is None:
        raise ConfigError([_unknown_family(kind)])
    config = {
        **family.defaults,
        **{key: value for key, value in config.items() if value is not None},
    }
    problems = _unknown_layers(config, kind)
    if problems:
        raise ConfigError(problems)
    try:
        sizes = _sizes(config, family)
    except KeyError as error:
        raise ConfigError([_missing(str(error.args[0]), kind)]) from None
    return ModelShape(name=name, notes=notes, **sizes)


def _sizes(config: Config, family: Family) -> dict[str, Any]:
    hidden, heads = first(config, "hidden_size"), first(config, "num_heads")
    found: dict[str, Any] = {
        "num_layers": first(config, "num_layers"),
        "hidden_size": hidden,
        "vocab_size": first(config, "vocab_size"),
        "num_heads": heads,
        "num_kv_heads": first(config, "num_kv_heads", heads),
        "head_dim": first(config, "head_dim", hidden // max(heads, 1)),
        "intermediate_size": first(config, "intermediate_size", 4 * hidden),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "num_mtp_layers": first(config, "num_mtp_layers", 0),
        "num_experts": first(config, "num_experts", 0),
        "experts_per_token": first(config, "experts_per_token", 0),
        "expert_intermediate_size": first(config, "expert_intermediate_size", 0),
    }
    found["windows"] = _windows(config, found["num_layers"])
    found["shared_intermediate_size"] = (
        first(config, "num_shared", 0) * found["expert_intermediate_size"]
    )
    found |= family.details
    for read in family.read:
        found |= read(config)
    if not found["num_experts"] or not found.get("moe_layers"):
        for key in ("num_experts", "experts_per_token", "expert_intermediate_size"):
            found[key] = 0
        found |= {"shared_intermediate_size": 0, "moe_layers": ()}
    if len(found["moe_layers"]) == found["num_layers"]:
        found["intermediate_size"] = 0
    return found


def _windows(config: Config, num_layers: int) -> tuple[int, ...]:
    """The attention window of every layer; empty when none has one."""
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if not window or config.get("use_sliding_window") is False:
        return ()
    window = int(window)
    if types := cast("Sequence[str]", config.get("layer_types") or ()):
        return tuple(window if kind in _WINDOW_LAYERS else 0 for kind in types)
    if "sliding_window_pattern" in config:
        step = int(config["sliding_window_pattern"])
        return tuple(0 if index % step == step - 1 else window for index in range(num_layers))
    kind = config.get("model_type")
    if kind in ("gemma2", "gpt_oss"):
        return tuple(window if index % 2 == 0 else 0 for index in range(num_layers))
    if config.get("use_sliding_window"):
        first = int(config.get("max_window_layers", 0))
        return tuple(window if index >= first else 0 for index in range(num_layers))
    if kind in ("llama4_text", "llama4", "gemma3", "gemma3_text"):
        step = 4 if "llama4" in str(kind) else 6
        return tuple(0 if index % step == step - 1 else window for index in range(num_layers))
    return (window,) * num_layers


def _unknown_layers(config: Config, kind: str) -> list[Problem]:
    problems: list[Problem] = []
    for key, what in _UNKNOWN_LAYERS.items():
        if config.get(key):
            message = f"{what} are not known; known are attention (GQA, MLA), MLPs and experts"
            problems.append(_problem("unknown-layer", key, config[key], message))
    known = (*_FULL_LAYERS, *_WINDOW_LAYERS)
    layers = cast("Sequence[object]", config.get("layer_types") or ())
    for layer in sorted({str(item) for item in layers} - set(known)):
        fix = nearest_choice(layer, known)
        message = f"`{layer}` is no layer kind that the planner has a formula for"
        problems.append(_problem("unknown-layer", "layer_types", layer, message, fix))
    patterns = cast("Sequence[object]", config.get("attn_type_list") or ())
    if any(item != 1 for item in patterns):
        message = "0 stands for linear attention, which is not known; known: 1 (softmax attention)"
        problems.append(_problem("unknown-layer", "attn_type_list", list(patterns), message))
    if config.get("use_cla"):
        message = "attention that shares keys and values between layers is not known"
        problems.append(_problem("unknown-layer", "use_cla", True, message))
    projection = config.get("word_embed_proj_dim")
    if projection and projection != config.get("hidden_size"):
        message = "an embedding narrower than the model is not known"
        problems.append(_problem("unknown-layer", "word_embed_proj_dim", projection, message))
    if kind == "minimax" and not patterns:
        message = "without it the layers of this family alternate with linear attention"
        problems.append(_problem("unknown-layer", "attn_type_list", None, message))
    return problems


def _problem(code: str, key: str, value: object, message: str, fix: str = "") -> Problem:
    return Problem(code=code, key=key, value=value, message=message, fix=fix)


def _unknown_family(kind: str) -> Problem:
    known = tuple(sorted({*FAMILIES, *SAME}))
    message = "the planner does not know the layers of this model family"
    return _problem(
        "unknown-model", "model_type", kind or None, message, nearest_choice(kind, known)
    )


def _missing(names: str, kind: str) -> Problem:
    message = f"the configuration of a {kind} model needs {names}"
    return _problem("missing", names.partition(" or ")[0], None, message)
