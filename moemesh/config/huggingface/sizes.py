"""The sizes of a model from a Hugging Face ``config.json``, by model family, without torch.

A configuration names most sizes and leaves the rest to its family's code: which projections have
biases, which norms exist, whether the table is tied. Those facts are data, a row a family, from the
published model code: ``presets/huggingface/families.toml``. What would change the counts and is not
understood (a layer kind, a family, a switch, a size that is missing) is an error that names the
key, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.keys import (
    Config,
    Record,
    first,
    known_families,
    names,
    num_layers,
    whole,
    wrong,
)
from moemesh.config.huggingface.readers import READERS
from moemesh.config.huggingface.unknown import unknown_layers, unread_parameters
from moemesh.config.huggingface.windows import attention_windows
from moemesh.config.suggest import nearest_choice

#: Where multimodal configurations keep their text model.
_TEXT_KEYS = ("text_config", "language_config", "llm_config")
_EXPERT_SIZES = ("num_experts", "experts_per_token", "expert_intermediate_size")


class Sizes(NamedTuple):
    """`fields` of a planner's ModelShape, `values` of the configuration of the text model with the
    family's defaults in them, the `model_type`, and `notes` on what was left out."""

    fields: dict[str, Any]
    values: Config
    kind: str
    notes: tuple[str, ...]


def read_sizes(config: Config) -> Sizes:
    """The sizes in a parsed ``config.json``.

    Of a multimodal model those of the text part, which `notes` say. Raises ConfigError naming every
    key that is missing or stands for layers without a formula.
    """
    config, notes = _text_model(config)
    kind = str(config.get("model_type") or "")
    family = _family(kind)
    defaults: Config = family.get("defaults", {})
    values = dict(defaults)
    for key, value in config.items():
        values[key] = defaults.get(key) if value is None else value
    values |= _absent(config, family)
    if problems := unknown_layers(values, kind):
        raise ConfigError(problems)
    record = Record(values)
    try:
        fields = _sizes(record, family)
    except KeyError as error:
        raise ConfigError([_missing(str(error.args[0]), kind)]) from None
    has_norm = fields.get("qk_norm", "none") != "none"
    if problems := unread_parameters(record, kind, has_norm=has_norm):
        raise ConfigError(problems)
    return Sizes(fields, values, kind, notes)


def _absent(config: Config, family: Config) -> Config:
    """Sizes that the family's code sets where the configuration does not name the key."""
    found = {key: value for key, value in family.get("absent", {}).items() if key not in config}
    if "rope_scaling" in config:  # the older name
        found.pop("rope_parameters", None)
    return found


def _text_model(config: Config) -> tuple[Config, tuple[str, ...]]:
    """The configuration of the text model, and what to say about the rest."""
    for key in _TEXT_KEYS:
        text = config.get(key)
        if isinstance(text, Mapping):
            outer = {
                name: config[name]
                for name in ("model_type", "tie_word_embeddings")
                if config.get(name) is not None
            }
            inner = {name: value for name, value in cast("Config", text).items() if value != ""}
            return outer | inner, ("only the text model is counted",)
        if text is not None:
            raise wrong("wrong-type", key, cast("object", text), f"{key} must be an object")
    if config.get("vision_config") or config.get("audio_config"):
        return config, ("only the text model is counted",)
    return config, ()


def _sizes(config: Config, family: Config) -> dict[str, Any]:
    hidden, heads = first(config, "hidden_size"), first(config, "num_heads")
    found: dict[str, Any] = dict(family.get("details", {}))
    for read in family.get("read", ()):
        found |= READERS[read](config)
    for key, fields in family.get("when", {}).items():
        if config.get(key):
            found |= fields
    if "positions" in family:
        found["learned_positions"] = _positions(config, family)
    layers = num_layers(config)
    found |= {
        "num_layers": layers,
        "hidden_size": hidden,
        "vocab_size": first(config, "vocab_size"),
        "num_heads": heads,
        "tied_embeddings": bool(config.get("tie_word_embeddings")),
        "num_mtp_layers": first(config, "num_mtp_layers", 0),
        "windows": attention_windows(
            config, family.get("windows", 0), has_switch=family.get("window_switch", True)
        ),
    }
    if "num_kv_heads" not in found:
        size, *left_out = family.get("kv_heads", ("num_kv_heads",))
        found["num_kv_heads"] = first(config, size, heads if left_out else None)
    if "head_dim" not in found:
        found["head_dim"] = _head_dim(config, hidden, heads)
    return found | _experts(config, found, layers)


def _positions(config: Config, family: Config) -> int:
    """Rows of the table of positions: of the first of its keys that is there, and those that are
    never used."""
    keys = cast("list[str]", family["positions"])
    found = next((key for key in keys if config.get(key) is not None), None)
    if found is None:
        raise KeyError(" or ".join(keys))
    return whole(config, found) + family.get("unused_positions", 0)


def _experts(config: Config, found: dict[str, Any], layers: int) -> dict[str, Any]:
    """The sizes of the experts, none in a family without them; the dense width where it is used."""
    sizes: dict[str, Any] = {"moe_layers": (), "shared_intermediate_size": 0}
    sizes |= dict.fromkeys(_EXPERT_SIZES, 0)
    moe = found.get("moe_layers", ())
    if "moe_layers" in found and (found.get("num_experts") or first(config, "num_experts")):
        sizes["moe_layers"] = moe
        sizes["shared_intermediate_size"] = found.get("shared_intermediate_size", 0)
        for size in _EXPERT_SIZES:
            sizes[size] = found[size] if size in found else first(config, size)
    if not sizes["moe_layers"]:
        sizes |= dict.fromkeys(_EXPERT_SIZES, 0) | {"shared_intermediate_size": 0}
        sizes |= {"router_selection_bias": False, "router_groups": 1, "router_groups_kept": 1}
    if len(sizes["moe_layers"]) == layers:
        sizes["intermediate_size"] = 0
    elif not found.get("intermediate_size"):
        sizes["intermediate_size"] = first(config, "intermediate_size")
    return sizes


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    """The key of the head size, else the hidden size cut into heads."""
    size = first(config, "head_dim", 0)
    if size:
        return size
    if heads < 1 or hidden % heads:
        key = next(name for name in names("num_heads") if name in config)
        message = f"{key} ({heads}) must divide the hidden size ({hidden}), or head_dim be given"
        raise wrong("not-divisible", key, heads, message)
    return hidden // heads


def _family(kind: str) -> Config:
    """The row of a family, by any name that it goes by."""
    known = known_families()
    same = {other: name for name, others in known["same"].items() for other in others}
    if (found := known["family"].get(same.get(kind, kind))) is not None:
        return found
    for what, families in known["refused"].items():
        if kind in families:
            message = f"{kind} has {what}, which the planner has no formula for"
            fix = "a TOML file of its sizes when a transformer of the same size is a fair stand-in"
            raise wrong("unknown-layer", "model_type", kind, message, fix)
    message = "the planner does not know the layers of this model family"
    fix = nearest_choice(kind, tuple(sorted({*known["family"], *same})))
    raise wrong("unknown-model", "model_type", kind or None, message, fix)


def _missing(names: str, kind: str) -> Problem:
    message = f"the configuration of a {kind} model needs {names}"
    return Problem(code="missing", key=names.partition(" or ")[0], message=message)
