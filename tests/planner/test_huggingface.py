"""Hugging Face configurations: parameter counts of released models of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import moemesh as mm
from moemesh.config.errors import ConfigError
from moemesh.planner.parameters import count_parameters
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.shapes.shape import from_huggingface
from tests.planner.published_configs import DENSE, WITH_EXPERTS, Released
from tests.planner.small_configs import SWITCHES, TWO, common, small

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V3 = common(
    "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536,
    n_group=8, topk_group=4, num_nextn_predict_layers=1, **LATENT,
)  # fmt: skip

#: Families without a whole configuration in `published_configs`: name -> (the keys that matter,
#: billions of parameters as released).
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama-3.1-8B": (common("llama", 32, 4096, 32, 8, 14336, 128256), "8.0303"),
    "Mistral-7B": (common("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096), "7.2417"),
    "Qwen2.5-7B": (common("qwen2", 28, 3584, 28, 4, 18944, 152064), "7.6156"),
    "Qwen3-8B": (common("qwen3", 36, 4096, 32, 8, 12288, 151936), "8.1907"),
    "Gemma-7B": (common("gemma", 28, 3072, 16, 16, 24576, 256000), "8.5377"),
    "Gemma-2-9B": (common("gemma2", 42, 3584, 16, 8, 14336, 256000, sliding_window=4096), "9.2417"),
    "Phi-3-mini": (common("phi3", 32, 3072, 32, 32, 8192, 32064), "3.8211"),
    "Phi-2": (common("phi", 32, 2560, 32, 32, 10240, 51200), "2.7797"),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
        "0.1244",
    ),
    "Pythia-6.9B": (common("gpt_neox", 32, 4096, 32, 32, 16384, 50432), "6.8573"),
    "OPT-6.7B": (
        common("opt", 32, 4096, 32, 32, 0, 50272, ffn_dim=16384, max_position_embeddings=2048)
        | {"intermediate_size": None},
        "6.6585",
    ),
    "StarCoder2-15B": (
        common("starcoder2", 40, 6144, 48, 4, 24576, 49152, tie_word_embeddings=False),
        "15.9579",
    ),
    "OLMo-2-7B": (common("olmo2", 32, 4096, 32, 32, 11008, 100352), "7.2986"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "billions"), MODELS.values(), ids=MODELS)
def test_released_models(config: dict[str, Any], billions: str) -> None:
    assert f"{count_parameters(from_huggingface(config)).total / 1e9:.4f}" == billions


RELEASED = DENSE | WITH_EXPERTS


@pytest.mark.parametrize("released", RELEASED.values(), ids=RELEASED)
def test_whole_configurations_to_the_last_parameter(released: Released) -> None:
    assert count_parameters(from_huggingface(released.config)).total == released.total


ACTIVE = {name: released for name, released in WITH_EXPERTS.items() if released.active}


@pytest.mark.parametrize("released", ACTIVE.values(), ids=ACTIVE)
def test_active_parameters_as_printed(released: Released) -> None:
    """Printed counts include embedding and head, one of them, or neither, without a note which."""
    counts = count_parameters(from_huggingface(released.config))
    ways = (counts.active, counts.active - counts.embedding, counts.active_without_embeddings)
    printed = str(released.active)
    digits = len(printed.partition(".")[2])
    assert printed in {f"{way / 1e9:.{digits}f}" for way in ways}, ways


@pytest.mark.parametrize(("config", "total"), SWITCHES)
def test_switches_add_what_the_published_code_builds(config: dict[str, Any], total: int) -> None:
    assert count_parameters(from_huggingface(config)).total == total


def test_a_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "DeepSeek-V3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    for source in (folder, folder / "config.json"):
        model = load_model(str(source))
        assert model.shape.name == "DeepSeek-V3"
        assert model.config is None
    preset = load_model("deepseek-v3").shape
    assert model.shape.to_json() | {"name": "", "router_groups": 0} == preset.to_json() | {
        "name": "",
        "router_groups": 0,
    }


def test_attention_windows() -> None:
    oss = small("gpt_oss", num_local_experts=8, sliding_window=128, **TWO)
    assert from_huggingface(oss).windows[:4] == (128, 0, 128, 0)
    types = {"layer_types": ["full_attention", "sliding_attention"] * 3}
    listed = from_huggingface(oss | types)
    assert listed.windows[:4] == (0, 128, 0, 128)
    qwen = MODELS["Qwen2.5-7B"][0] | {"sliding_window": 4096, "use_sliding_window": False}
    assert from_huggingface(qwen).windows == ()
    del qwen["use_sliding_window"]  # A missing key means off.
    assert from_huggingface(qwen).windows == ()
    switched = qwen | {"use_sliding_window": True, "max_window_layers": 21}
    assert from_huggingface(switched).windows == (0,) * 21 + (4096,) * 7
    for family, period in (("olmo3", 4), ("cohere2", 4), ("gemma2", 2)):
        cut = small(family, sliding_window=8)
        whole = [index for index, tokens in enumerate(from_huggingface(cut).windows) if not tokens]
        assert whole == list(range(period - 1, 6, period))
    moe = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    moe = small("qwen2_moe", use_sliding_window=True, max_window_layers=4, **moe, **TWO)
    assert from_huggingface(moe | {"sliding_window": 8}).windows == (8, 0, 8, 0, 0, 0)
    dots = WITH_EXPERTS["dots.llm1"].config | {"sliding_window": 4096}
    assert from_huggingface(dots).windows == (0,) * 62
    letters = small("exaone4", sliding_window=8, sliding_window_pattern="LLLG")
    assert from_huggingface(letters).windows == (8, 8, 8, 0, 8, 0)
    gemma = common("gemma3_text", 6, 64, 4, 4, 128, 100, sliding_window=8, sliding_window_pattern=3)
    assert from_huggingface(gemma).windows == (8, 8, 0, 8, 8, 0)


def test_of_a_multimodal_model_the_text_counts() -> None:
    text = WITH_EXPERTS["Llama-4-Maverick (text)"].config["text_config"]
    shape = from_huggingface({"model_type": "llama4", "text_config": text, "vision_config": {}})
    assert shape.notes == ("only the text model is counted",)
    assert shape.num_layers == 48


LLAMA = MODELS["Llama-3.1-8B"][0]
#: Families without a class in transformers here: missing keys have no known default.
PHI = LLAMA | {"model_type": "phi3"}
EXAONE = {k: v for k, v in DEEPSEEK_V3.items() if "lora" not in k} | {"model_type": "exaone_moe"}
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (LLAMA | {"model_type": "mixtrall"}, ("model_type", "did you mean mixtral")),
    (LLAMA | {"model_type": "unheard"}, ("model_type", "does not know the layers")),
    ({k: v for k, v in LLAMA.items() if k != "model_type"}, ("model_type",)),
    (LLAMA | {"layer_types": ["linear_attention"] * 32}, ("layer_types", "linear_attention")),
    (LLAMA | {"hybrid_override_pattern": "M-M*"}, ("hybrid_override_pattern", "state-space")),
    (LLAMA | {"attn_type_list": [0, 1] * 16}, ("attn_type_list", "linear attention")),
    (LLAMA | {"use_cla": True}, ("use_cla",)),
    ({k: v for k, v in PHI.items() if k != "hidden_size"}, ("needs hidden_size",)),
    (
        WITH_EXPERTS["Hunyuan-A13B"].config | {"moe_topk": [8] * 31 + [4]},
        ("moe_topk", "differs between layers"),
    ),
    (LLAMA | {"num_hidden_layers": "many"}, ("num_hidden_layers", "whole number")),
    (LLAMA | {"num_attention_heads": 0}, ("num_attention_heads (0)",)),
    # Families with known unsupported parts.
    (LLAMA | {"model_type": "jamba"}, ("jamba has state-space (Mamba) layers", "no formula")),
    (LLAMA | {"model_type": "qwen3_next"}, ("qwen3_next has linear attention",)),
    (LLAMA | {"model_type": "minimax_m1"}, ("minimax_m1 has linear attention",)),
    (LLAMA | {"model_type": "deepseek_v32"}, ("attention with an indexer",)),
    (LLAMA | {"model_type": "t5"}, ("t5 has an encoder",)),
    # Parameters that a family's code has no place for.
    (LLAMA | {"num_local_experts": 8}, ("num_local_experts = 8", "no experts of a llama model")),
    (LLAMA | {"kv_lora_rank": 512}, ("kv_lora_rank", "no latent attention of a llama model")),
    (LLAMA | {"use_qk_norm": True}, ("use_qk_norm", "no such switch of a llama model")),
    (LLAMA | {"add_cross_attention": True}, ("add_cross_attention",)),
    (WITH_EXPERTS["Mixtral-8x7B"].config | {"n_shared_experts": 1}, ("n_shared_experts",)),
    (DEEPSEEK_V3 | {"mlp_bias": True}, ("mlp_bias",)),
    (DEEPSEEK_V3 | {"index_n_heads": 64}, ("index_n_heads", "indexer")),
    # A missing key is an error, unless the family's class has a default.
    *(
        ({k: v for k, v in EXAONE.items() if k != key}, (f"needs {words}",))
        for key, words in {
            "n_routed_experts": "num_local_experts or",
            "n_shared_experts": "n_shared_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "moe_intermediate_size": "moe_intermediate_size",
            "first_k_dense_replace": "first_k_dense_replace",
            "intermediate_size": "intermediate_size",
        }.items()
    ),
    ({k: v for k, v in PHI.items() if k != "intermediate_size"}, ("needs intermediate_size",)),
    # Numbers that are not legal sizes.
    (LLAMA | {"hidden_size": float("nan")}, ("hidden_size", "whole number")),
    (LLAMA | {"hidden_size": float("inf")}, ("hidden_size", "whole number")),
    (LLAMA | {"hidden_size": -64}, ("hidden_size must be at least 0",)),
    (LLAMA | {"num_hidden_layers": 10**12}, ("num_hidden_layers (1000000000000) exceeds 65536",)),
    (LLAMA | {"num_attention_heads": 30}, ("(30) must divide the hidden size (4096)",)),
    (DEEPSEEK_V3 | {"kv_lora_rank": "512"}, ("kv_lora_rank", "whole number")),
    (EXAONE | {"moe_layer_freq": 0}, ("moe_layer_freq must be at least 1",)),
    (EXAONE | {"moe_layer_freq": [0, 1]}, ("2 entries for 61 layers",)),
    (EXAONE | {"mlp_layer_types": ["dense"] * 3}, ("3 entries for 61 layers",)),
    (EXAONE | {"mlp_layer_types": ["dense", "odd"] * 30 + ["odd"]}, ("`odd`",)),
    (PHI | {"layer_types": "full_attention"}, ("layer_types must be a list",)),
    (LLAMA | {"text_config": 3}, ("text_config must be an object",)),
    (WITH_EXPERTS["DBRX"].config | {"ffn_config": [1]}, ("ffn_config must be an object",)),
    (
        PHI | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
        ("layer_types has 3 entries for 32 layers",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "words"), BAD)
def test_what_cannot_be_counted_is_named(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_huggingface(config)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_is_left_out_is_the_default_of_the_class() -> None:
    """Those of transformers' LlamaConfig and DeepseekV3Config."""
    shape = from_huggingface({"model_type": "llama"})
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size) == (32, 4096, 11008)
    left_out = ("kv_lora_rank", "n_shared_experts", "first_k_dense_replace")
    config = {key: value for key, value in DEEPSEEK_V3.items() if key not in left_out}
    assert from_huggingface(config) == from_huggingface(DEEPSEEK_V3)


def test_every_unknown_layer_at_once() -> None:
    config = LLAMA | {"use_cla": True, "ssm_cfg": {"d": 1}, "layer_types": ["x", "y"]}
    with pytest.raises(ConfigError) as caught:
        from_huggingface(config)
    assert len(caught.value.problems) == 4


def test_broken_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, words in (("{", "not valid JSON"), ("[]", "JSON object")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_model(str(file))


def test_adapters_of_a_model_without_weights_are_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                "intermediate_size": 6144, "vocab_size": 151936, "norm_topk_prob": True,
                "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
            }
        )
    )  # fmt: skip
    task = {"cluster": "dgx_h100", "seq_len": 4096, "global_batch": 64, "top": 1}
    settings = ["lora.rank=16"]
    (folder,) = mm.plan(model=tmp_path, settings=settings, **task)
    (preset,) = mm.plan(model="qwen3-30b-a3b", settings=settings, **task)
    assert folder.seconds == preset.seconds
    assert folder.memory_bytes == preset.memory_bytes
    assert folder.command is None
