"""Conversations: the text of the chat template, and loss on the assistant turns only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.comm.mesh import Mesh
from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import Corpus, Document
from moemesh.data.records import Where
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.train.opening import own_batches

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


def by_itself(template: ChatTemplate, record: dict[str, Any], tokenizer: Tokenizer) -> Document:
    """One conversation by itself."""
    rendered = template.render(record, HERE)
    ((ids, offsets),) = tokenizer.encode_with_offsets([rendered.text])
    return Document(HERE, ids, rendered.mask(offsets))


def learned_of(found: Document) -> list[int]:
    assert found.learned is not None
    return found.ids[found.learned].tolist()


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def test_the_assistant_turns_carry_loss(folder: Path) -> None:
    tokenizer = Tokenizer.open(str(folder))
    found = by_itself(ChatTemplate.open(tokenizer), {"messages": TALK}, tokenizer)
    learned = learned_of(found)
    start, end = (tokenizer.encode(text, "") for text in (b"<|im_start|>", b"<|im_end|>"))
    assert len(start) == len(end) == 1
    text = tokenizer.decode([one for one in learned if one != int(end[0])])
    assert text == "Hallo, schön!Bye.", "not the newline that the template writes behind a turn"
    assert learned.count(int(end[0])) == 2, "the end of a turn is learned"
    assert int(start[0]) not in learned, "the header is not"


def test_bytes_of_characters_are_learned_whole() -> None:
    template = ChatTemplate(CHATML, {}, "test")
    found = by_itself(template, {"messages": TALK}, Tokenizer.open("bytes"))
    text = bytes(learned_of(found)).decode()
    assert text == "Hallo, schön!<|im_end|>Bye.<|im_end|>"


def test_the_rendering_is_that_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = theirs.apply_chat_template(TALK, chat_template=CHATML, tokenize=False)
    tokenizer = Tokenizer.open(str(folder))
    found = by_itself(ChatTemplate.open(tokenizer), {"messages": TALK}, tokenizer)
    assert np.array_equal(found.ids, tokenizer.encode(expected.encode(), HERE))


def test_batches_have_the_mask(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "chat.jsonl", *[{"messages": TALK}] * 50)
    tokenizer = Tokenizer.open(str(folder))
    one = by_itself(ChatTemplate.open(tokenizer), {"messages": TALK}, tokenizer)
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    assert np.array_equal(corpus.tokens, np.tile(one.ids, 50)), "nothing stands between"
    assert corpus.learned is not None and np.array_equal(corpus.learned, np.tile(one.learned, 50))
    size = len(one.ids)
    samples = Samples(corpus, seq_len=2 * size + 9, seed=0, global_batch=2)
    (batch,) = own_batches(samples, Mesh.single("cpu"), np.arange(4), 1, seed=0)
    assert batch.loss_mask_BS is not None and batch.documents_BS is not None
    assert batch.valid_BS is not None and batch.valid_BS.sum(1).tolist() == [2 * size] * 4
    # A token that carries loss is the target of the one before it.
    learned = np.concatenate([one.learned[1:], [False]] * 2 + [np.zeros(9, dtype=bool)])
    assert np.array_equal(batch.loss_mask_BS.numpy(), np.tile(learned, (4, 1)))
    assert batch.num_loss_tokens() == 4 * 2 * one.learned.sum()
    numbers = np.repeat([0, 1, -1], [size, size, 9])
    assert np.array_equal(batch.documents_BS[0].numpy(), numbers)


def test_texts_and_conversations_in_one_file(folder: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "mixed.jsonl", {"text": "brief"}, {"messages": TALK}, {"text": "user"})
    corpus = Corpus.open(str(data), tokenizer=str(folder), vocab_size=300)
    assert corpus.learned is not None
    assert corpus.learned[:5].all() and corpus.learned[-4:].all()
    newline = Tokenizer.open(str(folder)).encode(b"\n", "")
    assert corpus.learned[5] and corpus.tokens[5] == newline[0], "the end of a text"
    assert corpus.starts[1] == 6 and len(corpus.starts) == 3


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


def test_a_template_that_leaves_turns_out() -> None:
    """What is not in the text carries no loss; where no answer is, the record is bad."""
    source = "{% for m in messages %}{{ m.content if loop.last else '' }};{% endfor %}"
    template = ChatTemplate(source, {}, "test")
    found = template.render({"messages": TALK}, HERE)
    assert [found.text[span.start : span.stop] for span in found.learned] == ["Bye.;"]
    with pytest.raises(DataError, match=r"line 7, byte 90: .* none of the assistant turns"):
        template.render({"messages": [*TALK, {"role": "user", "content": "?"}]}, HERE)


def test_generation_blocks_are_their_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    talk = [{"role": "assistant", "content": "ab"}]
    found = by_itself(ChatTemplate(source, {}, "test"), {"messages": talk}, Tokenizer.open("bytes"))
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
    found = by_itself(ChatTemplate.open(tokenizer), {"messages": talk}, tokenizer)
    assert tokenizer.decode([int(one) for one in found.ids]) == "Be"
