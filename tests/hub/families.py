"""Tiny random folders of the families that the installed transformers has, with experts and dense.

A tiny configuration is the family's default with small sizes and one layer of each kind, found by
the modules of the full model on the meta device: no list of families has to be kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from tests import sandbox

#: Key of a configuration -> its largest value in a tiny model.
SIZES: dict[str, int] = {
    "n_embd": 64, "n_head": 4, "n_inner": 96, "n_positions": 512, "ffn_dim": 96,
    "ffn_hidden_size": 96, "word_embed_proj_dim": 32,
    "vocab_size": 320, "unpadded_vocab_size": 310, "vocab_size_per_layer_input": 320,
    "hidden_size": 64, "hidden_size_per_layer_input": 16,
    "intermediate_size": 48, "dense_intermediate_size": 48, "moe_intermediate_size": 24,
    "moe_hidden_size": 56, "projector_hidden_size": 64, "expansion_factor": 2,
    "shared_expert_intermediate_size": 40, "shared_experts_intermediate_size": 40,
    "shared_intermediate_size": 40, "moe_shared_expert_intermediate_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "num_attention_heads_per_layer": 4, "global_head_dim": 32, "num_global_key_value_heads": 2,
    "q_lora_rank": 24, "kv_lora_rank": 20, "o_lora_rank": 12, "o_groups": 2,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "qk_head_dim": 20, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64, "index_topk_blocks": 4,
    "index_block_size": 16, "indexer_head_dim": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "n_group": 2, "num_expert_group": 2, "topk_group": 1,
    "linear_num_heads": 4, "linear_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_dt_rank": 8,
    "mamba_head_dim": 16, "mamba_num_heads": 8, "mamba_d_ssm": 128, "ssm_state_size": 16,
    "state_size": 16, "n_groups": 2,
    "chunk_size": 16, "mamba_chunk_size": 16, "block_size": 16,
    "sliding_window": 32, "sliding_window_size": 32, "rel_extent": 32,
    "max_position_embeddings": 512, "rotary_dim": 8,
    "router_hidden_size": 16, "gated_norm_rank": 8, "loop_gate_rank": 8, "hc_lowrank": 8,
    "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 300,
    "split_ngram_parts": 4,
    # Encoders of images and sound.
    "depth": 1, "num_heads": 4, "num_position_embeddings": 16, "patch_size": 4, "image_size": 16,
    "position_embedding_size": 16, "encoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
}  # fmt: skip
#: Keys that number a layer, or count layers from the first on.
PLACES = (
    "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "moe_layer_end_index",
    "loop_layer_index_start", "loop_layer_index_end", "max_window_layers",
)  # fmt: skip
#: Values without which a default configuration has no experts, lacks a kind of layer, or does not
#: make a model.
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 31, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "diffusion_gemma_text": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 128},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 4, "num_hidden_layers": 8,
        "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        "num_hidden_layers": 6,
    },
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64,
        "indexer_compress_ratio": 4, "output_gate_type": "silu",
    },
}  # fmt: skip
#: Sizes of a tiny model that the family's own formulas bind to others.
BOUND: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"head_dim": 64, "qk_rope_head_dim": 8},
    "dots3_note_text": {"head_dim": 20},
    "falcon_h1": {"mamba_n_heads": 16},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        }
    },
    "mamba2": {"num_heads": 8},
    "mistral4": {"qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 16},
}
#: Sizes of an encoder that are those of the text part.
OF_THE_TEXT = ("out_hidden_size", "projection_dim", "text_hidden_size", "adapter_in_dim")
#: Special tokens of the tokenizer of a tiny folder, after the 256 bytes.
END, BEGIN, PAD = 256, 257, 258
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def family_names() -> list[str]:
    """Model types of all text models with experts that the installed transformers has."""
    names = _with_experts(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [name for name in names if CONFIG_MAPPING[name]().get_text_config().model_type == name]


def dense_names() -> list[str]:
    """Model types of all text models without experts whose default configuration is complete."""
    table: Mapping[str, Any] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with_experts, names = {*_with_experts(table)}, list[str]()
    for name in table:
        with suppress(ValueError, StrictDataclassError):
            is_text = CONFIG_MAPPING[name]().get_text_config().model_type == name
            names += [name] if is_text and name not in with_experts else []
    return names


def families() -> Iterator[tuple[str, Any]]:
    """(model type, tiny configuration) of each of :func:`family_names`."""
    yield from ((name, tiny_config(name)) for name in family_names())


def multimodal() -> Iterator[str]:
    """Model types that transformers loads as models of images and text."""
    yield from _with_experts(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


@cache
def text_of_images() -> list[str]:
    """Those of :func:`multimodal` whose text part has no class of its own."""
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [
        name
        for name in multimodal()
        if CONFIG_MAPPING[name]().get_text_config().model_type not in known
    ]


def _with_experts(names: Mapping[str, Any]) -> Iterator[str]:
    """Those whose modelling file decorates a module of experts."""
    home = Path(transformers.__file__).parent / "models"
    for name in names:
        module = model_type_to_module_name(name)
        file = home / module / f"modeling_{module}.py"
        if file.exists() and "@use_experts_implementation" in file.read_text():
            yield name


def model_class(config: Any) -> type[Any]:
    """The class that transformers builds for a configuration."""
    table: Mapping[str, Any] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.get_text_config() is not config or config.model_type not in table:
        table = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(transformers, table[config.model_type])


def has_experts(model: nn.Module) -> bool:
    """Whether a model has experts of the interface of transformers."""
    return any(hasattr(module, "_is_expert_parallel") for module in model.modules())


def on_meta(config: Any, whole: Any = None, values: Mapping[str, Any] | None = None) -> Any:
    """The model of a configuration, without memory. A text part without a model class of its own is
    built inside of `whole`, which may have other `values`."""
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_part = whole is not None and whole.get_text_config() is not whole
    if is_part and config.model_type not in known:
        config = type(whole)(**{**(values or _values(whole)), "text_config": config})
    with torch.device("meta"):
        return model_class(config)._from_config(config)


def kinds(model: Any) -> list[tuple[Any, ...]]:
    """The kind of every decoder layer: its types, and the classes and parameters in it."""
    config = model.config.get_text_config()
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    layers = next(filter(has_experts, lists), lists[0])
    lists = [getattr(config, key, None) for key in ("layer_types", "mlp_layer_types")]
    return [
        (
            *(values[index] if values else None for values in lists),
            frozenset(type(module).__name__ for module in layer.modules()),
            frozenset(name for name, _ in layer.named_parameters()),
        )
        for index, layer in enumerate(layers)
    ]


@cache
def tiny_config(name: str, layers: int = 2) -> Any:
    """A configuration of the model type `name` with small sizes and one layer of each kind, at
    least `layers`; of a model of images and text the encoders are as small. Raises AssertionError
    where it would not have all kinds of the default's layers, no experts, or parameters that are
    not small."""
    return sandbox.once(f"{name}-{layers}", lambda: _tiny_config(name, layers))


def _tiny_config(name: str, layers: int) -> Any:
    whole = CONFIG_MAPPING[name]()
    if whole.get_text_config() is whole:
        return _tiny_text(whole, layers, {})
    values = _small(_values(whole))
    for key, kind in type(whole).sub_configs.items():
        there = getattr(whole, key)
        if there is None and key == "vision_config":
            there = kind()
        if there is not None and there is not whole.get_text_config():
            inner = _encoder(_values(there))
            inner |= BOUND.get(there.model_type, {})
            values[key] = (type(there) if kind is AutoConfig else kind)(**inner)
    config = type(whole)(**{**values, "text_config": _tiny_text(whole, layers, values)})
    count = sum(parameter.numel() for parameter in on_meta(config).parameters())
    assert count < 20_000_000, f"{name} has {count:,} parameters"
    return config


def _encoder(values: dict[str, Any]) -> dict[str, Any]:
    """The values of an encoder with small sizes and one layer, and of those inside of it."""
    inner = _small(values)
    inner |= {size: 64 for size in OF_THE_TEXT if isinstance(inner.get(size), int)}
    if (count := inner.get("num_hidden_layers")) is not None:
        lists = {size: one for size, one in inner.items() if isinstance(one, list)}
        inner |= {size: one[:1] for size, one in lists.items() if len(one) == count}
        inner["num_hidden_layers"] = 1
    parts = {
        key: one for key, one in inner.items() if isinstance(one, dict) and "model_type" in one
    }
    return inner | {key: _encoder(one) for key, one in parts.items()}


def _tiny_text(whole: Any, layers: int, values: Mapping[str, Any]) -> Any:
    """The small text part of `whole`, whose other parts become those of `values`."""
    text = whole.get_text_config()
    full = type(text)(**{**_values(text), **CASES.get(text.model_type, {})})
    wanted = kinds(on_meta(full, whole))
    first = sorted({kind: index for index, kind in reversed([*enumerate(wanted)])}.values())
    more = [index for index in range(len(wanted)) if index not in first]
    chosen = sorted([*first, *more[: max(0, layers - len(first))]])
    problems: list[str] = []
    # Families that count layers by a period have each kind only in the first layers as they are.
    for kept in (chosen, [*range(max(first[-1] + 1, layers))]):
        try:
            config = type(text)(**_shrunken(full, kept))
            model = on_meta(config, whole, values)
        except (ValueError, IndexError, StrictDataclassError) as error:
            problems.append(f"layers {kept}: {error}")
            continue
        if {*kinds(model)} == {*wanted}:
            break
        problems.append(f"layers {kept} have not all kinds of the default's")
    else:
        raise AssertionError(f"{text.model_type}: {problems}")
    table = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_dense = text.model_type in table and text.model_type not in {*_with_experts(table)}
    assert has_experts(model) or is_dense, f"{text.model_type} has no experts"
    large = {
        key: [*one.shape]
        for key, one in model.named_parameters()
        if one.numel() > 60_000 and (whole is text or "language_model.layers." in key)
    }
    assert not large, f"{text.model_type}: {large}"
    return config


def _values(config: Any) -> dict[str, Any]:
    """Values of a configuration with which its class makes an equal one."""
    return {key: value for key, value in config.to_dict().items() if key != "transformers_version"}


def _shrunken(full: Any, kept: list[int]) -> dict[str, Any]:
    """The values of `full`, small, of the layers `kept`."""
    values, count = _values(full), full.num_hidden_layers
    for key, value in values.items():
        if isinstance(value, list) and len(value) == count:
            values[key] = [value[index] for index in kept]
        elif key in PLACES and isinstance(value, int):
            values[key] = sum(index < value for index in kept)
        elif key == "mlp_only_layers":
            values[key] = [place for place, index in enumerate(kept) if index in value]
        elif key == "per_layer_config" and value:
            of = {int(index): changes for index, changes in value.items()}
            values[key] = {
                f"{place:02}": _small(of[index]) for place, index in enumerate(kept) if index in of
            }
    small = _small(values)
    rope = small.get("rope_parameters")
    for one in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if isinstance(one, dict) and "mrope_section" in one:
            one["mrope_section"] = [2, 1, 1]
    return {**small, "num_hidden_layers": len(kept), **BOUND.get(full.model_type, {})}


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of which no size is larger than that of SIZES, with special tokens that exist."""
    made = dict(values)
    for key, value in values.items():
        if key.endswith(("_token_id", "_token_index", "_token_ids")) and (
            value is not None or key == "eos_token_id"
        ):
            names = {"eos_token_id": END, "bos_token_id": BEGIN, "pad_token_id": PAD}
            made[key] = names.get(key, PAD + 1 + sum(map(ord, key)) % 50)
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            made[key] = min(value, SIZES[key])
        elif key in SIZES and isinstance(value, list):
            made[key] = [min(one, SIZES[key]) for one in value]
    if values.get("num_attention_heads") == values.get("num_key_value_heads", 0):
        made["num_key_value_heads"] = made["num_attention_heads"]
    parts = [key for key in ("qk_rope_head_dim", "qk_nope_head_dim") if key in values]
    for count in (1, 2):  # latent attention: the rotated part, or both
        if parts and values.get("head_dim") == sum(values[key] for key in parts[:count]):
            made["head_dim"] = sum(made[key] for key in parts[:count])
    return made


def random_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The tiny model of the type `name`; all weights and state are random, also those that models
    start with at 0 or 1."""
    torch.manual_seed(seed)
    config = deepcopy(tiny_config(name))  # models write into theirs
    model = model_class(config)._from_config(config, dtype=dtype)
    with torch.no_grad():
        kept = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
        for tensor in kept.values():
            if tensor.is_floating_point():
                tensor += 0.05 * torch.randn_like(tensor)
    return model.eval()


def tiny_folder(name: str, path: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write the folder of :func:`random_model` as transformers does, with a tokenizer."""
    random_model(name, dtype, seed).save_pretrained(path)
    add_tokenizer(path)
    return path


def add_tokenizer(path: Path) -> None:
    """One token a byte and three special ones, with a chat template, into a folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "bos_token": "<|begin|>", "pad_token": "<|pad|>"}
    made.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    made.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(_TEMPLATE)
