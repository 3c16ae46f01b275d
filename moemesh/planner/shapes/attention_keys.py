"""Attention keys of Hugging Face configurations: attention, biases and norms."""

from __future__ import annotations

from typing import Any

from moemesh.planner.shapes.keys import Config, Reader, first, table, whole, wrong


def flag(key: str, *fields: str, default: bool = False) -> Reader:
    """Fields that one key switches on."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(key)
        return dict.fromkeys(fields, default if value is None else bool(value))

    return read


#: On all four projections; on query, key and value alone; on the dense MLP.
attention_bias = flag("attention_bias", "qkv_bias", "output_bias")
input_bias = flag("attention_bias", "qkv_bias")
mlp_bias = flag("mlp_bias", "mlp_bias")
use_bias = flag("use_bias", "qkv_bias", "output_bias", "mlp_bias", "expert_bias")


def head_norm(key: str, *, default: bool = False) -> Reader:
    """A norm over each head, with one scale for all heads, where the key says so."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(key)
        return {"qk_norm": "head" if (default if value is None else value) else "none"}

    return read


def norm_of_each_head(key: str) -> Reader:
    """A norm over each head with scales of its own, where the key says so: as many scales as a norm
    over all heads has."""

    def read(config: Config) -> dict[str, Any]:
        return {"qk_norm": "full" if config.get(key) else "none"}

    return read


def all_heads(config: Config) -> dict[str, Any]:
    """A family whose code has as many key heads as query heads when their number is left out."""
    return {"num_kv_heads": first(config, "num_kv_heads", first(config, "num_heads"))}


def multi_head(config: Config) -> dict[str, Any]:
    """A family whose code knows no key heads of their own."""
    return {"num_kv_heads": first(config, "num_heads")}


def four_hidden(config: Config) -> dict[str, Any]:
    """A family whose MLP is 4 h wide when its width is left out."""
    return {
        "intermediate_size": first(config, "intermediate_size", 4 * first(config, "hidden_size"))
    }


def latent_attention(config: Config) -> dict[str, Any]:
    """MLA. `q_lora_rank` may be null, which is a plain query projection, but not left out."""
    if "q_lora_rank" not in config:
        raise KeyError("q_lora_rank")
    has_bias = bool(config.get("attention_bias"))
    without_rotary = whole(config, "qk_nope_head_dim")
    return {
        "attention": "mla",
        "q_lora_rank": whole(config, "q_lora_rank", 0),
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


def learned_positions(*names: str, extra: int = 0) -> Reader:
    """A table of positions with as many rows as the first of `names` says, and `extra`."""

    def read(config: Config) -> dict[str, Any]:
        found = next((name for name in names if config.get(name) is not None), None)
        if found is None:
            raise KeyError(" or ".join(names))
        return {"learned_positions": whole(config, found) + extra}

    return read


def falcon(config: Config) -> dict[str, Any]:
    """One key head, or as many as there are query heads, or (40B and later) a number of its own;
    attention and MLP side by side behind one norm, behind one norm each, or one after the other."""
    heads = first(config, "num_heads")
    newer = bool(config.get("new_decoder_architecture"))
    parallel = bool(config.get("parallel_attn", True))
    if newer:
        num_kv_heads = first(config, "num_kv_heads", heads)
        norms = whole(config, "num_ln_in_parallel_attn", 2) if parallel else 2
    else:
        num_kv_heads = 1 if config.get("multi_query", True) else heads
        norms = 1 if parallel else 2
        first(config, "num_kv_heads", heads)  # Read, and without effect in the older code.
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
    if (ratio := whole(config, "expansion_ratio", 4)) != 4:
        message = "the code of an MPT is 4 times as wide whatever this key says"
        raise wrong("unknown-layer", "expansion_ratio", ratio, message, "expansion_ratio = 4")
    width = 4 * first(config, "hidden_size")
    return {"intermediate_size": width, "num_kv_heads": first(config, "num_heads")}


def parallel_norms(config: Config) -> dict[str, Any]:
    """One norm for attention and MLP where they stand side by side (StableLM)."""
    return {"norms_per_layer": 1 if config.get("use_parallel_residual") else 2}


def ling(config: Config) -> dict[str, Any]:
    """Ling: one bias key for the inputs of attention, one for its output."""
    return {
        "qkv_bias": bool(config.get("use_qkv_bias")),
        "output_bias": bool(config.get("use_bias")),
        "qk_norm": "head" if config.get("use_qk_norm") else "none",
    }
