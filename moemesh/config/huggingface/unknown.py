"""Families, layers and switches that nothing here has a formula for, refused by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from moemesh.config.errors import Problem
from moemesh.config.huggingface.keys import Config, Record, known_families, names
from moemesh.config.huggingface.windows import FULL_LAYERS, WINDOW_LAYERS

_KNOWN = "known are attention (GQA, MLA), MLPs and experts"


def unknown_layers(config: Config, kind: str) -> list[Problem]:
    """Every key of `config` that stands for layers without a formula."""
    problems: list[Problem] = []
    for key, what in known_families()["unknown"].items():
        if config.get(key):
            message = f"{what} are not known; {_KNOWN}"
            problems.append(_unknown(key, config[key], message))
    patterns = config.get("attn_type_list")
    if patterns and any(item != 1 for item in _items(patterns)):
        message = "0 stands for linear attention, not known; known: 1 (softmax attention)"
        problems.append(_unknown("attn_type_list", patterns, message))
    projection = config.get("word_embed_proj_dim")
    if projection and projection != config.get("hidden_size"):
        message = "an embedding narrower than the model is not known"
        problems.append(_unknown("word_embed_proj_dim", projection, message))
    kinds: Any = config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        listed = {str(item) for item in cast("Sequence[object]", kinds)}
        for layer in sorted(listed - {*FULL_LAYERS, *WINDOW_LAYERS}):
            message = f"`{layer}` is no layer kind that the planner has a formula for"
            problems.append(_unknown("layer_types", layer, message))
    if kind == "minimax" and not patterns:
        message = "without it the layers of this family alternate with linear attention"
        problems.append(_unknown("attn_type_list", None, message))
    return problems


def unread_parameters(config: Record, kind: str, *, has_norm: bool) -> list[Problem]:
    """Keys that stand for parameters where there are any, and that this family's reading never
    asked for: dropping them would count another model.

    `has_norm`: queries and keys have their norms by the family's code, whatever a key says.
    """
    problems: list[Problem] = []
    for size in ("num_experts", "num_shared", "expert_intermediate_size"):
        least = 2 if size == "num_experts" else 1
        problems += _unread(config, names(size), f"no experts of a {kind} model are known", least)
    problems += _unread(config, names("num_mtp_layers"), f"a {kind} model has no such layers")
    keys = known_families()["parameters"]
    problems += _unread(config, keys["latent"], f"no latent attention of a {kind} model is known")
    switches = keys["switches"] + ([] if has_norm else keys["norms"])
    return problems + _unread(config, switches, f"no such switch of a {kind} model is known")


def _unread(config: Record, keys: Collection[str], message: str, least: float = 1) -> list[Problem]:
    found: list[Problem] = []
    for key in sorted(set(keys) & set(config) - config.read):
        value = dict(config).get(key)
        if isinstance(value, (bool, int, float)) and value >= least:
            found.append(_unknown(key, value, message))
        elif isinstance(value, (list, tuple)) and value:
            found.append(_unknown(key, cast("object", value), message))
    return found


def _items(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (value,)


def _unknown(key: str, value: object, message: str) -> Problem:
    return Problem(code="unknown-layer", key=key, value=value, message=message)
