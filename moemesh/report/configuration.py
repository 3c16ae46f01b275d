"""Configurations of runs beside their defaults and beside one another, by dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from moemesh.config.errors import ConfigError
from moemesh.config.load import config_values, load_run
from moemesh.config.toml import format_value

#: (key, value of the first, value of the second); None stands for a key without a value.
Difference = tuple[str, object, object]


def differences(config: Mapping[str, Any]) -> tuple[list[Difference], str]:
    """(key, value, default) of the keys of a `config.toml` that differ from the defaults, and what
    these are: those of the model's preset, or of the model in a folder, whose own keys follow from
    the folder. A key that the file does not have stands for its default."""
    values = flat(config)
    path, preset = values.get("model.path"), values.get("model.preset")
    defaults = _defaults(preset if isinstance(preset, str) else None)
    found = [item for item in between(values, defaults) if item[0] in values]
    baseline = "the defaults"
    if path is not None:
        names = ("model.path", "model.preset")
        found = [item for item in found if not item[0].startswith("model.") or item[0] in names]
        baseline = "the defaults and the model's folder"
    elif isinstance(preset, str):
        # The preset's own keys follow from its name, which is itself a choice.
        usual = _defaults(None).get("model.preset")
        if preset != usual:
            found.insert(0, ("model.preset", preset, usual))
        baseline = "the defaults and the preset"
    return found, baseline


def with_defaults(config: Mapping[str, Any]) -> dict[str, object]:
    """Every key of a `config.toml`; one that the file does not have stands for its default."""
    values = flat(config)
    preset = values.get("model.preset")
    return _defaults(preset if isinstance(preset, str) else None) | values


def between(first: Mapping[str, object], second: Mapping[str, object]) -> list[Difference]:
    """The keys of two flat configurations whose values differ, in the order of the keys."""
    return [
        (key, first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if _text(first.get(key)) != _text(second.get(key))
    ]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Dotted key -> value; None and empty lists are keys without a value."""
    found: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _text(value: object) -> str:
    """Texts are compared: 1 and 1.0, a tuple and a list mean the same key."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    return "" if value is None else format_value(value)


def _defaults(preset: str | None) -> dict[str, object]:
    """Of every key; of an unknown preset (an older run's) those of no preset."""
    chosen = [] if preset is None else [f"model.preset={format_value(preset)}"]
    try:
        return flat(config_values(load_run([], chosen, environ={}).config))
    except ConfigError:
        return flat(config_values(load_run([], [], environ={}).config))
