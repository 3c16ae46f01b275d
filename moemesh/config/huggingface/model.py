"""The configuration of a model that `moemesh train` can start from, from its ``config.json``.

Sizes come from :mod:`moemesh.config.huggingface.sizes`, which also serves the planner; other traits
of a family's code (its router, its rotary positions) are data, a row a family, in
``presets/huggingface/trained.toml``. A switch or a size that our model cannot express is refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, cast

from moemesh.config.huggingface.keys import (
    Config,
    class_rows,
    first,
    known_families,
    real,
    table,
    wrong,
)
from moemesh.config.huggingface.sizes import read_sizes
from moemesh.config.sources import read_preset_table

#: Fields of a planner's shape that [model] lacks, with the only value that can be trained.
_FIXED: dict[str, object] = {
    "norm": "rms",
    "norms_per_layer": 2,
    "activation": "swiglu",
    "embedding_norm": False,
    "final_norm": True,
    "head_bias": False,
    "mlp_bias": False,
    "attention_gate": False,
    "learned_positions": 0,
    "dropout": False,
}
#: Fields of a planner's shape that are keys of [model] as well.
_SAME = (
    "num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim",
    "tied_embeddings", "attention", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rotary_head_dim", "v_head_dim", "qkv_bias", "output_bias", "attention_sinks",
    "intermediate_size", "num_experts", "experts_per_token", "expert_intermediate_size",
    "expert_bias", "router_logit_bias", "router_selection_bias", "router_groups",
    "router_groups_kept",
)  # fmt: skip
_YARN = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "mscale",
    "mscale_all_dim", "attention_factor",
)  # fmt: skip
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
#: Sizes that must not be 0.
_NEEDED = {"num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim"}
_NEEDED_BY_EXPERTS = {"experts_per_token", "router_groups", "router_groups_kept"}
#: Our keys for which 0 means off, whereas transformers' code multiplies or clips by 0.
ABOVE_0 = {"attention_multiplier", "clip_qkv", "swiglu_limit"}
_ROPE_ABOVE_0 = (
    "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "attention_factor",
)  # fmt: skip
#: Types of RoPE -> the keys of their tables; ROPE_NEEDS has the required ones.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": (*_LLAMA3, "original_max_position_embeddings"),
    "yarn": _YARN,
}
ROPE_NEEDS = {"linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3}
#: Keys of the tables of RoPE -> our keys.
ROPE_KEYS = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "truncate": "rope_truncate",
    "mscale": "rope_mscale",
    "mscale_all_dim": "rope_mscale_all_dim",
    "attention_factor": "rope_attention_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
}


# The number formats of released weights, from `quantization_config`.

Method = Literal["fp8", "mxfp4"]
_QUANTIZATION = "quantization_config"


class Quantization(NamedTuple):
    """Storage format of matrices: fp8 (e4m3) with a scale for each block of ``block`` rows and
    columns, or MXFP4 (OCP Microscaling Formats 1.0: 32 numbers of e2m1 and an exponent)."""

    method: Method
    block: tuple[int, int]

    def __str__(self) -> str:
        if self.method == "mxfp4":
            return "MXFP4 (4 bits, an exponent for every 32 numbers)"
        return f"fp8 (a scale for every {self.block[0]} x {self.block[1]} numbers)"


def quantization_of(config: Config) -> Quantization | None:
    """The format of the weights; None if they are not quantized.

    Raises ConfigError for an unreadable format, and for fp8 without blocks.
    """
    given = table(config, _QUANTIZATION)
    if not given:
        return None
    method = given.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4", (1, 32))
    if method != "fp8":
        message = f"weights in the format {method} cannot be read (known: fp8 in blocks, mxfp4)"
        fix = "take the folder of the original weights, or convert them to bfloat16"
        raise wrong("not-available", f"{_QUANTIZATION}.quant_method", method, message, fix)
    if (fmt := given.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        message = "fp8 weights are read in e4m3 only"
        raise wrong("not-available", f"{_QUANTIZATION}.fmt", fmt, message)
    block: object = given.get("weight_block_size")
    sizes = cast("Sequence[object]", block) if isinstance(block, (list, tuple)) else ()
    numbers = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    if len(sizes) != 2 or len(numbers) != 2 or min(numbers) < 1:
        key, given_block = f"{_QUANTIZATION}.weight_block_size", cast("object", block)
        message = "fp8 weights are read with a scale for each block of [rows, columns] only"
        raise wrong("not-available", key, given_block, message, "[128, 128]")
    return Quantization("fp8", (numbers[0], numbers[1]))


#: Fix for a folder that cannot be trained.
_UNTRAINED = (
    "plan it with `moemesh plan --model FOLDER` and train it with transformers, or choose a folder "
    "of a family that docs/models.md lists as trained"
)


@cache
def trained_families() -> dict[str, Any]:
    """The families that can be trained: ``presets/huggingface/trained.toml``."""
    return read_preset_table("trained", "huggingface")


def family_of(config: Config) -> str:
    """Name of the row of `trained.toml` for a ``config.json``. Raises ConfigError without one."""
    kind = str(config.get("model_type") or "")
    same = {other: name for name, others in known_families()["same"].items() for other in others}
    family = same.get(kind, kind)
    families = trained_families()["family"]
    if family not in families:
        message = "models of this family can be planned at most, not trained from their weights"
        raise wrong("not-available", "model_type", kind, message, _UNTRAINED)
    return family


def model_values(config: Config) -> dict[str, object]:
    """Keys and values of the section [model] for a parsed ``config.json``.

    Raises ConfigError for keys that are missing, wrong, or that our model cannot express.
    """
    quantization_of(config)
    if str(config.get("model_type")) in known_families()["family"]:
        family_of(config)  # a family that cannot be trained is refused before its sizes are read
    sizes = read_sizes(config)
    if sizes.notes:
        message = "only the code of transformers computes the text part of a larger model"
        if table(config, _QUANTIZATION):
            message += ", and quantized weights are not read into its models"
        raise wrong("not-available", "model_type", config.get("model_type"), message, _UNTRAINED)
    row = trained_families()["family"][family_of(config)]
    fields = sizes.fields
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            message = f"a model with {name} = {fields[name]} cannot be trained (known: {value})"
            raise wrong("not-available", "model_type", sizes.kind, message)
    if (activation := sizes.values.get("hidden_act", "silu")) not in ("silu", "swish"):
        message = "MLPs of trained models are gated by silu; with another one these weights are of "
        message += "another model"
        raise wrong("not-available", "hidden_act", activation, message, _UNTRAINED)
    section: dict[str, object] = {"first_dense_layers": 0, "num_shared_experts": 0}
    # A size of 0 means that the model lacks a part, unless every model has it.
    needed = _NEEDED | _NEEDED_BY_EXPERTS if fields["moe_layers"] else _NEEDED
    given = {name: fields[name] for name in _SAME if fields.get(name) is not None}
    section |= {name: value for name, value in given.items() if value or name in needed}
    # Layers with experts: all but the first ones, or a list.
    layers, moe = fields["num_layers"], fields["moe_layers"]
    if not moe:
        section["num_experts"] = 0
    elif moe == tuple(range(moe[0], layers)):
        section["first_dense_layers"] = moe[0]
    else:
        section |= {"moe_layers": list(moe), "first_dense_layers": None}
    # Shared experts by number; also by width, unless it is their number times that of an expert.
    if width := fields["shared_intermediate_size"]:
        count = first(sizes.values, "num_shared", 1) or 1
        section["num_shared_experts"] = count
        if width != count * fields["expert_intermediate_size"]:
            section["shared_intermediate_size"] = width
        if fields.get("shared_gate"):
            section["shared_gate"] = True
    norm, windows = fields.get("qk_norm", "none"), fields["windows"]
    if norm != "none":
        section |= {
            "qk_norm": True,
            "qk_norm_over": "projection" if norm == "full" else "head",
        }
    values, window = sizes.values, "sliding_window"
    is_zero = values.get(window) == 0 and values[window] is not False
    kinds = values.get("layer_types")
    may_slide = not isinstance(kinds, list) or "sliding_attention" in kinds
    if is_zero and may_slide and values.get("use_sliding_window", True):
        message = f"{window} = 0 hides every key there; known: above 0, or null"
        raise wrong("not-available", window, values[window], message)
    if windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        section |= {"sliding_window": max(windows), "layer_types": kinds}
    section |= row.get("fields", {})
    for name, names in trained_families()["keys"].items():
        key = next((key for key in names if values.get(key) is not None), None)
        if key is None:
            continue
        if values[key] == 0 and name in ABOVE_0:
            message = f"{key} = 0 sets to 0 what it multiplies or clips; known: above 0, or null"
            raise wrong("not-available", key, values[key], message)
        section[name] = values[key]
    section |= _rope(values, class_rows()[family_of(config)], fields)
    # The balance loss of transformers: one loss for all layers, in families that have it and if a
    # configuration enables it; selection biases do not move.
    balancing: dict[str, object] = {"aux_loss_coefficient": 0.0, "router_bias_rate": 0.0}
    weight = values.get("router_aux_loss_coef")
    if values.get("output_router_logits") and weight is not None:
        coefficient = real("router_aux_loss_coef", weight)
        # transformers counts selections per token, our loss per choice.
        balancing["aux_loss_coefficient"] = coefficient * fields["experts_per_token"]
        balancing |= {"aux_loss_layers": "together", "aux_loss_scope": "global"}
        if "router_score" in row.get("fields", {}):
            balancing["aux_loss_probabilities"] = "softmax"
    section |= balancing
    return {name: value for name, value in section.items() if value is not None}


def _rope(
    values: Mapping[str, Any], row: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, object]:
    """Our keys of rotary positions. As in transformers, the first of these tables counts:
    `rope_scaling`, which model cards add to a file with the newer `rope_parameters`; those
    parameters; the `row` of the family's class."""
    newer, older = table(values, "rope_parameters"), table(values, "rope_scaling")
    key, given = ("rope_scaling", older) if older else ("rope_parameters", newer)
    if any(isinstance(value, Mapping) for value in given.values()):
        message = "RoPE that differs between kinds of layers is not known"
        raise wrong("not-available", key, sorted(given), message)
    # A switch that is null is off; a number that is null is its default.
    switches = {"truncate": False} if "truncate" in given else {}
    given = switches | {name: value for name, value in given.items() if value is not None}
    for source in (given, values):  # checked in both, also if only one of them is used
        for name in _ROPE_ABOVE_0:
            if source.get(name) is not None and real(name, source[name]) <= 0:
                raise wrong("too-small", name, source[name], f"{name} must be above 0")
    usual = dict(row["rope"])
    # Defaults of these two hold with any table, the others only without a table.
    theta, share = (usual.pop(name, None) for name in ("rope_theta", "partial_rotary_factor"))
    if not older and values.get("rope_parameters") is None:
        given = usual
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ROPE_TYPES:
        message = f"RoPE of the type {kind} is not known; known: {', '.join(ROPE_TYPES)}"
        raise wrong("not-available", key, kind, message)
    if missing := [name for name in ROPE_NEEDS.get(kind, ()) if name not in given]:
        message = f"RoPE of the type {kind} needs {' and '.join(missing)}"
        raise wrong("missing", f"{key}.{missing[0]}", None, message)
    theta = given.get("rope_theta") or values.get("rope_theta") or theta
    keys: dict[str, object] = {"rope_theta": real("rope_theta", theta)}
    keys |= {ROPE_KEYS[name]: given[name] for name in ROPE_TYPES[kind] if name in given}
    # The frequencies of the type dynamic differ only after the model's positions, which no run
    # reaches.
    keys["rope_type"] = "default" if kind == "dynamic" else kind
    original = "original_max_position_embeddings"
    if original in ROPE_TYPES[kind]:  # the key outside of the table comes first
        keys.setdefault(original, values.get("max_position_embeddings"))
        keys[original] = values.get(original) or keys[original]
    if values.get("rotary_dim"):
        share = real("rotary_dim", values["rotary_dim"]) / fields["head_dim"]
    share = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or share
    if share is None or (kind in ("default", "dynamic") and not row["turns_a_part"]):
        return keys
    if (share := real("partial_rotary_factor", share)) != 1:
        if not row["turns_a_part"] or fields.get("attention") == "mla":
            message = "the code of this family turns whole heads"
            raise wrong("not-available", "partial_rotary_factor", share, message, "leave it out")
        keys["partial_rotary_factor"] = share
    return keys
