"""The export of a run on conversations stops in transformers where `generate --chat` stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.errors import UserError
from moemesh.data.chat import ChatTemplate
from moemesh.data.tokenizer import Tokenizer
from moemesh.train.weights.conversion import convert, write_adapter
from moemesh.train.weights.end_of_turn import (
    EndOfTurn,
    put_end_of_turn,
    text_ends,
    unapplied_settings,
)
from moemesh.train.weights.weight_sources import written_text
from tests.cli.test_data import CHATML
from tests.data.texts import byte_level_tokenizer
from tests.huggingface.conversations import add_tokenizer, write_sums
from tests.huggingface.tiny import load, save
from tests.train.runs import said, sets

transformers = pytest.importorskip("transformers")

#: Templates: the end of a turn is a token of the base, or the end of a text in a template.
LLAMA3 = (
    "{% for m in messages %}<|start|>{{ m.role }}<|head|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|head|>\n\n{% endif %}"
)
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|head|>", "<|eot|>")


def with_tokenizer(folder: Path, template: str, **settings: Any) -> Path:
    """A byte-level tokenizer; its end of a text is the id 0."""
    byte_level_tokenizer(folder, "1 + 2? 3", template, *TOKENS)
    settings = {"eos_token": "<|endoftext|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def base_model(folder: Path, kind: str = "llama", **generation: Any) -> Path:
    """A base model whose files name the end of a text only."""
    save(kind, folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def tuned(folder: Path, here: Path, *more: str, data: Path | None = None) -> Path:
    """A run of one step on conversations."""
    data = data or write_sums(here / "sums.jsonl", 40)
    given = [f"model.path={folder}", f"data.path={data}", "data.seq_len=64", "data.global_batch=2"]
    given += ["train.steps=1", "train.warmup_steps=0", "train.validation_batches=1", *more]
    said("train", *sets(*given), "--out", here / "run")
    return here / "run"


def json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def stop_of(folder: Path) -> str:
    """The token at which `moemesh generate --chat` stops."""
    return ChatTemplate.open(Tokenizer.open(str(folder))).stop


@pytest.mark.parametrize(
    ("template", "token", "generation"),
    [
        (CHATML, "<|im_end|>", {"eos_token_id": [0, 5], "temperature": 0.6, "do_sample": True}),
        pytest.param(LLAMA3, "<|eot|>", {}, marks=pytest.mark.slow),
    ],
)
def test_the_three_files(
    tmp_path: Path,
    template: str,
    token: str,
    generation: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = with_tokenizer(base_model(tmp_path / "base", **generation), template)
    convert(tuned(folder, tmp_path), tmp_path / "out")
    number = TOKENS.index(token)
    assert f"a turn ends with {token} (id {number})" in capsys.readouterr().err
    written = json_of(tmp_path / "out" / "generation_config.json")
    before = generation.get("eos_token_id", [0])
    assert written.pop("eos_token_id") == list(dict.fromkeys([*before, number]))
    generation.pop("eos_token_id", None)
    assert {key: written[key] for key in generation} == generation
    assert json_of(tmp_path / "out" / "config.json")["eos_token_id"] == [0, number]
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (read.eos_token, read.eos_token_id) == (token, number)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert number in model.generation_config.eos_token_id
    assert read.decode([number]) == stop_of(folder) == stop_of(tmp_path / "out")
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "3"}]
    theirs = [
        transformers.AutoTokenizer.from_pretrained(one).apply_chat_template(messages)["input_ids"]
        for one in (folder, tmp_path / "out")
    ]
    assert theirs[0] == theirs[1] and theirs[0].count(number) == 2


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_tokens_without_an_id_in_the_files_keep_theirs(tmp_path: Path, key: str) -> None:
    """transformers numbers such tokens in their order, and an `eos_token` comes first."""
    folder = base_model(tmp_path / "base")
    byte_level_tokenizer(folder, "1 + 2? 3", CHATML, "<|endoftext|>")
    names = ["<|tool|>", "<|im_start|>", "<|im_end|>"]
    settings = {"eos_token": "<|endoftext|>", key: names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(tuned(folder, tmp_path), tmp_path / "out")
    read, base = (
        transformers.AutoTokenizer.from_pretrained(place) for place in (tmp_path / "out", folder)
    )
    assert read.eos_token == "<|im_end|>"
    assert read.convert_tokens_to_ids(names) == base.convert_tokens_to_ids(names)
    assert read.eos_token_id in json_of(tmp_path / "out" / "config.json")["eos_token_id"]


def test_the_code_of_transformers(tmp_path: Path) -> None:
    """A model that transformers computes is exported by other functions."""
    folder = with_tokenizer(base_model(tmp_path / "base", "mixtral"), CHATML)
    convert(tuned(folder, tmp_path, "model.implementation=transformers"), tmp_path / "out")
    assert json_of(tmp_path / "out" / "config.json")["eos_token_id"] == [0, 2]
    assert json_of(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [0, 2]


def test_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    """The template lies next to a copy of the tokenizer; the base has none."""
    folder = with_tokenizer(base_model(tmp_path / "base"), CHATML)
    (folder / "chat_template.jinja").unlink()
    other = with_tokenizer(tmp_path / "tokenizer", CHATML)
    run = tuned(folder, tmp_path, f"data.tokenizer={other}")
    convert(run, tmp_path / "out")
    assert stop_of(tmp_path / "out") == "<|im_end|>"
    assert json_of(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    convert(run, tmp_path / "like", like=folder)
    assert not (tmp_path / "like" / "chat_template.jinja").exists()
    assert json_of(tmp_path / "like" / "generation_config.json")["eos_token_id"] == [0, 2]


@pytest.mark.slow
def test_a_template_that_writes_the_end_of_a_text_keeps_it(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_end|>\n", "<|im_end|>{{ eos_token }}")
    folder = with_tokenizer(base_model(tmp_path / "base"), template)
    convert(tuned(folder, tmp_path), tmp_path / "out")
    assert json_of(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [0, 2]
    assert json_of(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<|endoftext|>"


def test_an_end_that_is_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = add_tokenizer(base_model(tmp_path / "base"))
    convert(tuned(folder, tmp_path), tmp_path / "out")
    assert 'stop_strings=["</s>"], tokenizer=tokenizer' in capsys.readouterr().err
    assert json_of(tmp_path / "out" / "config.json")["eos_token_id"] == 0


@pytest.mark.slow
def test_completions_end_as_their_tokenizer_says(tmp_path: Path) -> None:
    folder = with_tokenizer(base_model(tmp_path / "base"), CHATML, eos_token="<|eot|>")
    (folder / "chat_template.jinja").unlink()
    data = tmp_path / "completions.jsonl"
    data.write_text('{"prompt": "1 + 2?", "completion": "3"}\n' * 40)
    convert(tuned(folder, tmp_path, data=data), tmp_path / "out")
    assert json_of(tmp_path / "out" / "config.json")["eos_token_id"] == [0, TOKENS.index("<|eot|>")]


def test_texts_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokenizer(base_model(tmp_path / "base"), CHATML)
    data = tmp_path / "text.txt"
    data.write_text("1 + 2 is 3, and so on. " * 100)
    convert(tuned(folder, tmp_path, data=data), tmp_path / "out")
    assert json_of(tmp_path / "out" / "config.json")["eos_token_id"] == 0
    assert json_of(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert "a turn ends" not in capsys.readouterr().err


def test_adapters_name_the_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT's folder has no tokenizer: what to give to generate is printed."""
    folder = with_tokenizer(base_model(tmp_path / "base"), CHATML)
    run, out = tuned(folder, tmp_path, "lora.rank=2"), tmp_path / "out"
    write_adapter(run, out)
    assert "generate(eos_token_id=[0, 2])" in capsys.readouterr().err
    for source in (run, next((run / "checkpoints").glob("step-*"))):
        assert written_text(source, out, "adapter").endswith("--prompt TEXT --chat")


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}, {"eos_token_id": [3, 4]}])
def test_the_ends_of_a_text_are_those_of_transformers(
    tmp_path: Path, generation: dict[str, Any] | None
) -> None:
    folder = base_model(tmp_path / "model")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    expected = load(folder).generation_config.eos_token_id
    ids = [expected] if isinstance(expected, int) else expected or []
    assert text_ends(folder) == ids
    assert bool(ids) is (generation is None or bool(generation.get("eos_token_id")))


def test_settings_of_the_text_part_without_generation_config(tmp_path: Path) -> None:
    folder, values = tmp_path, {"eos_token_id": 3, "bos_token_id": 1, "repetition_penalty": 1.3}
    values = {"eos_token_id": None, "text_config": values}
    (folder / "config.json").write_text(json.dumps(values))
    given = transformers.GenerationConfig.from_pretrained(
        folder, "config.json", _from_model_config=True
    )
    assert text_ends(folder) == [given.eos_token_id] == [3]
    assert unapplied_settings(folder) == ["repetition_penalty"] and given.repetition_penalty == 1.3
    put_end_of_turn(folder, EndOfTurn("<|im_end|>", "<|im_end|>", 7))
    generation, config = (
        json.loads((folder / name).read_text())
        for name in ("generation_config.json", "config.json")
    )
    assert generation == {"eos_token_id": [3, 7], "bos_token_id": 1}
    assert config == {**values, "eos_token_id": [3, 7]}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")  # no default of a class
    assert text_ends(folder) == []
    (folder / "config.json").write_text('{"text_config": [1], "temperature": 0.5}')
    assert (text_ends(folder), unapplied_settings(folder)) == ([], ["temperature"])


@pytest.mark.parametrize("ends", [2.0, "2", True, [2, None], [[2]], {"a": 2}])
def test_ends_that_are_no_ids(tmp_path: Path, ends: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(UserError, match=r"config\.json: eos_token_id = .* must be an id"):
        text_ends(tmp_path)


def test_settings_that_generate_does_not_apply(tmp_path: Path) -> None:
    """Keys with a value other than the one that changes nothing."""
    usual = transformers.GenerationConfig(eos_token_id=2, repetition_penalty=1.0, num_beams=1)
    usual.save_pretrained(tmp_path)
    assert unapplied_settings(tmp_path) == []
    changes: dict[str, Any] = {"repetition_penalty": 1.05, "suppress_tokens": [3]}
    changed = transformers.GenerationConfig(do_sample=True, **changes)
    changed.save_pretrained(tmp_path)
    assert unapplied_settings(tmp_path) == ["do_sample", *changes]


@pytest.mark.parametrize("name", ["words", "words/tokenizer.json", "words.json"])
def test_the_export_of_a_run_on_texts_has_its_tokenizer(tmp_path: Path, name: str) -> None:
    words = byte_level_tokenizer(tmp_path / "words", "def f(x): return x + 1", CHATML, *TOKENS)
    (tmp_path / "words.json").write_bytes((words / "tokenizer.json").read_bytes())
    (tmp_path / "notes.json").write_text("{}")  # no part of a tokenizer, beside one
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 60)
    given = ["model.num_layers=2", "model.hidden_size=32", f"data.path={text}"]
    given += [f"data.tokenizer={tmp_path / name}", "data.seq_len=16", "data.global_batch=2"]
    given += ["train.steps=1", "train.validation_batches=1"]
    said("train", *sets(*given), "--out", tmp_path / "run")
    said("convert", tmp_path / "run", tmp_path / "out")

    written = Tokenizer.open(str(tmp_path / "out"))
    assert written.fingerprint == Tokenizer.open(str(tmp_path / name)).fingerprint
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("  return  x").input_ids == written.encode(b"  return  x", "").tolist()
    assert theirs.decode(theirs("  return  x").input_ids) == "  return  x"
    assert (theirs.chat_template is not None) == (name != "words.json")
    assert not (tmp_path / "out/notes.json").exists()
    # The ids of the family's class are of other tokens here.
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id is None
