"""Packaged models and clusters: complete, with a source, and readable.

The planner's tests hold their parameters against those that were released.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.model import ModelConfig
from moemesh.config.sources import preset_names, read_preset_table
from moemesh.sharding.load_run import load_run

#: Keys that every preset must set: their defaults are those of tiny.
REQUIRED = {
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "first_dense_layers", "num_experts", "experts_per_token",
    "expert_intermediate_size", "num_shared_experts",
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    return load_run([], [f"model.preset={name}"], {}).config.model


def test_tiny_is_the_default() -> None:
    assert preset("tiny") == ModelConfig()


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete_and_state_their_source(name: str) -> None:
    table = read_preset_table(name)
    assert set(table) >= REQUIRED
    assert "shared_intermediate_size" not in table  # None could not be written back
    text = Path(__file__).parents[2] / "moemesh/config/presets" / f"{name}.toml"
    assert "Source: " in text.read_text() or name == "tiny"


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_cluster_presets_load(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == cluster.gpus_per_node in (1, 8, 72)
    assert {"float32", "bfloat16", "float64"} <= set(cluster.peak_flops)


def test_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (Path(__file__).parents[2] / "moemesh/config/presets/clusters/dgx_h100.toml").read_text()
    path.write_text(text.replace("nodes = 1\n", "nodes = 256\n"))
    assert load_cluster(str(path)).num_devices == 2048


def test_cluster_ranges() -> None:
    cluster = load_cluster("dgx_h100")
    broken = Cluster(**{**cluster.model_dump(), "nodes": 0, "peak_flops": {"float32": -1.0}})
    assert {problem.key for problem in broken.check()} == {
        "cluster.nodes",
        "cluster.peak_flops.float32",
    }
    (problem,) = cluster.model_copy(update={"peak_flops": {}}).check()
    assert problem.key == "cluster.peak_flops" and "bfloat16 = 989.4e12" in problem.fix
