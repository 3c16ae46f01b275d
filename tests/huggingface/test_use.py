"""A user's whole way: weights of transformers, conversations, training, export, text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError, UserError
from moemesh.train.generation import chooser, continuation, generate
from moemesh.train.inference import config_of, load
from tests import commands
from tests.huggingface.tiny import build, save
from tests.ranks import run_on_ranks

transformers = pytest.importorskip("transformers")

PROMPT = list(b"def generate(")
CHATML = """{% for message in messages %}
<{{ message.role }}>{{ message.content }}</s>
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}
"""


def moemesh(*arguments: str) -> str:
    """A command that must succeed; its standard output."""
    done = subprocess.run(
        [commands.python(), "-m", "moemesh", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_transformers(model: Any, count: int) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found[0, len(PROMPT) :].tolist()


def _continue(rank: int, folder: Path, plan: list[str], count: int) -> list[int]:
    config = config_of(folder, ["data.tokenizer=bytes", "train.dtype=float64", *plan])
    layout = config.plan.layout
    mesh = Mesh.single("cpu") if layout.world_size == 1 else Mesh.create(layout, "cpu")
    found = continuation(load(config, mesh, folder).model, PROMPT, chooser())
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Latents, windows and sinks with kept keys and values."""
    folder = save(kind, tmp_path / kind)
    assert _continue(0, folder, [], 24) == of_transformers(build(kind), 24)


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
    same = chooser(temperature=1.0, seed=7), chooser(temperature=1.0, seed=7)
    assert [same[0](logits_V) for _ in range(9)] == [same[1](logits_V) for _ in range(9)]


def test_what_generation_refuses(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"plan\.pp.*\n.*keeps a sequence whole"):
        generate(folder, "x", ["plan.pp=2"])
    with pytest.raises(UserError, match="--prompt is empty"):
        generate(folder, "")
    with pytest.raises(ConfigError, match="neither a run nor a folder"):
        generate(tmp_path, "x")


def test_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    """Fine-tune on conversations on four ranks, resume once, export: transformers and we agree."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = save("qwen3_moe", tmp_path / "model")
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    data, run, out = tmp_path / "chat.jsonl", tmp_path / "run", tmp_path / "tuned"
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    data.write_text((json.dumps({"messages": talk}) + "\n") * 40)
    keys = {
        "model.path": folder,
        "data.path": data,
        "data.documents": "mask",
        "data.seq_len": 32,
        "data.global_batch": 4,
        "plan.dp": 4,
        "plan.ep": 4,
        "train.validation_batches": 1,
        "train.lr": 0.01,
    }
    given = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    moemesh("train", *given, "--set", "train.steps=3", "--out", str(run))
    text = moemesh("train", *given, "--set", "train.steps=6", "--out", str(run))
    assert "resumed from step 3" in text
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    moemesh("convert", str(run), str(out))
    assert (out / "chat_template.jinja").exists() and (out / "tokenizer.json").exists()

    held_out = tmp_path / "text.txt"
    held_out.write_text("some text to be read, again and again. " * 8)
    ours, theirs = (
        json.loads(
            moemesh("evaluate", str(path), "--data", str(held_out), "--seq-len", "64", "--json")
        )
        for path in (run, out)
    )
    assert ours == pytest.approx(theirs, rel=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.tensor(made.encode(held_out.read_text()).ids)[None, :65]
    with torch.no_grad():
        reference = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None]).mean()
    first = tmp_path / "first.txt"
    first.write_text(held_out.read_text()[:65])
    found = json.loads(
        moemesh("evaluate", str(run), "--data", str(first), "--seq-len", "64", "--json")
    )
    assert found["tokens"] == 64 and found["loss"] == pytest.approx(-float(reference), abs=2e-6)
    written = moemesh("generate", str(run), "--prompt", "<user>2 + 2?", "--max-tokens", "5")
    assert written.startswith("<user>2 + 2?")
