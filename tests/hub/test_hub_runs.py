"""Runs of transformers' models from their folder to their export, by commands."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from tests.hub.families import random_model, tiny_folder
from tests.train.runs import metrics, moemesh, said, sets

PAIR = ("--set", "plan.dp=2", "--set", "plan.ep=2")
WIDTHS = ("--set", "plan.dp=2", "--set", "plan.etp=2")
STAGES = ("--set", "plan.pp=2", "--set", "plan.microbatches=2")
LENGTH = 40


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"{number} is {number * number % 97}. " for number in range(200)))
    return path


def chat_file(folder: Path) -> Path:
    path = folder / "chats.jsonl"
    turns = [(f"{number} squared?", f"{number * number}") for number in range(40)]
    roles = ("user", "assistant")
    for turn in turns:
        messages = [{"role": r, "content": text} for r, text in zip(roles, turn, strict=True)]
        with path.open("a") as file:
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def loss_of(folder: Path, text: Path, adapters: Path | None = None) -> float:
    """The mean loss over consecutive windows, by transformers, or PEFT over it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = type(random_model(config.model_type)).from_pretrained(folder).eval()
    if adapters is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            model = peft.PeftModel.from_pretrained(model, adapters).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"]
    count = (len(ids) - 1) // LENGTH
    inputs, targets = (
        torch.tensor(ids[shift : shift + count * LENGTH]).view(count, LENGTH) for shift in (0, 1)
    )
    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


#: A folder of images and text, and text models of several kinds of layers.
FAMILIES = (
    "gemma4", "qwen3_next", "kimi_linear", "lfm2_moe", "nemotron_h",
    "granitemoehybrid", "glm_moe_dsa",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("qwen3_5_moe", PAIR),
        pytest.param("qwen3_5_moe", STAGES, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", WIDTHS, marks=pytest.mark.slow),
        *(pytest.param(name, PAIR, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_a_folder_trains_on_two_ranks_resumes_on_one_and_comes_out(
    name: str, plan: tuple[str, ...], tmp_path: Path
) -> None:
    folder, text, out = tiny_folder(name, tmp_path / "in"), text_file(tmp_path), tmp_path / "run"
    keys = [f"model.path={folder}", f"data.path={chat_file(tmp_path)}", f"data.seq_len={LENGTH}"]
    keys += ["data.global_batch=4", "train.steps=2", "train.lr=1e-3", "train.warmup_steps=1"]
    said("train", "--out", out, *sets(*keys), *plan)
    one = sets(
        "train.steps=3", "plan.pp=1", "plan.dp=1", "plan.ep=1", "plan.etp=1", "plan.microbatches=1"
    )
    said("train", out / "config.toml", "--out", out, *one)
    assert len(metrics(out)) == 3
    assert "finished step 3 of 3" in said("explain", out)
    words = ["generate", out, "--chat", "--prompt", "5 squared?", "--max-tokens", 6, "--json"]
    answer = json.loads(moemesh(*map(str, words), *PAIR).stdout)
    assert 0 < len(answer["tokens"]) <= 6

    exported = tmp_path / "exported"
    said("convert", out, exported)
    before, after = (load_file(one / "model.safetensors") for one in (folder, exported))
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype for key in before)
    images = [key for key in before if "vision" in key or "visual" in key]
    assert bool(images) == ("vision_config" in json.loads((folder / "config.json").read_text()))
    assert all(torch.equal(before[key], after[key]) for key in images)
    assert sum(not torch.equal(before[key], after[key]) for key in before) > 20
    words = ["evaluate", out, "--data", text, "--seq-len", LENGTH, "--json", *PAIR]
    evaluated = json.loads(moemesh(*map(str, words)).stdout)["loss"]
    assert evaluated == pytest.approx(loss_of(exported, text), abs=2e-6)


@pytest.mark.slow
def test_a_run_is_made_of_a_folder_and_a_delta_put_onto_it(tmp_path: Path) -> None:
    folder, out = tiny_folder("deepseek_v4", tmp_path / "in"), tmp_path / "run"
    said("convert", folder, out)
    said("convert", out, tmp_path / "back")
    same = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == same
    text = text_file(tmp_path)
    keys = [f"data.path={text}", f"data.seq_len={LENGTH}", "data.global_batch=4", "train.steps=1"]
    keys += ['train.train_only=["*.layers.1.mlp.experts.*"]']
    said("train", out / "config.toml", "--out", tmp_path / "tuned", *sets(*keys))
    said("convert", tmp_path / "tuned", tmp_path / "delta", "--delta")
    said("convert", tmp_path / "tuned", tmp_path / "whole")
    said("convert", folder, tmp_path / "applied", "--apply", tmp_path / "delta")
    whole, applied = (tmp_path / one / "model.safetensors" for one in ("whole", "applied"))
    assert whole.read_bytes() == applied.read_bytes() != same
    delta = load_file(tmp_path / "delta" / "model.safetensors")
    assert delta and all(".1.ffn.experts." in name or ".1.mlp.experts." in name for name in delta)


@pytest.mark.slow
def test_scores_of_experts_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    folder, text = tiny_folder("qwen3_next", tmp_path / "in"), text_file(tmp_path)
    tables: list[dict[str, object]] = []
    for name, more in (("one", ()), ("two", PAIR)):
        table = tmp_path / f"{name}.json"
        said("esft", "scores", folder, text, "--seq-len", LENGTH, "--out", table, *more)
        tables.append(json.loads(table.read_text()))
    assert tables[0] == tables[1]
    shares = tables[0]["scores"]
    assert isinstance(shares, dict) and len(shares) == 2
    assert all(sum(row["token"]) == pytest.approx(1.0) for row in shares.values())
