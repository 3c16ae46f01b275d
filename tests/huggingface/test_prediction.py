"""Extra prediction layers (MTP) of a folder: kept unchanged, or trained on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moemesh.checkpoint.huggingface.logical import logical_tensors
from moemesh.train.weights.conversion import convert
from tests.huggingface.ours import config_of, there_and_back
from tests.huggingface.tiny import save
from tests.train.runs import said, sets

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """DeepSeek-V3 with one such layer, which has copies of both tables, as it was released."""
    path = save("deepseek_v3", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    model = config_of(path).model_copy(update={"num_mtp_layers": 1})
    generator = torch.Generator().manual_seed(0)
    for one in logical_tensors(model, "deepseek_v3").values():
        for piece in one.pieces:
            if piece.source not in tensors:
                tensors[piece.source] = torch.randn(piece.stored, generator=generator) / 8
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    values = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(values))
    return path


def trained(folder: Path, tmp_path: Path, *more: str) -> dict[str, Tensor]:
    """The tensors of the folder that a step from `folder` is exported to."""
    given = {"model.path": folder, "data.seq_len": 32, "data.global_batch": 4, "train.steps": 1}
    words = [f"{key}={value}" for key, value in given.items()] + ["data.tokenizer=bytes", *more]
    run, out = tmp_path / "run", tmp_path / "out"
    said("train", *sets(*words), "--out", run)
    convert(run, out)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    return load_file(out / "model.safetensors")


@pytest.mark.slow
def test_layers_that_are_not_trained_are_copied(folder: Path, tmp_path: Path) -> None:
    before = load_file(folder / "model.safetensors")
    after = trained(folder, tmp_path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.startswith("model.layers.3."):
            assert torch.equal(after[name], tensor), name
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_layers_are_trained_when_asked_for(folder: Path, tmp_path: Path) -> None:
    before = load_file(folder / "model.safetensors")
    after = trained(folder, tmp_path, "model.num_mtp_layers=1")
    assert before.keys() == after.keys()
    projection = "model.layers.3.eh_proj.weight"
    assert not torch.equal(after[projection], before[projection])
    # Copies of the tables are those of the trained model.
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    for copy, table in copies.items():
        assert torch.equal(after[f"model.layers.3.{copy}.weight"], after[table])
        assert not torch.equal(after[table], before[table])


def test_layers_of_another_form_are_kept(tmp_path: Path) -> None:
    """Qwen3-Next and its kin call them mtp.*."""
    path = save("qwen3_moe", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.randn(48, 96)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    after = load_file(there_and_back(path, tmp_path) / "model.safetensors")
    assert torch.equal(after["mtp.fc.weight"], tensors["mtp.fc.weight"])
