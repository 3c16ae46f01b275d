"""Both layouts of experts: as transformers writes and reads them, and from one into the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moemesh.checkpoint.huggingface.convert import write_folder
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface import folder as config_folder
from moemesh.config.huggingface.folder import EMBEDDING, HEAD, read_config
from moemesh.planner.shapes.load_shape import load_model
from moemesh.train.weights.conversion import convert
from tests.huggingface import tiny
from tests.huggingface.ours import (
    assert_same_weights,
    config_of,
    deferred,
    load,
    logits,
    there_and_back,
)
from tests.huggingface.test_families import tokens
from tests.huggingface.tiny import DENSE, FAMILIES, build, load_complete, make, save
from tests.train.runs import said, sets

pytest.importorskip("transformers")

KINDS = [kind for kind in FAMILIES if kind not in DENSE]
#: Families with one layout: all experts of a layer are in one tensor.
STACKED = ("gpt_oss", "granitemoe")


@pytest.mark.representative("mixtral", "ernie4_5_moe")
@pytest.mark.parametrize("kind", KINDS)
def test_from_one_layout_into_the_other(kind: str, tmp_path: Path) -> None:
    """The fused one is that of transformers' modules in memory, name by name and byte by byte."""
    usual = save(kind, tmp_path / "usual")
    fused = save(kind, tmp_path / "fused", save_original_format=False)
    convert(usual, tmp_path / "made", expert_layout="fused")
    assert_same_weights(tmp_path / "made", usual if kind in STACKED else fused)
    if kind != "gpt_oss":
        assert_same_weights(there_and_back(fused, tmp_path), usual)
    if kind in STACKED:
        with pytest.raises(ConfigError, match="hold all experts of a layer in one tensor"):
            convert(usual, tmp_path / "refused", expert_layout="per-expert")
        assert not (tmp_path / "refused").exists()


@pytest.mark.representative("qwen3_moe")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_fused_layout(kind: str, tmp_path: Path) -> None:
    made = there_and_back(save(kind, tmp_path / "usual"), tmp_path, expert_layout="fused")
    found, expected = (tiny.logits(one, tokens()) for one in (load_complete(made), build(kind)))
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


# A head beside a tied embedding: tied where both are equal, else a table of its own.

TOKENS = torch.arange(2 * 40).view(2, 40) * 7 % 288


def stored(head: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    table = tensors[EMBEDDING]
    match head:
        case "equal":
            tensors[HEAD] = table.clone()
        case "last number":
            tensors[HEAD] = table.clone()
            tensors[HEAD][-1, -1] += 1
        case "other dtype":
            tensors[HEAD] = (table + 0.1).bfloat16()
        case "alone":
            tensors[HEAD] = tensors.pop(EMBEDDING)
        case _:
            pass
    return tensors


def saved(kind: str, head: str, path: Path, *, shards: bool = False) -> Path:
    """A folder of the family `kind` whose config.json ties head and embedding."""
    make(kind, tie_word_embeddings=True).save_pretrained(path)
    tensors = stored(head, load_file(path / "model.safetensors"))
    if not shards:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    (path / "model.safetensors").unlink()
    write_folder(path, deferred(tensors), read_config(path), file_bytes=60_000)
    return path


@pytest.mark.parametrize(
    ("kind", "head", "shards"),
    [
        ("qwen3_moe", "none", False),
        ("qwen3_moe", "equal", True),
        ("qwen3_moe", "last number", True),
        ("ernie4_5_moe", "last number", False),
        ("llama", "other dtype", False),
        ("llama", "alone", False),
    ],
)
def test_a_stored_head_counts_as_in_transformers(
    kind: str, head: str, shards: bool, tmp_path: Path
) -> None:
    """Loaded, planned and written back."""
    path = saved(kind, head, tmp_path / "model", shards=shards)
    theirs = tiny.load(path, dtype=torch.float32)
    is_tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert is_tied == (head not in ("last number", "other dtype"))
    assert config_of(path).tied_embeddings == is_tied
    planned = load_model(str(path))
    assert planned.config == config_of(path) and planned.shape.tied_embeddings == is_tied
    expected = tiny.logits(theirs, TOKENS)
    torch.testing.assert_close(logits(load(path), TOKENS)[0], expected, rtol=1e-6, atol=2e-6)

    convert(path, tmp_path / "run", dtype="float64")
    convert(tmp_path / "run", tmp_path / "back", dtype="float32")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert (HEAD in back) == (not is_tied) and EMBEDDING in back
    assert read_config(tmp_path / "back")["tie_word_embeddings"] is is_tied
    again = tiny.load(tmp_path / "back", dtype=torch.float32)
    torch.testing.assert_close(tiny.logits(again, TOKENS), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_head_of_its_own_is_trained_and_exported(tmp_path: Path) -> None:
    path = saved("qwen3_moe", "last number", tmp_path / "model")
    given = [f"model.path={path}", "data.seq_len=16", "data.global_batch=2", "train.steps=1"]
    words = sets(*given, "data.tokenizer=bytes")
    said("train", *words, "--out", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "out")
    before = load_file(path / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in (HEAD, EMBEDDING):
        assert not torch.equal(after[name], before[name])
    refused = said("train", *words, "--set", "model.tied_embeddings=true", code=2)
    assert "have tied_embeddings = false" in refused


def test_tables_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is looked at several times in a command; its tables are read by the first alone."""
    path = saved("llama", "equal", tmp_path / "model")
    monkeypatch.setattr(config_folder, "_CHUNK_BYTES", 1000)  # more than one chunk
    before = config_folder._are_equal.cache_info().misses
    assert all(read_config(path)["tie_word_embeddings"] for _ in range(3))
    assert config_folder._are_equal.cache_info().misses == before + 1


@pytest.mark.parametrize("end", [-5, 10**15])
def test_a_header_that_lies_is_told_when_the_folder_is_opened(end: int, tmp_path: Path) -> None:
    path = saved("llama", "equal", tmp_path / "model")
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[HEAD]["data_offsets"][1] = end
    changed = json.dumps(header).encode()
    file = len(changed).to_bytes(8, "little") + changed + raw[8 + length :]
    (path / "model.safetensors").write_bytes(file)
    assert read_config(path)["tie_word_embeddings"]
