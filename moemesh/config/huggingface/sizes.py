"""The sizes of a model from a Hugging Face ``config.json``, by model family, without torch.

A configuration names most sizes and leaves the rest to its family's code: which projections have
biases, which norms exist, whether the table is tied. Those facts are data, a row a family, from the
published model code: ``presets/huggingface/families.toml``. A kind of layer, a family or a switch
without a row, and a missing size, would change the counts: they are errors that name the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.huggingface.keys import (
    Config,
    ReadConfiguration,
    as_class,
    check_length,
    first,
    indices,
    known_families,
    names,
    num_layers,
    scalar,
    table,
    whole,
    words,
    wrong,
)
from moemesh.config.suggest import nearest_choice

# Functions that read several keys of a published configuration: attention, norms, experts. Each
# returns fields of ModelShape; ``presets/huggingface/families.toml`` names those of a family.


#: Published name of a layer's MLP -> whether it has experts.
_MLP_KINDS = {"sparse": True, "moe": True, "dense": False, "mlp": False}


def four_hidden(config: Config) -> dict[str, Any]:
    """A family whose MLP is 4 h wide when its width is left out."""
    return {
        "intermediate_size": first(config, "intermediate_size", 4 * first(config, "hidden_size"))
    }


def latent_attention(config: Config) -> dict[str, Any]:
    """MLA. `q_lora_rank` null is a plain query projection; the key is required."""
    if "q_lora_rank" not in config:
        raise KeyError("q_lora_rank")
    has_bias = bool(config.get("attention_bias"))
    without_rotary = whole(config, "qk_nope_head_dim")
    return {
        "attention": "mla",
        "q_lora_rank": whole(config, "q_lora_rank", default=0),
        "kv_lora_rank": whole(config, "kv_lora_rank"),
        "qk_nope_head_dim": without_rotary,
        "qk_rotary_head_dim": whole(config, "qk_rope_head_dim"),
        "v_head_dim": whole(config, "v_head_dim"),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        # Decompressed heads: the per-head width has no key of its own.
        "head_dim": without_rotary,
        "num_kv_heads": first(config, "num_heads"),
    }


def falcon(config: Config) -> dict[str, Any]:
    """Key/value heads: one, the number of query heads, or (40B and later) the value of a key.
    Attention and MLP: in parallel after one norm or after a norm each, or one after the other."""
    heads = first(config, "num_heads")
    newer = bool(config.get("new_decoder_architecture"))
    parallel = bool(config.get("parallel_attn", True))
    if newer:
        num_kv_heads = first(config, "num_kv_heads", heads)
        norms = whole(config, "num_ln_in_parallel_attn", default=2) if parallel else 2
    else:
        num_kv_heads = 1 if config.get("multi_query", True) else heads
        norms = 1 if parallel else 2
        first(config, "num_kv_heads", heads)  # marks the key as read: the older code ignores it
    fields = ("qkv_bias", "output_bias", "mlp_bias")
    return dict.fromkeys(fields, bool(config.get("bias"))) | {
        "num_kv_heads": num_kv_heads,
        "norms_per_layer": norms,
    }


def one_key_head(config: Config) -> dict[str, Any]:
    """GPT-BigCode: one key head for all query heads, unless `multi_query` is false."""
    single = bool(config.get("multi_query", True))
    return {"num_kv_heads": 1 if single else first(config, "num_heads")}


def mpt(config: Config) -> dict[str, Any]:
    """MPT: ALiBi in place of learned positions, no biases, an MLP of 4 h."""
    attention = table(config, "attn_config")
    if not config.get("no_bias", True):
        message = "an MPT with biases is not known"
        raise wrong("unknown-layer", "no_bias", False, message, "no_bias = true")
    if attention.get("qk_ln"):
        message = "norms of queries and keys in an MPT are not known"
        raise wrong("unknown-layer", "attn_config.qk_ln", True, message)
    kind = attention.get("attn_type", "multihead_attention")
    if kind != "multihead_attention":
        known = "known: multihead_attention"
        raise wrong("unknown-layer", "attn_config.attn_type", kind, f"is not known ({known})")
    if not attention.get("alibi", True) and config.get("learned_pos_emb", True):
        message = "an MPT with learned positions is not known"
        raise wrong("unknown-layer", "attn_config.alibi", False, message, "alibi = true")
    if (ratio := whole(config, "expansion_ratio", default=4)) != 4:
        message = "the code of an MPT is always 4 times as wide, without regard to this key"
        raise wrong("unknown-layer", "expansion_ratio", ratio, message, "expansion_ratio = 4")
    width = 4 * first(config, "hidden_size")
    return {"intermediate_size": width, "num_kv_heads": first(config, "num_heads")}


def router_groups(config: Config) -> dict[str, Any]:
    """Number of groups of experts, and of groups that a token may choose from. The greedy choice of
    DeepSeek-V2 has no groups and ignores their keys."""
    if config.get("topk_method") == "greedy":
        for key in ("n_group", "topk_group"):
            whole(config, key, default=1)  # marks the key as read
        return {"router_groups": 1, "router_groups_kept": 1}
    return {
        "router_groups": whole(config, "n_group", default=1),
        "router_groups_kept": whole(config, "topk_group", default=1),
    }


def _multiples(count: int, step: int) -> tuple[int, ...]:
    """Layers whose number, from 1, is a multiple of `step`."""
    return tuple(range(step - 1, count, step))


def _interval(config: Config, key: str) -> int:
    """The distance between layers with experts, the value of `key`; by default 1."""
    step = whole(config, key, default=1)
    if step < 1:
        raise wrong("too-small", key, step, f"{key} must be at least 1", f"{key} = 1")
    return step


def _listed(config: Config) -> tuple[int, ...] | None:
    """Layers with experts, from the list of kinds of every layer's MLP; None without the list."""
    kinds = words(config, "mlp_layer_types")
    if not kinds:
        return None
    check_length("mlp_layer_types", kinds, num_layers(config))
    for kind in kinds:
        if kind not in _MLP_KINDS:
            message = f"the planner does not know MLPs of the kind `{kind}`"
            fix = "known: " + ", ".join(_MLP_KINDS)
            raise wrong("unknown-layer", "mlp_layer_types", kind, message, fix)
    return tuple(index for index, kind in enumerate(kinds) if _MLP_KINDS[kind])


def first_dense(config: Config) -> dict[str, Any]:
    """The first `first_k_dense_replace` layers are dense. Of the others, those whose numbers
    are multiples of `moe_layer_freq` have experts; or this key is a list with a flag for each
    layer, or `mlp_layer_types` names the kind of each."""
    if (listed := _listed(config)) is not None:
        return {"moe_layers": listed}
    layers, frequency = num_layers(config), config.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        flags = indices(config, "moe_layer_freq")
        check_length("moe_layer_freq", flags, layers)
        return {"moe_layers": tuple(index for index, has in enumerate(flags) if has)}
    dense, step = whole(config, "first_k_dense_replace"), _interval(config, "moe_layer_freq")
    return {"moe_layers": tuple(i for i in range(dense, layers) if i % step == 0)}


def sparse_step(config: Config) -> dict[str, Any]:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`; or
    `mlp_layer_types` names the kind of each."""
    step, dense = _interval(config, "decoder_sparse_step"), set(indices(config, "mlp_only_layers"))
    if (listed := _listed(config)) is not None:
        return {"moe_layers": listed}
    return {"moe_layers": tuple(i for i in _multiples(num_layers(config), step) if i not in dense)}


def every_layer(config: Config) -> dict[str, Any]:
    """Every layer has experts."""
    return {"moe_layers": tuple(range(num_layers(config)))}


def experts_in_mlp_key(config: Config) -> dict[str, Any]:
    """`intermediate_size` is the width of one expert and every layer has experts."""
    width = first(config, "intermediate_size")
    return every_layer(config) | {"expert_intermediate_size": width, "intermediate_size": 0}


def aria(config: Config) -> dict[str, Any]:
    """Shared and routed experts have one width, which is in the key of dense MLPs."""
    fields = experts_in_mlp_key(config)
    shared = first(config, "num_shared") * fields["expert_intermediate_size"]
    return fields | {"shared_intermediate_size": shared}


def gated_shared(config: Config) -> dict[str, Any]:
    """Qwen2-MoE: one shared expert of its own width after a learned gate."""
    width = whole(config, "shared_expert_intermediate_size")
    return {"shared_intermediate_size": width, "shared_gate": width > 0}


def shared_width(config: Config) -> dict[str, Any]:
    """The width of all shared experts has its own key, in channels."""
    return {"shared_intermediate_size": whole(config, "shared_intermediate_size", default=0)}


def ling_shared(config: Config) -> dict[str, Any]:
    """The width of one shared expert has its own key, or is that of a routed expert."""
    usual = first(config, "expert_intermediate_size")
    width = whole(config, "moe_shared_expert_intermediate_size", default=usual)
    return {"shared_intermediate_size": width * first(config, "num_shared", 0)}


def llama4(config: Config) -> dict[str, Any]:
    """One shared expert with the width of a routed one; dense layers have a separate width."""
    layers = num_layers(config)
    moe = indices(config, "moe_layers") or _multiples(
        layers, _interval(config, "interleave_moe_layer_step")
    )
    width = whole(config, "intermediate_size")
    return {
        "moe_layers": moe,
        "expert_intermediate_size": width,
        "shared_intermediate_size": width,
        "intermediate_size": whole(config, "intermediate_size_mlp"),
    }


def ernie(config: Config) -> dict[str, Any]:
    """Layers from the start to the end index have experts if their number, from 1, is a multiple of
    `moe_layer_interval`; or `mlp_layer_types` names the kind of each."""
    if (listed := _listed(config)) is not None:
        return {"moe_layers": listed}
    layers, step = num_layers(config), _interval(config, "moe_layer_interval")
    start, end = whole(config, "moe_layer_start_index"), config.get("moe_layer_end_index", -1)
    end = layers - 1 if end in (-1, None) else scalar("moe_layer_end_index", end)
    chosen = range(start, min(end, layers - 1) + 1)
    return {"moe_layers": tuple(index for index in chosen if (index + 1) % step == 0)}


def hunyuan(config: Config) -> dict[str, Any]:
    """Experts after the skipped layers; shared experts have the width of a dense MLP."""
    width = first(config, "intermediate_size")
    shared = first(config, "num_shared", 1) if config.get("use_mixed_mlp_moe", True) else 0
    skipped = whole(config, "moe_layer_num_skipped", default=0)
    return {
        "moe_layers": tuple(range(skipped, num_layers(config))),
        "expert_intermediate_size": first(config, "expert_intermediate_size", width),
        "shared_intermediate_size": width * shared,
    }


def minimax_m2(config: Config) -> dict[str, Any]:
    """MiniMax-M2: the norm of queries and keys is over all heads, unless `qk_norm_type` differs."""
    per_layer = config.get("qk_norm_type", "per_layer") == "per_layer"
    norm = "full" if per_layer else "head"
    return experts_in_mlp_key(config) | {
        "qk_norm": norm if config.get("use_qk_norm", True) else "none",
        "shared_intermediate_size": whole(config, "shared_intermediate_size", default=0),
    }


def dbrx(config: Config) -> dict[str, Any]:
    """DBRX: sizes in two nested tables, which may omit defaults."""
    attention, experts = table(config, "attn_config"), table(config, "ffn_config")
    return every_layer(config) | {
        "num_kv_heads": whole(attention, "kv_n_heads", default=1),
        "num_experts": whole(experts, "moe_num_experts", default=4),
        "experts_per_token": whole(experts, "moe_top_k", default=1),
        "expert_intermediate_size": whole(experts, "ffn_hidden_size", default=3584),
        "intermediate_size": 0,
    }


def arctic(config: Config) -> dict[str, Any]:
    """Arctic: besides the experts, every layer has a dense MLP of the hidden size with a norm of
    its own (arXiv:2201.05596 calls it a residual MoE)."""
    if (step := _interval(config, "moe_layer_frequency")) != 1:
        message = "layers of this family with and without experts differ in their norms"
        raise wrong(
            "unknown-layer", "moe_layer_frequency", step, message, "moe_layer_frequency = 1"
        )
    residual = bool(config.get("use_residual", True))
    return experts_in_mlp_key(config) | {
        "shared_intermediate_size": first(config, "hidden_size") if residual else 0,
        "norms_per_layer": 3 if residual else 2,
    }


def shared_experts(config: Config) -> dict[str, Any]:
    """The number of shared experts, each with the width of a routed expert; null means 0."""
    if not any(name in config for name in names("num_shared")):
        raise KeyError(" or ".join(names("num_shared")))
    shared = first(config, "num_shared", 0)
    width = first(config, "expert_intermediate_size") if shared else 0
    return {"shared_intermediate_size": shared * width}


READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    read.__name__: read
    for read in (
        four_hidden, latent_attention, falcon, one_key_head, mpt, router_groups, first_dense,
        sparse_step, experts_in_mlp_key, aria, gated_shared, shared_width, ling_shared, llama4,
        ernie, hunyuan, minimax_m2, dbrx, arctic, shared_experts,
    )
}  # fmt: skip


# Sliding windows: the layers that have one, and its length.


#: Published names of the kinds of layers.
FULL_LAYERS = ("full_attention", "attention", "global", "full")
WINDOW_LAYERS = ("sliding_attention", "sliding_window", "local", "chunked_attention")
#: Keys for the number of layers after which one has no window, or for a pattern of letters.
_PERIOD_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")


def attention_windows(config: Config, usual: int | str) -> tuple[int, ...]:
    """The attention window of every layer in tokens, 0 for none; () when no layer has one.

    `usual`, for a configuration without a list of kinds: a number n (every n-th layer sees the
    whole sequence); the key with the first layer that has a window; "not " and the key with the
    first layer that has none, before which every second layer has one; or "layer_types" (the list
    is required). Raises ConfigError for kinds of layers without a formula, for a list of another
    length, and for a missing list.
    """
    layers = num_layers(config)
    kinds = words(config, "layer_types") or words(config, "attention_layers")
    if not kinds and (groups := config.get("attention_types")):
        try:  # [[["global", "local"], 12]], to be written out
            kinds = tuple(name for each, n in groups for name in [str(kind) for kind in each] * n)
        except (TypeError, ValueError):
            message = 'attention_types must be a list such as [[["global", "local"], 12]]'
            raise wrong("wrong-type", "attention_types", groups, message) from None
    known = (*FULL_LAYERS, *WINDOW_LAYERS)
    for kind in kinds:
        if kind not in known:
            message = f"the planner has no formula for layers of the kind `{kind}`"
            fix = nearest_choice(kind, known)
            raise wrong("unknown-layer", "layer_types", kind, message, fix)
    if kinds:
        check_length("layer_types", kinds, layers)
    is_on = config.get("use_sliding_window")
    if is_on is not None and not is_on:
        return ()
    named = ("sliding_window", "attention_chunk_size", "window_size")
    key = next((key for key in named if config.get(key) and config[key] is not True), None)
    window = 0 if key is None else scalar(key, config[key])
    if not window:
        return ()
    if kinds:
        windows = tuple(window if kind in WINDOW_LAYERS else 0 for kind in kinds)
        return windows if any(windows) else ()
    if usual == "layer_types":
        message = "the layers with a window are unknown: layer_types is missing"
        raise wrong("missing", "layer_types", None, message)
    if isinstance(usual, str):
        start = whole(config, usual.removeprefix("not "), default=0)
        if usual.startswith("not "):
            return tuple(
                window if index < start and index % 2 == 0 else 0 for index in range(layers)
            )
        return tuple(window if index >= start else 0 for index in range(layers))
    pattern: Any = next((config[key] for key in _PERIOD_KEYS if config.get(key)), usual)
    if not isinstance(pattern, str):
        return alternating_windows(layers, window, scalar("sliding_window_pattern", pattern))
    # Letters, L for a window and G for none, repeated; the last layer has none.
    if set(pattern) - set("LG"):
        message = "a pattern has the letters L (a window) and G (the whole sequence)"
        raise wrong("unknown-layer", "sliding_window_pattern", pattern, message)
    local = [pattern[index % len(pattern)] == "L" for index in range(layers - 1)] + [False]
    return tuple(window if is_local else 0 for is_local in local)


def alternating_windows(num_layers: int, window: int, every: int) -> tuple[int, ...]:
    """Every `every`-th layer sees the whole sequence (none, if it is 0 or 1); the others see
    `window` tokens."""
    return tuple(
        0 if every > 1 and index % every == every - 1 else window for index in range(num_layers)
    )


# Families, layers and switches without a formula, refused by name.


_KNOWN = "known are attention (GQA, MLA), MLPs and experts"


def unknown_layers(config: Config, kind: str) -> list[Problem]:
    """A problem for every key of `config` that means layers without a formula."""
    problems: list[Problem] = []
    for key, what in known_families()["unknown"].items():
        if config.get(key):
            message = f"{what} are not known; {_KNOWN}"
            problems.append(Problem.of("unknown-layer", key, config[key], message))
    patterns = config.get("attn_type_list")
    is_several = isinstance(patterns, (list, tuple))
    each = cast("Sequence[object]", patterns) if is_several else [patterns]
    if patterns and any(item != 1 for item in each):
        message = "0 means linear attention, not known; known: 1 (softmax attention)"
        problems.append(Problem.of("unknown-layer", "attn_type_list", patterns, message))
    projection = config.get("word_embed_proj_dim")
    if projection and projection != config.get("hidden_size"):
        message = "an embedding narrower than the model is not known"
        problems.append(Problem.of("unknown-layer", "word_embed_proj_dim", projection, message))
    kinds: Any = config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        listed = {str(item) for item in cast("Sequence[object]", kinds)}
        for layer in sorted(listed - {*FULL_LAYERS, *WINDOW_LAYERS}):
            message = f"the planner has no formula for layers of the kind `{layer}`"
            problems.append(Problem.of("unknown-layer", "layer_types", layer, message))
    if kind == "minimax" and not patterns:
        message = "without it the layers of this family alternate with linear attention"
        problems.append(Problem.of("unknown-layer", "attn_type_list", None, message))
    return problems


def unread_parameters(
    config: Config, read: Collection[str], kind: str, *, has_norm: bool
) -> list[Problem]:
    """Problems for keys that mean parameters in other families and that this family's functions
    have not read: without them the count would be wrong.

    `read`: keys that were read; `has_norm`: the family's code always has norms of queries and keys.
    """
    keys, problems = known_families()["parameters"], list[Problem]()
    no_experts = f"no experts of a {kind} model are known"
    for group, message, least in (
        (names("num_experts"), no_experts, 2),
        (names("num_shared"), no_experts, 1),
        (names("expert_intermediate_size"), no_experts, 1),
        (names("num_mtp_layers"), f"a {kind} model has no such layers", 1),
        (keys["latent"], f"no latent attention of a {kind} model is known", 1),
        (
            keys["switches"] + ([] if has_norm else keys["norms"]),
            f"no such switch of a {kind} model is known",
            1,
        ),
    ):
        for key in sorted(set(group) & set(config) - set(read)):
            value: Any = config[key]
            is_number = isinstance(value, (bool, int, float)) and value >= least
            if is_number or (isinstance(value, (list, tuple)) and value):
                problems.append(Problem.of("unknown-layer", key, cast("object", value), message))
    return problems


#: Keys of the text model in multimodal configurations.
_TEXT_KEYS = ("text_config", "language_config", "llm_config")
_EXPERT_SIZES = ("num_experts", "experts_per_token", "expert_intermediate_size")


class Sizes(NamedTuple):
    """`fields` of a planner's ModelShape, `values` of the configuration of the text model with the
    family's defaults, the `model_type`, and `notes` on omissions."""

    fields: dict[str, Any]
    values: Config
    kind: str
    notes: tuple[str, ...]


def read_sizes(config: Config) -> Sizes:
    """The sizes in a parsed ``config.json``.

    Only the text part of a multimodal model is read, with a note in `notes`. Raises ConfigError
    with the first key that is missing, or with every key that means layers without a formula.
    """
    notes: tuple[str, ...] = ()
    if any(isinstance(config.get(part), Mapping) for part in ("vision_config", "audio_config")):
        notes = ("only the text model is counted",)
    for key in _TEXT_KEYS:
        text: Any = config.get(key)
        if isinstance(text, Mapping):
            outer = {
                name: config[name]
                for name in ("model_type", "tie_word_embeddings")
                if config.get(name) is not None
            }
            inner = {name: value for name, value in cast("Config", text).items() if value != ""}
            config, notes = outer | inner, ("only the text model is counted",)
            break
        if text is not None:
            raise wrong("wrong-type", key, text, f"{key} must be an object")
    kind = str(config.get("model_type") or "")
    if not kind:
        message = "a config.json of transformers names its family"
        raise wrong("missing", "model_type", None, message, '"model_type": "llama", for one')
    known = known_families()
    same = {other: name for name, others in known["same"].items() for other in others}
    name = same.get(kind, kind)
    if (family := known["family"].get(name)) is None:
        for what, families in known["refused"].items():
            if kind in families:
                message = f"{kind} has {what}, which the planner has no formula for"
                fix = "a TOML file of its sizes, if a transformer of the same size is close enough"
                raise wrong("unknown-layer", "model_type", kind, message, fix)
        message = "the planner does not know the layers of this model family"
        # A family with another number is hardly a typing error; it is a hint at a similar one.
        fix = nearest_choice(kind, tuple(sorted({*known["family"], *same})), any_number=True)
        raise wrong("unknown-model", "model_type", kind, message, fix)
    values = as_class(config, name)
    for key, value in family.get("defaults", {}).items():
        if values.get(key) is None:
            values[key] = value
    # Layers without a formula are refused by name, even if the family's code ignores the key.
    if problems := unknown_layers({**config, **values}, kind):
        raise ConfigError(problems)
    record = ReadConfiguration(values)
    try:
        fields = _sizes(record, family)
    except KeyError as error:
        missing = str(error.args[0])
        message = f"the configuration of a {kind} model needs {missing}"
        raise wrong("missing", missing.partition(" or ")[0], None, message) from None
    has_norm = fields.get("qk_norm", "none") != "none"
    if problems := unread_parameters(config, record.read, kind, has_norm=has_norm):
        raise ConfigError(problems)
    return Sizes(fields, values, kind, notes)


def _sizes(config: Config, family: Config) -> dict[str, Any]:
    hidden, heads = first(config, "hidden_size"), first(config, "num_heads")
    sizes: dict[str, Any] = dict(family.get("details", {}))
    for read in family.get("read", ()):
        sizes |= READERS[read](config)
    for key, fields in family.get("when", {}).items():
        if config.get(key):
            sizes |= fields
    if "positions" in family:
        # Rows of the table of positions: the first present key of its names, and rows that are
        # never used.
        keys = cast("list[str]", family["positions"])
        table_key = next((key for key in keys if config.get(key) is not None), None)
        if table_key is None:
            raise KeyError(" or ".join(keys))
        rows = whole(config, table_key) + family.get("unused_positions", 0)
        sizes["learned_positions"] = rows
    layers = num_layers(config)
    sizes |= {
        "num_layers": layers,
        "hidden_size": hidden,
        "vocab_size": first(config, "vocab_size"),
        "num_heads": heads,
        "tied_embeddings": bool(config.get("tie_word_embeddings")),
        "num_mtp_layers": first(config, "num_mtp_layers", 0),
        "windows": attention_windows(config, family.get("windows", 0)),
    }
    if "num_kv_heads" not in sizes:
        # The size whose key is read; a second one, "num_heads", is its default.
        size, *fallback = family.get("kv_heads", ("num_kv_heads",))
        sizes["num_kv_heads"] = first(config, size, heads if fallback else None)
    if "head_dim" not in sizes:
        # The key of the head size, else the hidden size cut into heads.
        size = first(config, "head_dim", 0)
        if not size and (heads < 1 or hidden % heads):
            key = next(name for name in names("num_heads") if name in config)
            message = (
                f"{key} ({heads}) must divide the hidden size ({hidden}), or head_dim be given"
            )
            raise wrong("not-divisible", key, heads, message)
        sizes["head_dim"] = size or hidden // heads
    if "moe_layers" in sizes and (sizes.get("num_experts") or first(config, "num_experts")):
        sizes.setdefault("shared_intermediate_size", 0)
        sizes |= {size: first(config, size) for size in _EXPERT_SIZES if size not in sizes}
    else:
        sizes["moe_layers"] = ()
    if not sizes["moe_layers"]:
        sizes |= dict.fromkeys((*_EXPERT_SIZES, "shared_intermediate_size"), 0)
        sizes |= {"router_selection_bias": False, "router_groups": 1, "router_groups_kept": 1}
    if len(sizes["moe_layers"]) == layers:
        sizes["intermediate_size"] = 0
    elif not sizes.get("intermediate_size"):
        sizes["intermediate_size"] = first(config, "intermediate_size")
    return sizes
