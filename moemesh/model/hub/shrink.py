"""A small model of the same family: few layers, at least one of each kind, and small sizes.

A test with it tests the modelling code with the settings of the real model. Its layers are the
first ones of the real model, until each kind is among them: rules by layer index stay valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from moemesh.model.hub.build import Blueprint, blueprint
from moemesh.model.hub.experts import is_experts

#: Keys of the number of experts.
_EXPERTS = r"(n_routed|num|num_local|moe_num|num_routed)_experts|n_experts"
#: (pattern of a key, its largest value in a small model); the first match counts.
_LARGEST: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size(_per_layer_input)?", 128),
    (r"hidden_size_per_layer_input", 16),
    (r"linear_num_key_heads|index_n_heads|.*n_groups|mamba_num_groups", 2),
    (r"n_group|num_expert_groups?", 2),
    (r"topk_group|.*limited_groups?", 1),
    (r"(n_|num_)shared_experts?|num_shared_expert", 1),
    (r"num_experts_per_tok(en)?|moe_(topk|k|router_topk)|top_k(_experts)?|.*experts_top_k", 2),
    (r"num_zero_experts|zero_expert_num", 2),
    (r"mamba_(n|num)_heads", 8),
    (r".*key_value_heads|num_kv_heads|.*_kv_heads", 2),
    (r".*(num|n)_(attention_)?heads|linear_num_value_heads|.*_num_heads|.*attention_heads", 4),
    (r"(qk_)?rope_head_dim|qk_rope_head_dim|.*rotary_dim", 8),
    (r"(index|qk)_head_dim", 24),
    (r".*head_dim|mamba_d_head|.*head_size", 16),
    (r".*(lora_rank|_rank|rank_dim)", 16),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"(mamba_)?chunk_size|.*window(_size)?|attention_chunk_size", 16),
    (r"index_topk|.*index_topk_.*", 32),
    (r"(moe|expert|shared|.*expert).*(intermediate|ffn|hidden).*(size|dim)", 32),
    (r".*(intermediate_size|ffn_hidden_size|ffn_dim|mlp_hidden_size)", 96),
    (r"(.*_)?hidden_size|d_model|n_embd|conv_dim|embedding_size|block_dim|projection_dim", 64),
    (r".*embed_proj_dim", 64),
    (r"depth", 2),
)  # fmt: skip

#: Keys of the number of heads of Mamba layers, and of the size of a head.
_MAMBA_HEADS = (
    ("num_heads", "head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
)


def shrunken(values: Mapping[str, Any], experts: int = 8, layers: int = 2) -> Blueprint:
    """The small model of a parsed ``config.json``, with at most `experts` experts and at least
    `layers` layers, if the real model has these. Raises ValueError if it would lack a kind of
    module that the real one has."""
    whole = blueprint(values)
    real = whole.build()
    # The smallest number of first layers that contain one layer of each kind.
    kinds = [kind_of(layer) for layer in decoder_layers(real)[1]]
    needed = 1 + max(map(kinds.index, kinds))
    num_layers = max(needed, min(layers, len(kinds)))
    names = {name: key for key, name in whole.config.attribute_map.items()}
    small = blueprint(_small(whole.config.to_dict(), num_layers, experts, names))
    missing = _kinds(real) - _kinds(small.build())
    if missing:
        raise ValueError(f"the small model has no {', '.join(sorted(missing))}")
    return small


def _kinds(model: PreTrainedModel) -> set[str]:
    """The classes of modules in the decoder layers."""
    _, layers = decoder_layers(model)
    return {type(module).__name__ for module in layers.modules()}


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: the list with the experts, or else the outermost with
    the configured number of layers. Raises ValueError for experts outside of the interface or in
    several lists, and for a model without such a list."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    names = {
        next(path for path in lists if name.startswith(path + "."))
        for name, module in model.named_modules()
        if is_experts(module)
    }
    if not names:
        classes = {type(module).__name__ for module in model.modules()}
        if experts := ", ".join(sorted(name for name in classes if "Expert" in name)):
            message = f"experts ({experts}) do not pass through the interface of transformers"
            raise ValueError(message)
        count = model.config.get_text_config().num_hidden_layers
        names = {name for name, module in lists.items() if len(module) == count}
        depth = min((name.count(".") for name in names), default=0)
        names = {name for name in names if name.count(".") == depth}
        if len(names) > 1:  # the encoder of images may have the same number
            modules = {*model.get_decoder().modules()}
            names = {name for name in names if lists[name] in modules}
        if not names:
            raise ValueError(f"no list of modules has the length of the decoder ({count} layers)")
    if len(names) > 1:
        raise ValueError(f"several lists of layers may be the decoder: {', '.join(sorted(names))}")
    (name,) = names
    return name, lists[name]


def kind_of(layer: nn.Module) -> frozenset[tuple[str, str]]:
    """The kind of a layer: names and classes of its modules, and their attributes that select a
    variant (such as ``layer_type`` or ``is_causal``)."""
    attributes = {
        (f"{name}.{key}", str(value))
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if ("type" in key or "is_" in key or "sliding" in key) and isinstance(value, (str, bool))
    }
    return frozenset(
        {(name, type(module).__name__) for name, module in layer.named_modules()} | attributes
    )


def _small(
    values: dict[Any, Any], layers: int, experts: int, names: Mapping[str, str]
) -> dict[str, Any]:
    """Smaller `values`. `names`: usual names of keys, by the family's own name."""
    usual = {names.get(key, key): value for key, value in values.items()}
    total = usual.get("num_hidden_layers")
    small: dict[str, Any] = {}
    for name, value in values.items():
        key = names.get(name, name)
        if key == "num_hidden_layers":
            value = min(value, layers)
        elif re.fullmatch(_EXPERTS, str(key)) and isinstance(value, int):
            value = min(value, experts)
        elif isinstance(value, dict) and "rope" not in str(key):
            table = cast("dict[Any, Any]", value)
            if table and all(str(layer).isdigit() for layer in table):  # layers by number
                table = {layer: item for layer, item in table.items() if int(layer) < layers}
            value = _small(table, layers, experts, names)
        elif isinstance(value, list):
            items = cast("list[Any]", value)
            # An item for each layer; lists of layers may have more items than there are layers.
            longer = len(items) > total if total is not None and "layer" in str(key) else False
            if len(items) == total or longer:
                items = items[: len(items) - total + min(total, layers)]
            elif str(key).endswith("layers"):
                items = [item for item in items if not isinstance(item, int) or item <= layers]
            value = [_smaller(key, item) for item in items]
        else:
            value = _smaller(key, value)
        small[name] = value
    # Sizes that follow from one another in the real model follow in the small one.
    if values.get("qk_nope_head_dim") == values.get("qk_rope_head_dim", 0):
        small["qk_nope_head_dim"] = small["qk_rope_head_dim"]
    heads = values.get("num_attention_heads")
    if heads is not None and heads == values.get("num_key_value_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    if isinstance(rotary := values.get("qk_rope_head_dim"), int):
        parts = "qk_nope_head_dim", "qk_rope_head_dim"
        both = sum(values.get(part) or 0 for part in parts)
        for key in (key for key in values if str(key).endswith("head_dim") and key not in parts):
            if values[key] in (rotary, both):
                summed = parts[1:] if values[key] == rotary else parts
                small[key] = sum(small[part] for part in summed)
    # The inner width of Mamba layers is that of their heads.
    expand = values.get("mamba_expand", values.get("expand"))
    for count, size in _MAMBA_HEADS:
        if not isinstance(values.get(size), int) or not values.get(count):
            continue
        if values.get("mamba_d_ssm"):
            small["mamba_d_ssm"] = small[count] * small[size]
        elif expand and values[count] * values[size] == expand * values["hidden_size"]:
            small[size] = int(expand * small["hidden_size"]) // small[count]
    # Numbers of rotary pairs for time, height and width; their sum is that of all rotated pairs.
    rope = dict(small.get("rope_parameters") or {})
    if "mrope_section" in rope:
        size = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
        size *= rope.get("partial_rotary_factor") or 1
        pairs = int(small.get("qk_rope_head_dim") or size) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        small["rope_parameters"] = rope
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(small.get(key), (int, list)):
            small[key] = 1
    return small


def _smaller(key: object, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, largest in _LARGEST:
        if re.fullmatch(pattern, str(key)):
            return min(value, largest)
    return value
