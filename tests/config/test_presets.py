"""Packaged models and clusters against published parameter counts and data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError
from moemesh.config.model import ModelConfig
from moemesh.config.sources import preset_names, read_preset_table
from moemesh.sharding.load_run import load_run

# Billions of parameters without extra prediction layers: published totals; DeepSeek-V2-Lite and
# Mixtral-8x7B from their papers, Llama 3 8B and the others as released.
BILLIONS = {
    "llama3-8b": 8.030,
    "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.63,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
    "deepseek-v2-lite": 15.706,
    "deepseek-v3": 671.026,
    "deepseek-v2": 235.741,
    "kimi-k2": 1026.408,
    "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829,
    "qwen2-57b-a14b": 57.409,
}
# Active for one token, with embedding and head.
ACTIVE_BILLIONS = {"mixtral-8x22b": 39.16, "qwen3-235b-a22b": 22.19, "deepseek-v3": 37.55}

#: A preset must say these itself: the default is tiny's.
REQUIRED = {
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "first_dense_layers",
    "num_experts",
    "experts_per_token",
    "expert_intermediate_size",
    "num_shared_experts",
}


def count(model: ModelConfig, experts: int) -> int:
    """Parameters with `experts` routed experts a layer."""
    m = model
    h = m.hidden_size
    if m.attention == "mla":
        query_head = m.qk_nope_head_dim + m.qk_rotary_head_dim
        rank = m.q_lora_rank
        query = h * rank + rank + rank * m.num_heads * query_head
        if rank == 0:
            query = h * m.num_heads * query_head
        attention = query + h * (m.kv_lora_rank + m.qk_rotary_head_dim) + m.kv_lora_rank
        attention += m.kv_lora_rank * m.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
        attention += m.num_heads * m.v_head_dim * h
    else:
        attention = 2 * h * (m.num_heads + m.num_kv_heads) * m.head_dim
        attention += 2 * m.head_dim * m.qk_norm
        attention += (m.num_heads + 2 * m.num_kv_heads) * m.head_dim * m.qkv_bias
    attention += h * m.output_bias + m.num_heads * m.attention_sinks
    moe = 3 * experts * h * m.expert_intermediate_size + 3 * h * m.shared_width
    moe += experts * (2 * m.expert_intermediate_size + h) * m.expert_bias
    moe += (h + m.router_logit_bias) * m.num_experts + h * m.shared_gate
    total = m.num_layers * (attention + 2 * h) + h
    total += m.num_moe_layers * moe + m.num_dense_layers * 3 * h * m.intermediate_size
    return total + m.vocab_size * h * (1 if m.tied_embeddings else 2)


def preset(name: str) -> ModelConfig:
    return load_run([], [f"model.preset={name}"], {}).config.model


def test_every_preset_has_a_golden() -> None:
    assert set(preset_names()) == {*BILLIONS, "tiny"}


def test_tiny_is_the_default() -> None:
    assert preset("tiny") == ModelConfig()


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete_and_state_their_source(name: str) -> None:
    table = read_preset_table(name)
    assert set(table) >= REQUIRED
    assert "shared_intermediate_size" not in table  # None could not be written back
    text = Path(__file__).parents[2] / "moemesh/config/presets" / f"{name}.toml"
    assert "Source: " in text.read_text() or name == "tiny"


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_parameter_count(name: str, billions: float) -> None:
    model = preset(name)
    digits = len(str(billions).split(".")[1])
    assert round(count(model, model.num_experts) / 1e9, digits) == billions


@pytest.mark.parametrize(("name", "billions"), ACTIVE_BILLIONS.items())
def test_active_parameter_count(name: str, billions: float) -> None:
    model = preset(name)
    assert round(count(model, model.experts_per_token) / 1e9, 2) == billions


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_cluster_presets_load(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == cluster.gpus_per_node in (8, 72)
    assert {"float32", "bfloat16", "float64"} <= set(cluster.peak_flops)


def test_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (Path(__file__).parents[2] / "moemesh/config/presets/clusters/dgx_h100.toml").read_text()
    path.write_text(text.replace("nodes = 1\n", "nodes = 256\n"))
    assert load_cluster(str(path)).num_devices == 2048


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes = ", "not valid TOML"),
        ("nodess = 3", "did you mean nodes?"),
        ("nodes = '3'", "cluster.nodes"),
        ("", "cluster.memory_bytes"),
    ],
)
def test_broken_cluster_files(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    assert expected in str(caught.value)


def test_unknown_cluster_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean dgx_h100"):
        load_cluster("dgx-h100")


def test_cluster_ranges() -> None:
    cluster = load_cluster("dgx_h100")
    broken = Cluster(**{**cluster.model_dump(), "nodes": 0, "peak_flops": {"float32": -1.0}})
    assert {problem.key for problem in broken.check()} == {
        "cluster.nodes",
        "cluster.peak_flops.float32",
    }
