"""Both layouts of experts: as transformers writes and reads them, and from one into the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.folder import read_config
from moemesh.train.weights.conversion import convert
from tests.huggingface.test_families import tokens
from tests.huggingface.tiny import DENSE, FAMILIES, build, save

pytest.importorskip("transformers")

KINDS = [kind for kind in FAMILIES if kind not in DENSE]
#: Families with one layout: all experts of a layer are in one tensor.
STACKED = ("gpt_oss", "granitemoe")


def same(one: Path, other: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.representative("mixtral", "ernie4_5_moe")
@pytest.mark.parametrize("kind", KINDS)
def test_from_one_layout_into_the_other(kind: str, tmp_path: Path) -> None:
    """The fused one is that of transformers' modules in memory, name by name and byte by byte."""
    usual = save(kind, tmp_path / "usual")
    fused = save(kind, tmp_path / "fused", save_original_format=False)
    convert(usual, tmp_path / "made", expert_layout="fused")
    same(tmp_path / "made", usual if kind in STACKED else fused)
    if kind != "gpt_oss":
        convert(fused, tmp_path / "run")
        convert(tmp_path / "run", tmp_path / "back")
        same(tmp_path / "back", usual)
    if kind in STACKED:
        with pytest.raises(ConfigError, match="hold all experts of a layer in one tensor"):
            convert(usual, tmp_path / "refused", expert_layout="per-expert")
        assert not (tmp_path / "refused").exists()


@pytest.mark.representative("qwen3_moe")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_fused_layout(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save(kind, tmp_path / "usual")
    convert(folder, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "made", expert_layout="fused")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "made",
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        expected, found = build(kind)(tokens()).logits, model.eval()(tokens()).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_another_dtype(tmp_path: Path) -> None:
    folder = save("deepseek_v3", tmp_path / "model")
    convert(folder, tmp_path / "half", "huggingface", dtype="bfloat16")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in before.items():
        kept = torch.float32 if "correction_bias" in name else torch.bfloat16
        assert torch.equal(after[name], tensor.to(kept)), name
    config = read_config(tmp_path / "half")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_refusals(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"in this format already.*\n.*--expert-layout or"):
        convert(folder, tmp_path / "out", "huggingface")
    with pytest.raises(ConfigError, match="runs have one layout"):
        convert(folder, tmp_path / "out", "moemesh", expert_layout="fused")
    assert not (tmp_path / "out").exists()
