"""Conversations: the text of the chat template, and loss on the assistant turns only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.comm.mesh import Mesh
from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import Corpus
from moemesh.data.records import Where
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.train.batches import own_batches

#: ChatML, as many published models have it.
CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
HERE = Where("chat.jsonl", "line", 7, 90)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "Hallo, schön!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of characters and two special tokens, with its template."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer"
    path.mkdir()
    written = "".join(one["content"] + one["role"] for one in TALK)
    letters = sorted(set(written) | set("\n <|>_.,?B"))
    vocabulary = {letter: index for index, letter in enumerate(["?unknown", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?unknown"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def test_the_assistant_turns_carry_loss(folder: Path) -> None:
    tokenizer = Tokenizer.open(str(folder))
    found = ChatTemplate.open(Tokenizer.open(str(folder))).encode(
        {"messages": TALK}, tokenizer, HERE
    )
    learned = [int(one) for one, is_learned in zip(*found, strict=True) if is_learned]
    start, end = (tokenizer.encode(text, "") for text in (b"<|im_start|>", b"<|im_end|>"))
    assert len(start) == len(end) == 1
    text = tokenizer.decode([one for one in learned if one != int(end[0])])
    assert text == "Hallo, schön!\nBye.\n"
    assert learned.count(int(end[0])) == 2, "the end of a turn is learned"
    assert int(start[0]) not in learned, "the header is not"


def test_bytes_of_characters_are_learned_whole() -> None:
    template = ChatTemplate(CHATML, {}, "test")
    found = template.encode({"messages": TALK}, Tokenizer.open("bytes"), HERE)
    text = bytes(int(one) for one, is_learned in zip(*found, strict=True) if is_learned).decode()
    assert text == "Hallo, schön!<|im_end|>\nBye.<|im_end|>\n"


def test_the_rendering_is_that_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = theirs.apply_chat_template(TALK, chat_template=CHATML, tokenize=False)
    tokenizer = Tokenizer.open(str(folder))
    found = ChatTemplate.open(Tokenizer.open(str(folder))).encode(
        {"messages": TALK}, tokenizer, HERE
    )
    assert np.array_equal(found.ids, tokenizer.encode(expected.encode(), HERE))


def test_batches_have_the_mask(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "chat.jsonl", *[{"messages": TALK}] * 12)
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    assert corpus.learned is not None and len(corpus.learned) == len(corpus.tokens)
    samples = Samples(corpus, seq_len=16, seed=0, global_batch=2)
    ids = np.arange(4, dtype=np.int64)
    (batch,) = own_batches(samples, Mesh.single("cpu"), ids, 1, seed=0)
    assert batch.loss_mask_BS is not None
    flat = batch.loss_mask_BS.flatten().numpy()
    assert np.array_equal(flat, corpus.learned[1 : 4 * 16 + 1])
    assert 0 < batch.num_loss_tokens() < batch.num_tokens


def test_texts_and_conversations_in_one_file(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "mixed.jsonl", {"text": "brief"}, {"messages": TALK}, {"text": "user"})
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    assert corpus.learned is not None
    assert corpus.learned[:5].all() and corpus.learned[-4:].all()
    assert not corpus.learned[5], "the newline between documents"
    assert len(corpus.starts) == 3


def test_a_corpus_of_texts_has_no_mask(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "text.jsonl", {"text": "one"}, {"text": "two"})
    assert Corpus.open(str(data)).learned is None


MISTAKES: dict[str, tuple[Any, str]] = {
    "empty": ({"messages": []}, "line 1, byte 0: .* at least one message"),
    "no role": ({"messages": [{"content": "x"}]}, 'line 1, byte 0: message 1 has no "role"'),
    "no content": ({"messages": [{"role": "user"}]}, 'message 1 has no "content"'),
    "no answer": ({"messages": TALK[:2]}, "no assistant turn"),
    "no list": ({"messages": "x"}, "at least one message"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_conversation(folder: Path, tmp_path: Path, name: str) -> None:
    record, message = MISTAKES[name]
    data = jsonl(tmp_path / "chat.jsonl", record)
    with pytest.raises(DataError, match=message):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)


def test_templates_that_fail(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "chat.jsonl", {"messages": TALK})
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"line 1, byte 0: .* fails: roles must alternate"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="is broken"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(DataError, match="fails"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)


def test_a_template_that_rewrites_earlier_turns(folder: Path) -> None:
    """Some drop earlier reasoning: the part of a turn in the whole text cannot be told then."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content if loop.last else '' }};{% endfor %}", {}, "test"
    )
    with pytest.raises(DataError, match="turn 3 otherwise"):
        template.encode({"messages": TALK}, Tokenizer.open(str(folder)), HERE)


def test_generation_blocks_are_their_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    talk = [{"role": "assistant", "content": "ab"}]
    found = ChatTemplate(source, {}, "test").encode(
        {"messages": talk}, Tokenizer.open("bytes"), HERE
    )
    assert bytes(found.ids).decode() == "ab"


def test_special_tokens_of_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = {
        "bos_token": {"content": "B"},
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    talk = [{"role": "assistant", "content": "e"}]
    tokenizer = Tokenizer.open(str(folder))
    found = ChatTemplate.open(Tokenizer.open(str(folder))).encode(
        {"messages": talk}, tokenizer, HERE
    )
    assert tokenizer.decode([int(one) for one in found.ids]) == "Be"
