"""A folder of transformers is planned and priced as the model that `moemesh train` starts from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from moemesh.config.cluster import load_cluster
from moemesh.planner.estimate import estimate_named, estimate_run
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import plan_named, to_json
from moemesh.planner.shapes.load_shape import load_model
from moemesh.sharding.load_run import load_run
from tests.huggingface.tiny import save
from tests.train.runs import metrics, said

pytest.importorskip("transformers")

TWO_DEVICES = load_cluster("laptop_cpu").model_copy(update={"gpus_per_node": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose config.json names an extra prediction layer, as those of its family do."""
    path = save("deepseek_v3", tmp_path_factory.mktemp("a folder") / "tiny")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return path


@pytest.mark.parametrize("trainable", [True, False])
def test_the_command_of_a_plan_trains_the_folder(
    folder: Path, tmp_path: Path, trainable: bool
) -> None:
    planned = plan_named(PlanRequest(str(folder), TWO_DEVICES, 32, 4, trainable=trainable))
    best = to_json(planned)["plans"][0]
    assert f"model.path={folder}" in best["command"] and not best["not_trained"]
    if not trainable:
        return
    words = shlex.split(best["command"])
    assert words[:2] == ["moemesh", "train"]
    said(*words[1:], "--set", "train.steps=1", "--out", tmp_path)
    assert len(metrics(tmp_path)) == 1


def test_the_price_is_that_of_the_run(folder: Path) -> None:
    given = [f"model.path={folder}", "data.seq_len=32", "data.global_batch=4", "plan.dp=2"]
    run = load_run([], [*given, "plan.ep=2", "train.dtype=bfloat16"]).config
    estimate = estimate_named(str(folder), "laptop_cpu", "dp=2,ep=2", 32, 4)
    trained = estimate_run(run, "laptop_cpu")
    numbers = load_file(folder / "model.safetensors").items()
    count = sum(tensor.numel() for name, tensor in numbers if "correction_bias" not in name)
    assert estimate.to_json()["parameters"] == trained.to_json()["parameters"]
    assert estimate.parameters.total == count
    assert estimate.traffic == trained.traffic
    assert any("extra prediction layers" in note for note in estimate.notes)


def test_a_folder_that_is_planned_only_says_why(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"")
    quantized = {**config, "quantization_config": {"quant_method": "gptq"}}
    (other / "config.json").write_text(json.dumps(quantized))
    best = to_json(plan_named(PlanRequest(str(other), TWO_DEVICES, 32, 4)))["plans"][0]
    assert best["command"] is None
    assert "gptq cannot be read" in best["not_trained"][0]


def test_a_config_json_alone_is_a_shape(tmp_path: Path, folder: Path) -> None:
    """With no weights beside it there is nothing to start from; all of its layers count."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = load_model(tmp_path)
    assert model.config is None and model.shape.num_mtp_layers == 1
