"""Indexed datasets: the layout of Megatron, the sidecar, the loss mask, and damaged files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.data import indexed
from moemesh.data.corpus import Corpus
from moemesh.data.indexed import BIN, IDX, MASK, META, IndexedTokens, IndexedWriter, path_with
from moemesh.data.samples import Windows
from moemesh.data.tokenizer import DataError


def writer(
    prefix: Path, *, vocab_size: int = 1000, end: Sequence[int] = (), ends_last: bool = False
) -> IndexedWriter:
    return IndexedWriter(
        prefix,
        vocab_size=vocab_size,
        tokenizer="made",
        end_of_document=np.array(end, dtype=np.int32),
        ends_last=ends_last,
    )


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def megatron(
    prefix: Path,
    lengths: Sequence[int],
    documents: Sequence[int],
    tokens: Sequence[int],
    *,
    code: int = 4,
    dtype: str = "<i4",
) -> None:
    """The pair as Megatron lays it out, byte by byte."""
    starts = [sum(lengths[:i]) * np.dtype(dtype).itemsize for i in range(len(lengths))]
    content = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    content += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents))
    content += struct.pack(f"<{len(lengths)}i", *lengths)
    content += struct.pack(f"<{len(starts)}q", *starts)
    content += struct.pack(f"<{len(documents)}q", *documents)
    path_with(prefix, IDX).write_bytes(content)
    path_with(prefix, BIN).write_bytes(np.array(tokens, dtype=dtype).tobytes())


def test_a_pair_of_megatron_is_read(tmp_path: Path) -> None:
    """Three documents, the first of two sequences, the second empty."""
    megatron(tmp_path / "a.b", [2, 1, 3], [0, 2, 2, 3], [5, 6, 7, 8, 9, 10])
    for path in (tmp_path / "a.b", tmp_path / "a.b.bin", tmp_path / "a.b.idx"):
        token_file = IndexedTokens.open(path)
        assert token_file.tokens.tolist() == [5, 6, 7, 8, 9, 10]
        assert token_file.starts.tolist() == [0, 3]
        assert token_file.learned is None and token_file.sidecar is None and token_file.max_id == 10
    assert isinstance(token_file.tokens, np.memmap)


def test_a_pair_of_ours_has_the_bytes_of_megatron(tmp_path: Path) -> None:
    with writer(tmp_path / "ours") as ours:
        for document in (ids(1, 2), ids(), ids(999)):
            ours.add(document)
    megatron(tmp_path / "theirs", [2, 1], [0, 1, 2], [1, 2, 999], code=8, dtype="<u2")
    for suffix in (BIN, IDX):
        ours_path = path_with(tmp_path / "ours", suffix)
        assert ours_path.read_bytes() == path_with(tmp_path / "theirs", suffix).read_bytes()
    assert sorted(path.name for path in tmp_path.glob("ours*")) == [
        "ours.bin",
        "ours.idx",
        "ours.meta.json",
    ]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")]
)
def test_ids_take_the_smallest_dtype(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    with writer(tmp_path / "a", vocab_size=vocab_size) as made:
        made.add(ids(0, vocab_size - 1))
    token_file = IndexedTokens.open(tmp_path / "a")
    assert token_file.tokens.dtype.name == dtype and token_file.tokens.tolist() == [
        0,
        vocab_size - 1,
    ]
    assert token_file.sidecar is not None and token_file.sidecar.max_id == vocab_size - 1


@pytest.mark.parametrize("ends_last", [False, True])
@pytest.mark.parametrize("masked", [(), (0,), (1,), (2,), (0, 2)])
def test_parts_give_the_file_of_one_writer(
    tmp_path: Path, masked: tuple[int, ...], ends_last: bool
) -> None:
    """A file joined from parts: an end token after each text, which carries loss as the text does,
    and with `ends_last` also after conversations and after the last document."""
    documents = [ids(1, 2, 3), ids(4), ids(5, 6)]
    masks = [np.arange(len(d)) % 2 == 0 if i in masked else None for i, d in enumerate(documents)]
    with writer(tmp_path / "whole", end=(7, 8), ends_last=ends_last) as whole:
        for document, mask in zip(documents, masks, strict=True):
            whole.add(document, mask)
    for name, own in (("one", slice(0, 1)), ("two", slice(1, 3))):
        with writer(tmp_path / name, end=(7, 8), ends_last=ends_last) as part:
            for document, mask in zip(documents[own], masks[own], strict=True):
                part.add(document, mask)
    with writer(tmp_path / "joined", end=(7, 8), ends_last=ends_last) as joined:
        for name, last in (("one", 0), ("two", 2)):
            joined.extend(IndexedTokens.open(tmp_path / name), ends_text=masks[last] is None)
    for suffix in (BIN, IDX, MASK, META):
        first, second = (path_with(tmp_path / name, suffix) for name in ("whole", "joined"))
        assert first.exists() == second.exists() == (suffix != MASK or bool(masked))
        if first.exists():
            assert first.read_bytes() == second.read_bytes()
    token_file = IndexedTokens.open(tmp_path / "joined")
    has_end = [ends_last or (i < 2 and i not in masked) for i in range(3)]
    ends = [[7, 8] if one else [] for one in has_end]
    parts = [[*document.tolist(), *end] for document, end in zip(documents, ends, strict=True)]
    assert token_file.tokens.tolist() == [one for part in parts for one in part]
    assert token_file.starts.tolist() == [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    if masked:
        assert token_file.learned is not None
        expected = [
            [True] * len(part) if mask is None else [*mask.tolist(), *([False] * len(end))]
            for part, mask, end in zip(parts, masks, ends, strict=True)
        ]
        assert token_file.learned.tolist() == [one for part in expected for one in part]
    token_file.verify()


def test_long_documents_are_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "MAX_SEQUENCE", 4)
    monkeypatch.setattr(indexed, "CHUNK", 3)
    with writer(tmp_path / "a") as made:
        for length in (9, 4, 1):
            made.add(np.arange(length, dtype=np.int32))
    megatron(
        tmp_path / "b",
        [4, 4, 1, 4, 1],
        [0, 3, 4, 5],
        [*range(9), *range(4), 0],
        code=8,
        dtype="<u2",
    )
    assert (
        path_with(tmp_path / "a", IDX).read_bytes() == path_with(tmp_path / "b", IDX).read_bytes()
    )
    token_file = IndexedTokens.open(tmp_path / "a")
    assert token_file.starts.tolist() == [0, 9, 13]
    assert token_file.tokens.tolist() == [*range(9), *range(4), 0]


def test_nothing_is_left_of_a_writer_that_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writer(tmp_path / "a") as made:
        made.add(ids(1), np.array([True]))
        raise KeyError
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="no token"), writer(tmp_path / "a"):
        pass
    assert not list(tmp_path.iterdir())
    path_with(tmp_path / "a", META).write_text("{}")
    with pytest.raises(DataError, match=r"a\.meta\.json exists"):
        writer(tmp_path / "a")


@pytest.mark.parametrize("place", [BIN, MASK, META, IDX])
def test_nothing_is_left_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Whichever file is full: the temporary ones go, and those that have their names already."""
    opened = Path.open

    def full(path: Path, mode: str = "r", **options: Any) -> Any:
        file = opened(path, mode, **options)
        return opened(Path("/dev/full"), mode) if path.name == f"a{place}.tmp" else file

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DataError, match=f"a{place}.tmp: No space"), writer(tmp_path / "a") as made:
        made.add(ids(1, 2), np.array([False, True]))
    assert not list(tmp_path.iterdir())


def damaged(place: int, content: bytes) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = path_with(prefix, IDX)
        data = bytearray(path.read_bytes())
        data[place : place + len(content)] = content
        path.write_bytes(data)

    return damage


def cut(suffix: str, count: int) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = path_with(prefix, suffix)
        content = path.read_bytes()
        path.write_bytes(content[:-count] if count > 0 else content + bytes(-count))

    return damage


def said(**facts: object) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = path_with(prefix, META)
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))

    return damage


#: 3 sequences of 2, 1 and 3 tokens; 3 documents: 34 + 12 + 24 + 32 bytes.
HUGE = struct.pack("<Q", 2**63)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged(0, b"X"), "does not begin as an index"),
        (cut(IDX, 80), "does not begin as an index"),
        (damaged(9, b"\2"), "version 2"),
        (damaged(17, b"\7"), "dtype code 7"),
        (damaged(18, HUGE), "needs 110680464442257309762"),
        (damaged(26, HUGE), "needs 73786976294838206534"),
        (damaged(18, struct.pack("<QQ", 0, 11)), "needs 122"),
        (cut(IDX, 1), "101 bytes"),
        (cut(IDX, -3), "multimodal"),
        (damaged(34, struct.pack("<i", -2)), "sequence 0 has -2 tokens"),
        (damaged(34, struct.pack("<i", 3)), "sequence 1 begins at byte 4 .* end at byte 6"),
        (damaged(46, struct.pack("<q", 2)), "sequence 0 begins at byte 2"),
        (damaged(70, struct.pack("<q", 1)), "from 1 to 3"),
        (damaged(78, struct.pack("<q", 9)), "must ascend from 0 to 3"),
        (damaged(94, struct.pack("<q", 4)), "from 0 to 4"),
        (cut(BIN, 1), "has 11 bytes, and .* describes 6 tokens of 2 bytes"),
        (cut(BIN, -2), "has 14 bytes"),
        (cut(MASK, 1), r"a\.mask\.bin has 5 bytes, and .* has 6"),
        (said(num_tokens=7), "of 7 tokens in 3 documents, and the index of 6 in 3"),
        (said(num_documents=1), "in 1 documents"),
        (said(max_id=70000), "70000, is not a number of uint16"),
        (said(max_id=-1), "counts must be numbers"),
        (said(vocab_size="9"), "counts must be numbers"),
        (said(format="other"), "must be"),
        (said(files=[]), "not a sidecar"),
        (said(files={"../x": {}}), "must name"),
        (said(extra=1), "unexpected keyword"),
        (lambda prefix: path_with(prefix, META).write_text("[" * 10**5), "not a sidecar"),
        (lambda prefix: path_with(prefix, META).write_bytes(bytes(2 << 20)), "2097152 bytes"),
        (lambda prefix: path_with(prefix, MASK).write_bytes(b"\1\0\2\0\1\0"), "byte 2: 2 is"),
        (lambda prefix: path_with(prefix, BIN).unlink(), r"a\.bin: the file does not exist"),
        (lambda prefix: path_with(prefix, MASK).unlink(), r"a\.mask\.bin: the file does not exist"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    with writer(tmp_path / "a") as made:
        for length in (2, 1, 3):
            made.add(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))
    assert IndexedTokens.open(tmp_path / "a").learned is not None
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=message):
        IndexedTokens.open(tmp_path / "a")


def test_ids_outside_the_vocabulary_and_other_tokenizers(tmp_path: Path) -> None:
    with writer(tmp_path / "a") as made:
        made.add(ids(1, 2))
        made.add(ids(3, 300, 4))
    token_file = IndexedTokens.open(tmp_path / "a")
    token_file.check(301, "made")
    with pytest.raises(DataError, match=r"token 3 \(document 2\): id 300 .*vocab_size to 301"):
        token_file.check(300)
    with pytest.raises(DataError, match=r"made with the tokenizer made, and .* bytes"):
        token_file.check(301, "bytes")
    said(max_id=500)(tmp_path / "a")
    with pytest.raises(DataError, match="max_id is 500"):
        IndexedTokens.open(tmp_path / "a").check(400)


def test_files_of_others_are_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "CHUNK", 2)
    megatron(tmp_path / "a", [5], [0, 1], [0, 1, 2, 3, -1])
    token_file = IndexedTokens.open(tmp_path / "a")
    assert token_file.max_id == 3
    with pytest.raises(DataError, match=r"token 4 \(document 1\): id -1"):
        token_file.check(4)
    megatron(tmp_path / "b", [5], [0, 1], [0, 1, 2, 3, 9])
    with pytest.raises(DataError, match=r"id 9 .* to 10"):
        IndexedTokens.open(tmp_path / "b").check(9)
    IndexedTokens.open(tmp_path / "b").check(10)


def test_changed_bytes_are_found_by_verify(tmp_path: Path) -> None:
    with writer(tmp_path / "a") as made:
        made.add(ids(1, 2))
    path = path_with(tmp_path / "a", BIN)
    path.write_bytes(b"\0" * 4)
    with pytest.raises(DataError, match="was changed or damaged"):
        IndexedTokens.open(tmp_path / "a").verify()


def test_damaged_ids_end_the_run_before_the_model_sees_them(tmp_path: Path) -> None:
    with writer(tmp_path / "a") as made:
        made.add(np.arange(64, dtype=np.int32))
    content = bytearray(path_with(tmp_path / "a", BIN).read_bytes())
    content[2 * 21 + 1] = 0xFF
    path_with(tmp_path / "a", BIN).write_bytes(content)
    token_file = IndexedTokens.open(tmp_path / "a")
    token_file.check(1000)
    samples = Windows(Corpus.indexed(token_file, 1000, "a.bin"), 8)
    samples.batch(np.array([0, 1]))
    with pytest.raises(DataError, match=r"a\.bin, token 21: id 65301 is not below .* 1000"):
        samples.batch(np.array([0, 2]))
