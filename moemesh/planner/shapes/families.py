"""Facts that a model family's code fixes and its configuration omits: a table of families.

Which projections have biases, which norms there are, where the experts stand, what a left-out key
means: from the published model code of each family. A key that is not in `defaults` and that no
reader has a value for must be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moemesh.planner.shapes import attention_keys as attention
from moemesh.planner.shapes import expert_keys as experts
from moemesh.planner.shapes.keys import Reader


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model family's code fixes. `details` are fields of ModelShape that hold for all of its
    models, `read` those that depend on the configuration, `defaults` keys that a configuration may
    leave out."""

    details: dict[str, Any] = field(default_factory=dict[str, Any])
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    read: Sequence[Reader] = ()


_BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_LAYER_NORM = {"norm": "layer_bias"}
_PLAIN_GELU = {"activation": "gelu"}
_GPT = _BIASED | _LAYER_NORM | _PLAIN_GELU
_HEAD_NORM = {"qk_norm": "head"}
_FULL_NORM = {"qk_norm": "full"}
_FOUR_NORMS = {"norms_per_layer": 4}
_ONE_NORM = {"norms_per_layer": 1}
_SELECTION_BIAS = {"router_selection_bias": True}
_HEADS_OF_128 = {"head_dim": 128}
_HEADS_OF_256 = {"head_dim": 256}
_TIED = {"tie_word_embeddings": True}
_BIAS_KEYS = (attention.attention_bias, attention.mlp_bias)
_LATENT_EXPERTS = (
    experts.first_dense(), experts.shared_experts, attention.latent_attention,
    experts.router_groups,
)  # fmt: skip
_DEEPSEEK_V3 = Family(read=_LATENT_EXPERTS, details=_SELECTION_BIAS)
_QWEN3_MOE = Family(details=_HEAD_NORM, read=(experts.sparse_step, attention.attention_bias))
_OLMOE = Family(
    details=_FULL_NORM,
    read=(experts.experts_in_mlp_key, attention.attention_bias, attention.all_heads),
)
_GLM4_MOE = (experts.first_dense(), experts.shared_experts, experts.router_groups)

DENSE: dict[str, Family] = {
    "llama": Family(read=(*_BIAS_KEYS, attention.all_heads)),
    "mistral": Family(),
    "ministral": Family(),
    "ministral3": Family(defaults=_HEADS_OF_128),
    "qwen2": Family(details={"qkv_bias": True}),
    "qwen3": Family(
        details=_HEAD_NORM, read=(attention.attention_bias,), defaults=_HEADS_OF_128
    ),
    "gemma": Family(read=(attention.attention_bias,), defaults=_TIED | _HEADS_OF_256),
    "gemma2": Family(
        read=(attention.attention_bias,), details=_FOUR_NORMS, defaults=_TIED | _HEADS_OF_256
    ),
    "gemma3_text": Family(
        read=(attention.attention_bias,),
        details=_FOUR_NORMS | _HEAD_NORM,
        # Released multimodal configurations say of their text model only what is unusual.
        defaults=_TIED
        | _HEADS_OF_256
        | {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "phi3": Family(read=(attention.all_heads,)),
    "phi": Family(
        details=_GPT | _ONE_NORM | {"head_bias": True}, read=(attention.all_heads,)
    ),
    "gpt2": Family(
        details=_GPT | {"dropout": True},
        defaults=_TIED | {"n_positions": 1024},
        read=(
            attention.learned_positions("n_positions", "n_ctx"),
            attention.multi_head,
            attention.four_hidden,
        ),
    ),
    "gpt_bigcode": Family(
        details=_GPT | {"dropout": True},
        defaults=_TIED | {"n_positions": 1024},
        read=(
            attention.learned_positions("n_positions"),
            attention.one_key_head,
            attention.four_hidden,
        ),
    ),
    "gpt_neo": Family(
        details=_LAYER_NORM | _PLAIN_GELU | {"output_bias": True, "mlp_bias": True},
        defaults=_TIED,
        read=(
            attention.learned_positions("max_position_embeddings"),
            attention.multi_head,
            attention.four_hidden,
        ),
    ),
    "gptj": Family(
        details=_LAYER_NORM | _PLAIN_GELU | _ONE_NORM | {"mlp_bias": True, "head_bias": True},
        read=(attention.multi_head, attention.four_hidden),
    ),
    "gpt_neox": Family(
        details=_LAYER_NORM | _PLAIN_GELU | {"mlp_bias": True},
        read=(
            attention.flag("attention_bias", "qkv_bias", "output_bias", default=True),
            attention.multi_head,
        ),
    ),
    "bloom": Family(
        details=_GPT | {"embedding_norm": True},
        defaults=_TIED,
        read=(attention.multi_head, attention.four_hidden),
    ),
    "mpt": Family(
        details={"norm": "layer"} | _PLAIN_GELU, defaults=_TIED, read=(attention.mpt,)
    ),
    "falcon": Family(
        details=_LAYER_NORM | _PLAIN_GELU,
        defaults=_TIED,
        read=(attention.falcon, attention.four_hidden),
    ),
    "opt": Family(
        details=_GPT | {"dropout": True},
        defaults=_TIED,
        read=(
            # Two rows in front of the first position are never used.
            attention.learned_positions("max_position_embeddings", extra=2),
            attention.multi_head,
        ),
    ),
    "starcoder2": Family(
        details=_LAYER_NORM | _PLAIN_GELU,
        defaults=_TIED | {"use_bias": True},
        read=(attention.use_bias,),
    ),
    "stablelm": Family(
        details=_LAYER_NORM,
        read=(
            attention.flag("use_qkv_bias", "qkv_bias"),
            attention.parallel_norms,
            attention.norm_of_each_head("qk_layernorm"),
        ),
    ),
    "nemotron": Family(
        details=_LAYER_NORM | _PLAIN_GELU, read=(*_BIAS_KEYS, attention.all_heads)
    ),
    "granite": Family(read=(*_BIAS_KEYS, attention.all_heads)),
    "olmo": Family(
        details={"norm": "plain"}, read=(attention.attention_bias, attention.all_heads)
    ),
    "olmo2": Family(details=_FULL_NORM, read=(attention.attention_bias, attention.all_heads)),
    "olmo3": Family(details=_FULL_NORM, read=(attention.attention_bias, attention.all_heads)),
    "cohere": Family(
        details={"norm": "layer"} | _ONE_NORM,
        defaults=_TIED,
        read=(
            attention.attention_bias,
            attention.all_heads,
            attention.norm_of_each_head("use_qk_norm"),
        ),
    ),
    "cohere2": Family(
        details={"norm": "layer"} | _ONE_NORM,
        defaults=_TIED,
        read=(attention.attention_bias, attention.all_heads),
    ),
    "glm": Family(
        read=(attention.flag("attention_bias", "qkv_bias", default=True),), defaults=_HEADS_OF_128
    ),
    "glm4": Family(
        read=(attention.flag("attention_bias", "qkv_bias", default=True),),
        defaults=_HEADS_OF_128,
        details=_FOUR_NORMS,
    ),
    "internlm2": Family(
        read=(attention.flag("bias", "qkv_bias", "output_bias"), attention.all_heads)
    ),
    "internlm3": Family(
        read=(attention.flag("qkv_bias", "qkv_bias"), attention.flag("bias", "mlp_bias")),
        defaults=_HEADS_OF_128,
    ),
    "baichuan": Family(read=(attention.multi_head,)),
    "smollm3": Family(read=_BIAS_KEYS, defaults=_TIED),
    "seed_oss": Family(
        read=(
            attention.flag("attention_bias", "qkv_bias", default=True),
            attention.flag("attention_out_bias", "output_bias"),
            attention.mlp_bias,
        ),
        defaults=_HEADS_OF_128,
    ),
    "arcee": Family(details=_PLAIN_GELU, read=(*_BIAS_KEYS, attention.all_heads)),
    "mimo": Family(details={"qkv_bias": True}, read=(attention.flag("attention_bias"),)),
    "exaone4": Family(details=_HEAD_NORM),
    "ernie4_5": Family(read=(attention.use_bias,), defaults=_TIED | _HEADS_OF_128),
    "hunyuan_v1_dense": Family(
        read=(
            attention.attention_bias,
            attention.all_heads,
            attention.head_norm("use_qk_norm", default=True),
        )
    ),
}  # fmt: skip

WITH_EXPERTS: dict[str, Family] = {
    "mixtral": Family(read=(experts.experts_in_mlp_key,)),
    "qwen2_moe": Family(
        read=(
            experts.sparse_step,
            experts.gated_shared,
            attention.flag("qkv_bias", "qkv_bias", default=True),
        )
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    # Dense layers are chosen by `first_k_dense_replace`, 0 when it is left out.
    "deepseek_v2": Family(
        read=(experts.first_dense(default=0), *_LATENT_EXPERTS[1:])
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": Family(
        read=(experts.first_dense(default=1), *_LATENT_EXPERTS[1:]), details=_SELECTION_BIAS
    ),
    "deepseek": Family(
        read=(
            experts.first_dense(default=0),
            experts.shared_experts,
            attention.attention_bias,
            attention.all_heads,
        )
    ),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "gpt_oss": Family(
        details={"attention_sinks": True, "expert_bias": True, "router_logit_bias": True},
        read=(
            experts.experts_in_mlp_key,
            attention.flag("attention_bias", "qkv_bias", "output_bias", default=True),
        ),
        defaults={"head_dim": 64},
    ),
    "granitemoe": Family(
        read=(experts.experts_in_mlp_key, attention.attention_bias, attention.all_heads)
    ),
    "granitemoeshared": Family(
        read=(
            experts.experts_in_mlp_key,
            attention.attention_bias,
            attention.all_heads,
            experts.shared_width,
        )
    ),
    "dbrx": Family(details={"norm": "layer"}, read=(experts.dbrx,)),
    "phimoe": Family(
        details=_LAYER_NORM,
        read=(
            experts.experts_in_mlp_key,
            attention.attention_bias,
            attention.flag("lm_head_bias", "head_bias"),
        ),
    ),
    "glm4_moe": Family(
        details=_SELECTION_BIAS,
        read=(*_GLM4_MOE, attention.input_bias, attention.head_norm("use_qk_norm")),
    ),
    "solar_open": Family(
        details=_SELECTION_BIAS,
        defaults=_HEADS_OF_128 | {"first_k_dense_replace": 0},
        read=(*_GLM4_MOE, attention.input_bias, attention.head_norm("use_qk_norm")),
    ),
    "dots1": Family(
        details=_HEAD_NORM | _SELECTION_BIAS,
        read=(*_GLM4_MOE, attention.attention_bias),
    ),
    "exaone_moe": Family(
        details=_HEAD_NORM | _SELECTION_BIAS, read=_GLM4_MOE
    ),
    "minimax_m2": Family(
        read=(experts.minimax_m2,), details=_SELECTION_BIAS, defaults=_HEADS_OF_128
    ),
    "hunyuan_v1_moe": Family(
        read=(
            experts.hunyuan,
            attention.attention_bias,
            attention.all_heads,
            attention.head_norm("use_qk_norm", default=True),
        )
    ),
    "ernie4_5_moe": Family(
        read=(experts.ernie, experts.shared_experts), details=_SELECTION_BIAS, defaults=_TIED
    ),
    "llama4_text": Family(
        # Its norm of queries and keys has no scales.
        read=(experts.llama4, attention.attention_bias, attention.flag("use_qk_norm")),
        defaults=_HEADS_OF_128
    ),
    "aria_text": Family(read=(experts.aria, *_BIAS_KEYS)),
    "bailing_moe": Family(
        read=(experts.first_dense(default=0), experts.ling_shared, attention.ling)
    ),
    "bailing_moe_v2": Family(
        read=(
            experts.first_dense(default=0),
            experts.ling_shared,
            attention.ling,
            experts.router_groups,
        ),
        details=_SELECTION_BIAS,
    ),
    "grok-1": Family(
        details=_FOUR_NORMS, read=(experts.experts_in_mlp_key,), defaults=_TIED
    ),
    "arctic": Family(read=(experts.arctic,)),
}  # fmt: skip

FAMILIES: dict[str, Family] = DENSE | WITH_EXPERTS

#: Names under which the same code is published.
SAME = {
    "Yi": "llama",
    "yi": "llama",
    "code_llama": "llama",
    "gpt-sw3": "gpt2",
    "hunyuan": "hunyuan_v1_moe",
    "deepseek_v2_lite": "deepseek_v2",
    "minimax": "minimax_m2",
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "glm4v_text": "glm4",
    "glm4v_moe": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
    "kimi_vl": "deepseek_v3",
    "aria": "aria_text",
}
