"""moemesh tokenize and moemesh data show: their output; training reads the same samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.data.preview import previews
from moemesh.data.sources import open_samples
from moemesh.data.tokenizer import Tokenizer
from moemesh.model.batch import document_starts
from moemesh.sharding.load_run import load_run
from moemesh.train.opening import own_batches
from tests.data.texts import byte_level_tokenizer
from tests.test_cli import Invoke, run_all_guarded, run_guarded

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with a template, conversations, and a text."""
    special = ("<|im_start|>", "<|im_end|>")
    byte_level_tokenizer(tmp_path, Path(__file__).read_text(), CHATML, *special)
    lines: list[dict[str, Any]] = []
    for number in range(12):
        talk = [("user", f"Number {number}?"), ("assistant", f"Grüße \x1b[31m{number}!")]
        lines.append({"messages": [{"role": one, "content": text} for one, text in talk]})
        lines.append({"text": f"A text of number {number}."})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def settings(folder: Path, *more: str) -> list[str]:
    given = {
        "data.path": f"{folder}/chat.jsonl",
        "data.tokenizer": str(folder),
        "model.vocab_size": "300",
        "data.seq_len": "40",
        "data.global_batch": "4",
    }
    given |= dict(one.split("=", 1) for one in more)
    return [part for key, value in given.items() for part in ("--set", f"{key}={value}")]


def test_samples_are_shown_with_documents_and_loss(folder: Path, invoke: Invoke) -> None:
    arguments = ["data", "show", *settings(folder, "data.documents=mask"), "--samples", "5"]
    code, out, _ = invoke(*arguments)
    assert code == 0
    assert "positions restart; targets that carry loss are in {+ +}" in out
    assert "=== step 1, sequence 4 of 4: sample " in out
    assert "=== step 2, sequence 1 of 4: sample " in out
    assert "<|im_start|>user" in out and "{+Grüße \\u001b[31m" in out and "\x1b" not in out
    _, later, _ = invoke(*arguments[:-1], "1", "--step", "2")
    assert later.partition("=== step 2")[2] == out.partition("=== step 2")[2] != ""


def test_green_on_a_terminal(folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("moemesh.cli.data.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = invoke("data", "show", *settings(folder))
    assert "\x1b[32mGrüße \\u001b[31m" in out and "{+" not in out
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as given:
            given.setenv(name, value)
            out = invoke("data", "show", *settings(folder))[1]
        assert "{+Grüße" in out and "\x1b" not in out


@pytest.mark.parametrize("documents", ["ignore", "mask"])
def test_what_is_shown_is_what_a_step_reads(folder: Path, documents: str, invoke: Invoke) -> None:
    given = settings(folder, f"data.documents={documents}")
    code, out, _ = invoke("data", "show", *given, "--json")
    assert code == 0
    shown = json.loads(out)["samples"]
    config = load_run([], given[1::2]).config
    samples = open_samples(config.data, seed=0, vocab_size=300, cache=None, log=print)
    (batch,) = own_batches(samples, Mesh.single("cpu"), samples.ids_at(0, 4), 1, seed=0)
    assert batch.loss_mask_BS is not None
    tokens = torch.tensor([one["tokens"] for one in shown])
    assert torch.equal(batch.tokens_BS, tokens[:, :-1])
    assert torch.equal(batch.targets_BS, tokens[:, 1:])
    assert batch.loss_mask_BS.tolist() == [one["targets_with_loss"] for one in shown]
    positions = torch.arange(40).expand(4, 40)
    if documents == "mask":
        assert batch.documents_BS is not None
        assert batch.documents_BS.tolist() == [one["documents"][:-1] for one in shown]
        positions = positions - document_starts(batch.documents_BS)
    assert batch.valid_BS is not None
    assert positions.tolist() == [one["positions"] for one in shown]
    reader = Tokenizer.open(str(folder))
    for one, valid in zip(shown, batch.valid_BS, strict=True):
        text = "".join(piece["text"] for piece in one["pieces"])
        assert text == reader.decode(one["tokens"][: int(valid.sum())], special=True)
        learned = [piece["text"] for piece in one["pieces"] if piece["learned"]]
        if documents == "mask" and any("Grüße" in text for text in learned):
            assert all("<|im_start|>" not in text for text in learned)


def test_characters_in_two_pieces_are_shown_once(tmp_path: Path) -> None:
    """Bytes: a window may end, and loss may begin, inside a character."""
    (tmp_path / "a.txt").write_text("ü" * 200)
    config = load_run([], [f"data.path={tmp_path}/a.txt", "data.seq_len=7"]).config
    samples = open_samples(config.data, seed=0, vocab_size=256, cache=None, log=print)
    for one in previews(samples, Tokenizer.open("bytes"), 0, 4):
        assert "".join(piece.text for piece in one.pieces).strip("\ufffd") in ("üüü", "üüüü")


def test_data_show_and_tokenize_need_no_torch(folder: Path) -> None:
    words = ["tokenize", str(folder / "chat.jsonl"), str(folder / "tokens")]
    process = run_all_guarded(
        {"torch"}, ["data", "show", *settings(folder)], [*words, "--tokenizer", str(folder)]
    )
    assert process.returncode == 0, process.stderr
    assert "training samples" in process.stdout and "tokens.bin: " in process.stdout
    assert run_guarded({"numpy", "tokenizers"}, "tokenize", "--help").returncode == 0


def test_tokenize_prints_and_training_reads_it(folder: Path, invoke: Invoke) -> None:
    source, out = str(folder / "chat.jsonl"), str(folder / "tokens" / "chat")
    code, text, err = invoke("tokenize", source, out, "--tokenizer", str(folder))
    assert code == 0 and "tokens in 24 documents" in text
    assert err.startswith(f"tokenizing {source} with {folder}\n1 file(s), 0.0 MB, into {out}")
    code, text, _ = invoke("tokenize", source, out, "--tokenizer", str(folder), "--json")
    facts = json.loads(text)
    assert facts["num_documents"] == 24 and facts["prefix"] == out
    direct = settings(folder, "data.documents=mask")
    for name in (out, f"{out}.bin", f"{out}.idx", str(folder / "tokens")):
        tokens = settings(folder, "data.documents=mask", f"data.path={name}")
        texts = [invoke("data", "show", *given, "--json")[1] for given in (direct, tokens)]
        first, second = (json.loads(text) for text in texts)
        assert first["num_tokens"] == second["num_tokens"]
        for one in (*first["samples"], *second["samples"]):
            del one["source"], one["stream"]
        assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat.jsonl", "x", "--tokenizer", "none"], 'data.tokenizer is "none"'),
        (["none.txt", "x", "--tokenizer", "bytes"], "none.txt: No such file"),
        (["chat.jsonl", "x", "--tokenizer", "bytes"], "no chat template"),
        (["chat.jsonl", "x", "--tokenizer", ".", "--append-eod"], 'names no "eos_token"'),
        (["chat.jsonl", "x", "--tokenizer", ".", "--eod-token", "<|x|>"], 'no token "<|x|>"'),
        (["chat.jsonl", "x", "--tokenizer", ".", "--format", "csv"], "csv"),
        (["chat.jsonl", "/proc/none/x", "--tokenizer", "."], "/proc/none"),
        (["chat.jsonl", "x.parts/lock/y", "--tokenizer", "."], "x.parts/lock"),
    ],
)
def test_mistakes_are_one_message(
    folder: Path,
    arguments: list[str],
    message: str,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "x.parts").mkdir()
    (folder / "x.parts" / "lock").write_text("")
    code, _, err = invoke("tokenize", *arguments)
    assert code == 2
    assert message in err


def test_a_vocabulary_beyond_the_embedding_is_refused_before_anything_is_read(
    folder: Path, invoke: Invoke
) -> None:
    given = settings(folder, "model.vocab_size=299", f"data.path={folder}/none.jsonl")
    for verb in (["data", "show"], ["config", "check"], ["train"]):
        code, _, err = invoke(*verb, *given)
        assert code == 2 and "ids up to 299, and model.vocab_size is 299" in err


def test_the_first_line_comes_before_the_text_is_read(folder: Path) -> None:
    """Seconds of text; there are two lines before there is a token."""
    (folder / "slow.txt").write_bytes(b"word " * 2_000_000)
    command = [sys.executable, "-m", "moemesh", "tokenize", str(folder / "slow.txt")]
    command += [str(folder / "x"), "--tokenizer", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("tokenizing ")
        assert process.stderr.readline().startswith("1 file(s), 10.0 MB")
        assert not (folder / "x.idx").exists()
        process.kill()
