"""The cache of tokens that a run makes of its text: written once, whole, and for one text."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from moemesh.config.data import DataConfig
from moemesh.data import sources as sources_module
from moemesh.data.sources import open_samples
from moemesh.data.tokenizer import DataError
from tests.data.texts import lines, opened
from tests.waiting import PATIENCE


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but one plain file is large enough for the cache."""
    monkeypatch.setattr(sources_module, "SMALL_BYTES", 0)


def folder_of_texts(tmp_path: Path) -> DataConfig:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(5):
        lines(folder / f"{number}.jsonl", "word", 40 + number)
    (folder / "long.txt").write_text("a long text\n" * 50)
    return DataConfig(path=str(folder), seq_len=8, global_batch=2, documents="mask")


@pytest.mark.usefixtures("small")
def test_cached_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    data = folder_of_texts(tmp_path)
    plain, cached = opened(data), opened(data, tmp_path / "cache")
    assert isinstance(cached.corpora[0].tokens, np.memmap)
    assert np.array_equal(plain.corpora[0].tokens, cached.corpora[0].tokens)
    assert np.array_equal(plain.corpora[0].starts, cached.corpora[0].starts)
    ids = plain.ids_at(0, 30)
    assert np.array_equal(ids, cached.ids_at(0, 30))
    one, other = plain.documents(ids), cached.documents(ids)
    assert one is not None and other is not None and np.array_equal(one, other)


@pytest.mark.usefixtures("small")
def test_the_cache_is_written_once_and_follows_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = folder_of_texts(tmp_path), tmp_path / "cache"
    first = opened(data, cache)

    def never(*arguments: object) -> None:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr("moemesh.data.tokenizing.write_tokens", never)
        assert opened(data, cache).fingerprint() == first.fingerprint()
    lines(tmp_path / "text" / "0.jsonl", "word", 41)
    changed = opened(data, cache)
    assert changed.num_tokens == first.num_tokens + 11
    assert changed.fingerprint() != first.fingerprint()
    # A damaged entry is written anew.
    for entry in cache.glob("*.bin"):
        entry.write_bytes(entry.read_bytes()[:-1])
    assert opened(data, cache).fingerprint() == changed.fingerprint()


@pytest.mark.usefixtures("small")
def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    data, cache = folder_of_texts(tmp_path), tmp_path / "cache"
    bad = tmp_path / "text" / "3.jsonl"
    bad.write_text(bad.read_text() + "{\n")
    with pytest.raises(DataError, match=r"3\.jsonl, line 44, byte"):
        opened(data, cache)
    assert [entry for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []
    skipping = data.model_copy(update={"bad_records": "skip", "bad_record_share": 0.1})
    for _ in range(2):  # written, and read
        said: list[str] = []
        open_samples(skipping, seed=0, vocab_size=256, cache=cache, say=said.append)
        assert any("1 of 212 records" in text or "records are bad" in text for text in said)


_OPEN = """
import sys
from pathlib import Path
from moemesh.config.data import DataConfig
from moemesh.data import sources
sources.SMALL_BYTES = 0
data = DataConfig(path=sys.argv[1], seq_len=8, global_batch=2)
samples = sources.open_samples(
    data, seed=0, vocab_size=256, cache=Path(sys.argv[2]), say=lambda text: print(text)
)
print(samples.num_tokens)
"""


def test_processes_that_start_together_tokenize_once(tmp_path: Path) -> None:
    data = folder_of_texts(tmp_path)
    assert data.path is not None
    command = [sys.executable, "-c", _OPEN, data.path, str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    assert len({text.splitlines()[-1] for text in printed}) == 1
    assert sum(" s\n" in text for text in printed) == 1


@pytest.mark.usefixtures("small")
def test_whoever_comes_second_waits(tmp_path: Path) -> None:
    data, cache = folder_of_texts(tmp_path), tmp_path / "cache"
    opened(data, cache)
    (lock,) = cache.glob(".*.lock")
    said: list[str] = []

    def open_again() -> None:
        open_samples(data, seed=0, vocab_size=256, cache=cache, say=said.append)

    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=open_again)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and any("another process is at work" in text for text in said)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    data = folder_of_texts(tmp_path)
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(DataError, match=r"set data\.cache"):
        opened(data, tmp_path / "cache")


def test_pieces_of_a_long_text_are_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "SMALL_BYTES", 0)
    monkeypatch.setattr("moemesh.data.records.PIECE", 64)
    data = folder_of_texts(tmp_path)
    plain, cached = opened(data), opened(data, tmp_path / "cache")
    assert np.array_equal(plain.corpora[0].tokens, cached.corpora[0].tokens)
    for samples in (plain, cached):
        assert len(samples.corpora[0].starts) == 5 * 40 + 10 + 1
