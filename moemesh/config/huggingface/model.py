"""The configuration of a model that `moemesh train` can start from, from its ``config.json``.

Sizes come from :mod:`moemesh.config.huggingface.sizes`, which also serves the planner; what a
family's code does besides (its router, its rotary positions) is data, a row a family, in
``presets/huggingface/trained.toml``. A switch or a size that our model cannot express is refused by
name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple, cast

from moemesh.config.huggingface.keys import Config, first, known_families, real, table, wrong
from moemesh.config.huggingface.sizes import read_sizes

#: Fields of a planner's shape that say nothing new to a trained model, with the value that it has.
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
_SAME = (
    "num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim",
    "tied_embeddings", "attention", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rotary_head_dim", "v_head_dim", "qkv_bias", "output_bias", "attention_sinks",
    "intermediate_size", "num_experts", "experts_per_token", "expert_intermediate_size",
    "expert_bias", "router_logit_bias", "router_selection_bias", "router_groups",
    "router_groups_kept",
)  # fmt: skip
#: Our names of the types of RoPE, what their tables must have, and the keys of these with "rope_"
#: or nothing in front.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
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


# The number formats of released weights, as `quantization_config` says.

Method = Literal["fp8", "mxfp4"]
_QUANTIZATION = "quantization_config"


class Quantization(NamedTuple):
    """How matrices are stored: fp8 (e4m3) with a scale for each block of ``block`` rows and
    columns, or MXFP4 (OCP Microscaling Formats 1.0: 32 numbers of e2m1 and an exponent)."""

    method: Method
    block: tuple[int, int]

    def __str__(self) -> str:
        if self.method == "mxfp4":
            return "MXFP4 (4 bits, an exponent for every 32 numbers)"
        return f"fp8 (a scale for every {self.block[0]} x {self.block[1]} numbers)"


def quantization_of(config: Config) -> Quantization | None:
    """The format of the weights; None where they are stored as they are.

    Raises ConfigError naming a format that cannot be read.
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
    numbers = [one for one in sizes if isinstance(one, int) and not isinstance(one, bool)]
    if len(sizes) != 2 or len(numbers) != 2 or min(numbers) < 1:
        key, given_block = f"{_QUANTIZATION}.weight_block_size", cast("object", block)
        message = "fp8 weights are read with a scale for each block of [rows, columns] only"
        raise wrong("not-available", key, given_block, message, "[128, 128]")
    return Quantization("fp8", (numbers[0], numbers[1]))


#: Keys that every family reads.
_FOR_ALL = ("norm_eps", "init_std", "max_position_embeddings")


@cache
def trained_families() -> dict[str, Any]:
    """``presets/huggingface/trained.toml``."""
    home = files("moemesh.config") / "presets" / "huggingface"
    return tomllib.loads((home / "trained.toml").read_text(encoding="utf-8"))


def family_of(config: Config) -> str:
    """The row of `trained.toml` for a ``config.json``. Raises ConfigError naming the nearest."""
    kind = str(config.get("model_type") or "")
    same = {other: name for name, others in known_families()["same"].items() for other in others}
    found = same.get(kind, kind)
    families = trained_families()["family"]
    if found not in families:
        message = "models of this family can be planned at most, not trained from their weights"
        raise wrong("not-available", "model_type", kind, message, ", ".join(sorted(families)))
    return found


def model_values(config: Config) -> dict[str, object]:
    """Keys and values of the section [model] for a parsed ``config.json``.

    Raises ConfigError naming what is missing, wrong, or beyond our model.
    """
    quantization_of(config)
    if str(config.get("model_type")) in known_families()["family"]:
        family_of(config)  # Before its sizes: a family that is planned at most is refused as that.
    sizes = read_sizes(config)
    row = trained_families()["family"][family_of(config)]
    fields = sizes.fields
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            message = f"a model with {name} = {fields[name]} cannot be trained (known: {value})"
            raise wrong("not-available", "model_type", sizes.kind, message)
    if (activation := sizes.values.get("hidden_act", "silu")) not in ("silu", "swiglu", "swish"):
        message = "MLPs of trained models are gated by silu"
        raise wrong("not-available", "hidden_act", activation, message, 'hidden_act = "silu"')
    found: dict[str, object] = {"first_dense_layers": 0, "num_shared_experts": 0}
    # A size of 0 stands for a part that the model does not have.
    found |= {name: fields[name] for name in _SAME if fields.get(name) not in (None, 0)}
    # Layers with experts: all but the first ones, or a list.
    layers, moe = fields["num_layers"], fields["moe_layers"]
    if not moe:
        found["num_experts"] = 0
    elif moe == tuple(range(moe[0], layers)):
        found["first_dense_layers"] = moe[0]
    else:
        found |= {"moe_layers": list(moe), "first_dense_layers": None}
    # Shared experts by number and, where it is not their number times an expert's, by width.
    if width := fields["shared_intermediate_size"]:
        count = first(sizes.values, "num_shared", 1) or 1
        found["num_shared_experts"] = count
        if width != count * fields["expert_intermediate_size"]:
            found["shared_intermediate_size"] = width
        if fields.get("shared_gate"):
            found["shared_gate"] = True
    norm, windows = fields.get("qk_norm", "none"), fields["windows"]
    if norm != "none":
        found |= {"qk_norm": True, "qk_norm_over": "projection" if norm == "full" else "head"}
    if windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        found |= {"sliding_window": max(windows), "layer_types": kinds}
    found |= row.get("fields", {})
    values = dict(row.get("defaults", {}))
    values |= {key: value for key, value in sizes.values.items() if value is not None}
    for name, names in trained_families()["keys"].items():
        if name in _FOR_ALL or name in row.get("reads", ()):
            given = next((values[key] for key in names if values.get(key) is not None), None)
            if given is not None:
                found[name] = given
    found |= _rope(values, fields)
    # How transformers balances the experts in training: by one loss for all layers, of families
    # that have it and where a configuration asks for it; it moves no selection bias.
    balancing: dict[str, object] = {"aux_loss_coefficient": 0.0, "router_bias_rate": 0.0}
    if values.get("output_router_logits") and "aux_loss" in row:
        wanted = values.get("router_aux_loss_coef")
        coefficient = real("router_aux_loss_coef", row["aux_loss"] if wanted is None else wanted)
        # Selections there are counted per token, not per choice.
        balancing["aux_loss_coefficient"] = coefficient * fields["experts_per_token"]
        balancing |= {"aux_loss_layers": "together", "aux_loss_scope": "global"}
        if "router_score" in row.get("fields", {}):
            balancing["aux_loss_probabilities"] = "softmax"
    found |= balancing
    return {name: value for name, value in found.items() if value is not None}


def _rope(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, object]:
    """Rotary positions, from the old keys or the new table, which newer versions write."""
    newer, older = table(values, "rope_parameters"), table(values, "rope_scaling")
    if any(isinstance(one, Mapping) for one in newer.values()):
        message = "RoPE that differs between kinds of layers is not known"
        raise wrong("not-available", "rope_parameters", sorted(newer), message)
    given = {key: value for key, value in {**older, **newer}.items() if value is not None}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_TYPES:
        message = f"RoPE of the type {kind} is not known; known: {', '.join(_ROPE_TYPES)}"
        raise wrong("not-available", "rope_scaling", kind, message)
    if missing := [key for key in ROPE_NEEDS.get(kind, ()) if key not in given]:
        message = f"RoPE of the type {kind} needs {' and '.join(missing)}"
        raise wrong("missing", f"rope_scaling.{missing[0]}", None, message)
    found: dict[str, object] = {"rope_type": kind}
    theta = given.get("rope_theta") or values.get("rope_theta")
    if theta is not None:
        found["rope_theta"] = real("rope_theta", theta)
    if kind != "default":
        known = {name: given[key] for key, name in ROPE_KEYS.items() if key in given}
        found |= known
        if kind != "linear" and "original_max_position_embeddings" not in known:
            found["original_max_position_embeddings"] = values.get("max_position_embeddings")
    share = given.get("partial_rotary_factor") or values.get("partial_rotary_factor")
    if rotary := values.get("rotary_dim"):
        share = real("rotary_dim", rotary) / fields["head_dim"]
    if share and fields.get("attention") != "mla":
        found["partial_rotary_factor"] = real("partial_rotary_factor", share)
    return found
