"""One file into records: every format, compression and kind of damage, with the place."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from moemesh.data import corpus as documents
from moemesh.data import records as records_module
from moemesh.data.chat import ChatTemplate
from moemesh.data.corpus import Corpus, Document
from moemesh.data.input_files import DataFile, find
from moemesh.data.records import BadRecordError, BadRecordLog, Record, Where, read
from moemesh.data.tokenizer import DataError, Tokenizer
from tests.data.test_chat import by_itself
from tests.data.texts import all_of, byte_level_tokenizer

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def texts(path: Path, format: str = "auto") -> list[Record]:
    return [record for _, record in all_of(path, format)]


def packed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    # Two frames, as `cat a.zst b.zst` makes them.
    half = len(content) // 2
    return zstandard.compress(content[:half]) + zstandard.compress(content[half:])


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_read_as_plain_ones(tmp_path: Path, ending: str) -> None:
    lines = b"".join(json.dumps({"text": f"zeile {i} ü"}).encode() + b"\n" for i in range(5000))
    for name, content in (("a.jsonl", lines), ("b.txt", b"plain text\n" * 9000)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / (name + ending)).write_bytes(packed(ending, content))
        plain, decompressed = all_of(tmp_path / name), all_of(tmp_path / (name + ending))
        assert [record for _, record in plain] == [record for _, record in decompressed]
        assert [where[1:] for where, _ in plain] == [where[1:] for where, _ in decompressed]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["short", "changed"])
def test_damaged_compressed_files_are_named(tmp_path: Path, ending: str, damage: str) -> None:
    pytest.importorskip("zstandard")
    good = bytearray(packed(ending, bytes(range(65, 90)) * 40_000))
    file = tmp_path / ("a.txt" + ending)
    if damage == "short":
        good = good[:-5]
    else:
        good[8:40] = b"\xff" * 32
    file.write_bytes(good)
    with pytest.raises(DataError, match=rf"a\.txt\{ending}: the (gzip|zstd) data are damaged"):
        texts(file)


def test_names_that_lie_are_refused(tmp_path: Path) -> None:
    refused = {
        "a.txt": (gzip.compress(b"text"), "gzip data"),
        "a.jsonl": (zstandard.compress(b"{}"), "zstd data"),
        "a.txt.gz": (b"plain", "does not begin as such"),
        "b.txt.gz": (gzip.compress(gzip.compress(b"twice")), "gzip data"),
        "a.parquet": (b'{"text": "x"}', "does not begin as such"),
        "b.txt": (b"PAR1....", "parquet data"),
        "a.safetensors": (b"\x40\0\0\0\0\0\0\0{}", "binary data"),
        "tokenizer.json": (b'{\n "a": 1}', "holds one JSON object on several lines"),
        "a.csv": (b"text,label\none,1\n", "named as a table.*to_parquet"),
        "a.pdf": (b"%PDF-1.7\n1 0 obj", "a PDF document"),
        "b": (b'{"text": "one"}\n{"text": "two"}\n', "holds JSON"),
        "c": (b'{"messages": []}', "holds JSON"),
    }
    for name, (content, reason) in refused.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}.*{reason}"):
            texts(tmp_path / name)
    # A format that is given by name overrides the check.
    assert texts(tmp_path / "b", "jsonl") == [b"one", b"two"]
    assert texts(tmp_path / "a.csv", "text") == [b"text,label\none,1\n"]
    assert texts(tmp_path / "c", "text") == [b'{"messages": []}']
    assert texts(tmp_path / "a.safetensors", "bytes") == [b"\x40\0\0\0\0\0\0\0{}"]
    with pytest.raises(DataError, match="gzip data"):
        texts(tmp_path / "a.txt", "text")


def test_text_that_begins_with_a_brace_is_text(tmp_path: Path) -> None:
    for content in (b"{% if x %}\nhello\n", b"{\n  not json\n", b"[1, 2]\n", b"{"):
        (tmp_path / "a.txt").write_bytes(content)
        assert texts(tmp_path / "a.txt") == [content]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_records(tmp_path: Path, name: str, indent: int | None) -> None:
    """Alpaca's and LLaMA-Factory's files: one list instead of a record on each line."""
    content = "\ufeff\n" + json.dumps([{"text": "ü"}, {"text": 5}, {"text": "two"}], indent=indent)
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    log = BadRecordLog("skip", 0.5)
    [file] = find(str(tmp_path / name))
    assert [record for _, record in read(file, log=log)] == ["ü".encode(), b"two"]
    assert log.places == [
        f'{tmp_path / name}, element 2: expected an object with a text under the key "text", or '
        'a conversation under the key "messages"; found "text" with a number'
    ]


def test_json_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert texts(tmp_path / "a.json") == [b"one", b"two"]
    (tmp_path / "a.json").write_text('[{"text": "one"},\n{"text": "two"},\n]')
    with pytest.raises(DataError, match=r"a\.json: not a valid list in JSON \(.*line 3 column 1"):
        texts(tmp_path / "a.json")


def test_several_paths_in_one(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for name in names:
        Path(name).write_text("text")
    with pytest.raises(
        DataError, match=rf'data.sources=\[{{path="{names[0]}"}}, {{path="{names[1]}"'
    ):
        find(",".join(names))
    with pytest.raises(DataError, match=r"c\.txt: No such file or directory \((?!several)"):
        find(f"{names[0]},{tmp_path}/c.txt")


def test_a_folder_of_mixed_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    (tmp_path / "c.txt").write_text("three")
    pq.write_table(pa.table({"text": ["four", "five"]}), tmp_path / "d.parquet")
    assert texts(tmp_path) == [b"one", b"two", b"three", b"four", b"five"]
    assert texts(tmp_path, "jsonl") == [b"one", b"two"]
    assert texts(tmp_path, "parquet") == [b"four", b"five"]


def test_places_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "\xc3\xa9"}\n\n{"text": "b"}\r\n' + b'{"text": "c"')
    pairs: list[tuple[Where, Record]] = []
    with pytest.raises(BadRecordError) as caught:
        for one in read(DataFile(file, "jsonl")):
            pairs.append(one)
    assert [(w.record, w.byte, r) for w, r in pairs] == [(1, 0, "é".encode()), (3, 19, b"b")]
    assert caught.value.where == Where(str(file), "line", 4, 34 + 12)
    assert f"{file}, line 4, byte 46: not valid JSON" in str(caught.value)


def test_a_byte_order_mark_counts_as_bytes(tmp_path: Path) -> None:
    for content, byte in ((b'{"text": x}', 12), (b'{"text": "\xff"}', 13)):
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
        with pytest.raises(BadRecordError, match=rf"line 1, byte {byte}: not valid"):
            texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "found a list"),
        (b"3", "found a number"),
        (b"{}", "found an empty object"),
        (b'{"tekst": "x"}', 'found an object with the keys "tekst"'),
        (b'{"text": 3}', 'found "text" with a number'),
        (b'{"text": null}', 'found "text" with null'),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"text": "a", "text": "b"}', r"not valid JSON \(the key text is repeated\)"),
    ],
)
def test_bad_records_are_named_or_left_out(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "ok"}\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2, byte \d+: .*{reason}"):
        texts(file)
    log = BadRecordLog("skip", 1.0)
    assert [r for _, r in read(DataFile(file, "jsonl"), log=log)] == [b"ok", b"last"]
    assert (log.bad, log.total) == (1, 1) and f"{file}, line 2, byte" in log.places[0]


def test_another_key(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"content": "x", "text": 1}\n' + json.dumps(CHAT))
    assert [record for _, record in all_of(file, text_key="content")] == [b"x", CHAT]
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    assert [record for _, record in all_of(tmp_path / "a.parquet", text_key="content")] == [b"x"]
    with pytest.raises(DataError, match=r'neither a column "text" nor "messages", but "content"'):
        texts(tmp_path / "a.parquet")
    twice = pa.table([["x"], ["y"]], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r'a\.parquet has the columns "text" more than once'):
        texts(tmp_path / "a.parquet")


def test_conversations_of_tables(tmp_path: Path) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]
    table = pa.table({"messages": [CHAT["messages"], turns], "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    pairs = all_of(tmp_path / "a.parquet")
    assert [record for _, record in pairs] == [CHAT, {"messages": turns}]
    assert str(pairs[1][0]) == f"{tmp_path / 'a.parquet'}, row 2"


def test_nulls_of_tables_are_bad_records(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: "):
        texts(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet: the parquet data cannot be read"):
        texts(tmp_path / "b.parquet")


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(1000)], "n": range(1000)})
    rows.shuffle(seed=1).save_to_disk(tmp_path / "one")
    pairs = all_of(tmp_path / "one")
    assert [r for _, r in pairs] == [t.encode() for t in rows.shuffle(seed=1)["text"]]
    assert str(pairs[9][0]) == f"{tmp_path / 'one'}, row 10"
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(
        tmp_path / "splits"
    )
    assert len(texts(tmp_path / "splits")) == 1000
    assert len(texts(tmp_path / "splits" / "test")) == 3
    datasets.DatasetDict({"a": rows}).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match='splits "a", but no "train"'):
        texts(tmp_path / "other")
    for part in (tmp_path / "one").glob("*.arrow"):
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(DataError, match="the dataset cannot be read"):
        texts(tmp_path / "one")
    with pytest.raises(DataError, match="a dataset that was saved"):
        texts(tmp_path, "dataset")


def test_datasets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    loads: list[object] = []

    def load(name: str, subset: str | None, *, split: str) -> object:
        loads.append((name, subset, split))
        if name == "owner/none":
            raise FileNotFoundError("no such dataset")
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    for path in ("hub:owner/name", "hub:owner/name:small"):
        pairs = [one for file in find(path) for one in read(file)]
        assert [record for _, record in pairs] == [b"a", b"b"]
        assert str(pairs[1][0]) == f"{path}, row 2"
    assert loads == [("owner/name", None, "train"), ("owner/name", "small", "train")]
    with pytest.raises(DataError, match=r"hub:owner/none: the dataset cannot be read"):
        list(read(find("hub:owner/none")[0]))
    with pytest.raises(DataError, match="a dataset of the Hub"):
        find("hub:owner/name", "jsonl")


def test_long_texts_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "PIECE", 80)
    content = "".join(f"line {i}\n" + "  indented ü\n\n" * (i % 4) for i in range(60)).encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    pairs = all_of(tmp_path / "a.txt.gz")
    pieces = [record for _, record in pairs]
    assert b"".join(p for p in pieces if isinstance(p, bytes)) == content and len(pieces) > 20
    for where, piece in pairs:
        assert isinstance(piece, bytes) and where.byte is not None
        assert content[where.byte :].startswith(piece)
        assert piece[:1] not in b" \n" and where.continues == (where.byte > 0)
    # Without a newline: between two characters.
    (tmp_path / "b.txt").write_text("äöü" * 100)
    for piece in texts(tmp_path / "b.txt"):
        assert isinstance(piece, bytes) and piece.decode()
    assert len(texts(tmp_path / "b.txt")) > 5


# Records into documents with ordinary tokenizers: batches change only the time.

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with a template and an end of text, and the settings of a server."""
    path = byte_level_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), Path(__file__).read_text(), TEMPLATE, "<|end|>"
    )
    made = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    made.enable_truncation(5)
    made.enable_padding(length=9, pad_token="<|end|>")
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return path


def records() -> Iterator[tuple[Where, Record]]:
    for number, line in enumerate(Path(__file__).read_bytes().splitlines(), start=1):
        record: Record = line
        if number % 5 == 0:
            talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(line)}]
            record = {"messages": talk}
        yield Where("made.jsonl", "line", number, 10 * number), record


def encoded(
    pairs: Iterable[tuple[Where, Record]], tokenizer: Tokenizer, log: BadRecordLog | None = None
) -> list[Document]:
    """The documents of a file of these records."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "read", lambda *_: pairs)
        file = DataFile(Path("made.jsonl"), "jsonl")
        return list(documents.documents_of([file], tokenizer, "text", log or BadRecordLog()))


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
    rows = encoded(records(), tokenizer)
    assert [
        (where, ids.tolist(), None if learned is None else learned.tolist())
        for where, ids, learned in rows
    ] == expected
    assert {ids.dtype for _, ids, _ in rows} == {np.dtype(np.uint8 if name == "bytes" else "i4")}
    assert sum(learned is not None for _, _, learned in rows) > 20


def test_bad_records_come_in_order_with_their_places(folder: Path) -> None:
    def broken() -> Iterator[tuple[Where, Record]]:
        for number, record in enumerate([b"one", b"\xff", {"messages": []}, b"two"], start=1):
            yield Where("made.jsonl", "line", number, number), record

    log = BadRecordLog("skip", 1.0)
    rows = encoded(broken(), Tokenizer.open(str(folder)), log)
    assert [where.record for where, _, _ in rows] == [1, 4]
    assert [message[:30] for message in log.places] == [
        "made.jsonl, line 2, byte 2: no",
        'made.jsonl, line 3, byte 3: "m',
    ]
    with pytest.raises(BadRecordError, match=r"line 2, byte 2: not valid UTF-8"):
        encoded(broken(), Tokenizer.open(str(folder)))
    text = Where("a.txt", "file", 1, 100)
    with pytest.raises(DataError, match=r"a\.txt.*byte offset 102: not valid UTF-8"):
        encoded([(text, b"ok\xff")], Tokenizer.open(str(folder)))


def test_settings_of_serving_do_not_cut_documents(folder: Path) -> None:
    """A tokenizer file with truncation to 5 tokens and padding to 9."""
    tokenizer = Tokenizer.open(str(folder))
    assert tokenizer.decode(tokenizer.encode(b"def test_settings_of_serving", "").tolist()) == (
        "def test_settings_of_serving"
    )


def test_half_of_a_character_in_a_conversation(folder: Path) -> None:
    record: dict[str, Any] = json.loads(
        '{"messages": [{"role": "assistant", "content": "\\ud83d"}]}'
    )
    with pytest.raises(BadRecordError, match=r"line 1, byte 0: the chat template .* fails: .*utf"):
        encoded([(Where("a", "line", 1, 0), record)], Tokenizer.open(str(folder)))


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
    with pytest.raises(DataError, match=rf"data\.tokenizer {renamed} has ids"):
        Tokenizer.open(str(renamed)).check(299)


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"]
)
def test_parts_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="not a usable tokenizer"):
        Tokenizer.open(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"has no tokenizer\.json: .*pip install transformers"):
        Tokenizer.open(str(tmp_path))


def test_the_two_files_of_save_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["1 + 2"], vocab_size=260)
    made.save_model(str(tmp_path))
    with pytest.raises(DataError, match=r'no tokenizer\.json: .* save\("tokenizer\.json"\)'):
        Tokenizer.open(str(tmp_path))


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


def test_a_completion_carries_the_loss(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "def ", "completion": "test"}\n')
    corpus = Corpus.open(str(tmp_path / "a.jsonl"), tokenizer=str(folder), vocab_size=300)
    assert corpus.learned is not None
    tokenizer = Tokenizer.open(str(folder))
    texts = [corpus.tokens[mask].tolist() for mask in (~corpus.learned, corpus.learned)]
    assert [tokenizer.decode(ids, special=True) for ids in texts] == ["def ", "test<|end|>"]
    parts = [{"label": text[0] == "t", "text": text} for text in ("def ", "test", ": ", "t")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"segments": parts}))
    corpus = Corpus.open(str(tmp_path / "a.jsonl"), tokenizer=str(folder), vocab_size=300)
    assert corpus.learned is not None
    texts = [corpus.tokens[mask].tolist() for mask in (~corpus.learned, corpus.learned)]
    assert [tokenizer.decode(ids, special=True) for ids in texts] == ["def : ", "testt"]


def test_a_column_of_bytes_is_text(tmp_path: Path) -> None:
    rows = pa.table({"text": pa.array([b"one", "zwö".encode()], pa.binary())})
    pq.write_table(rows, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == [b"one", "zwö".encode()]


def test_nulls_are_missing_keys(tmp_path: Path) -> None:
    """Rows in the form that `datasets.Dataset.to_json` writes."""
    call = {"function": {"name": "f", "arguments": {"a": None, "zone": "UTC"}}, "id": None}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    record = {"messages": turns, "tools": [{"name": "f", "strict": None}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    (_, line), (_, row) = all_of(tmp_path / "a.jsonl")[0], all_of(tmp_path / "a.parquet")[0]
    call = {"function": {"name": "f", "arguments": {"zone": "UTC"}}}
    turn = {"role": "assistant", "tool_calls": [call]}
    assert line == row == {"messages": [turn], "tools": [{"name": "f"}]}


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_json_in_a_table_is_what_it_stands_for(tmp_path: Path, form: str) -> None:
    """Values of mixed types, which datasets writes as texts of the type arrow.json, and maps."""
    datasets = pytest.importorskip("datasets")
    turns = [{"role": "assistant", "content": "a", "arguments": {"b": [1, {"c": "d"}]}}]
    tools = [{"name": "f"}, {"name": 1}]
    text, as_json = datasets.Value("string"), datasets.Json()
    turn = {"role": text, "content": text, "arguments": as_json}
    features = {"messages": datasets.List(turn), "tools": datasets.List(as_json)}
    features = datasets.Features(features)
    made = datasets.Dataset.from_list([{"messages": turns, "tools": tools}], features=features)
    if form == "dataset":
        made.save_to_disk(str(tmp_path / "a"))
    else:
        table = made.with_format("arrow")[:]
        values = pa.array([[("think", "no")]], pa.map_(pa.string(), pa.string()))
        pq.write_table(table.append_column("chat_template_kwargs", values), tmp_path / "a.parquet")
    (_, record), *_ = all_of(next(tmp_path.iterdir()))
    more = {} if form == "dataset" else {"chat_template_kwargs": {"think": "no"}}
    assert record == {"messages": turns, "tools": tools, **more}


def test_a_map_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    messages = pa.array([[{"role": "assistant", "content": "a"}]])
    values = pa.array([[("think", "no"), ("think", "yes")]], pa.map_(pa.string(), pa.string()))
    table = pa.table({"messages": messages, "chat_template_kwargs": values})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: .* a key twice"):
        all_of(tmp_path / "a.parquet")
