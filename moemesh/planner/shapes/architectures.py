"""Shapes from a table of architectures, and GPTs from three numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from moemesh.config.errors import ConfigError, Problem
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
        raise ConfigError(
            [
                Problem(
                    code="unknown-model",
                    key="arch",
                    value=arch,
                    message="no entry of the table of architectures has this name",
                    fix=nearest_choice(arch, known),
                )
            ]
        )
    return from_arch_entry(arch, cast("Mapping[str, Any]", table[arch]))


def from_arch_entry(name: str, entry: Mapping[str, Any]) -> ModelShape:
    """One entry of such a table. Raises ConfigError for a missing or an unknown key."""
    _check_entry(name, entry)
    layers = int(entry["layers"])
    is_moe = entry["type"] == "moe"
    dense = int(entry.get("dense_layers", 0)) if is_moe else layers
    gelu = entry["act"] == "gelu"
    details: dict[str, Any] = dict(_GPT_DETAILS) if gelu else {}
    details["tied_embeddings"] = bool(entry.get("tied_embeddings", False))
    if entry.get("attention_bias"):
        details |= {"qkv_bias": True, "output_bias": True}
    mla = cast("Mapping[str, int]", entry.get("mla") or {})
    if mla:
        details |= {
            "attention": "mla",
            "q_lora_rank": mla["q_lora"],
            "kv_lora_rank": mla["kv_lora"],
            "qk_nope_head_dim": mla["qk_nope"],
            "qk_rotary_head_dim": mla["qk_rope"],
            "v_head_dim": mla["v_head"],
        }
    if entry.get("sliding_window"):
        every = int(entry.get("sliding_window_every", 1))
        details["windows"] = alternating_windows(layers, int(entry["sliding_window"]), every)
    if is_moe:
        details |= {
            "moe_layers": tuple(range(dense, layers)),
            "num_experts": entry["experts"],
            "experts_per_token": entry["topk"],
            "expert_intermediate_size": entry["moe_ffn"],
            "shared_intermediate_size": entry.get("shared_ffn", 0),
            "expert_bias": bool(entry.get("expert_bias")),
            "router_logit_bias": bool(entry.get("expert_bias")),
            "router_groups": entry.get("router_groups", 1),
            "router_groups_kept": entry.get("router_group_topk", 1),
        }
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=entry["hidden"],
        vocab_size=entry["vocab"],
        num_heads=entry["heads"],
        num_kv_heads=entry["kv_heads"],
        head_dim=entry["head_dim"],
        intermediate_size=int(entry.get("dense_ffn", 0)) if is_moe else entry["ffn"],
        activation="gelu" if gelu else "swiglu",
        **details,
    )


def alternating_windows(num_layers: int, window: int, every: int) -> tuple[int, ...]:
    """One layer in `every` sees the whole sequence, the last of each `every`; the others (all, when
    `every` is 1) see `window` tokens."""
    if every == 1:
        return (window,) * num_layers
    return tuple(0 if index % every == every - 1 else window for index in range(num_layers))


_ENTRY_KEYS = {
    "type", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "act", "ffn", "experts",
    "topk", "moe_ffn", "shared_ffn", "dense_layers", "dense_ffn", "mla", "tied_embeddings",
    "attention_bias", "expert_bias", "sliding_window", "sliding_window_every", "router_groups",
    "router_group_topk", "source",
}  # fmt: skip
_ENTRY_NEEDS = ("type", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "act")
_ENTRY_NEEDS_MOE = ("experts", "topk", "moe_ffn")


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    problems: list[Problem] = []
    needed: Sequence[str] = (
        *_ENTRY_NEEDS,
        *(_ENTRY_NEEDS_MOE if entry.get("type") == "moe" else ("ffn",)),
    )
    for key in needed:
        if key not in entry:
            problems.append(
                Problem(code="missing", key=f"{name}.{key}", message=f"the entry has no `{key}`")
            )
    for key in entry:
        if key not in _ENTRY_KEYS:
            known = ", ".join(sorted(_ENTRY_KEYS))
            problems.append(
                Problem(
                    code="unknown-key",
                    key=f"{name}.{key}",
                    value=entry[key],
                    message=f"the planner does not know `{key}`",
                    fix=f"known: {known}",
                )
            )
    for key, choices in (("type", ("dense", "moe")), ("act", ("swiglu", "gelu"))):
        if key in entry and entry[key] not in choices:
            problems.append(
                Problem(
                    code="unknown-layer",
                    key=f"{name}.{key}",
                    value=entry[key],
                    message=f"no layer of this kind is known (known: {', '.join(choices)})",
                )
            )
    if problems:
        raise ConfigError(problems)
