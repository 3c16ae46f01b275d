"""The corpus and its samples: which files are read, the order of ids, and the messages."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.comm.mesh import Mesh
from moemesh.config.data import Documents
from moemesh.data import corpus as corpus_module
from moemesh.data.corpus import Corpus
from moemesh.data.samples import Samples
from moemesh.data.tokenizer import DataError
from moemesh.train.opening import own_batches
from tests.data.texts import held_out_ids, stream, training_ids


def bytes_of(corpus: Corpus) -> bytes:
    return corpus.tokens.astype(np.uint8).tobytes()


def make(num_tokens: int, vocab_size: int = 256, seed: int = 0) -> Corpus:
    drawn = np.random.default_rng(seed).integers(0, vocab_size, num_tokens)
    return stream(drawn.astype(np.int32), vocab_size)


# --- reading ---------------------------------------------------------------------------------


def test_default_corpus_is_the_standard_library_and_opens_fast() -> None:
    start = time.process_time()
    corpus = Corpus.open()
    seconds = time.process_time() - start
    assert seconds < 2
    assert len(corpus.starts) > 100 and len(corpus.tokens) > 2_000_000
    assert b"class JSONDecoder" in bytes_of(corpus)
    # abc before zipfile: relative names in order
    assert bytes_of(corpus).index(b"class ABCMeta") < bytes_of(corpus).index(b"class ZipFile")


def test_folder_order_joining_and_skipping(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"two")
    (tmp_path / "b-file").write_bytes("drei ü".encode())
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "c-empty").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "y").write_bytes(b"no")
    corpus = Corpus.open(str(tmp_path))
    # "b-file" < "b/x.txt": names are compared as text with "/", on every platform
    assert bytes_of(corpus) == "one\ndrei ü\ntwo".encode()
    assert len(corpus.starts) == 3  # one of four files is empty


def test_glob_and_file(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert bytes_of(Corpus.open(str(tmp_path / "*.txt"))) == b"a.txt\nb.txt"
    assert bytes_of(Corpus.open(str(tmp_path / "c.md"))) == b"c.md"
    odd = tmp_path / "odd[1].txt"
    odd.write_text("a name that looks like a pattern")
    assert bytes_of(Corpus.open(str(odd))).startswith(b"a name")


def test_the_format_follows_from_the_names(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "one"}')
    assert bytes_of(Corpus.open(str(file))) == b"one"
    assert bytes_of(Corpus.open(str(tmp_path / "*.jsonl"))) == b"one"
    assert bytes_of(Corpus.open(str(tmp_path))) == b"one"
    assert bytes_of(Corpus.open(str(file), format="text")) == b'{"text": "one"}'
    (tmp_path / "note.txt").write_text("mixed")
    assert bytes_of(Corpus.open(str(tmp_path))) == b"one\nmixed"


def test_large_file_is_mapped_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "big"
    file.write_bytes(bytes(range(256)) * 40)
    plain = Samples(Corpus.open(str(file), "bytes"), seq_len=16, seed=3)
    monkeypatch.setattr(corpus_module, "MAP_FROM_BYTES", 100)
    mapped = Samples(Corpus.open(str(file), "bytes"), seq_len=16, seed=3)
    assert isinstance(mapped.corpora[0].tokens, np.memmap)
    ids = mapped.ids_at(0, 8)
    assert np.array_equal(mapped.batch(ids)[1], plain.batch(ids)[1])
    assert mapped.unigram_loss() == plain.unigram_loss()


def test_missing_path_names_it_and_the_nearest_parent(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Corpus.open(str(tmp_path / "no" / "such"))
    assert str(tmp_path / "no" / "such") in str(caught.value)
    assert f"nearest existing folder is {tmp_path}" in str(caught.value)


def test_nothing_to_read(tmp_path: Path) -> None:
    for made, path, format, words in (
        (False, tmp_path, "auto", "folder holds no readable file"),
        (False, tmp_path / "*.txt", "auto", "pattern matches no file"),
        (True, tmp_path / "empty", "auto", "no text in them"),
        (True, tmp_path, "jsonl", r"holds no \.jsonl file"),
        (True, "/dev/null", "auto", "neither a regular file nor a folder"),
        (True, tmp_path / "empty", "parquet", "empty: the parquet data cannot be read"),
    ):
        if made:
            (tmp_path / "empty").write_bytes(b"")
        with pytest.raises(DataError, match=words):
            Corpus.open(str(path), format)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "locked"
    file.write_text("x")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"locked: cannot be read \(Permission denied\)"):
        Corpus.open(str(file))


def test_id_outside_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"plain")
    (tmp_path / "b").write_bytes(b"caf\xc3\xa9")
    with pytest.raises(DataError) as caught:
        Corpus.open(str(tmp_path), vocab_size=128)
    for part in (str(tmp_path / "b"), "byte offset 3", "id 195", "128", "model.vocab_size to 256"):
        assert part in str(caught.value)
    assert len(Corpus.open(str(tmp_path), vocab_size=256).tokens) == 11


def test_tokenizer_folder_and_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Corpus.open(tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install tokenizers"):
        Corpus.open(tokenizer=str(tmp_path))


# --- samples ---------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(30, 2000),
    seq_len=st.integers(1, 9),
    held_out=st.floats(0, 0.5),
    global_batch=st.integers(1, 7),
    seed=st.integers(0, 2**63 - 1),
)
def test_each_training_id_once_an_epoch(
    num_tokens: int, seq_len: int, held_out: float, global_batch: int, seed: int
) -> None:
    try:
        samples = Samples(
            make(num_tokens),
            seq_len=seq_len,
            seed=seed,
            held_out=held_out,
            global_batch=global_batch,
        )
    except DataError:
        return
    training, held = training_ids(samples), held_out_ids(samples)
    assert len(held) == max(1, round(samples.num_samples * held_out))
    assert sorted([*training, *held]) == list(range(samples.num_samples))
    steps = 2 * len(training) // global_batch + 1
    order = np.concatenate(
        [samples.ids_at(step * global_batch, global_batch) for step in range(steps)]
    )
    assert order.dtype == np.int64
    for epoch in range(2):
        one = order[epoch * len(training) : (epoch + 1) * len(training)]
        assert sorted(one) == training.tolist()
    # A position gives the same sample for any batch size, independent of earlier calls.
    fresh = Samples(make(num_tokens), seq_len=seq_len, seed=seed, held_out=held_out)
    assert np.array_equal(fresh.ids_at(len(order) // 2, 5)[:2], order[len(order) // 2 :][:2])


def test_order_is_the_same_everywhere_and_for_ever() -> None:
    """Golden: a change here changes every run that anybody resumes."""
    samples = Samples(make(1001), seq_len=10, seed=7, held_out=0.1)
    assert held_out_ids(samples).tolist() == GOLDEN_HELD_OUT
    assert samples.ids_at(0, 8).tolist() == GOLDEN_FIRST
    assert samples.ids_at(90, 4).tolist() == GOLDEN_SECOND_EPOCH


GOLDEN_HELD_OUT = [12, 17, 21, 28, 44, 54, 65, 70, 75, 78]
GOLDEN_FIRST = [46, 30, 64, 84, 52, 93, 6, 74]
GOLDEN_SECOND_EPOCH = [19, 31, 29, 1]


def test_epochs_and_seeds_differ() -> None:
    samples = Samples(make(5001), seq_len=10, seed=0)
    count = len(training_ids(samples))
    first, second = samples.ids_at(0, count), samples.ids_at(count, count)
    assert not np.array_equal(first, second)
    other = Samples(make(5001), seq_len=10, seed=1)
    assert not np.array_equal(held_out_ids(other), held_out_ids(samples))
    # going back re-creates an epoch that left the cache
    samples.ids_at(7 * count, 1)
    assert np.array_equal(samples.ids_at(0, count), first)


def test_batch_is_the_windows() -> None:
    corpus = make(101, vocab_size=1000)
    samples = Samples(corpus, seq_len=10, seed=0)
    tokens, targets = samples.batch(np.array([9, 0]))
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.flags.c_contiguous and targets.flags.c_contiguous
    assert tokens[0].tolist() == corpus.tokens[90:100].tolist()
    assert targets[0].tolist() == corpus.tokens[91:101].tolist()
    assert tokens[1].tolist() == corpus.tokens[:10].tolist()
    assert samples.batch(np.empty(0, dtype=np.int64))[0].shape == (0, 10)
    with pytest.raises(AssertionError):
        samples.batch(np.array([10]))


def test_no_token_is_a_target_of_both_splits() -> None:
    samples = Samples(stream(np.arange(4001), 4001), seq_len=16, seed=0, held_out=0.2)
    trained = set(samples.batch(training_ids(samples))[1].reshape(-1).tolist())
    held = set(samples.batch(held_out_ids(samples))[1].reshape(-1).tolist())
    assert not trained & held
    # blocks: held-out windows mostly have held-out neighbours when the share is large enough
    large = Samples(make(64 * 16 * 20 + 1), seq_len=16, seed=0, held_out=0.2)
    neighbours = np.diff(held_out_ids(large)) == 1
    assert neighbours.mean() > 0.7


def test_validation_ids_spread() -> None:
    samples = Samples(make(5001), seq_len=10, seed=0, held_out=0.1)
    chosen = samples.validation_ids(5)
    assert len(set(chosen.tolist())) == 5 and set(chosen) <= set(held_out_ids(samples))
    assert chosen[0] == held_out_ids(samples)[0] and chosen[-1] > held_out_ids(samples)[30]
    assert np.array_equal(samples.validation_ids(10_000), held_out_ids(samples))
    assert len(samples.validation_ids(0)) == 0


def test_unigram_loss_is_the_plain_sum() -> None:
    samples = Samples(make(1203, vocab_size=11), seq_len=12, seed=0, held_out=0.2)
    counts = [1] * 11
    for target in samples.batch(training_ids(samples))[1].reshape(-1).tolist():
        counts[target] += 1
    held = samples.batch(held_out_ids(samples))[1].reshape(-1).tolist()
    expected = sum(-math.log(counts[target] / sum(counts)) for target in held) / len(held)
    assert samples.unigram_loss() == pytest.approx(expected, rel=1e-12)


def test_too_little_data_says_how_much_is_needed() -> None:
    with pytest.raises(DataError) as caught:
        Samples(make(50), seq_len=10, seed=0, global_batch=8)
    message = str(caught.value)
    assert "50 tokens" in message and "at least 91 tokens" in message
    Samples(make(91), seq_len=10, seed=0, global_batch=8)
    with pytest.raises(DataError):
        Samples(make(90), seq_len=10, seed=0, global_batch=8)
    with pytest.raises(DataError, match="0 training samples"):
        Samples(make(3), seq_len=10, seed=0)
    with pytest.raises(DataError, match="seq_len"):
        Samples(make(50), seq_len=0, seed=0)
    with pytest.raises(DataError, match="held_out"):
        Samples(make(50), seq_len=2, seed=0, held_out=1.0)


@pytest.mark.parametrize("held_out", [0.0, 0.05, 0.5, 0.9])
def test_needed_tokens_are_exactly_enough(held_out: float) -> None:
    with pytest.raises(DataError) as caught:
        Samples(make(5), seq_len=3, seed=0, held_out=held_out, global_batch=20)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    Samples(make(needed), seq_len=3, seed=0, held_out=held_out, global_batch=20)
    with pytest.raises(DataError):
        Samples(make(needed - 1), seq_len=3, seed=0, held_out=held_out, global_batch=20)


def test_documents_of_a_sample(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    texts = ["abc", "", "de", "fghijkl"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = Corpus.open(str(file))
    assert bytes_of(corpus) == b"abc\nde\nfghijkl"
    # The newline ends a document; the empty one is none.
    assert corpus.starts.tolist() == [0, 4, 7]
    samples = Samples(corpus, seq_len=4, seed=0, documents="mask")
    numbers = samples.documents(np.array([0, 1]))
    assert numbers is not None
    assert numbers.tolist() == [[0, 0, 0, 0, 1], [1, 1, 1, 2, 2]]
    assert Samples(corpus, seq_len=4, seed=0).documents(np.array([0])) is None


@pytest.mark.parametrize("documents", ["ignore", "mask"])
def test_no_target_lies_in_another_document(tmp_path: Path, documents: Documents) -> None:
    for name, text in (("a", "abc"), ("b", "de"), ("c", "fghijkl" * 9)):
        (tmp_path / name).write_text(text)
    samples = Samples(Corpus.open(str(tmp_path)), seq_len=8, seed=0, documents=documents)
    (batch,) = own_batches(samples, Mesh.single("cpu"), np.array([0]), 1, seed=0)
    assert bytes(batch.tokens_BS[0].tolist()) == b"abc\nde\nf"
    if documents == "ignore":
        assert batch.loss_mask_BS is None and batch.documents_BS is None
        return
    assert batch.documents_BS is not None and batch.loss_mask_BS is not None
    assert batch.documents_BS.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert batch.loss_mask_BS.tolist() == [[True] * 3 + [False] + [True] * 2 + [False] + [True]]
