"""Folders of transformers' models: read by slices, into a checkpoint, and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moemesh.checkpoint import store
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.convert import checkpoint_weights
from moemesh.checkpoint.huggingface.hub_weights import HubWeights, stored_hub_tensors
from moemesh.checkpoint.huggingface.weight_folder import torch_dtype
from moemesh.checkpoint.load import Shard
from moemesh.checkpoint.store import open_checkpoint
from moemesh.config.errors import ConfigError
from moemesh.train.weights.conversion import open_weights
from moemesh.train.weights.weight_sources import config_of
from tests.hub.families import family_names, random_model, tiny_folder

#: A stack in the folder, experts by themselves, a text part among images, groups of several
#: parameters, a text part that the conversions of the larger model make.
REPRESENTATIVES = ("gpt_oss", "deepseek_v3", "qwen3_5_moe", "lara_mini", "minimax_m3_vl")
FAMILIES = [
    pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow)
    for name in dict.fromkeys([*REPRESENTATIVES, "gemma4", *family_names()])
]


def held(weights: HubWeights, experts: slice, rows: slice) -> list[Shard]:
    """Shards of some experts and some rows of everything else, filled from `weights`."""
    shards: list[Shard] = []
    for name, meta in weights.tensors.meta.items():
        shape, names = tuple(meta.shape), [f"model.{name}"]
        if name in weights.tensors.stacks:
            module, _, leaf = name.rpartition(".")
            held_here = range(shape[0])[experts]
            names, shape = [f"model.{module}.{one}.{leaf}" for one in held_here], shape[1:]
        start = rows.indices(shape[0])[0] if shape else 0
        tensor = torch.empty(shape, dtype=meta.dtype)[rows] if shape else torch.empty(())
        offset = (start, *(0 for _ in shape[1:])) if shape else ()
        shards += [
            Shard(name=one, shape=shape, offset=offset, tensor=tensor.clone()) for one in names
        ]
    weights.load_into(shards)
    return shards


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_go_through_a_checkpoint_by_slices_and_come_back(name: str, tmp_path: Path) -> None:
    """Four ranks hold uneven parts; what is written is equal bit by bit, and loads."""
    model = random_model(name)
    model.save_pretrained(tmp_path / "in")
    weights = HubWeights(tmp_path / "in")
    halves = (slice(3), slice(3, None))
    parts = [(experts, rows) for experts in (slice(5), slice(5, None)) for rows in halves]
    shards = [shard for experts, rows in parts for shard in held(weights, experts, rows)]
    whole = {(shard.name, shard.offset): shard for shard in shards}
    store.save(tmp_path / "saved", 0, list(whole.values()), {})
    read = checkpoint_weights(open_checkpoint(tmp_path / "saved", 0))
    stored = weights.folder.stored
    assert not weights.tensors.irreversible()
    written = {
        key: tensor.make().contiguous()
        for key, tensor in stored_hub_tensors(
            read, weights.tensors, lambda key: torch_dtype(stored[key].dtype)
        )
    }
    before = load_file(tmp_path / "in" / "model.safetensors")
    assert_same({key: before[key] for key in before if key not in weights.tensors.carried}, written)
    (tmp_path / "out").mkdir()
    carried = {key: before[key] for key in weights.tensors.carried}
    save_file({**written, **carried}, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path / "out")
    logits: list[Tensor] = []
    for folder in ("in", "out"):
        loaded, info = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        with torch.no_grad():
            ids = torch.arange(24)[None]
            logits.append(loaded.eval()(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*logits)


def test_a_rank_reads_the_experts_that_it_holds(tmp_path: Path) -> None:
    weights = HubWeights(tiny_folder("gpt_oss", tmp_path))
    held(weights, slice(2), slice(None))
    read = weights.folder.bytes_read
    stacks = sum(weights.tensors.meta[name].nbytes for name in weights.tensors.stacks)
    whole = sum(meta.nbytes for meta in weights.tensors.meta.values())
    assert read == whole - stacks + stacks // 4


def changed(folder: Path, change: Any) -> Path:
    """The folder with its tensors changed in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"{EXPERT} is missing \(one of 1 experts\)"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(320, 63)}),
            r"lm_head\.weight has shape \[320, 63\], config\.json makes it \[320, 64\]",
        ),
        (
            lambda t: t.update({EXPERT: torch.zeros(24, 64, dtype=torch.int8)}),
            rf"{EXPERT} is stored as int8 and config\.json names no such format",
        ),
        (
            lambda t: [t.pop(key) for key in [*t] if ".layers.1.mlp.gate." in key],
            r"model\.layers\.1\.mlp\.gate\.weight is missing",
        ),
    ],
)
def test_a_folder_of_other_weights_is_refused_by_name(
    change: Any, message: str, tmp_path: Path
) -> None:
    folder = changed(tiny_folder("qwen3_moe", tmp_path), change)
    with pytest.raises(CheckpointError, match=message):
        HubWeights(folder)


def test_a_folder_of_the_base_model_has_no_prefix(tmp_path: Path) -> None:
    """Tensors of the text part of an older layout, and of a base model with its head."""
    folder = tiny_folder("qwen3_next", tmp_path)
    before = load_file(folder / "model.safetensors")

    def strip(prefix: str) -> Any:
        def change(tensors: dict[str, Tensor]) -> None:
            for key in [*tensors]:
                tensors[prefix + key.removeprefix("model.")] = tensors.pop(key)

        return change

    for prefix in ("", "model.language_model."):
        weights = HubWeights(changed(folder, strip(prefix)))
        name = "model.layers.0.mlp.shared_expert.up_proj.weight"
        assert torch.equal(weights.read(name, [range(40), range(64)]), before[name])
        changed(folder, lambda tensors: (tensors.clear(), tensors.update(before)))


@pytest.mark.parametrize("name", ["mistral3", "kimi_k25", "nemotron_h_omni"])
def test_the_text_part_of_a_larger_model(name: str, tmp_path: Path) -> None:
    """Names that only the renamings of the larger model explain, and a head beside the base."""
    folder = tiny_folder(name, tmp_path)
    weights, whole = HubWeights(folder), random_model(name)
    part = next(
        module
        for module in whole.modules()
        if type(module) is type(weights.tensors.model.base_model)
    )
    expected = {f"model.{key}": tensor for key, tensor in part.state_dict().items()}
    if name == "nemotron_h_omni":  # the others have tied tables
        expected["lm_head.weight"] = whole.language_model.lm_head.weight
    assert expected.keys() == weights.tensors.meta.keys()
    for key, tensor in expected.items():
        assert torch.equal(weights.read(key, [range(size) for size in tensor.shape]), tensor), key


def test_a_head_of_its_own_is_not_the_embedding(tmp_path: Path) -> None:
    """transformers does not tie two stored tensors that differ, in a family whose names are others
    than those that `read_config` compares."""
    folder = tiny_folder("gpt2", tmp_path)
    table = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    HubWeights(changed(folder, lambda t: t.update({"lm_head.weight": table.clone()})))
    changed(folder, lambda t: t.update({"lm_head.weight": table + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* differ, and config\.json makes"):
        HubWeights(folder)


def test_tensors_of_no_part_are_carried_and_named(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    folder, config = tiny_folder("qwen3_moe", tmp_path), ["model.implementation=transformers"]
    notes: list[str] = []
    open_weights(config_of(folder, config), notes.append)
    assert notes == []
    changed(folder, lambda t: t.update({"mtp.x": torch.zeros(2), bias: torch.zeros(2)}))
    assert set(HubWeights(folder).tensors.carried) == {"mtp.x", bias}
    open_weights(config_of(folder, config), notes.append)
    assert notes == [
        f"{bias} and 1 more of {folder}: no part of the trained model; an export has them unchanged"
    ]


def test_a_quantized_folder_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3_moe", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="quantized weights are not read"):
        HubWeights(folder)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3_moe", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is never read.*save_pretrained"):
        HubWeights(folder)
