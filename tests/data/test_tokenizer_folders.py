"""Tokenizers are those of AutoTokenizer, in whichever file of a folder a token is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import Corpus
from moemesh.data.tokenizer import DataError, Tokenizer
from tests.data.texts import byte_level_tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXT = "a<|im_start|>user\nGrüße</s> <extra>b <|im_end|>\n<|im_start|><|im_start|> [X] "
#: A token with its flags, as save_pretrained writes it.
START = {
    "content": "<|im_start|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
#: A whole tokenizer of two tokens.
VERSION = {
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}
#: Files next to a tokenizer.json that lacks the tokens.
WAYS: dict[str, dict[str, Any]] = {
    "eos_token": {CONFIG: {"eos_token": "<|im_end|>"}},
    "flags": {CONFIG: {"eos_token": START | {"__type": "AddedToken", "rstrip": True}}},
    "added_tokens_decoder": {CONFIG: {"added_tokens_decoder": {"300": START}}},
    "blanks that a token takes": {
        CONFIG: {"added_tokens_decoder": {"300": START | {"lstrip": True, "rstrip": True}}}
    },
    "not special": {CONFIG: {"added_tokens_decoder": {"300": START | {"special": False}}}},
    "additional_special_tokens": {CONFIG: {"additional_special_tokens": ["<extra>", "</s>"]}},
    "extra_special_tokens": {CONFIG: {"extra_special_tokens": {"image_token": "<extra>"}}},
    "a list of extra ones": {CONFIG: {"extra_special_tokens": ["<extra>", "<|im_end|>"]}},
    "special_tokens_map": {MAP: {"eos_token": "</s>", "pad_token": START}},
    "added_tokens": {ADDED: {"<|im_start|>": 300, "<|im_end|>": 301}},
    "added_tokens and settings": {ADDED: {"<|im_end|>": 300}, CONFIG: {"eos_token": "<|im_end|>"}},
    "add_bos_token": {CONFIG: {"bos_token": "<|im_start|>", "add_bos_token": True}},
    "add_eos_token": {CONFIG: {"eos_token": "</s>", "add_eos_token": True}},
    "split_special_tokens": {CONFIG: {"eos_token": "</s>", "split_special_tokens": True}},
    "a class": {CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[X]"}},
    "a class with rules of its own": {
        CONFIG: {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    },
    "padding": {CONFIG: {"pad_token": "[PAD]"}},
    "a file for a version": {
        CONFIG: {"fast_tokenizer_files": ["tokenizer.5.0.0.json", "tokenizer.99.0.0.json"]},
        "tokenizer.5.0.0.json": VERSION,
    },
    "a class by the model": {"config.json": {"model_type": "qwen2"}},
}


def folder_with(path: Path, files: dict[str, Any]) -> Path:
    folder = byte_level_tokenizer(path, Path(__file__).read_text(), "{{ eos_token }}")
    write(folder, files)
    return folder


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("way", WAYS)
def test_ids_are_those_of_auto_tokenizer(tmp_path: Path, way: str) -> None:
    folder = folder_with(tmp_path / "tokenizer", WAYS[way])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = theirs(TEXT, add_special_tokens=False)["input_ids"]
    tokenizer = Tokenizer.open(str(folder))
    assert tokenizer.encode(TEXT.encode(), "").tolist() == expected
    assert tokenizer.encode_with_offsets([TEXT])[0][0].tolist() == expected
    assert tokenizer.vocab_size == max(theirs.get_vocab().values()) + 1
    assert tokenizer.decode(expected, special=True) == theirs.decode(expected)


#: Settings that change the text of ids, beside a tokenizer of words in which <x> is not special.
TEXT_SETTINGS: dict[str, dict[str, Any]] = {
    "blanks before punctuation": {"clean_up_tokenization_spaces": True},
    "special by its name": {"pad_token": "<x>"},
    "special by its flag": {"added_tokens_decoder": {"4": START | {"content": "<x>"}}},
}


@pytest.mark.parametrize("name", TEXT_SETTINGS)
def test_texts_of_ids_are_those_of_auto_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    words = ["it", "'s", ".", "[UNK]"]
    loaded = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id_ for id_, word in enumerate(words)}, "[UNK]")
    )
    loaded.add_tokens([tokenizers.AddedToken("<x>", normalized=False)])
    loaded.save(str(tmp_path / "tokenizer.json"))
    ids = [0, 1, 4, 2]
    assert Tokenizer.open(str(tmp_path)).decode(ids) == "it 's <x> ."
    write(tmp_path, {CONFIG: TEXT_SETTINGS[name]})
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer = Tokenizer.open(str(tmp_path))
    expected = theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == expected != "it 's <x> ."
    assert tokenizer.decode(ids, special=True) == theirs.decode(ids)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match="pip install transformers"):
        Tokenizer.open(str(tmp_path))


def test_the_token_that_fills_texts_up_is_special(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    loaded.add_tokens(["<x>"])
    loaded.enable_padding(pad_id=2, pad_token="<x>")
    loaded.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer = Tokenizer.open(str(tmp_path))
    assert tokenizer.decode([0, 2]) == theirs.decode([0, 2], skip_special_tokens=True) == "a"
    assert tokenizer.settings.special == theirs.special_tokens_map == {"pad_token": "<x>"}
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r'token "<x>", which is not special in it: .*pip install'):
        Tokenizer.open(str(tmp_path))
    loaded.add_special_tokens(["<x>"])
    loaded.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(str(tmp_path)).settings.special == {"pad_token": "<x>"}


def test_a_class_that_changes_blanks_needs_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LlamaTokenizer writes no blank before a text that follows a special token."""
    vocabulary = {piece: id_ for id_, piece in enumerate(["<unk>", "▁", "a", "▁a"])}
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("▁", "a")]))
    steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    loaded.normalizer = tokenizers.normalizers.Sequence(steps)
    loaded.add_special_tokens(["<s>"])
    loaded.save(str(tmp_path / "tokenizer.json"))
    alone = Tokenizer.open(str(tmp_path)).encode(b"<s>a", "").tolist()
    write(tmp_path, {CONFIG: {"tokenizer_class": "LlamaTokenizer", "legacy": False}})
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    expected = theirs("<s>a", add_special_tokens=False)["input_ids"]
    assert Tokenizer.open(str(tmp_path)).encode(b"<s>a", "").tolist() == expected != alone
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"names a class of transformers.*pip install"):
        Tokenizer.open(str(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"added_tokens_decoder": {}}])
def test_two_files_that_name_an_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = byte_level_tokenizer(tmp_path, "a", "{{ eos_token }}", "<|im_start|>", "<|im_end|>")
    settings = settings | {"eos_token": "<|im_start|>"}
    write(folder, {CONFIG: settings, MAP: {"eos_token": "<|im_end|>"}})
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert Tokenizer.open(str(folder)).settings.special["eos_token"] == theirs.eos_token


def test_a_token_beside_the_file_changes_the_fingerprint(tmp_path: Path) -> None:
    plain = Tokenizer.open(str(folder_with(tmp_path / "plain", {})))
    other = Tokenizer.open(str(folder_with(tmp_path / "other", WAYS["added_tokens"])))
    again = Tokenizer.open(str(folder_with(tmp_path / "again", WAYS["added_tokens"])))
    assert plain.fingerprint != other.fingerprint == again.fingerprint
    alone = Tokenizer.open(str((tmp_path / "plain" / "tokenizer.json").rename(tmp_path / "t.json")))
    assert alone.fingerprint == plain.fingerprint, "settings that change nothing"


@pytest.mark.parametrize("way", [way for way in WAYS if "class" not in way])
def test_without_transformers_equal_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder = folder_with(tmp_path / "tokenizer", WAYS[way])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"pip install transformers"):
        Tokenizer.open(str(folder))


def test_a_folder_that_adds_nothing_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path / "tokenizer", {})
    made = transformers.AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    made.enable_padding(pad_token="[PAD]")
    made.save(str(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = theirs("[PAD]", add_special_tokens=False)["input_ids"]
    assert Tokenizer.open(str(folder)).encode(b"[PAD]", "").tolist() == expected
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r'token "\[PAD\]", which it does not have: .*pip install'):
        Tokenizer.open(str(folder))
    made.no_padding()
    made.save(str(folder / "tokenizer.json"))
    assert Tokenizer.open(str(folder)).vocab_size == 300


def test_without_transformers_a_whole_file_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path / "tokenizer", WAYS["added_tokens and settings"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = [
        {"name": "default", "template": "{{ eos_token }}"},
        {"name": "tool_use", "template": "tools"},
    ]
    tokenizer.save_pretrained(str(tmp_path / "whole"))
    expected = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    read = Tokenizer.open(str(tmp_path / "whole"))
    assert read.encode(TEXT.encode(), "").tolist() == expected
    assert read.settings.special["eos_token"] == "<|im_end|>"
    assert set(read.settings.templates) == {"default", "tool_use"}


def test_a_tokenizer_written_in_python(tmp_path: Path) -> None:
    """transformers has no fast form of some: their texts are read, conversations are refused."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"text": TEXT}))
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=1000)
    assert corpus.tokens.tolist() == theirs(TEXT, add_special_tokens=False)["input_ids"]
    data.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
    with pytest.raises(DataError, match="ByT5Tokenizer of transformers has no offsets"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=1000)


def test_a_text_that_the_tokenizer_refuses(tmp_path: Path) -> None:
    """A model without its unknown token fails on some texts only."""
    model = VERSION["model"] | {"unk_token": "[no]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(VERSION | {"model": model}))
    tokenizer = Tokenizer.open(str(tmp_path))
    assert tokenizer.encode(b"a", "").tolist() == [0]
    for encode in (tokenizer.encode_batch, tokenizer.encode_with_offsets):
        with pytest.raises(DataError, match=rf"{tmp_path}: the tokenizer fails on a text: .*UNK"):
            encode(["b"])


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("tokenizer.model", "two packages: pip install sentencepiece protobuf"),
        ("tiktoken.model", "a package: pip install tiktoken"),
        ("tekken.json", "a package: pip install mistral_common"),
    ],
)
def test_pieces_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, need: str
) -> None:
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / CONFIG).write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setattr("moemesh.data.tokenizer.find_spec", lambda name: None)
    with pytest.raises(DataError, match=f"{name} needs {need}"):
        Tokenizer.open(str(tmp_path))


def test_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n"
    folder = folder_with(tmp_path / "tokenizer", {CONFIG: settings, "own.py": code})
    with pytest.raises(DataError, match="custom code"):
        Tokenizer.open(str(folder))
    assert not (tmp_path / "ran").exists()


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
NAMED = [
    {"name": "default", "template": "{{ messages[1].content }}{{ bos_token }}"},
    {"name": "tool_use", "template": "tools {{ messages[1].content }}"},
]
#: Files with chat templates.
TEMPLATES: dict[str, dict[str, Any]] = {
    "jinja": {"chat_template.jinja": "file {{ messages[1].content }}"},
    "settings": {CONFIG: {"chat_template": "key {{ messages[1].content }}", "bos_token": "<s>"}},
    "both": {
        CONFIG: {"chat_template": "key {{ messages[1].content }}"},
        "chat_template.jinja": "file {{ messages[1].content }}",
    },
    "a list": {CONFIG: {"chat_template": NAMED, "bos_token": "<s>"}},
    "a folder": {
        "chat_template.jinja": "file {{ messages[1].content }}",
        "additional_chat_templates/tool_use.jinja": "use {{ messages[1].content }}",
    },
}


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("where", TEMPLATES)
def test_templates_are_those_of_auto_tokenizer(
    tmp_path: Path, where: str, tools: list[dict[str, Any]] | None
) -> None:
    folder = folder_with(tmp_path / "tokenizer", {})
    (folder / "chat_template.jinja").unlink()
    write(folder, TEMPLATES[where])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": TALK, "tools": tools}))
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=1000)
    tokenizer = Tokenizer.open(str(folder))
    assert tokenizer.decode(corpus.tokens.tolist(), special=True) == expected


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tokenizer", {})
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="no chat template"):
        ChatTemplate.open(Tokenizer.open(str(folder)))
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert ChatTemplate.open(Tokenizer.open(str(folder))).prompt(TALK) == "ab"
