"""Shapes from every source: our configurations, tables of architectures, presets, TOML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import ConfigError
from moemesh.config.model import ModelConfig
from moemesh.config.sources import preset_names
from moemesh.planner.shapes.load_shape import SHAPES, from_arch_table, load_model
from moemesh.planner.shapes.shape import LayerKind, ModelShape, from_model_config

DENSE: dict[str, Any] = {
    "type": "dense", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "ffn": 128, "vocab": 100, "act": "swiglu",
}  # fmt: skip
MOE: dict[str, Any] = {
    "type": "moe", "layers": 6, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16,
    "experts": 8, "topk": 2, "moe_ffn": 32, "shared_ffn": 48, "dense_layers": 3, "dense_ffn": 96,
    "vocab": 100, "act": "swiglu",
    "mla": {"q_lora": 24, "kv_lora": 16, "qk_nope": 16, "qk_rope": 8, "v_head": 12},
}  # fmt: skip
TABLE = {"_note": "a remark", "dense": DENSE, "moe": MOE}


def test_our_own_configuration() -> None:
    shape = from_model_config(ModelConfig(num_layers=4, first_dense_layers=1), "small")
    assert shape.moe_layers == (1, 2, 3)
    assert shape.shared_intermediate_size == 128
    assert shape.kind_counts == {LayerKind(False, 0): 1, LayerKind(True, 0): 3}


def test_an_entry_of_a_table() -> None:
    shape = from_arch_table("moe", TABLE)
    assert shape.attention == "mla"
    assert (shape.query_head_dim, shape.value_head_dim) == (24, 12)
    assert shape.moe_layers == (3, 4, 5)


def test_the_patterns_of_a_table() -> None:
    gpt = from_arch_table("gpt:4x128a8", TABLE)
    assert (gpt.vocab_size, gpt.intermediate_size, gpt.head_dim) == (51200, 512, 16)
    assert from_arch_table("gpt:4x128a8v99", TABLE).vocab_size == 99
    # One dense layer and n - 1 layers of experts.
    assert from_arch_table("moe#L4", TABLE).moe_layers == (1, 2, 3)
    assert from_arch_table("moe#L1", TABLE).moe_layers == ()
    assert from_arch_table("dense#L2", TABLE).num_layers == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rnn_layers": 3}, ("rnn_layers", "unknown key")),
        ({"act": "relu6"}, ("relu6", "swiglu, gelu")),
        ({"type": "mamba"}, ("mamba", "dense, moe")),
    ],
)
def test_unknown_keys_of_a_table_are_named(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_arch_table("dense", {"dense": DENSE | change})
    assert all(word in str(caught.value) for word in words)


def test_all_missing_keys_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        from_arch_table("bad", {"bad": {"type": "moe", "layers": 2}})
    keys = {problem.key for problem in caught.value.problems}
    assert {"bad.hidden", "bad.experts", "bad.topk"} <= keys


def test_an_unknown_name_has_a_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean dense"):
        from_arch_table("dens", TABLE)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
    ],
)
def test_names_of_the_hub_are_presets(name: str, preset: str) -> None:
    assert load_model(name).shape == load_model(preset).shape


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "Qwen/Qwen3-14B"])
def test_a_name_of_another_size_is_no_preset(name: str) -> None:
    with pytest.raises(ConfigError):
        load_model(name)


@pytest.mark.parametrize("name", preset_names(SHAPES))
def test_packaged_shapes_load_and_state_their_source(name: str) -> None:
    folder = Path(__file__).parents[2] / "moemesh/config/presets" / SHAPES
    assert "# Source: " in (folder / f"{name}.toml").read_text()
    assert load_model(name).shape.name == name


BARE = """
num_layers = 3
hidden_size = 64
vocab_size = 100
num_heads = 4
num_kv_heads = 4
head_dim = 16
"""


EXPERTS = "num_experts = 4\nexperts_per_token = 1\nexpert_intermediate_size = 32\n"


@pytest.mark.parametrize(
    ("text", "moe_layers"),
    [
        (BARE + "intermediate_size = 128\n", ()),
        (BARE + f'{EXPERTS}moe_layers = "all"\n', (0, 1, 2)),
        (BARE + "first_dense_layers = 1\nnum_experts = 4\nexperts_per_token = 1\n", (1, 2)),
        ('[model]\npreset = "tiny"\nnum_layers = 2\n', (1,)),
    ],
)
def test_toml_files(tmp_path: Path, text: str, moe_layers: tuple[int, ...]) -> None:
    file = tmp_path / "model.toml"
    file.write_text(text)
    assert load_model(str(file)).shape.moe_layers == moe_layers


def test_one_window_is_that_of_every_layer(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(BARE + "intermediate_size = 8\nwindows = 16\n")
    assert load_model(tmp_path / "model.toml").shape.windows == (16, 16, 16)


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("[model]\nnum_layers = 3\n\n[plan]\ndp = 2\n")
    model = load_model(tmp_path / "run")
    assert (model.config, model.shape.name) == (ModelConfig(num_layers=3), "run")
    assert load_model(tmp_path / "run/config.toml") == model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BARE.replace("num_heads = 4\n", "") + "intermediate_size = 8\n", "num_heads = 32"),
        (BARE.replace("head_dim = 16\n", ""), "such as head_dim = 16"),
        (BARE.replace("num_layers = 3", "num_layers = 1000000000"), "must be at most 65536"),
        (BARE + "intermediate_size = 8\nwindows = -8\n", "0 is the whole sequence"),
        (BARE + "intermediate_size = 8\nwindows = [8]\n", "windows = 8, one for all"),
        (BARE + f"{EXPERTS}moe_layers = [2, 0, 2]\n", r"moe_layers = \[0, 2\]"),
        (BARE.replace("= 3", "= 10000000000") + f'{EXPERTS}moe_layers = "all"\n', "at most 65536"),
        ('model = "tiny"\n', r"\[model\] is a section"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, text: str, words: str) -> None:
    """Other mistakes in a file are in ``tests/mistakes``."""
    (tmp_path / "model.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_model(str(tmp_path / "model.toml"))


def test_every_broken_size_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelShape(
            num_layers=0, hidden_size=-1, vocab_size=5, num_heads=1, num_kv_heads=1, head_dim=1
        )
    assert len(caught.value.problems) >= 2
