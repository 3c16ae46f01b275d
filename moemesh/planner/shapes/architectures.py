"""Shapes from a table of architectures, and GPTs from three numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.windows import alternating_windows
from moemesh.config.suggest import nearest_choice
from moemesh.planner.shapes.shape import ModelShape

_GPT = re.compile(r"gpt:(\d+)x(\d+)a(\d+)(?:v(\d+))?")
_TRUNCATED = re.compile(r"(.+)#L(\d+)")
_GPT_VOCABULARY = 51200
_GPT_POSITIONS = 2048


def gpt(num_layers: int, hidden: int, heads: int, vocab: int = _GPT_VOCABULARY) -> ModelShape:
    """A GPT as Megatron trains it: GELU, multi-head, width 4h, biases, learned positions, tied."""
    return ModelShape(
        name=f"gpt:{num_layers}x{hidden}a{heads}v{vocab}",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        activation="gelu",
        **_GPT_DETAILS,
    )


#: What a table entry with act = "gelu" leaves unsaid.
_GPT_DETAILS: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "norm": "layer_bias",
    "learned_positions": _GPT_POSITIONS,
    "tied_embeddings": True,
    "dropout": True,
}


def from_arch_table(arch: str, table: Mapping[str, Any]) -> ModelShape:
    """The model called `arch` of a table in the form of ``model_archs.json``.

    Understands ``gpt:<L>x<h>a<heads>[v<vocab>]`` and ``<arch>#L<n>``. Raises ConfigError for a name
    that is neither.
    """
    if found := _GPT.fullmatch(arch):
        layers, hidden, heads, vocab = found.groups()
        return gpt(int(layers), int(hidden), int(heads), int(vocab or _GPT_VOCABULARY))
    if found := _TRUNCATED.fullmatch(arch):
        return from_arch_table(found.group(1), table).truncated(int(found.group(2)))
    if arch not in table or arch.startswith("_"):
        known = tuple(name for name in table if not name.startswith("_"))
        message = "no entry of the table of architectures has this name"
        fix = nearest_choice(arch, known)
        raise ConfigError([Problem.of("unknown-model", "arch", arch, message, fix)])
    return from_arch_entry(arch, cast("Mapping[str, Any]", table[arch]))


def from_arch_entry(name: str, entry: Mapping[str, Any]) -> ModelShape:
    """One entry of such a table. Raises ConfigError for a missing or an unknown key."""
    needed = [*_CHOICES, *_SIZES, *(list(_EXPERTS)[:3] if entry.get("type") == "moe" else ("ffn",))]
    needed.remove("tied_embeddings")
    wrong = [("missing", key, f"the entry has no `{key}`") for key in needed if key not in entry]
    for key in entry:
        if key not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            message = f"the planner does not know `{key}` (known: {known})"
            wrong.append(("unknown-key", key, message))
    for key, choices in _CHOICES.items():
        if key in entry and entry[key] not in choices:
            message = f"no layer of this kind is known (known: {', '.join(choices)})"
            wrong.append(("unknown-layer", key, message))
    if wrong:
        raise ConfigError(
            Problem.of(code, f"{name}.{key}", entry.get(key), message)
            for code, key, message in wrong
        )
    layers, is_moe, gelu = entry["layers"], entry["type"] == "moe", entry["act"] == "gelu"
    found: dict[str, Any] = {"tied_embeddings": False, "activation": entry["act"]}
    if gelu:
        found = _GPT_DETAILS | found
    given = {key: value for key, value in entry.items() if value}
    for key in given.keys() & (_SIZES.keys() | (_EXPERTS.keys() if is_moe else set())):
        found[(_SIZES | _EXPERTS)[key]] = given[key]
    if given.get("attention_bias"):
        found |= {"qkv_bias": True, "output_bias": True}
    if latent := cast("Mapping[str, int]", given.get("mla", {})):
        found |= {"attention": "mla"} | {_LATENT[key]: value for key, value in latent.items()}
    if window := given.get("sliding_window"):
        every = entry.get("sliding_window_every", 1)
        found["windows"] = alternating_windows(layers, window, every)
    if is_moe:
        found["moe_layers"] = tuple(range(given.get("dense_layers", 0), layers))
        has_bias = bool(given.get("expert_bias"))
        found |= {"expert_bias": has_bias, "router_logit_bias": has_bias}
    found["intermediate_size"] = given.get("dense_ffn", 0) if is_moe else entry["ffn"]
    return ModelShape(name=name, **found)


#: Keys of an entry that are fields of ModelShape under another name.
_SIZES = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads",
    "kv_heads": "num_kv_heads", "head_dim": "head_dim", "vocab": "vocab_size",
    "tied_embeddings": "tied_embeddings",
}  # fmt: skip
_EXPERTS = {
    "experts": "num_experts", "topk": "experts_per_token", "moe_ffn": "expert_intermediate_size",
    "shared_ffn": "shared_intermediate_size", "router_groups": "router_groups",
    "router_group_topk": "router_groups_kept",
}  # fmt: skip
_LATENT = {
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "qk_nope": "qk_nope_head_dim",
    "qk_rope": "qk_rotary_head_dim", "v_head": "v_head_dim",
}  # fmt: skip
_CHOICES = {"type": ("dense", "moe"), "act": ("swiglu", "gelu")}
_OTHERS = (
    "ffn", "dense_layers", "dense_ffn", "mla", "attention_bias", "expert_bias", "sliding_window",
    "sliding_window_every", "source",
)  # fmt: skip
_KNOWN = (*_CHOICES, *_SIZES, *_EXPERTS, *_OTHERS)
