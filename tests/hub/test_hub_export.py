"""Exports of transformers' models: names, dtypes and files of the folder that they came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.hub_weights import HubWeights
from moemesh.checkpoint.huggingface.pieces import Read
from moemesh.config.huggingface.folder import SINGLE
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.weights.hub_export import RECORD, export, keep_record, open_source
from tests.hub.families import add_tokenizer, random_model, tiny_folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def mixed_folder(name: str, path: Path) -> Path:
    """A folder of several files in bfloat16, with the float32 tensors of transformers."""
    random_model(name, torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    add_tokenizer(path)
    return path


def plus(read: Read, number: float) -> Read:
    """The same weights in float32, each plus `number`, as trained ones."""
    return lambda name, box: read(name, box).float() + number


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe", "gemma4"])
def test_a_folder_comes_out_as_it_went_in(name: str, tmp_path: Path) -> None:
    folder = mixed_folder(name, tmp_path / "in")
    source = open_source(folder)
    export(plus(HubWeights(folder).read, 0.0), source, tmp_path / "out")
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert len({one.dtype for one in before.values()}) == (2 if name == "deepseek_v3" else 1)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    for same in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (folder / same).read_bytes() == (tmp_path / "out" / same).read_bytes()
    indices = [json.loads((one / INDEX).read_text()) for one in (folder, tmp_path / "out")]
    assert indices[0]["weight_map"] == indices[1]["weight_map"]


INDEX = "model.safetensors.index.json"


def test_what_trained_is_written_and_the_rest_is_copied(tmp_path: Path) -> None:
    folder = mixed_folder("qwen3_5_moe", tmp_path / "in")
    expert = "model.layers.1.mlp.experts.3.down_proj"
    trained = {expert, "model.embed_tokens.weight"}
    weights = plus(HubWeights(folder).read, 1.0)
    export(weights, open_source(folder), tmp_path / "out", trains=trained.__contains__)
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    alone = "model.language_model.layers.1.mlp.experts.3.down_proj.weight"
    assert changed == {alone, "model.language_model.embed_tokens.weight"}
    embedding = before["model.language_model.embed_tokens.weight"]
    wanted = (embedding.float() + 1.0).bfloat16()
    assert torch.equal(after["model.language_model.embed_tokens.weight"], wanted)


@pytest.mark.parametrize("has_both", [True, False])
def test_a_trained_table_under_the_names_of_its_folder(tmp_path: Path, has_both: bool) -> None:
    """A tied head beside the embedding, or the head alone: the model has one table."""
    folder, table = tiny_folder("gemma2", tmp_path / "in"), "model.embed_tokens.weight"
    tensors = load_file(folder / SINGLE)
    embedding = tensors[table] if has_both else tensors.pop(table)
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    weights = plus(HubWeights(folder).read, 1.0)
    export(weights, open_source(folder), tmp_path / "out", trains={table}.__contains__)
    after = tensors_of(tmp_path / "out")
    assert after.keys() == tensors.keys()
    for name, before in tensors.items():
        is_table = name in (table, "lm_head.weight")
        assert torch.equal(after[name], before + 1.0 if is_table else before), name


def test_experts_of_a_stack_in_two_dtypes(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3_moe", tmp_path / "in")
    tensors = load_file(folder / SINGLE)
    first = {name for name in tensors if ".experts.0." in name}
    mixed = {name: one.bfloat16() if name in first else one for name, one in tensors.items()}
    save_file(mixed, folder / SINGLE, metadata={"format": "pt"})
    export(HubWeights(folder).read, open_source(folder), tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    for name, tensor in mixed.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def test_another_dtype_is_that_of_most_tensors(tmp_path: Path) -> None:
    folder = mixed_folder("deepseek_v3", tmp_path / "in")
    source = open_source(folder)
    export(HubWeights(folder).read, source, tmp_path / "out", dtype="float16")
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    for name, tensor in before.items():
        wanted = torch.float16 if tensor.dtype == torch.bfloat16 else tensor.dtype
        assert after[name].dtype == wanted, name
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float16


def test_the_record_of_a_run_is_enough_for_what_it_trained(tmp_path: Path) -> None:
    for name, has_images in (("deepseek_v3", False), ("qwen3_5_moe", True)):
        folder, run = tiny_folder(name, tmp_path / name), tmp_path / f"run-{name}"
        weights = HubWeights(folder)
        keep_record(weights, RunFolder.open(run, "never"))
        assert (run / RECORD).exists()
        source = open_source(tmp_path / "gone", run)
        out = tmp_path / f"out-{name}"
        if has_images:
            with pytest.raises(CheckpointError, match=r"model\.visual.* no checkpoint holds it"):
                export(weights.read, source, out)
            continue
        export(weights.read, source, out)
        before, after = tensors_of(folder), tensors_of(out)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        theirs = transformers.AutoConfig.from_pretrained(folder).to_dict()
        assert transformers.AutoConfig.from_pretrained(out).to_dict() | {
            "_name_or_path": ""
        } == theirs | {"_name_or_path": ""}
