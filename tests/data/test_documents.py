"""Tokenizers as they come, and records into documents: batches change nothing but the time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.data import corpus as documents
from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import encoded
from moemesh.data.records import BadRecordError, Record, Where
from moemesh.data.tokenizer import DataError, Tokenizer
from tests.data.test_chat import by_itself

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with a template and an end of text."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.enable_truncation(5)
    made.enable_padding(length=9)
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return path


def records() -> Iterator[tuple[Where, Record]]:
    for number, line in enumerate(Path(__file__).read_bytes().splitlines(), start=1):
        record: Record = line
        if number % 5 == 0:
            talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(line)}]
            record = {"messages": talk}
        yield Where("made.jsonl", "line", number, 10 * number), record


@pytest.mark.parametrize("name", ["bytes", "folder"])
def test_batches_are_the_records_one_by_one(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(documents, "BATCH_RECORDS", 7)
    tokenizer = Tokenizer.open(str(folder))
    template = ChatTemplate.open(tokenizer)
    if name == "bytes":
        tokenizer = Tokenizer.open("bytes")
        monkeypatch.setattr(documents.ChatTemplate, "open", lambda _: template)
    expected: list[tuple[Where, list[int], list[bool] | None]] = []
    for where, record in records():
        if isinstance(record, dict):
            _, ids, learned = by_itself(template, record, tokenizer)
            assert learned is not None
            expected.append((where, ids.tolist(), learned.tolist()))
        elif record:
            expected.append((where, tokenizer.encode(record, where).tolist(), None))
    found = list(encoded(records(), tokenizer))
    assert [
        (where, ids.tolist(), None if learned is None else learned.tolist())
        for where, ids, learned in found
    ] == expected
    assert {ids.dtype for _, ids, _ in found} == {np.dtype(np.uint8 if name == "bytes" else "i4")}
    assert sum(learned is not None for _, _, learned in found) > 20


def test_bad_records_come_in_order_with_their_places(folder: Path) -> None:
    def broken() -> Iterator[tuple[Where, Record]]:
        for number, record in enumerate([b"one", b"\xff", {"messages": []}, b"two"], start=1):
            yield Where("made.jsonl", "line", number, number), record

    bad: list[str] = []
    found = encoded(broken(), Tokenizer.open(str(folder)), on_bad=lambda e: bad.append(str(e)))
    assert [where.record for where, _, _ in found] == [1, 4]
    assert [message[:30] for message in bad] == [
        "made.jsonl, line 2, byte 2: no",
        'made.jsonl, line 3, byte 3: "m',
    ]
    with pytest.raises(BadRecordError, match=r"line 2, byte 2: not valid UTF-8"):
        list(encoded(broken(), Tokenizer.open(str(folder))))
    text = Where("a.txt", "file", 1, 100)
    with pytest.raises(DataError, match=r"a\.txt.*byte offset 102: not valid UTF-8"):
        list(encoded([(text, b"ok\xff")], Tokenizer.open(str(folder))))


def test_settings_of_serving_do_not_cut_documents(folder: Path) -> None:
    """The file asks for at most 5 and exactly 9 tokens."""
    tokenizer = Tokenizer.open(str(folder))
    assert tokenizer.decode(tokenizer.encode(b"def test_settings_of_serving", "").tolist()) == (
        "def test_settings_of_serving"
    )


def test_half_of_a_character_in_a_conversation(folder: Path) -> None:
    record: dict[str, Any] = json.loads(
        '{"messages": [{"role": "assistant", "content": "\\ud83d"}]}'
    )
    with pytest.raises(BadRecordError, match=r"line 1, byte 0: the chat template .* fails: .*utf"):
        list(encoded([(Where("a", "line", 1, 0), record)], Tokenizer.open(str(folder))))


def test_a_file_or_a_folder(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(str(folder))
    renamed = tmp_path / "own.json"
    renamed.write_bytes((folder / "tokenizer.json").read_bytes())
    for path in (folder / "tokenizer.json", renamed):
        assert Tokenizer.open(str(path)).fingerprint == tokenizer.fingerprint
    assert tokenizer.vocab_size == 300
    tokenizer.check(300)
    with pytest.raises(DataError, match=r"ids up to 299, and model\.vocab_size is 299: .* to 300"):
        tokenizer.check(299)
    Tokenizer.open("bytes").check(128)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tokenizer.model", "SentencePiece"),
        ("vocab.json", "without the rules"),
        ("merges.txt", "without the rules"),
        ("tokenizer_config.json", "without a vocabulary"),
    ],
)
def test_other_kinds_of_tokenizers_are_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=f"{name} is .*{reason}.*save_pretrained"):
            Tokenizer.open(str(path))


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nearest existing folder"):
        Tokenizer.open(str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a usable tokenizer"):
        Tokenizer.open(str(tmp_path))


def test_the_end_of_a_text(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(str(folder))
    assert tokenizer.end_of_text() == tokenizer.id_of("<|end|>") == 0
    with pytest.raises(DataError, match="no token"):
        tokenizer.id_of("<|none|>")
    with pytest.raises(DataError, match="bytes"):
        Tokenizer.open("bytes").end_of_text()
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match='names no "eos_token"'):
        Tokenizer.open(str(tmp_path)).end_of_text()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert Tokenizer.open(str(tmp_path)).end_of_text() == 0
