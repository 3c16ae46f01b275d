"""Sliding windows of a published model: the layers that have one, and how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from moemesh.config.huggingface.keys import (
    Config,
    check_length,
    num_layers,
    scalar,
    whole,
    words,
    wrong,
)
from moemesh.config.suggest import nearest_choice

FULL_LAYERS = ("full_attention", "attention", "global", "full")
WINDOW_LAYERS = ("sliding_attention", "sliding_window", "local", "chunked_attention")

_PERIOD_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")


def attention_windows(
    config: Config, usual: int | str, *, has_switch: bool = True
) -> tuple[int, ...]:
    """The attention window of every layer in tokens, 0 for none; () when no layer has one.

    `usual`: where no list says which layers have it, one in so many sees the whole sequence, or
    the key of the first layer that has it. `has_switch`: `use_sliding_window` counts. Raises
    ConfigError for kinds of layers without a formula, for a list of another length, and for a list
    that is missing.
    """
    layers = num_layers(config)
    kinds = _kinds(config, layers)
    is_on = config.get("use_sliding_window")
    if has_switch and is_on is not None and not is_on:
        return ()
    named = ("sliding_window", "attention_chunk_size", "window_size")
    key = next((key for key in named if config.get(key) and config[key] is not True), None)
    window = 0 if key is None else scalar(key, config[key])
    if not window:
        return ()
    if kinds:
        found = tuple(window if kind in WINDOW_LAYERS else 0 for kind in kinds)
        return found if any(found) else ()
    if usual == "layer_types":
        message = "which layers have the window is not said: layer_types is missing"
        raise wrong("missing", "layer_types", None, message)
    if isinstance(usual, str):
        start = whole(config, usual, 0)
        return tuple(window if index >= start else 0 for index in range(layers))
    return _periodic(config, usual, layers, window)


def _periodic(config: Config, usual: int, layers: int, window: int) -> tuple[int, ...]:
    pattern: Any = next((config[key] for key in _PERIOD_KEYS if config.get(key)), usual)
    if isinstance(pattern, str):
        # Letters, L for a window and G for none, over and over; the last layer has none.
        if set(pattern) - set("LG"):
            message = "a pattern has the letters L (a window) and G (the whole sequence)"
            raise wrong("unknown-layer", "sliding_window_pattern", pattern, message)
        local = [pattern[index % len(pattern)] == "L" for index in range(layers - 1)] + [False]
        return tuple(window if is_local else 0 for is_local in local)
    period = scalar("sliding_window_pattern", pattern)
    return alternating_windows(layers, window, period)


def alternating_windows(num_layers: int, window: int, every: int) -> tuple[int, ...]:
    """One layer in `every` sees the whole sequence, the last of each `every`; the others (all, when
    `every` is 0 or 1) see `window` tokens."""
    return tuple(
        0 if every > 1 and index % every == every - 1 else window for index in range(num_layers)
    )


def _kinds(config: Config, layers: int) -> tuple[str, ...]:
    """The kind of every layer where the configuration lists them."""
    kinds = words(config, "layer_types") or words(config, "attention_layers")
    if not kinds and config.get("attention_types"):
        kinds = _unrolled(config["attention_types"])
    known = (*FULL_LAYERS, *WINDOW_LAYERS)
    for kind in kinds:
        if kind not in known:
            message = f"`{kind}` is no layer kind that the planner has a formula for"
            fix = nearest_choice(kind, known)
            raise wrong("unknown-layer", "layer_types", kind, message, fix)
    if kinds:
        check_length("layer_types", kinds, layers)
    return kinds


def _unrolled(value: object) -> tuple[str, ...]:
    """[[["global", "local"], 12]] written out."""
    found: list[str] = []
    try:
        for kinds, times in cast("Sequence[tuple[Sequence[str], int]]", value):
            found += [str(kind) for kind in kinds] * times
    except (TypeError, ValueError):
        message = 'attention_types must be a list such as [[["global", "local"], 12]]'
        raise wrong("wrong-type", "attention_types", value, message) from None
    return tuple(found)
