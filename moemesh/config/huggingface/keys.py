"""Sizes under the names of published configurations, read strictly.

The keys that were read are recorded, so that a key that adds parameters to the model and was not
read is reported instead of ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.experts import MOST_LAYERS
from moemesh.config.sources import read_preset_table

Config = Mapping[str, Any]
#: Name of the file with the sizes of a model.
CONFIG = "config.json"


@cache
def known_families() -> dict[str, Any]:
    """Known families of configurations, and their keys: ``presets/huggingface/families.toml``."""
    return read_preset_table("families", "huggingface")


@cache
def class_rows() -> dict[str, Any]:
    """Facts on configuration classes of transformers: ``presets/huggingface/classes.toml``."""
    return read_preset_table("classes", "huggingface")


#: Keys that every class reads: the family, and the keys of RoPE.
_FOR_ALL = (
    "model_type", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
    "original_max_position_embeddings",
)  # fmt: skip


def as_class(config: Config, kind: str) -> dict[str, Any]:
    """`config` as transformers' configuration class of the family `kind` reads it: with the key
    names and the defaults of the class, without keys that it ignores. For a family without a row in
    ``classes.toml`` a plain copy."""
    row = class_rows().get(kind)
    if row is None:
        return dict(config)
    known, defaults = {*row["reads"], *_FOR_ALL, *names("num_mtp_layers")}, row["defaults"]
    values = defaults | {key: value for key, value in config.items() if key in known}
    values |= {key: config[name] for name, key in row["aliases"].items() if name in config}
    # A switch that is null is off, whatever its default.
    for key in (key for key, value in defaults.items() if isinstance(value, bool)):
        if not isinstance(values[key], bool) and values[key] not in (None, 0, 1):
            fix = _without_quotes(key, values[key], "true|false")
            raise wrong("wrong-type", key, values[key], f"{key} must be true or false", fix)
        values[key] = bool(values[key])
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def names(size: str) -> list[str]:
    """The published names of one of our sizes."""
    return known_families()["names"][size]


class ReadConfiguration(Mapping[str, Any]):
    """A configuration that records the keys that were read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def first(config: Config, size: str, default: int | None = None) -> int:
    """The value of a size, from the first of its published names that `config` has. Raises KeyError
    with all names if it has none and no `default` is given."""
    return whole(config, *names(size), default=default)


def whole(config: Config, *keys: str, default: int | None = None) -> int:
    """One whole number, from the first present key of `keys`. Raises KeyError without key and
    default, ConfigError for any other value."""
    # Reads all keys, so that a second name of the size is not reported as unread.
    present = [key for key in keys if config.get(key) is not None]
    if present:
        return scalar(present[0], config[present[0]])
    if default is None:
        raise KeyError(" or ".join(keys))
    return default


def real(key: str, value: object) -> float:
    """One finite number. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        fix = _without_quotes(key, value, r"-?\d+(\.\d+)?(e-?\d+)?")
        raise wrong("wrong-type", key, value, f"{key} must be a number", fix)
    return float(value)


def scalar(name: str, value: Any) -> int:
    """One whole number of at least 0; a list must have equal entries for all layers."""
    if isinstance(value, (list, tuple)):
        values = cast("Sequence[Any]", value)
        if not values or any(item != values[0] for item in values):
            message = f"{name} differs between layers; known are models with the same for all"
            raise wrong("unknown-layer", name, cast("object", value), message)
        value = values[0]
    bad = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad or not math.isfinite(value) or value != int(value):
        fix = _without_quotes(name, value, r"\d+")
        message = f"{name} must be a whole number"
        raise wrong("wrong-type", name, cast("object", value), message, fix)
    if value < 0:
        raise wrong("too-small", name, cast("object", value), f"{name} must be at least 0")
    return int(value)


def _without_quotes(key: str, value: object, pattern: str) -> str:
    """The fix for a text that matches the pattern of a legal value; "" for others."""
    text = value.strip().lower() if isinstance(value, str) else ""
    return f"{key} = {text}, without quotes" if re.fullmatch(pattern, text) else ""


def indices(config: Config, key: str) -> tuple[int, ...]:
    """A list of layer numbers; () without one."""
    return tuple(scalar(key, item) for item in _listed(config, key, "of layer numbers"))


def words(config: Config, key: str) -> tuple[str, ...]:
    """A list with one word a layer; () without one."""
    return tuple(map(str, _listed(config, key, "with one word a layer")))


def _listed(config: Config, key: str, what: str) -> Sequence[object]:
    value: object = config.get(key)
    if value is not None and not isinstance(value, (list, tuple)):
        raise wrong("wrong-type", key, value, f"{key} must be a list {what}")
    return cast("Sequence[object]", value or ())


def check_length(key: str, values: Sequence[object], layers: int) -> None:
    """Raises ConfigError unless a list has one entry for each layer."""
    if len(values) != layers:
        message = f"{key} has {len(values)} entries for {layers} layers"
        raise wrong("shape", key, list(values), message)


def table(config: Config, key: str) -> Config:
    """A nested object; empty without one."""
    value: object = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong("wrong-type", key, value, f"{key} must be an object")
    return cast("Config", value)


def num_layers(config: Config) -> int:
    """The number of layers, at most MOST_LAYERS."""
    layers = first(config, "num_layers")
    if layers > MOST_LAYERS:
        key = next(name for name in names("num_layers") if name in config)
        message = f"{key} ({layers}) exceeds {MOST_LAYERS}"
        raise wrong("too-large", key, layers, message, f"{key} = {MOST_LAYERS}")
    return layers


def off_note(key: str, value: float) -> str:
    """The note on a key of dropout or noise, whose random numbers would depend on the layout."""
    return f"{key} = {value} is set to 0: results would depend on the layout"


def wrong(code: str, key: str, value: object, message: str, fix: str = "") -> ConfigError:
    """A problem with one key as an exception."""
    return ConfigError([Problem.of(code, key, value, message, fix)])
