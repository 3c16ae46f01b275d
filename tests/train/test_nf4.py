"""A run on a base in NF4, from the folder to the export, by the commands of a user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moemesh.config.errors import ConfigError
from moemesh.config.plan import Plan
from moemesh.config.trainable import refusals
from moemesh.ops.nf4 import dequantize, quantize
from moemesh.sharding.load_run import load_run
from moemesh.sharding.parameters import tensors
from tests.huggingface import tiny
from tests.train.runs import losses, metrics, moemesh, said, sets

pytest.importorskip("transformers")

#: Weights of a folder that a base in NF4 holds in 4 bits.
QUANTIZED = ("_proj.weight", ".gate_up_proj", ".down_proj")
TRAIN = [
    *("data.tokenizer=bytes", "data.seq_len=16", "data.global_batch=4", "train.steps=3"),
    *("train.checkpoint_every=1", "train.validation_batches=1", "train.warmup_steps=0"),
    *("train.lr=0.01", "train.lr_schedule=constant", "lora.rank=3"),
]


def settings(folder: Path) -> list[str]:
    """The settings of a run on the base and the text in `folder`, which are written there."""
    tiny.make("qwen3_moe", hidden_size=64, moe_intermediate_size=128).save_pretrained(
        folder / "base"
    )
    (folder / "a.txt").write_text("What holds the base in four bits trains the rest. " * 40)
    return [*TRAIN, f"data.path={folder / 'a.txt'}", f"model.path={folder / 'base'}"]


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    return settings(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, which no test changes."""
    folder = tmp_path_factory.mktemp("nf4")
    said(
        "train", *sets(*settings(folder), "lora.base=nf4", "train.steps=1"), "--out", folder / "run"
    )
    return folder / "run"


def rounded(base: Path, out: Path) -> Path:
    """A copy of a folder with the numbers that NF4 gives its weights."""
    shutil.copytree(base, out)
    stored = load_file(base / "model.safetensors")
    for name, weight in stored.items():
        if name.endswith(QUANTIZED):
            stored[name] = dequantize(quantize(weight), weight.dtype)
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    return out


def predicted_memory(run: Path) -> dict[str, list[dict[str, int]]]:
    """The memory of a run, whose states are those that were predicted."""
    memory = json.loads((run / "memory.json").read_text())
    for key in ("dense_weights", "expert_weights", "gradients", "optimizer"):
        assert [one[key] for one in memory["ranks"]] == [one[key] for one in memory["predicted"]]
    return memory


def evaluated(source: Path, *more: str) -> float:
    data = source.parent / "a.txt"
    words = ["evaluate", str(source), "--data", str(data), "--seq-len", "16", "--json"]
    return json.loads(moemesh(*words, *sets(*more)).stdout)["loss"]


def test_the_merged_model_and_the_run_in_another_plan_have_one_loss(
    trained: Path, tmp_path: Path
) -> None:
    run = trained
    assert predicted_memory(run)
    manifest = json.loads((run / "checkpoints/step-1/manifest.json").read_text())
    names = {name for name in manifest["tensors"] if name.startswith("model.")}
    assert names and all("_lora_" in name for name in names)
    said("convert", run, tmp_path / "merged")
    (tmp_path / "a.txt").write_text((run.parent / "a.txt").read_text())
    merged = evaluated(tmp_path / "merged", "data.tokenizer=bytes")
    assert evaluated(run, "plan.dp=2", "plan.ep=2") == pytest.approx(merged, rel=1e-5)


@pytest.mark.slow
def test_from_the_folder_to_the_export(tmp_path: Path, given: list[str]) -> None:
    """Losses of the dequantized copy, a resume in another plan, the merged model, the adapters."""
    run, other = tmp_path / "run", tmp_path / "other"
    said("train", *sets(*given, "lora.base=nf4", "train.steps=2"), "--out", run)
    said(
        "train", run / "config.toml", *sets("train.steps=3", "plan.dp=2", "plan.ep=2"), "--out", run
    )
    copy = rounded(tmp_path / "base", tmp_path / "copy")
    said("train", *sets(*given, f"model.path={copy}"), "--out", other)
    assert losses(metrics(run)) == pytest.approx(losses(metrics(other)), rel=1e-6)
    # A checkpoint holds what trains, and names the base.
    manifest = json.loads((run / "checkpoints/step-3/manifest.json").read_text())
    names = {name for name in manifest["tensors"] if name.startswith("model.")}
    assert names and all("_lora_" in name for name in names)
    assert manifest["state"]["base"].startswith("blake2b")
    # Weights are at most 0.16 of fp32's.
    memory = predicted_memory(run)
    config = load_run([], given).config
    stacks = [one for one in tensors(config.model, Plan()) if one.is_expert]
    whole = sum(4 * torch.Size(one.shape).numel() for one in stacks if "_lora_" not in one.name)
    factors = sum(4 * torch.Size(one.shape).numel() for one in stacks if "_lora_" in one.name)
    assert sum(one["expert_weights"] - factors // 2 for one in memory["ranks"]) <= 0.16 * whole
    # The merged model is that of the run on the copy.
    for source in (run, other):
        said("convert", source, source.with_suffix(".merged"))
    merged = load_file(tmp_path / "run.merged/model.safetensors")
    for name, weight in load_file(tmp_path / "other.merged/model.safetensors").items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-5, atol=1e-5)
    loss = evaluated(run)
    assert evaluated(run, "plan.dp=2", "plan.ep=2") == pytest.approx(loss, rel=1e-5)
    bytes_ = "data.tokenizer=bytes"
    assert evaluated(tmp_path / "run.merged", bytes_) == pytest.approx(loss, rel=1e-5)
    assert said("generate", run, "--prompt", "What", "--max-tokens", 3)
    # The adapters beside the base in 4 bits.
    said("convert", run, tmp_path / "peft", "--adapter")
    keys = [bytes_, "lora.rank=3", f"lora.path={tmp_path / 'peft'}"]
    assert evaluated(tmp_path / "base", *keys, "lora.base=nf4") == pytest.approx(loss, rel=1e-5)
    assert evaluated(tmp_path / "base", *keys) != pytest.approx(loss, rel=1e-5)


def test_another_base_is_refused(trained: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(trained, run)
    rounded(trained.parent / "base", other)
    words = ["train", run / "config.toml", *sets(f"model.path={other}", "train.steps=2")]
    text = said(*words, "--out", run, "--allow-change", "model.path", code=2)
    assert "other weights" in text and "model.path = the folder of the first start" in text
    base = (trained.parent / "base").rename(tmp_path / "gone")
    assert "base holds no weights" in said("convert", run, tmp_path / "merged", code=2)
    base.rename(trained.parent / "base")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["lora.rank=0"], ('lora.base = "nf4"', "rank = 0 trains all of them", "rank = 16")),
        (["plan.dp=4", "plan.etp=4"], ("etp = 4 cuts the 128 inputs of down_proj", "etp = 2")),
        (["plan.tp=2"], ("tp = 2 cuts the 64 inputs of o_proj of attention", "tp = 1")),
        (['train.train_only=["*.qkv"]'], ("layers.0.attention.qkv would train", "in 4 bits")),
        (['train.train_only=["*.experts.3.*"]'], ("experts.gate_up would train", "in 4 bits")),
        (["plan.dp=2", "plan.ep=2", "plan.spare_slots=2"], ("spare_slots = 2", "lora.base = nf4")),
        (["train.rebalance_every=2"], ("rebalance_every = 2 moves experts",)),
    ],
)
def test_what_a_base_in_nf4_refuses(
    given: list[str], keys: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    if "plan.tp=2" not in keys:
        given = [*given, "plan.attention_exit=all_to_all"]
    text = said("train", *sets(*given, "lora.base=nf4", *keys), "--out", tmp_path / "run", code=2)
    assert all(word in text for word in words), text
    assert not (tmp_path / "run").exists()


def test_rows_of_odd_length_are_refused() -> None:
    config = load_run([], ["lora.rank=2", "lora.base=nf4", "model.intermediate_size=385"]).config
    (problem,) = refusals(config)
    assert (
        problem.key == "lora.base" and "down_proj of mlp has 385 numbers a row" in problem.message
    )


def test_esft_is_refused(tmp_path: Path, given: list[str]) -> None:
    table = tmp_path / "table.json"
    words = ["esft", "scores", tmp_path / "base", tmp_path / "a.txt", "--seq-len", 16]
    said(*words, "--samples", 4, "--out", table, *sets("data.tokenizer=bytes"))
    keys = sets(*given, "lora.base=nf4", f"train.esft={table}")
    text = said("train", *keys, "--out", tmp_path / "run", code=2)
    assert "train.esft" in text and "lora.base = nf4 holds it in 4 bits" in text


def test_a_base_that_is_drawn_is_refused(tmp_path: Path, given: list[str]) -> None:
    keys = [key for key in given if not key.startswith("model.path")]
    text = said("train", *sets(*keys, "lora.base=nf4"), "--out", tmp_path / "run", code=2)
    assert "base = nf4 reads the base at every start" in text
    with pytest.raises(ConfigError, match="base"):
        load_run([], [*given, "lora.base=int8"])


def test_the_base_is_not_exported(trained: Path, tmp_path: Path) -> None:
    """A delta has what trained, and folders have no dtype of 4 bits."""
    run = trained
    assert "--adapter" in said("convert", run, tmp_path / "out", "--delta", code=2)
    assert "nf4" in said("convert", run, tmp_path / "out", "--dtype", "nf4", code=2)
    assert not (tmp_path / "out").exists()
