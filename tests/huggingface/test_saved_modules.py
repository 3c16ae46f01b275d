"""Whole weights beside adapters in PEFT's format: `modules_to_save`, and those of a vocabulary."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.adapters import CONFIG, WEIGHTS
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError
from moemesh.model.batch import Batch
from moemesh.sharding.load_run import load_run
from moemesh.train.inference.evaluation import load as load_on
from moemesh.train.preparation import check_inputs
from moemesh.train.weights.conversion import write_adapter
from tests.huggingface.ours import assert_near
from tests.huggingface.tiny import build, logits, make, save
from tests.train.runs import moemesh

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS, TARGETS = (torch.arange(2 * 41).view(2, 41) * 7 % 256).unfold(1, 40, 1).unbind(1)
LORA = ["lora.rank=4", "lora.alpha=6", 'lora.targets=["q_proj"]']
ENDS = ["lm_head", "embed_tokens"]


def our_losses(folder: Path, keys: list[str], run: Path | None = None) -> torch.Tensor:
    """Losses of the tokens in our model of `folder`, or of `run`."""
    config = load_run([], [f"model.path={folder}", *LORA, *keys], {}).config
    batch = Batch(tokens_BS=TOKENS, targets_BS=TARGETS, sequences_B=torch.arange(2), training=False)
    parallel = load_on(config, Mesh.single("cpu"), run or folder)
    return parallel.model(batch).losses_T.detach()


def their_losses(model: Any) -> torch.Tensor:
    return F.cross_entropy(logits(model, TOKENS).flatten(0, 1), TARGETS.flatten(), reduction="none")


def saved_by_peft(
    kind: str, folder: Path, modules: list[str] | None, is_tied: bool = False, **options: Any
) -> Any:
    """PEFT's model of the family `kind` whose adapters and `modules` are not those of its base,
    written to `folder`."""
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], modules_to_save=modules,
        task_type="CAUSAL_LM", init_lora_weights=False,
    )  # fmt: skip
    base = make(kind, tie_word_embeddings=True) if is_tied else copy.deepcopy(build(kind))
    theirs = peft.get_peft_model(base.eval(), settings)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            if "modules_to_save" in name:
                tensor.add_(torch.linspace(-0.1, 0.1, tensor.numel()).view_as(tensor))
    theirs.save_pretrained(folder, **options)
    return theirs


@pytest.mark.usefixtures("architectures")
@pytest.mark.parametrize("implementation", ["moemesh", "transformers"])
@pytest.mark.parametrize("modules", [["lm_head"], ENDS, ["model.norm"]])
def test_saved_modules_are_computed_as_in_peft(
    tmp_path: Path, implementation: str, modules: list[str]
) -> None:
    theirs = saved_by_peft("qwen3_moe", tmp_path / "peft", modules)
    folder = save("qwen3_moe", tmp_path / "base")
    expected = their_losses(theirs)
    assert (expected - their_losses(build("qwen3_moe"))).abs().max() > 1e-2
    keys = [f"lora.path={tmp_path / 'peft'}", f"model.implementation={implementation}"]
    assert_near(our_losses(folder, keys), expected)


def test_embeddings_that_peft_saves_without_a_list_are_read(tmp_path: Path) -> None:
    theirs = saved_by_peft("llama", tmp_path / "peft", None, save_embedding_layers=True)
    stored = load_file(tmp_path / "peft" / WEIGHTS)
    ends = [name for name in stored if "lora" not in name]
    assert any("embed_tokens" in name for name in ends)
    for name in ends:
        stored[name] = stored[name] * 1.5
    save_file(stored, tmp_path / "peft" / WEIGHTS)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(build("llama")), tmp_path / "peft")
    folder = save("llama", tmp_path / "base")
    assert_near(our_losses(folder, [f"lora.path={tmp_path / 'peft'}"]), their_losses(theirs))


def test_a_run_trains_them_and_exports_them_to_peft(tmp_path: Path) -> None:
    saved_by_peft("qwen3_moe", tmp_path / "peft", ENDS)
    folder = save("qwen3_moe", tmp_path / "base")
    text = tmp_path / "a.txt"
    text.write_text("some text that is read\n" * 200)
    keys = [f"model.path={folder}", f"lora.path={tmp_path / 'peft'}", *LORA, "data.seq_len=32"]
    keys += [f"data.path={text}", "data.tokenizer=bytes", "data.global_batch=2", "train.steps=2"]
    with pytest.raises(CheckpointError, match=r"train_only = \[\"embedding.weight\", \"head.weig"):
        check_inputs(load_run([], keys, {}))
    keys.append('train.train_only=["embedding.weight", "head.weight"]')
    run = tmp_path / "run"
    done = moemesh(
        "train", *(word for key in keys for word in ("--set", key)), "--set", "plan.dp=2",
        "--out", str(run),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    write_adapter(run, tmp_path / "out")
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("peft", "out"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    written = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert written["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(build("qwen3_moe")), tmp_path / "out")
    assert_near(our_losses(folder, [], run), their_losses(theirs))
    for gone in (tmp_path / "peft", folder / "model.safetensors"):
        gone.rename(tmp_path / f"old-{gone.name}")  # the checkpoints have all weights
    resumed = moemesh("train", str(run), "--set", "train.steps=3", "--set", "plan.dp=1")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize(
    ("kind", "modules", "message"),
    [
        ("qwen3_moe", ["o_proj"], "modules_to_save has o_proj, and the folder no weights of it"),
        ("qwen3_moe", ["norm"], "layernorm.weight does not belong to this model|q_norm"),
        ("llama", ["lm_head"], "the embedding of this model is its head"),
    ],
)
def test_other_modules_are_refused(
    tmp_path: Path, kind: str, modules: list[str], message: str
) -> None:
    is_tied = kind == "llama"
    saved_by_peft(kind, tmp_path / "peft", modules, is_tied)
    folder = tmp_path / "base"
    make(kind, tie_word_embeddings=is_tied).save_pretrained(folder)
    with pytest.raises(CheckpointError, match=message):
        our_losses(folder, [f"lora.path={tmp_path / 'peft'}"])


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    saved_by_peft("qwen3_moe", tmp_path / "peft", ["lm_head"])
    stored = load_file(tmp_path / "peft" / WEIGHTS)
    name = "base_model.model.lm_head.weight"
    stored[name] = torch.cat([stored[name], stored[name][:3]])
    save_file(stored, tmp_path / "peft" / WEIGHTS)
    folder = save("qwen3_moe", tmp_path / "base")
    with pytest.raises(CheckpointError, match="resize the base to the vocabulary of the adapters"):
        our_losses(folder, [f"lora.path={tmp_path / 'peft'}"])


def test_whole_weights_are_not_put_onto_a_packed_base(tmp_path: Path) -> None:
    saved_by_peft("qwen3_moe", tmp_path / "peft", ["lm_head"])
    folder = save("qwen3_moe", tmp_path / "base")
    with pytest.raises(CheckpointError, match="not put onto a base in 4 bits"):
        our_losses(folder, [f"lora.path={tmp_path / 'peft'}", "lora.base=nf4"])


def test_adapters_of_a_run_that_trains_more_are_refused(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "base")
    text = tmp_path / "a.txt"
    text.write_text("some text that is read\n" * 200)
    keys = [f"model.path={folder}", *LORA, "data.seq_len=32", f"data.path={text}"]
    keys += ["data.tokenizer=bytes", "data.global_batch=2", "train.steps=1"]
    keys += ['train.train_only=["*.router.weight"]']
    words = [word for key in keys for word in ("--set", key)]
    assert moemesh("train", *words, "--out", str(tmp_path / "run")).returncode == 0
    with pytest.raises(ConfigError, match=r"trains layers\.0.*router\.weight besides its adapters"):
        write_adapter(tmp_path / "run", tmp_path / "out")
