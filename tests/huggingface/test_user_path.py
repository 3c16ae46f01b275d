"""The path of a user, by the commands of a section of docs/finetuning.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moemesh.cli import main
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, UserError
from moemesh.model.batch import Batch
from moemesh.sharding.load_run import load_run
from moemesh.train.inference.evaluation import load
from moemesh.train.inference.generation import chooser, continuation, generate
from moemesh.train.weights.weight_sources import config_of
from tests import commands
from tests.documents import ROOT
from tests.huggingface import tiny
from tests.huggingface.conversations import add_tokenizer, write_sums
from tests.huggingface.ours import assert_near, assert_same_weights
from tests.huggingface.tiny import build, save
from tests.ranks import run_on_ranks
from tests.train.runs import moemesh, said, sets
from tests.waiting import PATIENCE, until

transformers = pytest.importorskip("transformers")

PAGE, TITLE = ROOT / "docs/finetuning.md", "## From download to export"
MODEL = "Qwen3-30B-A3B"
STEPS = 12
#: The recipe's sizes on two processes of this machine; the environment is stronger than a file.
SMALL = {
    "plan__dp": 2, "plan__tp": 1, "plan__ep": 2, "plan__microbatches": 1, "data__seq_len": 64,
    "data__global_batch": 8, "train__dtype": "float32", "train__steps": STEPS, "train__lr": 3e-3,
    "train__warmup_steps": 2, "train__validation_batches": 1,
}  # fmt: skip


def commands_of_page() -> list[list[str]]:
    """The commands of the section, word by word."""
    section = PAGE.read_text().split(TITLE)[1].split("\n## ")[0]
    lines = "".join(re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    return [shlex.split(line, comments=True) for line in lines.splitlines() if line]


def command(words: str) -> list[str]:
    """The command of the page that begins with `words`."""
    (found,) = (line for line in commands_of_page() if shlex.join(line).startswith(words))
    return found


class User:
    """Somebody with a model, a tokenizer and conversations in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recipes").symlink_to(ROOT / "recipes")
        model = add_tokenizer(save("qwen3_moe", folder / MODEL))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
        write_sums(folder / "chats.jsonl", 300)
        (folder / "held-out.txt").write_text("what is 12 + 30? it is 42. " * 160)

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        assert words[0] == "moemesh"
        small = {f"MOEMESH__{key}": str(value) for key, value in SMALL.items()}
        return subprocess.Popen(
            [commands.python(), "-m", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, **(small if words[1] in ("train", "config") else {})},
        )

    def run(self, words: list[str]) -> str:
        process = self.start(words)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, f"{shlex.join(words)}\n{out}{err}"
        return out

    def stop_early(self, words: list[str], run: Path) -> None:
        """Press Ctrl-C after the first steps."""
        process = self.start(words)
        metrics = run / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, out + err
        assert "the same command resumes from there" in out

    def losses(self, run: Path) -> list[float]:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


IDS = torch.randint(0, 96, (2, 128), generator=torch.Generator().manual_seed(1))


def agree_with_transformers(run: Path, exported: Path) -> None:
    """Logits of the run here, and of the export there."""
    model = load(config_of(run, []), Mesh.single("cpu"), run).model
    batch = Batch(tokens_BS=IDS, targets_BS=IDS, sequences_B=torch.arange(2), training=False)
    with torch.no_grad():
        ours = model.logits(batch).view(2, 128, -1)
    assert_near(ours, tiny.logits(tiny.load(exported), IDS))


def loss_of_transformers(folder: Path, text: str) -> float:
    model = tiny.load(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        return float(model(ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:]).loss)


@pytest.mark.documents
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    user, by_verb = User(tmp_path), dict[str, list[str]]()
    for words in commands_of_page():
        by_verb.setdefault(" ".join(words[:2]), words)
    train = by_verb["moemesh train"]
    assert "ok: 2 ranks" in user.run(["moemesh", "config", "check", *train[2:3]])
    run, whole = tmp_path / "runs" / Path(train[2]).stem, tmp_path / "whole"
    user.run([*train, "--out", str(whole)])
    user.stop_early(train, run)
    assert "resumed from step" in user.run(train)
    losses = user.losses(run)
    assert losses == user.losses(whole) and len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5, "it learns"

    convert = by_verb["moemesh convert"]
    user.run(convert)
    exported = tmp_path / convert[3]
    assert (exported / "tokenizer.json").exists() and (exported / "chat_template.jinja").exists()
    user.run(["moemesh", "convert", str(whole), str(tmp_path / "from-whole")])
    assert_same_weights(exported, tmp_path / "from-whole")
    agree_with_transformers(run, exported)

    measured = json.loads(user.run([*by_verb["moemesh evaluate"], "--json"]))
    text = (tmp_path / "held-out.txt").read_text()[: measured["tokens"] + 1]
    assert measured["loss"] == pytest.approx(loss_of_transformers(exported, text), abs=2e-6)
    generate = by_verb["moemesh generate"]
    written = user.run(generate)
    assert written.startswith(generate[generate.index("--prompt") + 1])
    assert written == user.run(["moemesh", "generate", convert[3], *generate[3:]])


def changed(before: Path, after: Path) -> set[str]:
    """The tensors of a folder that another one has otherwise."""
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    assert old.keys() == new.keys()
    return {name for name, tensor in old.items() if not torch.equal(tensor, new[name])}


@pytest.mark.slow
def test_experts_of_a_task(tmp_path: Path) -> None:
    """ESFT: scores, training, export; the chosen experts alone have moved."""
    user = User(tmp_path)
    scores, train = command("moemesh esft scores"), command("moemesh train recipes/esft")
    user.run([*scores, "--seq-len", "64"])
    table = json.loads((tmp_path / scores[scores.index("--out") + 1]).read_text())["experts"]
    chosen = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer, experts in table.items()
        for expert in experts
        for part in ("gate", "up", "down")
    }
    assert 0 < len(chosen) < 3 * 2 * 8, "some of 8 experts in two layers"
    user.run(train)
    run = tmp_path / "runs" / Path(train[2]).stem
    losses = user.losses(run)
    assert losses[-1] < losses[0]
    exported = tmp_path / "esft"
    user.run(["moemesh", "convert", str(run), str(exported)])
    assert changed(tmp_path / MODEL, exported) == chosen
    agree_with_transformers(run, exported)
    assert user.run(["moemesh", "generate", str(run), "--prompt", "12", "--max-tokens", "4"])


# Text from weights of transformers: greedy, drawn, on several ranks.

PROMPT = list(b"def generate(")


def of_transformers(model: Any, count: int) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return output[0, len(PROMPT) :].tolist()


def _continue(rank: int, folder: Path, plan: list[str], count: int) -> list[int]:
    config = config_of(folder, ["data.tokenizer=bytes", "train.dtype=float64", *plan])
    layout = config.plan.layout
    mesh = Mesh.single("cpu") if layout.world_size == 1 else Mesh.create(layout, "cpu")
    tokens = continuation(load(config, mesh, folder).model, PROMPT, chooser())
    return [next(tokens) for _ in range(count)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Latents, windows and sinks with kept keys and values."""
    folder = save(kind, tmp_path / kind)
    assert _continue(0, folder, [], 24) == of_transformers(build(kind), 24)


def test_a_generated_token_competes_with_no_other(tmp_path: Path) -> None:
    """A capacity holds for whole sequences; token by token nothing is dropped."""
    folder = save("qwen3_moe", tmp_path / "model")
    limited = _continue(0, folder, ["model.capacity_factor=0.5"], 8)
    assert limited == _continue(0, folder, [], 8)


def test_ranks_write_the_same_text(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "model")
    plan = ["plan.tp=2", "plan.dp=2", "plan.ep=4", "plan.data=zero3"]
    expected = _continue(0, folder, [], 8)
    assert run_on_ranks(4, _continue, folder, plan, 8) == [expected] * 4


def test_choices() -> None:
    logits_V = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    assert chooser()(logits_V) == 0
    draw = chooser(temperature=1.0, seed=1)
    counts = torch.bincount(torch.tensor([draw(logits_V) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, logits_V.exp(), atol=0.03)
    draw = chooser(temperature=1.0, top_p=0.6, seed=1)
    assert {draw(logits_V) for _ in range(500)} == {0, 1}, "0.5, and the one that passes 0.6"
    draw = chooser(temperature=1.0, top_p=0.0)
    assert {draw(logits_V) for _ in range(50)} == {0}
    assert chooser(temperature=1e-320)(logits_V) == 0
    with pytest.raises(UserError, match="weights are not numbers"):
        chooser()(logits_V * torch.nan)
    same = chooser(temperature=1.0, seed=7), chooser(temperature=1.0, seed=7)
    assert [same[0](logits_V) for _ in range(9)] == [same[1](logits_V) for _ in range(9)]


def test_text_past_the_positions_of_a_model_gets_a_note(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(config))
    for count, is_noted in ((3, False), (4, True)):
        assert generate(folder, "abcde", ["data.tokenizer=bytes"], max_tokens=count) == 0
        note = "--prompt: 9 tokens with the answer, and the model has 8 positions"
        assert (note in capfd.readouterr().err) == is_noted


def test_the_next_command_of_adapters_is_accepted(tmp_path: Path) -> None:
    """PEFT's rank is twice that of the run, and so is its alpha: stacks alone are adapted."""
    folder = save("mixtral", tmp_path / "model")
    (tmp_path / "a.txt").write_text("some text\n" * 80)
    given = [f"data.path={tmp_path / 'a.txt'}", "data.seq_len=16", "data.global_batch=2"]
    given += ["data.tokenizer=bytes", "train.steps=1", "train.validation_batches=1"]
    given += ["train.warmup_steps=0"]
    lora = ["lora.rank=3", "lora.alpha=5", 'lora.targets=["gate_proj", "up_proj"]']
    said("train", *sets(f"model.path={folder}", *given, *lora), "--out", tmp_path / "run")
    peft = tmp_path / "the adapters"
    done = moemesh("convert", str(tmp_path / "run"), str(peft), "--adapter")
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("next: "))
    _, *words = shlex.split(line.removeprefix("next: ").replace("TEXT", "a"))
    said(*words, "--max-tokens", "1")
    config = load_run([], [*given, f"lora.path={peft}"]).config
    assert config.model_path == str(folder)
    assert (config.lora.scaling, config.lora.targets) == (5 / 3, ("gate_proj", "up_proj"))
    said("train", *sets(*given, f"lora.path={peft}"), "--out", tmp_path / "again")


@pytest.mark.slow
def test_the_next_commands_of_a_run_on_conversations_are_accepted(tmp_path: Path) -> None:
    """Folders have blanks in their names, the text has the template of the training."""
    folder = add_tokenizer(save("qwen3_moe", tmp_path / "a model"))
    write_sums(tmp_path / "sums.jsonl", 24)
    given = [f"model.path={folder}", f"data.path={tmp_path / 'sums.jsonl'}", "data.seq_len=48"]
    given += ["data.global_batch=2", "train.steps=1", "train.validation_batches=1"]
    trained = said("train", *sets(*given), "--out", tmp_path / "a run")
    done = moemesh("convert", str(tmp_path / "a run"), str(tmp_path / "an export"))
    lines = [*trained.splitlines(), *done.stderr.splitlines()]
    commands = [line[line.index("moemesh generate") :] for line in lines if "generate " in line]
    for command, source in zip(commands[:1] + commands[-1:], ("a run", "an export"), strict=True):
        verb, name, *words = shlex.split(command.partition("  ")[0])[1:]
        assert (verb, name) == ("generate", str(tmp_path / source)) and "--chat" in words
        assert moemesh(verb, name, *words, "--max-tokens", "1").returncode == 0


def test_notes_on_a_folder_are_printed_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save("llama", tmp_path / "model")
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moemesh", "generate", str(folder), "--prompt", "a"])
        patch.setattr("moemesh.train.inference.generation.on_ranks", lambda *_, **__: 0)
        main()
    assert capfd.readouterr().err.count("holds no tokenizer.json") == 1


def test_what_generation_refuses(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"plan\.pp.*\n.*keeps a sequence whole"):
        generate(folder, "x", ["plan.pp=2"])
    with pytest.raises(UserError, match="--prompt is empty"):
        generate(folder, "")
    with pytest.raises(UserError, match="--prompt is not UTF-8 text: character 3"):
        generate(folder, "ab\udc80", ["data.tokenizer=bytes"])
