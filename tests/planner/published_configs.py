"""Configurations of released models with all the keys they come with, and what those models count.

Totals are those of the released weights where their files state them, and equal the published model
code, built without memory, wherever that is part of Transformers (4.57 and 5.23); Kimi-K2, Grok-1,
Arctic and Ling are added up by hand from theirs. Selection biases of routers and extra prediction
layers are in no total.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Released(NamedTuple):
    """A configuration, its total, and the active parameters in billions to the digits printed by
    its makers (None: they print none)."""

    config: dict[str, Any]
    total: int
    active: str | None = None


def _gqa(
    kind: str, layers: int, hidden: int, heads: int, kv: int, width: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
    } | more


_UNTIED = {"tie_word_embeddings": False}
_LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1} | _UNTIED
_LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "attention_bias": False, "ep_size": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
    "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1,
} | _UNTIED  # fmt: skip
_V3 = _LATENT | {
    "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_QWEN_MOE = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 48,
} | _UNTIED  # fmt: skip
_MIXTRAL = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
    "output_router_logits": False, "sliding_window": None,
} | _UNTIED  # fmt: skip
_GPT_OSS = {
    "head_dim": 64, "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": True,
    "swiglu_limit": 7.0, "sliding_window": 128, "initial_context_length": 4096,
    "router_aux_loss_coef": 0.9, "quantization_config": {"quant_method": "mxfp4"},
} | _UNTIED  # fmt: skip
_GLM = {
    "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
} | _UNTIED  # fmt: skip
_LLAMA4 = {
    "intermediate_size_mlp": 16384, "head_dim": 128, "num_experts_per_tok": 1,
    "attention_chunk_size": 8192, "attention_bias": False, "use_qk_norm": True,
    "for_llm_compression": False, "router_jitter_noise": 0.0, "no_rope_layers": [],
    "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
} | _UNTIED  # fmt: skip
_LING = {
    "head_dim": 128, "use_bias": False, "use_qkv_bias": False, "norm_topk_prob": True,
    "output_router_logits": False, "use_sliding_window": False, "norm_head": False,
    "norm_softmax": False, "moe_router_topk_scaling_factor": 1.0,
} | _UNTIED  # fmt: skip
_QWEN_DENSE = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
_SWA_OFF = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 70}

DENSE: dict[str, Released] = {
    "Llama-2-7B": Released(
        _gqa("llama", 32, 4096, 32, 32, 11008, 32000, **_LLAMA), 6_738_415_616
    ),
    "Llama-3.2-1B": Released(
        _gqa("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Qwen2.5-72B": Released(
        _gqa("qwen2", 80, 8192, 64, 8, 29568, 152064, **_SWA_OFF, **_UNTIED), 72_706_203_648
    ),
    "Qwen3-0.6B": Released(
        _gqa("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, attention_bias=False,
             tie_word_embeddings=True, **_QWEN_DENSE),
        596_049_920,
    ),
    "Gemma-2-27B": Released(
        _gqa("gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128, sliding_window=4096,
             attn_logit_softcapping=50.0),
        27_227_128_320,
    ),
    "Gemma-3-1B": Released(
        _gqa("gemma3_text", 26, 1152, 4, 1, 6912, 262144, head_dim=256, sliding_window=512,
             sliding_window_pattern=6),
        999_885_952,
    ),
    # The text model of this config has only those keys that differ from the defaults of the code.
    "Gemma-3-4B (text)": Released(
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        3_880_263_168,
    ),
    "Phi-3-medium": Released(
        _gqa("phi3", 40, 5120, 40, 10, 17920, 32064, sliding_window=2047, **_UNTIED),
        13_960_238_080,
    ),
    "GPT-2-XL": Released(
        {
            "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 48,
            "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
        },
        1_557_611_200,
    ),
    "GPT-J-6B": Released(
        {
            "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048,
            "n_inner": None, "rotary_dim": 64, "vocab_size": 50400, "tie_word_embeddings": False,
        },
        6_050_882_784,
    ),
    "GPT-NeoX-20B": Released(
        {
            "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
            "num_attention_heads": 64, "num_hidden_layers": 44, "vocab_size": 50432,
            "use_parallel_residual": True, "rotary_pct": 0.25, "tie_word_embeddings": False,
        },
        20_554_567_680,
    ),
    "GPT-Neo-2.7B": Released(
        {
            "model_type": "gpt_neo", "hidden_size": 2560, "intermediate_size": None,
            "num_heads": 20, "num_layers": 32, "vocab_size": 50257,
            "max_position_embeddings": 2048, "window_size": 256,
            "attention_types": [[["global", "local"], 16]],
            "attention_layers": ["global", "local"] * 16,
        },
        2_651_307_520,
    ),
    "Falcon-7B": Released(
        {
            "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
            "num_hidden_layers": 32, "num_kv_heads": 71, "vocab_size": 65024, "alibi": False,
            "bias": False, "multi_query": True, "new_decoder_architecture": False,
            "parallel_attn": True,
        },
        6_921_720_704,
    ),
    "Falcon-40B": Released(
        {
            "model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128,
            "num_hidden_layers": 60, "num_kv_heads": 8, "vocab_size": 65024, "alibi": False,
            "bias": False, "multi_query": False, "new_decoder_architecture": True,
            "parallel_attn": True,
        },
        41_303_293_952,
    ),
    "BLOOM-176B": Released(
        {
            "model_type": "bloom", "hidden_size": 14336, "n_head": 112, "n_layer": 70,
            "vocab_size": 250880, "pretraining_tp": 4, "slow_but_exact": False,
        },
        176_247_271_424,
    ),
    "MPT-7B": Released(
        {
            "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
            "expansion_ratio": 4, "vocab_size": 50432, "no_bias": True, "learned_pos_emb": True,
            "attn_config": {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False},
        },
        6_649_286_656,
    ),
    "StarCoder": Released(
        {
            "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40,
            "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
        },
        15_517_456_384,
    ),
}  # fmt: skip

WITH_EXPERTS: dict[str, Released] = {
    "Mixtral-8x7B": Released(
        _gqa("mixtral", 32, 4096, 32, 8, 14336, 32000, **_MIXTRAL), 46_702_792_704, "12.9"
    ),
    "Mixtral-8x22B": Released(
        _gqa("mixtral", 56, 6144, 48, 8, 16384, 32768, **_MIXTRAL), 140_630_071_296, "39.2"
    ),
    "Qwen1.5-MoE-A2.7B": Released(
        _gqa("qwen2_moe", 24, 2048, 16, 16, 5632, 151936, **_QWEN_MOE, num_experts=60,
             num_experts_per_tok=4, moe_intermediate_size=1408,
             shared_expert_intermediate_size=5632),
        14_315_784_192, "2.7",
    ),
    "Qwen2-57B-A14B": Released(
        _gqa("qwen2_moe", 28, 3584, 28, 4, 18944, 151936, **_QWEN_MOE, num_experts=64,
             num_experts_per_tok=8, moe_intermediate_size=2560,
             shared_expert_intermediate_size=20480),
        57_408_658_944, "14",
    ),
    "Qwen3-30B-A3B": Released(
        _gqa("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, attention_bias=False,
             num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, **_QWEN_MOE),
        30_532_122_624, "3",
    ),
    "Qwen3-235B-A22B": Released(
        _gqa("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, head_dim=128, attention_bias=False,
             num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, **_QWEN_MOE),
        235_093_634_560, "22",
    ),
    "OLMoE-1B-7B": Released(
        _gqa("olmoe", 16, 2048, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8,
             attention_bias=False, clip_qkv=None, norm_topk_prob=False, **_UNTIED),
        6_919_161_856, "1.3",
    ),
    "DeepSeek-V2": Released(
        _gqa("deepseek_v2", 60, 5120, 128, 128, 12288, 102400,
             **_LATENT | {
                 "q_lora_rank": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
                 "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
                 "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3,
                 "topk_method": "group_limited_greedy",
             }),
        235_741_434_880, "21",
    ),
    "DeepSeek-V2-Lite": Released(
        _gqa("deepseek_v2", 27, 2048, 16, 16, 10944, 102400,
             **_LATENT | {
                 "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
                 "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                 "topk_method": "greedy",
             }),
        15_706_484_224,
    ),
    "DeepSeek-V3": Released(
        _gqa("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, **_V3), 671_026_404_352, "37"
    ),
    "Kimi-K2": Released(
        _gqa("kimi_k2", 61, 7168, 64, 64, 18432, 163840,
             **_V3 | {
                 "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1,
                 "topk_group": 1, "num_nextn_predict_layers": 0,
             }),
        1_026_408_209_408, "32",
    ),
    "GLM-4.5": Released(
        _gqa("glm4_moe", 92, 5120, 96, 8, 12288, 151552, use_qk_norm=True,
             n_routed_experts=160, moe_intermediate_size=1536, first_k_dense_replace=3, **_GLM),
        352_797_814_784, "32",
    ),
    "GLM-4.5-Air": Released(
        _gqa("glm4_moe", 46, 4096, 96, 8, 10944, 151552, use_qk_norm=False,
             n_routed_experts=128, moe_intermediate_size=1408, first_k_dense_replace=1, **_GLM),
        106_852_245_504, "12",
    ),
    "gpt-oss-20b": Released(
        _gqa("gpt_oss", 24, 2880, 64, 8, 2880, 201088, num_local_experts=32,
             layer_types=["sliding_attention", "full_attention"] * 12, **_GPT_OSS),
        20_914_757_184, "3.6",
    ),
    "gpt-oss-120b": Released(
        _gqa("gpt_oss", 36, 2880, 64, 8, 2880, 201088, num_local_experts=128,
             layer_types=["sliding_attention", "full_attention"] * 18, **_GPT_OSS),
        116_829_156_672, "5.1",
    ),
    "Llama-4-Scout (text)": Released(
        {
            "model_type": "llama4", "boi_token_index": 200080, "vision_config": {"hidden_size": 1},
            "text_config": _gqa(
                "llama4_text", 48, 5120, 40, 8, 8192, 202048, num_local_experts=16,
                interleave_moe_layer_step=1, **_LLAMA4,
            ),
        },
        107_769_861_120, "17",
    ),
    "Llama-4-Maverick (text)": Released(
        {
            "model_type": "llama4", "vision_config": {"hidden_size": 1},
            "text_config": _gqa(
                "llama4_text", 48, 5120, 40, 8, 8192, 202048, num_local_experts=128,
                interleave_moe_layer_step=2, **_LLAMA4,
            ),
        },
        400_711_848_960, "17",
    ),
    "Phi-3.5-MoE": Released(
        _gqa("phimoe", 32, 4096, 32, 8, 6400, 32064, num_local_experts=16, num_experts_per_tok=2,
             attention_bias=True, lm_head_bias=True, sliding_window=131072,
             router_jitter_noise=0.01, input_jitter_noise=0.01, **_UNTIED),
        41_873_153_344, "6.6",
    ),
    "MiniMax-M2": Released(
        _gqa("minimax_m2", 62, 3072, 48, 8, 1536, 200064, head_dim=128, num_local_experts=256,
             num_experts_per_tok=8, use_qk_norm=True, qk_norm_type="per_layer",
             attn_type_list=[1] * 62, scoring_func="sigmoid", use_routing_bias=True,
             shared_intermediate_size=0, use_mtp=True, **_UNTIED),
        228_689_748_992, "10",
    ),
    "Hunyuan-A13B": Released(
        _gqa("hunyuan_v1_moe", 32, 4096, 32, 8, 3072, 128167, attention_head_dim=128,
             head_dim=128, num_experts=64, moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32,
             num_shared_expert=[1] * 32, moe_layer_num_skipped=0, use_mixed_mlp_moe=True,
             use_qk_norm=True, use_cla=False, cla_share_factor=2, attention_bias=False,
             mlp_bias=False, tie_word_embeddings=True),
        80_393_183_232, "13",
    ),
    "ERNIE-4.5-21B-A3B": Released(
        _gqa("ernie4_5_moe", 28, 2560, 20, 4, 12288, 103424, moe_num_experts=64, moe_k=6,
             moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
             moe_layer_end_index=29, moe_layer_interval=1, use_bias=False, moe_use_aux_free=True,
             moe_capacity=[64, 64, 64], tie_word_embeddings=True),
        21_825_436_160, "3",
    ),
    "dots.llm1": Released(
        _gqa("dots1", 62, 4096, 32, 32, 10944, 152064, n_routed_experts=128, n_shared_experts=2,
             num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
             n_group=1, topk_group=1, attention_bias=False, sliding_window=None,
             max_window_layers=62, use_sliding_window=False, moe_layer_freq=1, **_UNTIED),
        142_774_373_888, "14",
    ),
    "DBRX": Released(
        {
            "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
            "vocab_size": 100352, "max_seq_len": 32768, "tie_word_embeddings": False,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {
                "ffn_hidden_size": 10752, "moe_jitter_eps": 0.01, "moe_num_experts": 16,
                "moe_top_k": 4,
            },
        },
        131_596_523_520, "36",
    ),
    "Granite-3.0-1B-A400M": Released(
        _gqa("granitemoe", 24, 1024, 16, 8, 512, 49155, num_local_experts=32,
             num_experts_per_tok=8, attention_bias=False, attention_multiplier=0.015625,
             residual_multiplier=0.22, logits_scaling=6.0, tie_word_embeddings=True),
        1_334_628_352, "0.4",
    ),
    "Grok-1": Released(
        _gqa("grok-1", 64, 6144, 48, 8, 32768, 131072, num_experts=8, num_experts_per_tok=2,
             attn_output_multiplier=0.0884, max_attn_value=30.0, tie_word_embeddings=True),
        315_684_820_992,
    ),
    "Arctic": Released(
        _gqa("arctic", 35, 7168, 56, 8, 4864, 32000, num_local_experts=128,
             num_experts_per_tok=2, moe_layer_frequency=1, use_residual=True,
             parallel_attn_mlp_res=True, moe_train_capacity_factor=1, sliding_window=None,
             **_UNTIED),
        478_584_608_768, "17",
    ),
    "Ling-lite": Released(
        _gqa("bailing_moe", 28, 2048, 16, 4, 5632, 126464, num_experts=64, num_experts_per_tok=6,
             num_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=0, **_LING),
        16_801_974_272, "2.75",
    ),
    "Ling-1T": Released(
        _gqa("bailing_moe_v2", 80, 8192, 64, 8, 18432, 157184, num_experts=256,
             num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=2048,
             moe_shared_expert_intermediate_size=2048, first_k_dense_replace=4, n_group=8,
             topk_group=4, use_qk_norm=True, score_function="sigmoid",
             moe_router_enable_expert_bias=True, num_nextn_predict_layers=0, **_LING),
        999_705_309_184, "50",
    ),
}  # fmt: skip
