"""Small configurations with one changed key, and the model of the published code for each.

Totals are those of the modules that Transformers 4.57 builds, without selection biases of routers.
"""

from __future__ import annotations

from typing import Any


def common(
    family: str, layers: int, hidden: int, heads: int, kv: int, width: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
    } | more


SMALL = {"layers": 6, "hidden": 64, "heads": 8, "kv": 4, "width": 96, "vocab": 320}


def small(kind: str, **more: Any) -> dict[str, Any]:
    return common(kind, *SMALL.values(), **more)


TWO = {"num_experts_per_tok": 2}
FALCON = {"intermediate_size": None, "num_key_value_heads": None}
SWITCHES: list[tuple[dict[str, Any], int]] = [
    (small("llama", attention_bias=True), 227_264),
    (small("llama", mlp_bias=True), 227_648),
    (small("llama", head_dim=32, tie_word_embeddings=True), 426_816),
    (small("qwen3", attention_bias=True, head_dim=32), 451_136),
    (small("qwen3"), 1_333_568),
    (small("gemma2", head_dim=16), 280_128),
    (small("gemma3_text", head_dim=16, attention_bias=True), 282_240),
    (small("cohere", use_qk_norm=True), 205_824),
    (small("cohere", attention_bias=True), 206_400),
    (small("stablelm", use_parallel_residual=True, use_qkv_bias=True), 226_944),
    (small("gpt_neox", attention_bias=False), 215_616),
    (small("starcoder2", use_bias=False), 169_600),
    (small("seed_oss", head_dim=16, attention_out_bias=True), 301_760),
    (small("nemotron", head_dim=8), 190_080),
    (small("granite", attention_bias=True), 227_264),
    (small("olmo"), 225_280),
    (small("olmo2"), 226_688),
    (small("smollm3", mlp_bias=True), 207_168),
    (small("exaone4"), 226_208),
    (small("hunyuan_v1_dense", head_dim=16), 300_032),
    (small("falcon", num_kv_heads=2, new_decoder_architecture=True, bias=True, **FALCON), 283_072),
    (small("falcon", parallel_attn=False, **FALCON), 274_048),
    (small("falcon", multi_query=False, tie_word_embeddings=False, **FALCON), 336_768),
    (small("falcon", num_kv_heads=2, new_decoder_architecture=True,
           num_ln_in_parallel_attn=1, **FALCON), 279_424),
    (small("mixtral", num_local_experts=8, **TWO), 1_003_328),
    (small("qwen2_moe", num_experts=8, moe_intermediate_size=48,
           shared_expert_intermediate_size=80, mlp_only_layers=[2], decoder_sparse_step=2,
           **TWO), 440_576),
    (small("qwen2_moe", num_experts=8, moe_intermediate_size=48,
           shared_expert_intermediate_size=80, qkv_bias=False, **TWO), 653_504),
    (small("qwen3_moe", num_experts=8, moe_intermediate_size=48, head_dim=16,
           mlp_only_layers=[0, 1], **TWO), 523_264),
    (small("qwen3_moe", num_experts=8, moe_intermediate_size=48, **TWO), 561_056),
    (small("gpt_oss", num_local_experts=8, head_dim=16, attention_bias=False, **TWO), 1_089_440),
    (small("granitemoeshared", num_local_experts=8, shared_intermediate_size=40, **TWO), 1_049_408),
    (small("phimoe", num_local_experts=8, attention_bias=True, **TWO), 1_005_312),
    (small("olmoe", num_experts=8, attention_bias=True, **TWO), 1_005_056),
    (small("glm4_moe", n_routed_experts=8, n_shared_experts=2, moe_intermediate_size=48,
           first_k_dense_replace=2, head_dim=16, use_qk_norm=True, attention_bias=True,
           **TWO), 598_528),
    (small("dots1", n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=48,
           first_k_dense_replace=3, **TWO), 421_280),
    (small("ernie4_5_moe", moe_num_experts=8, moe_k=2, moe_num_shared_experts=2,
           moe_intermediate_size=48, moe_layer_start_index=2, moe_layer_end_index=4,
           head_dim=8), 428_352),
    (small("deepseek_v3", n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=48,
           first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
           qk_rope_head_dim=8, v_head_dim=12, n_group=2, topk_group=1, attention_bias=True,
           **TWO), 647_280),
    (small("deepseek_v2", n_routed_experts=8, n_shared_experts=2, moe_intermediate_size=48,
           first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
           qk_rope_head_dim=8, v_head_dim=12, **TWO), 656_016),
    (small("llama4_text", num_local_experts=8, intermediate_size_mlp=200, head_dim=16,
           interleave_moe_layer_step=2, num_experts_per_tok=1), 803_648),
    (small("aria_text", moe_num_experts=8, moe_topk=2, moe_num_shared_experts=3), 1_335_104),
    (small("hunyuan_v1_moe", num_experts=8, moe_topk=2, num_shared_expert=1,
           head_dim=16), 1_187_840),
]  # fmt: skip
