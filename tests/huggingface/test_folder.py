"""Folders that are not as they should be: one message that names file and tensor, nothing used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.contents import FolderContents, StoredTensor
from moemesh.checkpoint.huggingface.convert import carry_along, write_folder
from moemesh.checkpoint.huggingface.logical import ahead_tensors, logical_tensors
from moemesh.checkpoint.huggingface.weight_folder import HuggingFaceWeights, WeightFolder
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.folder import INDEX, SINGLE, lacks_weights
from moemesh.config.model import ModelConfig
from moemesh.config.run import RunConfig
from moemesh.sharding.load_run import load_run
from moemesh.train.inference import evaluation
from moemesh.train.weights.weight_sources import check_folder, check_weights
from tests.huggingface import ours
from tests.huggingface.ours import assert_near, deferred
from tests.huggingface.tiny import load, logits, make, save

CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_shared_experts=0, num_experts=4)
KIND = "qwen3_moe"
GIVEN = {"model_type": KIND}
TOKENS = torch.arange(80).view(2, 40) * 7 % 288


def tensors() -> dict[str, torch.Tensor]:
    named = logical_tensors(CONFIG, KIND)
    return {
        piece.source: torch.randn(piece.stored) for one in named.values() for piece in one.pieces
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and an index."""
    path = tmp_path / "model"
    write_folder(path, deferred(tensors()), GIVEN, file_bytes=300_000)
    assert len(list(path.glob("model-*.safetensors"))) > 1
    return path


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceWeights(folder, CONFIG, GIVEN)
    return str(caught.value)


def test_a_good_folder_is_read_by_slices(folder: Path) -> None:
    weights = HuggingFaceWeights(folder, CONFIG, GIVEN)
    name = "layers.1.feed_forward.experts.3.down"
    whole = weights.read(name, [range(32), range(128)])
    part = weights.read(name, [range(4, 9), range(100, 128)])
    assert torch.equal(whole[4:9, 100:], part)


def test_a_file_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    file = sorted(folder.glob("model-*"))[0]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "is not a regular file" in refused(folder)


def test_missing_extra_and_misshapen_tensors_are_told_together(tmp_path: Path) -> None:
    changed = tensors()
    del changed["model.norm.weight"]
    changed["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 32)
    changed["model.vision.weight"] = torch.zeros(1)
    save_file(changed, tmp_path / SINGLE)
    message = refused(tmp_path)
    assert "model.norm.weight is missing" in message
    assert "model.vision.weight belongs to no part of the model" in message
    assert "q_proj.weight has shape [3, 32], config.json makes it [128, 32]" in message


def test_an_index_and_files_that_disagree(folder: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        files["model.norm.weight"] = next(
            file for file in files.values() if file != files["model.norm.weight"]
        )

    change_index(folder, change)
    assert "model.norm.weight" in refused(folder)


def test_a_file_that_is_missing_or_cut(folder: Path) -> None:
    file = sorted(folder.glob("model-*"))[1]
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    ends = f"ends at byte {len(content) - 10}, its header describes {len(content)} bytes"
    assert f"{ends}: the tensor model.norm.weight is cut; a download" in refused(folder)
    file.write_bytes(content[:100])
    assert "ends at byte 100, within its header of" in refused(folder)
    file.write_bytes(content + b"more")
    assert "it is damaged" in refused(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refused(folder)
    file.unlink()
    assert file.name in refused(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert INDEX in refused(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        WeightFolder(Path(__file__))


@pytest.mark.parametrize(
    ("kind", "num_ahead", "names", "refused_name"),
    [
        (KIND, 0, ["2.eh_proj.weight", "2.mlp.gate.weight"], None),
        (KIND, 0, ["3.hnorm.weight", "3.mlp.gate.weight"], None),
        (KIND, 0, ["2.mlp.gate.weight"], "2.mlp.gate.weight"),
        (KIND, 1, ["2.mlp.gate.weight"], None),
        (KIND, 1, ["10.mlp.gate.weight", "3.mlp.gate.weight", "2.mlp.gate.weight"], "3.mlp"),
        (KIND, 1, ["2.mlp.gate.weight", "3.eh_proj.weight"], "2.mlp.gate.weight"),
        # Families that are known to name a part that no other layer has.
        ("deepseek_v3", 1, ["2.mlp.gate.weight"], "2.mlp.gate.weight"),
        ("deepseek_v3", 0, ["2.enorm.weight", "2.mlp.gate.weight"], None),
        (KIND, 0, ["9" * 5000 + ".mlp.gate.weight"], "belongs to no part of the model"),
    ],
)
def test_layers_behind_the_last_are_prediction_layers_or_named(
    kind: str, num_ahead: int, names: list[str], refused_name: str | None
) -> None:
    extra = [f"model.layers.{name}" for name in names]
    expected = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    contents = SimpleNamespace(path="P", tensors=expected | dict.fromkeys(extra))
    known = ahead_tensors(contents.tensors, CONFIG, kind, num_ahead)
    contents.tensors = {
        name: StoredTensor("", "float32", expected.get(name, ())) for name in contents.tensors
    }
    if refused_name is None:
        FolderContents.check(contents, expected, known, CONFIG.num_layers)
        assert known == set(extra)
        return
    with pytest.raises(CheckpointError) as caught:
        FolderContents.check(contents, expected, known, CONFIG.num_layers)
    assert refused_name in str(caught.value)
    if len(names[0]) < 100:
        assert "is after the 2 layers of config.json and not of a pred" in str(caught.value)


def test_an_unknown_tensor_of_a_layer_that_is_trained_ahead_is_named() -> None:
    config = CONFIG.model_copy(update={"num_mtp_layers": 1})
    names = [
        "model.layers.2.enorm.weight",
        "model.layers.2.a",
        "model.layers.2.embed_tokens.weight",
    ]
    assert ahead_tensors(names, config, "deepseek_v3", 1) == {names[2]}


def test_one_file_counts_before_an_index(folder: Path) -> None:
    """transformers reads the same way a folder where a model was saved over a larger one."""
    changed = {name: tensor.zero_() for name, tensor in tensors().items()}
    save_file(changed, folder / SINGLE)
    weights = HuggingFaceWeights(folder, CONFIG, GIVEN)
    assert not weights.read("norm.weight", [range(32)]).any()
    next(folder.glob("model-*")).unlink()
    check_folder(folder)
    HuggingFaceWeights(folder, CONFIG, GIVEN)


def test_files_of_two_conversions_do_not_mix(folder: Path, tmp_path: Path) -> None:
    """Loaders would take one file for the whole model."""
    with pytest.raises(CheckpointError, match=rf"{INDEX}: is a file of another model"):
        write_folder(folder, deferred(tensors()), {})
    write_folder(tmp_path / "one", deferred(tensors()), {})
    with pytest.raises(CheckpointError, match=rf"{SINGLE}: is a file of another model"):
        write_folder(tmp_path / "one", deferred(tensors()), {}, file_bytes=300_000)


def test_pieces_of_different_dtypes_keep_their_numbers(tmp_path: Path) -> None:
    """Queries in fp16 beside keys in fp32 and values in bf16."""
    named = tensors()
    expected = {name: named[name].clone() for name in named}
    for name in named:
        if "q_proj" in name or "v_proj" in name:
            named[name] = named[name].to(torch.float16 if "q_proj" in name else torch.bfloat16)
            expected[name] = named[name].float()
    for folder, values in ((tmp_path / "mixed", named), (tmp_path / "full", expected)):
        folder.mkdir()
        save_file(values, folder / SINGLE)
    mixed, full = (HuggingFaceWeights(tmp_path / one, CONFIG, GIVEN) for one in ("mixed", "full"))
    name = "layers.1.attention.qkv"
    box = [range(size) for size in full.tensors[name].shape]
    assert torch.equal(mixed.read(name, box), full.read(name, box))


def test_an_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    named = deferred(tensors())
    stop = KeyError("stopped")

    def on_file(done: int, total: int) -> None:
        if done == 1:
            raise stop

    with pytest.raises(KeyError):
        write_folder(tmp_path / "out", named, {}, file_bytes=300_000, on_file=on_file)
    (first,) = (tmp_path / "out").iterdir()
    written = first.stat().st_ino
    assert not (tmp_path / "out" / INDEX).exists()
    write_folder(tmp_path / "out", named, {}, file_bytes=300_000)
    assert first.stat().st_ino == written, "a file was written twice"
    assert WeightFolder(tmp_path / "out").tensors.keys() == named.keys()


def test_a_conversion_does_not_keep_the_weights_of_an_earlier_step(tmp_path: Path) -> None:
    """Same names, same shapes: only one number of the last tensor differs."""
    named = tensors()
    write_folder(tmp_path, deferred(named), {})
    write_folder(tmp_path, deferred(named), {})  # the second time nothing is written
    later = named | {max(named): named[max(named)].clone()}
    later[max(named)].view(-1)[-1] += 1
    with pytest.raises(CheckpointError, match="holds other weights"):
        write_folder(tmp_path, deferred(later), {})


def test_a_conversion_does_not_mix_models(folder: Path) -> None:
    other = deferred({"model.norm.weight": torch.zeros(2)})
    (folder / SINGLE).write_bytes(sorted(folder.glob("model-*"))[0].read_bytes())
    with pytest.raises(CheckpointError, match="another model"):
        write_folder(folder, other, {})


def test_small_files_are_carried_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "config.json", "chat_template.jinja", ".hidden", "a.bin"):
        (source / name).write_text(name)
    assert carry_along(source, tmp_path / "out") == ["chat_template.jinja", "tokenizer.json"]


@pytest.mark.parametrize(
    ("kind", "prefixed"),
    [
        ("llama", lambda name: name.removeprefix("model.")),
        ("qwen3_moe", lambda name: name.removeprefix("model.")),
        ("gpt_oss", lambda name: f"model.{name}"),
    ],
)
def test_another_prefix(tmp_path: Path, kind: str, prefixed: Callable[[str], str]) -> None:
    """Saved from the base model, or from a module around: as transformers loads it."""
    folder = save(kind, tmp_path / "model")
    expected = logits(load(folder, dtype=torch.float32), TOKENS)
    given = load_file(folder / SINGLE)
    moved = {prefixed(name): one for name, one in given.items()}
    save_file(moved, folder / SINGLE, {"format": "pt"})
    theirs = logits(load(folder, dtype=torch.float32), TOKENS)
    assert_near(theirs, expected)
    assert_near(ours.logits(ours.load(folder), TOKENS)[0], expected)
    twice = dict(load_file(folder / SINGLE))
    for name in ("norm.weight", "model.norm.weight", "model.model.norm.weight"):
        twice[name] = given["model.norm.weight"].clone()
    save_file(twice, folder / SINGLE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"with and without|belongs to no part"):
        ours.load(folder)


def test_a_base_model_with_tied_tables(tmp_path: Path) -> None:
    """`model.model.save_pretrained` has no head to save."""
    model = make("llama", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / SINGLE))
    assert_near(ours.logits(ours.load(tmp_path), TOKENS)[0], logits(model, TOKENS))


#: Content of a folder, by file -> the kind that a message names, and its remedy.
OTHERS = {
    "model-Q4.gguf": ("weights in GGUF", "original weights, in safetensors"),
    "checkpoints/step-2": ("a run of moemesh", "moemesh convert [^ ]*other FOLDER"),
    "zero_to_fp32.py": ("a checkpoint of DeepSpeed", "python [^ ]*other/zero_to_fp32.py"),
    "fsdp_0/__0_0.distcp": ("a distributed checkpoint of torch", "merge-weights [^ ]*other/fsdp_0"),
    "tuned/config.json": ("folders of models", "model.path=[^ ]*other/tuned"),
    "model-00001-of-00002.safetensors": ("weights alone", "the config.json of the same model"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    kind, remedy = OTHERS[name]
    file = tmp_path / "other" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_run([], [f"model.path={tmp_path / 'other'}"])
    assert re.search(f"other holds {kind}, and no config.json", str(caught.value))
    assert re.search(f"fix: .*{remedy}", str(caught.value))
    if kind != "a run of moemesh":
        with pytest.raises(ConfigError, match=kind):
            check_weights(tmp_path / "other")


@pytest.mark.parametrize("name", ["model.safetensors", "x.gguf", "notes.md"])
def test_a_file_is_no_model(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.truncate(8 << 20)
    with pytest.raises(ConfigError, match=rf"{name} is a file; .*\s+fix: model.path={folder}\b"):
        load_run([], [f"model.path={folder / name}"])
    with pytest.raises(CheckpointError, match=rf"weights are in its folder: model.path={folder}$"):
        raise CheckpointError(lacks_weights(folder / "config.json"))


def test_the_address_of_a_model() -> None:
    address = "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main"
    with pytest.raises(ConfigError, match=r"fix: model\.path=Qwen/Qwen3-0\.6B"):
        load_run([], [f"model.path={address}"])
    with pytest.raises(ConfigError, match=r"fix: model\.path=Qwen3-0\.6B"):
        load_run([], ["model=Qwen3-0.6B"])


@pytest.mark.usefixtures("architectures")
def test_a_mistral_with_kinds_of_layers_is_a_ministral(tmp_path: Path) -> None:
    """`AutoConfig` changes its family, whose windows alternate; our own code has none of it."""
    model = make("mistral", sliding_window=24)
    model.save_pretrained(tmp_path / "plain")
    exported = ours.there_and_back(tmp_path / "plain", tmp_path)
    assert load(exported).config.model_type == "mistral"
    file = tmp_path / "plain" / "config.json"
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": kinds}))
    assert load(tmp_path / "plain").config.model_type == "ministral"
    keys = [f"model.path={tmp_path / 'plain'}"]
    with pytest.raises(ConfigError, match='model_type = "ministral"'):
        load_run([], [*keys, "model.implementation=moemesh"])
    assert load_run([], keys).config.model.implementation == "transformers"


def test_weights_of_another_shape_are_found_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("llama", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": 64}))
    config = load_run([], [f"model.path={folder}"]).config
    made: list[RunConfig] = []
    monkeypatch.setattr(evaluation, "construct", lambda config, mesh: made.append(config))
    with pytest.raises(CheckpointError, match="shape"):
        evaluation.load(config, Mesh.single("cpu"), folder)
    assert not made
