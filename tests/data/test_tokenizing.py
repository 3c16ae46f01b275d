"""moemesh tokenize: the tokens of a corpus read directly, and the same bytes after any end."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.config.data import DataConfig
from moemesh.data import indexed
from moemesh.data import sources as sources_module
from moemesh.data.corpus import Corpus
from moemesh.data.indexed import IndexedTokens
from moemesh.data.sources import open_samples
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.data.tokenizing import TokenizeJob, TokenPart, TokenSettings, output_prefix
from tests.data.texts import byte_level_tokenizer, lines, opened
from tests.waiting import PATIENCE, until

TALK = [{"role": "user", "content": "Grüße?"}, {"role": "assistant", "content": "Hallo!"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Characters as tokens, with a template and an end of text."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    text, special = Path(__file__).read_text(), ("<|end|>", "<|other|>")
    path = byte_level_tokenizer(tmp_path / "tokenizer", text, template, *special)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Files of several formats; one of them is empty, one begins with the first conversation."""
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("An essay.\n\nÜber alles.")
    (folder / "b.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    (folder / "c.txt").write_text("")
    lines = [{"messages": TALK}, {"text": "three"}, {"messages": [*TALK, *TALK]}]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "sub" / "e.jsonl").write_text('{"text": "four"}\n')
    return folder


def job(text: Path, out: Path, tokenizer: str, **settings: Any) -> TokenizeJob:
    return TokenizeJob.open(str(text), str(out), TokenSettings(tokenizer=tokenizer, **settings))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but those of the lock, by its name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["bytes", "BPE"])
def test_the_tokens_are_those_of_a_corpus(
    text: Path, tmp_path: Path, tokenizer: str, name: str
) -> None:
    if name == "bytes":
        (text / "d.jsonl.gz").unlink()
        tokenizer = "bytes"
    facts = job(text, tmp_path / "out" / "x", tokenizer).run()
    token_file = IndexedTokens.open(tmp_path / "out" / "x")
    token_file.verify()
    corpus = Corpus.open(str(text), tokenizer=tokenizer, vocab_size=300)
    assert np.array_equal(token_file.tokens, corpus.tokens)
    assert np.array_equal(token_file.starts, corpus.starts)
    assert facts["num_documents"] == len(corpus.starts) == (4 if name == "bytes" else 7)
    assert facts["made_from"]["records"] == (5 if name == "bytes" else 8)
    assert facts["tokenizer"] == Tokenizer.open(tokenizer).fingerprint
    if name == "bytes":
        assert token_file.learned is None and corpus.learned is None
    else:
        assert token_file.learned is not None
        assert np.array_equal(token_file.learned, corpus.learned)
        assert 0 < token_file.learned.sum() < len(token_file.learned)
    suffixes = [".bin", ".idx", *([".mask.bin"] if name == "BPE" else []), ".meta.json"]
    assert sorted(contents(tmp_path / "out")) == [f"x{suffix}" for suffix in suffixes]


@pytest.mark.parametrize(("end", "ids"), [("eos", [0]), ("<|other|>", [1])])
def test_an_end_of_text_behind_every_document(
    text: Path, tmp_path: Path, tokenizer: str, end: str, ids: list[int]
) -> None:
    facts = job(text, tmp_path / "x", tokenizer, end_of_document=end).run()
    token_file = IndexedTokens.open(tmp_path / "x")
    ends = np.append(token_file.starts[1:], len(token_file.tokens)) - 1
    assert (
        token_file.tokens[ends].tolist() == ids * 7 and np.isin(token_file.tokens, ids).sum() == 7
    )
    assert facts["end_of_document"] == ids and facts["ends_last"]
    with pytest.raises(DataError, match="no token"):
        job(text, tmp_path / "y", tokenizer, end_of_document="<|none|>")
    with pytest.raises(DataError, match="bytes"):
        job(text, tmp_path / "y", "bytes", end_of_document="eos")


class EndedError(Exception):
    """Stands for the end of the process."""


def ending_after(calls: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which raises at each call after the first `calls` ones."""
    left = calls

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise EndedError
        return original(*arguments, **named)

    return call


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that become parts from now on."""
    made: list[str] = []
    original = TokenPart.make

    def counted(part: TokenPart, *arguments: Any) -> dict[str, Any]:
        made.append(part.file.path.name)
        return original(part, *arguments)

    monkeypatch.setattr(TokenPart, "make", counted)
    return made


@pytest.mark.representative("renaming")
@pytest.mark.parametrize("place", ["parts", "renaming"])
def test_a_run_goes_on_after_any_end(
    text: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ended before each part, and before each renaming of a file."""
    job(text, tmp_path / "whole" / "x", tokenizer).run()
    expected = contents(tmp_path / "whole")
    ends = 0
    for calls in range(100):
        out = tmp_path / f"out{calls}"
        with monkeypatch.context() as patched:
            if place == "parts":
                patched.setattr(TokenPart, "make", ending_after(calls, TokenPart.make))
            else:
                patched.setattr(indexed.os, "replace", ending_after(calls, os.replace))
                # A killed process leaves its files.
                patched.setattr("moemesh.data.indexed.IndexedWriter.abandon", lambda _: None)
            try:
                job(text, out / "x", tokenizer).run()
            except EndedError:
                ends += 1
            else:
                break
        made, notes = counting(monkeypatch), list[str]()
        job(text, out / "x", tokenizer).run(on_note=notes.append)
        monkeypatch.undo()
        if place == "parts":
            assert len(made) == 5 - calls
            assert notes[1:] == ([f"{calls} of 5 files are tokenized already"] if calls else [])
        assert contents(out) == expected
    assert ends == (5 if place == "parts" else 24)


def test_several_processes_give_the_same_bytes(text: Path, tmp_path: Path, tokenizer: str) -> None:
    job(text, tmp_path / "one" / "x", tokenizer).run()
    progress: list[tuple[int, ...]] = []
    job(text, tmp_path / "two" / "x", tokenizer).run(
        processes=2, advance=lambda *done: progress.append(done)
    )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    total = tuple(int(one) for one in np.sum(progress, axis=0))
    token_file = IndexedTokens.open(tmp_path / "two" / "x")
    size = sum(path.stat().st_size for path in text.rglob("*") if path.is_file())
    assert total == (size, len(token_file.tokens) - 4, 5), "four newlines follow texts"


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_come_from_where_they_are(
    text: Path, tmp_path: Path, tokenizer: str, processes: int
) -> None:
    (text / "b.jsonl").write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 2, byte 26: not valid JSON"):
        job(text, tmp_path / "x", tokenizer).run(processes=processes)
    (text / "b.jsonl").write_text('{"text": "one"}\n{"messages": []}\n')
    with pytest.raises(DataError, match=r'b\.jsonl, line 2, byte 16: "messages" must be'):
        job(text, tmp_path / "x", tokenizer).run(processes=processes)
    (text / "b.jsonl").unlink()
    job(text, tmp_path / "x", tokenizer).run(processes=processes)


def test_bad_records_are_left_out_and_counted(text: Path, tmp_path: Path, tokenizer: str) -> None:
    (text / "b.jsonl").write_text('{"text": "one"}\n{"messages": []}\n{\n{"text": "two"}\n')
    settings = {"bad_records": "skip", "bad_record_share": 0.3}
    notes: list[str] = []
    facts = job(text, tmp_path / "x", tokenizer, **settings).run(on_note=notes.append)
    assert facts["made_from"]["records"] == 9 and facts["made_from"]["bad_records"] == 2
    assert "2 of 9 records are bad" in notes[-1] and "line 3, byte" in notes[-1]
    settings["bad_record_share"] = 0.2
    with pytest.raises(DataError, match=r"2 of 9 records are bad"):
        job(text, tmp_path / "y", tokenizer, **settings).run()


def test_the_output_is_not_overwritten(text: Path, tmp_path: Path, tokenizer: str) -> None:
    job(text, tmp_path / "x", tokenizer).run()
    notes: list[str] = []
    facts = job(text, tmp_path / "x", tokenizer).run(on_note=notes.append)
    assert "is complete" in notes[0] and facts["num_documents"] == 7
    with pytest.raises(DataError, match="exists, and was made of other files or with other"):
        job(text, tmp_path / "x", tokenizer, end_of_document="eos").run()
    (text / "a.txt").write_text("More.")
    with pytest.raises(DataError, match="exists, and was made of other files"):
        job(text, tmp_path / "x", tokenizer).run()
    (tmp_path / "y.bin").write_text("mine")
    with pytest.raises(DataError, match=r"y\.bin exists"):
        job(text, tmp_path / "y", tokenizer).run()
    assert (tmp_path / "y.bin").read_text() == "mine"
    with pytest.raises(DataError, match="is inside the folder"):
        job(text, text / "tokens" / "x", tokenizer)


def test_parts_of_other_settings_and_changed_files_are_made_again(
    text: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*calls: int) -> None:
        with monkeypatch.context() as patched, pytest.raises(EndedError):
            patched.setattr(TokenPart, "make", ending_after(calls[0], TokenPart.make))
            job(text, tmp_path / "x", tokenizer).run()

    ended(3)
    (text / "a.txt").write_text("Other.")
    notes: list[str] = []
    job(text, tmp_path / "x", tokenizer).run(on_note=notes.append)
    formats, resumed = notes
    assert formats.endswith(
        "holds files of several formats (3 jsonl, 2 text); all of them are read"
    )
    assert resumed == "2 of 5 files are tokenized already"
    corpus = Corpus.open(str(text), tokenizer=tokenizer, vocab_size=300)
    assert np.array_equal(IndexedTokens.open(tmp_path / "x").tokens, corpus.tokens)
    for path in tmp_path.glob("x.*"):
        path.unlink()
    ended(3)
    job(text, tmp_path / "x", tokenizer, end_of_document="eos").run(on_note=notes.append)
    assert "has parts of other settings" in notes[-1]
    token_file = IndexedTokens.open(tmp_path / "x")
    assert token_file.tokens[-1] == 0 and (token_file.tokens == 0).sum() == 7


def test_two_at_once_and_no_text(text: Path, tmp_path: Path) -> None:
    parts = tmp_path / "x.parts"
    parts.mkdir()
    (text / "d.jsonl.gz").unlink()
    with (parts / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is writing"):
            job(text, tmp_path / "x", "bytes").run()
    job(text, tmp_path / "x", "bytes").run()
    with pytest.raises(DataError, match="no text in them"):
        job(text / "c.txt", tmp_path / "y", "bytes").run()
    assert sorted(path.name for path in tmp_path.glob("y*")) == ["y.parts"]


def test_the_names_of_outputs(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    there = str(tmp_path / "there")
    assert output_prefix("a/chat.jsonl.gz", there) == tmp_path / "there" / "chat"
    assert output_prefix("a/*.txt", there) == tmp_path / "there" / "tokens"
    assert output_prefix("a/b/", f"{tmp_path}/new/") == tmp_path / "new" / "b"
    assert output_prefix("a", f"{tmp_path}/v1.5") == tmp_path / "v1.5"
    assert output_prefix("a", f"{tmp_path}/v1.idx") == tmp_path / "v1"


@pytest.mark.slow
def test_a_killed_run_goes_on(text: Path, tmp_path: Path, tokenizer: str) -> None:
    """A job killed at other times, with worker processes, which end with it."""
    for number in range(40):
        lines = "".join(f'{{"text": "{"word " * 50}{number} {i}"}}\n' for i in range(2000))
        (text / f"f{number}.jsonl").write_text(lines)
    job(text, tmp_path / "whole" / "x", tokenizer).run()
    command = [sys.executable, "-m", "moemesh", "tokenize", str(text), str(tmp_path / "out" / "x")]
    command += ["--tokenizer", tokenizer]
    kills = 0
    for attempt in range(60):
        more = ["--processes", "2"] if attempt % 2 else []
        with subprocess.Popen([*command, *more], stderr=subprocess.DEVNULL) as process:
            try:
                code = process.wait(timeout=0.5 + 0.1 * attempt)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
                continue
        assert code == 0
        break
    assert kills > 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    ours = ["pgrep", "-f", str(tmp_path / "out")]
    until(lambda: not subprocess.run(ours, capture_output=True, check=False).stdout)


# The cache of tokens that a run makes of its text: written once, whole, and for one text.


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
        raise AssertionError("tokenized a second time")

    with monkeypatch.context() as patch:
        patch.setattr("moemesh.data.tokenizing.write_tokens", never)
        assert opened(data, cache).fingerprint() == first.fingerprint()
    lines(tmp_path / "text" / "0.jsonl", "word", 41)
    changed = opened(data, cache)
    assert changed.num_tokens == first.num_tokens + 11
    assert changed.fingerprint() != first.fingerprint()
    # A damaged entry is rewritten.
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
        open_samples(skipping, seed=0, vocab_size=256, cache=cache, log=said.append)
        assert any("1 of 212 records" in text or "records are bad" in text for text in said)


_OPEN = """
import sys
from pathlib import Path
from moemesh.config.data import DataConfig
from moemesh.data import sources
sources.SMALL_BYTES = 0
data = DataConfig(path=sys.argv[1], seq_len=8, global_batch=2)
samples = sources.open_samples(
    data, seed=0, vocab_size=256, cache=Path(sys.argv[2]), log=lambda text: print(text)
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
        open_samples(data, seed=0, vocab_size=256, cache=cache, log=said.append)

    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=open_again)
        thread.start()
        until(lambda: any("another process is tokenizing them" in text for text in said))
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(PATIENCE)
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
