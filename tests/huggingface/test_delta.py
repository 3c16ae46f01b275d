"""The tensors that a run trained: written alone, put onto their base, refused on another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.huggingface.tiny import save
from tests.train.runs import arguments, said

transformers = pytest.importorskip("transformers")


def trained(base: Path, out: Path, **keys: object) -> None:
    """A short run from `base`; the model's sizes are those of the folder."""
    given = arguments(out, model__path=str(base), data__tokenizer="bytes", **keys)
    sizes = {"model.num_layers", "model.hidden_size", "model.head_dim", "model.intermediate_size",
             "model.expert_intermediate_size"}  # fmt: skip
    kept: list[str] = []
    for option, value in zip(given[3::2], given[4::2], strict=True):
        if value.partition("=")[0] not in sizes:
            kept += [option, value]
    said(*given[:3], *kept)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


CASES = {
    # family, what trains, dtype, a name that must be in the delta, a part of names that may not
    "attention": (
        "qwen3_moe",
        ["*.attention.*"],
        "float32",
        "model.layers.0.self_attn.q_proj.weight",
        "experts",
    ),
    "bfloat16": (
        "qwen3_moe",
        ["layers.0.feed_forward.experts.[12].*"],
        "bfloat16",
        "model.layers.0.mlp.experts.1.down_proj.weight",
        "experts.0.",
    ),
    "stacks of experts": (
        "gpt_oss",
        ["layers.1.feed_forward.experts.0.*"],
        "float32",
        "model.layers.1.mlp.experts.gate_up_proj",
        "self_attn",
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow] if name != "bfloat16" else []) for name in CASES],
)
def test_base_and_delta_are_the_export(case: str, tmp_path: Path) -> None:
    family, patterns, dtype, inside, outside = CASES[case]
    base, out, delta = save(family, tmp_path / "base"), tmp_path / "run", tmp_path / "delta"
    trained(base, out, train__train_only=patterns, train__dtype=dtype)
    said("convert", out, tmp_path / "whole")
    said("convert", out, delta, "--delta")
    said("convert", base, tmp_path / "joined", "--apply", delta)
    whole, joined, part = (weights(tmp_path / name) for name in ("whole", "joined", "delta"))
    assert whole.keys() == joined.keys()
    for name, tensor in whole.items():
        assert tensor.dtype == joined[name].dtype
        assert torch.equal(tensor, joined[name]), name
    assert inside in part and not any(outside in name for name in part)
    assert len(part) < len(whole) / 2
    before = weights(base)[inside].to(part[inside].dtype)
    assert not torch.equal(before, part[inside])
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "joined")
    ]
    assert configs[0] == configs[1]


def test_another_base_is_refused(tmp_path: Path) -> None:
    base, out = save("qwen3_moe", tmp_path / "base"), tmp_path / "run"
    trained(base, out, train__train_only=["*.attention.*"])
    said("convert", out, tmp_path / "delta", "--delta")
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = {name: tensor.clone() for name, tensor in weights(other).items()}
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    error = said("convert", other, tmp_path / "x", "--apply", tmp_path / "delta", code=2)
    assert "made for other weights" in error and not (tmp_path / "x").exists()
    error = said("convert", base, base, "--apply", tmp_path / "delta", code=2)
    assert "base holds config.json, " in error and weights(base).keys() == tensors.keys()
    error = said("convert", base, tmp_path / "x", "--apply", base, code=2)
    assert "delta.json" in error
    error = said("convert", out, tmp_path / "x", "--delta", "--to", "huggingface", code=2)
    assert "--delta" in error


def test_a_run_without_a_base_has_no_delta(tmp_path: Path) -> None:
    said(*arguments(tmp_path / "run", train__steps=1))
    error = said("convert", tmp_path / "run", tmp_path / "x", "--delta", code=2)
    assert "a delta needs it as its base" in error
