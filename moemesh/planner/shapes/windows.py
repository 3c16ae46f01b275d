"""Which layers of a published model look back through a window only, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from moemesh.config.suggest import nearest_choice
from moemesh.planner.shapes.keys import Config, num_layers, scalar, whole, words, wrong

FULL_LAYERS = ("full_attention", "attention", "global", "full")
WINDOW_LAYERS = ("sliding_attention", "sliding_window", "local", "chunked_attention")

#: Families in which one layer in so many sees the whole sequence when no key says which.
_PERIODS = {
    "gemma2": 2,
    "gpt_oss": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "llama4_text": 4,
}
_PERIOD_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
#: Families whose window has a switch that is off when it is left out.
_SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
#: Families whose first `max_window_layers` layers see the whole sequence.
_FROM_LAYER = ("qwen2", "qwen3", "qwen2_moe", "dots1")


def attention_windows(config: Config, family: str) -> tuple[int, ...]:
    """The attention window of every layer in tokens, 0 for none; () when no layer has one.

    Raises ConfigError for kinds of layers without a formula, and for a list of another length.
    """
    layers = num_layers(config)
    kinds = _kinds(config, layers)
    if family in _SWITCHED and not config.get("use_sliding_window"):
        return ()
    if config.get("use_sliding_window") is False:
        return ()
    window = _window(config)
    if not window:
        return ()
    if kinds:
        found = tuple(window if kind in WINDOW_LAYERS else 0 for kind in kinds)
        return found if any(found) else ()
    if family == "smollm3":
        message = "which layers have the window is not said: layer_types is missing"
        raise wrong("missing", "layer_types", None, message)
    if family in _FROM_LAYER:
        start = whole(config, "max_window_layers", 0)
        return tuple(window if index >= start else 0 for index in range(layers))
    return _periodic(config, family, layers, window)


def _window(config: Config) -> int:
    """Tokens of the window, whatever it is called."""
    for key in ("sliding_window", "attention_chunk_size", "window_size"):
        if config.get(key) and config[key] is not True:
            return scalar(key, config[key])
    return 0


def _periodic(config: Config, family: str, layers: int, window: int) -> tuple[int, ...]:
    pattern: Any = _PERIODS.get(family, 0)
    for key in _PERIOD_KEYS:
        if config.get(key):
            pattern = config[key]
            break
    if isinstance(pattern, str):
        # Letters, L for a window and G for none, over and over; the last layer has none.
        if set(pattern) - set("LG"):
            message = "a pattern has the letters L (a window) and G (the whole sequence)"
            raise wrong("unknown-layer", "sliding_window_pattern", pattern, message)
        local = [pattern[index % len(pattern)] == "L" for index in range(layers - 1)] + [False]
        return tuple(window if is_local else 0 for is_local in local)
    period = scalar("sliding_window_pattern", pattern)
    if not period:
        return (window,) * layers
    return tuple(0 if index % period == period - 1 else window for index in range(layers))


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
    if kinds and len(kinds) != layers:
        message = f"layer_types has {len(kinds)} entries for {layers} layers"
        raise wrong("shape", "layer_types", list(kinds), message)
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
