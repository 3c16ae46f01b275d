"""Sources of a run: mixed by weight, validated on own files, checked beforehand."""

from __future__ import annotations

import datetime
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moemesh.config.data import DataConfig, DataSource
from moemesh.config.errors import SeveralErrors
from moemesh.config.load import resolved_toml
from moemesh.config.run import RunConfig
from moemesh.data.corpus import Corpus
from moemesh.data.indexed import IndexedTokens, IndexedWriter
from moemesh.data.input_files import find, notes_on, pinned
from moemesh.data.samples import Samples, SampleSource
from moemesh.data.sources import check, open_samples, with_vocabulary
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.data.tokenizing import TokenizeJob, TokenSettings
from moemesh.sharding.load_run import load_run
from moemesh.train.preparation import RunRequest
from tests.commands import python
from tests.data.texts import byte_level_tokenizer, held_out_ids, lines, opened, stream
from tests.huggingface.conversations import add_tokenizer


def letter_stream(letter: str, num_tokens: int, learned: np.ndarray | None = None) -> Corpus:
    tokens = np.full(num_tokens, ord(letter), dtype=np.uint8)
    return stream(tokens, source=letter, learned=learned)


def letters(samples: Samples, ids: np.ndarray) -> str:
    return "".join(map(chr, samples.batch(ids)[0][:, 0]))


# --- mixing ----------------------------------------------------------------------------------


def mixed(**options: Any) -> Samples:
    made = [
        SampleSource("a", (letter_stream("a", 4001),), 0.7),
        SampleSource("b", (letter_stream("b", 101), letter_stream("c", 201)), 0.3),
    ]
    return Samples(made, seq_len=10, seed=5, **options)


def test_windows_are_drawn_in_the_shares_and_small_sources_repeat() -> None:
    samples = mixed()
    drawn = letters(samples, samples.ids_at(0, 2000))
    assert drawn.count("a") == 1400
    for start in range(0, 2000, 10):
        assert drawn[start : start + 10].count("a") == 7
    # 28 windows of b and c train; each is drawn once before any is repeated.
    ids = samples.ids_at(0, 2000)
    small = ids[ids >= 400]
    assert len(set(small[:28].tolist())) == 28 == len(samples.splits[1].training)
    assert sorted(small[:28]) == sorted(small[28:56])
    assert samples.epochs(2000) == [1400 / 380, 600 / 28]


def test_one_cursor_resumes_and_no_layout_changes_the_order() -> None:
    whole = mixed().ids_at(0, 600)
    assert np.array_equal(mixed().ids_at(123, 300), whole[123:423])
    again = mixed()
    pieces = [again.ids_at(start, 7) for start in range(0, 595, 7)]
    assert np.array_equal(np.concatenate(pieces), whole[:595])


def test_validation_has_the_shares_too() -> None:
    samples = mixed(held_out=0.5)
    drawn = letters(samples, samples.validation_ids(20))
    assert drawn.count("a") == 14 and drawn.count("b") + drawn.count("c") == 6
    assert not set(samples.validation_ids(200)) & set(samples.ids_at(0, 3000))


def test_own_validation_keeps_all_for_training() -> None:
    samples = mixed(validation=[letter_stream("v", 55), letter_stream("w", 31)])
    assert set(letters(samples, samples.validation_ids(100))) == {"v", "w"}
    assert len(held_out_ids(samples)) == 8
    assert samples.num_training == 400 + 10 + 20
    assert "v" not in letters(samples, samples.ids_at(0, 1000))
    with pytest.raises(DataError, match="validation v holds 10 tokens and makes no sample"):
        mixed(validation=[letter_stream("v", 10)])


def test_a_source_without_a_sample_is_named() -> None:
    made = [
        SampleSource("a", (letter_stream("a", 401),)),
        SampleSource("b", (letter_stream("b", 11),)),
    ]
    with pytest.raises(DataError, match=r"data\.sources\[1\] b holds 11 tokens"):
        Samples(made, seq_len=10, seed=0)
    Samples(made, seq_len=10, seed=0, validation=[letter_stream("v", 55)])


# --- files -----------------------------------------------------------------------------------


def tokens_in(prefix: Path, num_documents: int, vocab_size: int = 256) -> Path:
    end = np.array([10])
    with IndexedWriter(
        prefix,
        vocab_size=vocab_size,
        tokenizer="bytes",
        end_of_document=end,
        ends_last=False,
    ) as writer:
        for number in range(num_documents):
            writer.add(np.frombuffer(f"token {number:05}".encode(), dtype=np.uint8))
    return prefix.with_name(prefix.name + ".bin")


def test_formats_mix(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    tokens_in(shards / "one", 50)
    tokens_in(shards / "two", 70)
    data = DataConfig(
        sources=(
            DataSource(path=str(lines(tmp_path / "a.jsonl.gz", "lines", 100)), weight=3.0),
            DataSource(path=str(shards)),
        ),
        validation=str(lines(tmp_path / "v.jsonl", "valid", 20)),
        seq_len=11,
        global_batch=4,
    )
    assert not check(data, 256)
    samples = opened(data)
    assert [len(split.source.corpora) for split in samples.splits] == [1, 2]
    texts = [bytes(row.astype(np.uint8)) for row in samples.batch(samples.ids_at(0, 8))[0]]
    assert sum(b"oken" in text for text in texts) == 2
    assert samples.num_training == 1198 // 11 + 598 // 11 + 838 // 11
    prefixes = {bytes(row.astype(np.uint8))[:5] for row in samples.batch(held_out_ids(samples))[0]}
    assert prefixes <= {b"valid"} or all(b"lines" not in one for one in prefixes)


@pytest.mark.parametrize("name", ["one.bin", "one.idx", "one", "*.bin", "."])
def test_names_of_token_files(tmp_path: Path, name: str) -> None:
    tokens_in(tmp_path / "one", 50)
    path = str(tmp_path / name) if name != "." else str(tmp_path)
    assert opened(DataConfig(path=path, seq_len=8, global_batch=2)).num_tokens == 50 * 12 - 1


def test_a_folder_of_token_files_and_others(tmp_path: Path) -> None:
    tokens_in(tmp_path / "one", 50)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"token files and others, such as .*notes\.txt"):
        opened(DataConfig(path=str(tmp_path)))
    data = DataConfig(path=str(tmp_path), format="indexed", seq_len=8, global_batch=2)
    assert opened(data).num_tokens == 599
    with pytest.raises(DataError, match="no pair of"):
        opened(DataConfig(path=str(tmp_path / "*.txt"), format="indexed"))


def test_another_key_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "some words, then others"}\n' * 9)
    data = DataConfig(path=str(tmp_path / "a.jsonl"), text_key="body", seq_len=8, global_batch=2)
    assert opened(data).num_tokens == 9 * 24 - 1


def test_conversations_beside_texts(tmp_path: Path) -> None:
    """Windows of texts are those of texts alone; no conversation is cut or attends to another."""
    pytest.importorskip("tokenizers")
    folder = add_tokenizer(tmp_path)
    tokenizer = Tokenizer.open(str(folder))
    talks: list[dict[str, Any]] = []
    for number in range(6):
        question, answered = "ask " * (9 * number + 1), "TELL" * (7 * number + 1)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]
        talks.append({"messages": turns})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talks))
    (tmp_path / "plain.txt").write_text("plain text " * 200)
    data = DataConfig(
        sources=(
            DataSource(path=str(tmp_path / "chat.jsonl")),
            DataSource(path=str(tmp_path / "plain.txt")),
        ),
        tokenizer=str(folder),
        seq_len=380,
        global_batch=2,
        held_out=0.1,
    )
    samples = opened(data)
    ids = np.arange(samples.num_samples)
    targets, mask, documents = samples.batch(ids)[1], samples.loss_mask(ids), samples.documents(ids)
    assert mask is not None and documents is not None
    of_chats = ids < samples.firsts[1]
    for number in range(6):
        own = mask & (documents[:, 1:] == number) & of_chats[:, None]
        assert len(np.unique(np.nonzero(own)[0])) == 1, "in one sequence"
        assert tokenizer.decode(targets[own].tolist()) == "TELL" * (7 * number + 1) + "</s>"
    assert mask[~of_chats].all() and not documents[~of_chats].any()
    alone = opened(data.model_copy(update={"sources": (data.sources[1],)}))
    assert np.array_equal(alone.windows(np.arange(5)), samples.windows(ids[~of_chats]))
    with pytest.raises(DataError, match=r"6 conversations have no .* raise data.seq_len"):
        opened(data.model_copy(update={"seq_len": 8}))


def test_several_formats_in_a_folder_are_told(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "word", 5)
    lines(tmp_path / "b.jsonl.gz", "word", 5)
    (tmp_path / "README.md").write_text("about the data")
    said: list[str] = []
    data = DataConfig(path=str(tmp_path), seq_len=8, global_batch=2)
    open_samples(data, seed=0, vocab_size=256, cache=None, log=said.append)
    assert said == [
        f"note: {tmp_path} holds files of several formats (2 jsonl, 1 text); all of them are read"
    ]


@pytest.mark.parametrize("mark", ["card", "download", None])
def test_splits_in_a_folder(tmp_path: Path, mark: str | None) -> None:
    """A copy of a dataset of the Hub gives its split train, like its name; others give all."""
    (tmp_path / "data").mkdir()
    for name in ("train-0", "test-0"):
        lines(tmp_path / "data" / f"{name}.jsonl", name, 5)
    if mark == "card":
        (tmp_path / "README.md").write_text("---\nlicense: mit\nconfigs:\n- a\n---\nabout")
    if mark == "download":
        records = tmp_path / ".cache" / "huggingface" / "download" / "data"
        records.mkdir(parents=True)
        for name in ("train-0", "test-0"):
            (records / f"{name}.jsonl.metadata").touch()
    lines(tmp_path / "constraints.jsonl", "own", 5)
    said: list[str] = []
    data = DataConfig(path=str(tmp_path), seq_len=8, global_batch=2)
    samples = open_samples(data, seed=0, vocab_size=256, cache=None, log=said.append)
    given = "holds files that are named as another split (data/test-0.jsonl); all of them are read"
    note = "is a dataset of the Hub: only its split train is read, without "
    note += f"{'constraints.jsonl, ' * (mark == 'card')}data/test-0.jsonl"
    note = note if mark else given
    assert said == [f"note: {tmp_path} {note}"]
    text = samples.corpora[0].tokens.tobytes().decode()
    assert ("test-0" in text) == (mark is None) and "train-0" in text and "about" not in text
    assert ("own" in text) == (mark != "card")  # a file that the user has added to a download


def test_a_note_names_files_that_are_read(tmp_path: Path) -> None:
    """Neither files of another format nor the splits of a saved dataset."""
    for name in ("train.jsonl", "test.txt"):
        lines(tmp_path / name, name, 5)
    assert notes_on(str(tmp_path), find(str(tmp_path), "jsonl")) == []
    of_formats, of_splits = notes_on(str(tmp_path), find(str(tmp_path)))
    assert "(1 text, 1 jsonl)" in of_formats and "(test.txt)" in of_splits
    (tmp_path / "test.txt").write_text("text")
    notes: list[str] = []
    TokenizeJob.open(str(tmp_path), f"{tmp_path}-out/x", TokenSettings(tokenizer="bytes")).run(
        on_note=notes.append
    )
    assert notes == [of_formats, of_splits]
    (tmp_path / "dataset_dict.json").touch()
    assert notes_on(str(tmp_path), find(str(tmp_path))) == []


def test_a_format_selects_the_files_of_a_glob_unless_none_has_such_a_name(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.txt"):
        lines(tmp_path / name, name, 5)
    for glob, name in (("t*", "train.jsonl"), ("test*", "test.txt")):
        [file] = find(f"{tmp_path}/{glob}", "jsonl")
        assert (file.path.name, file.format) == (name, "jsonl")


# --- bad records -----------------------------------------------------------------------------


def test_bad_records_are_counted_and_bounded(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", "word", 98)
    file.write_bytes(file.read_bytes() + b'{"text": 1}\n{"text": "\xff"}\n')
    data = DataConfig(path=str(file), seq_len=8, global_batch=2)
    with pytest.raises(DataError, match=r"line 99, byte .*\nfix: .*data\.bad_records"):
        opened(data)
    said: list[str] = []
    skipping = data.model_copy(update={"bad_records": "skip", "bad_record_share": 0.02})
    samples = open_samples(skipping, seed=0, vocab_size=256, cache=None, log=said.append)
    assert samples.num_tokens == 98 * 11 - 1
    (note,) = said
    assert "2 of 100 records are bad" in note and f"{file}, line 100, byte" in note
    with pytest.raises(DataError, match=r"2 of 100 records are bad, more than .* = 0\.019"):
        opened(skipping.model_copy(update={"bad_record_share": 0.019}))


# --- looking at the data beforehand ----------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"path": "nots"}, "nots: No such file"),
        ({"path": "a.jsonl", "tokenizer": "nowhere"}, "nowhere"),
        ({"path": "a.jsonl", "validation": "v.txt"}, r"v\.txt"),
        ({"sources": (DataSource(path="a.jsonl"), DataSource(path="b"))}, "b: No such file"),
        ({"path": "raw.txt"}, "gzip data"),
        ({"path": "t.idx"}, r"t\.bin|t\.idx"),
    ],
)
def test_check_finds_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", "word", 3)
    (tmp_path / "raw.txt").write_bytes(gzip.compress(b"x"))
    (error,) = check(DataConfig(**data), 256)
    assert isinstance(error, DataError) and re.search(reason, str(error))
    assert not check(DataConfig(path="a.jsonl"), 256)


def test_all_that_is_wrong_with_the_data_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("a.txt", 50), ("b.txt", 40), ("broken.jsonl", 9)):
        (tmp_path / name).write_text("x" * size)
    gone = (DataSource(path="none"), DataSource(path="a.txt"), DataSource(path="nowhere"))
    errors = check(DataConfig(sources=gone, validation="v.txt", tokenizer="no_tokenizer"), 256)
    words = ("no_tokenizer", "data.path none", "data.path nowhere", "data.validation v.txt")
    assert len(errors) == 4
    assert all(word in str(error) for word, error in zip(words, errors, strict=True))
    with pytest.raises(SeveralErrors) as caught:
        opened(DataConfig(path="a.txt", validation="b.txt", seq_len=60, global_batch=4))
    assert len(caught.value.errors) == 2
    assert "lower data.seq_len to 39" in str(caught.value)
    both = (DataSource(path="broken.jsonl"), DataSource(path="none"))
    with pytest.raises(SeveralErrors) as caught:
        opened(DataConfig(sources=both, seq_len=4, global_batch=1))
    assert [word in str(caught.value) for word in ("line 1", "none")] == [True, True]


def test_fingerprints_follow_tokens_and_order() -> None:
    def of(num_tokens: int, seed: int = 0, weight: float = 1.0) -> dict[str, str]:
        made = [
            SampleSource("a", (letter_stream("a", num_tokens),), weight),
            SampleSource("b", (letter_stream("b", 900),)),
        ]
        return Samples(made, seq_len=10, seed=seed).fingerprint()

    first = of(1001)
    assert of(1001) == first
    assert {key for key in first if of(1001, seed=1)[key] != first[key]} == {"order"}
    assert {key for key in first if of(1001, weight=2.0)[key] != first[key]} == {"order"}
    assert {key for key in first if of(1002)[key] != first[key]} == {"source 1"}


def test_fingerprints_of_large_files_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moemesh.data.corpus.MAP_FROM_BYTES", 1)
    monkeypatch.setattr("moemesh.data.corpus.DIGEST_WHOLE", 1000)
    monkeypatch.setattr("moemesh.data.corpus.BLOCK", 16)
    file = tmp_path / "a.txt"
    content = bytearray(b"0123456789" * 5000)

    def fingerprint() -> str:
        file.write_bytes(content)
        return Corpus.open(str(file)).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    content[3] = content[-3] = 65
    other = fingerprint()
    assert other != first
    content.append(65)
    assert fingerprint() not in (first, other)


def test_documents_of_token_files_open(tmp_path: Path) -> None:
    assert IndexedTokens.open(tokens_in(tmp_path / "one", 3)).starts.tolist() == [0, 12, 24]


# --- what follows from the data -------------------------------------------------------------


def test_the_vocabulary_follows_the_tokenizer(tmp_path: Path) -> None:
    folder = byte_level_tokenizer(tmp_path / "tokenizer", Path(__file__).read_text(), "x", "<eos>")
    given = [f"data.tokenizer={folder}"]
    for words in ([], ["model.preset=tiny"], ["model.preset=mixtral-8x7b"]):
        loaded = with_vocabulary(load_run([], [*given, *words], environ={}))
        assert loaded.config.model.vocab_size == 300
        assert loaded.origins["model.vocab_size"] == f"the ids of data.tokenizer = {folder}"
    kept = with_vocabulary(load_run([], [*given, "model.vocab_size=512"], environ={}))
    assert kept.config.model.vocab_size == 512
    kept = with_vocabulary(load_run([], ["data.tokenizer=nowhere"], environ={}))
    assert kept.config.model.vocab_size == 256
    words = [python(), "-m", "moemesh", "config", "show", "--set", given[0]]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert re.search(r"model\.vocab_size += 300 +# the ids of data\.tokenizer", shown.stdout)


def test_no_vocabulary_beside_another_mistake(tmp_path: Path) -> None:
    folder = byte_level_tokenizer(tmp_path / "tokenizer", Path(__file__).read_text(), "x", "<eos>")
    (tmp_path / "text.txt").write_text("1 + 2 = 3\n" * 100)
    words = ["config", "check", "--set", f"data.tokenizer={folder}", "--set", "train.stps=3"]
    words += ["--set", f"data.path={tmp_path / 'text.txt'}"]
    checked = subprocess.run([python(), "-m", "moemesh", *words], capture_output=True, text=True)
    assert checked.returncode == 2
    assert "train.stps" in checked.stderr and "vocab_size" not in checked.stderr


COMMIT = "0123456789" * 4


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake cache of huggingface_hub, which needs no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "hub"
    dataset = cache / "datasets--owner--chats"
    data = dataset / "snapshots" / COMMIT / "data"
    data.mkdir(parents=True)
    (dataset / "refs").mkdir()
    (dataset / "refs" / "main").write_text(COMMIT)
    (data.parent / "README.md").write_text("no data")
    lines(data / "train-0.jsonl", "train", 30)
    lines(data / "test-0.jsonl", "test", 30)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return dataset


@pytest.mark.parametrize(
    "name", ["owner/chats", f"owner/chats@{COMMIT}", "hf://datasets/owner/chats@main"]
)
def test_a_name_of_the_hub(hub: Path, name: str) -> None:
    (file,) = find(name)
    assert file.path == hub / "snapshots" / COMMIT / "data" / "train-0.jsonl"
    assert pinned(name) == f"owner/chats@{COMMIT}"


def test_names_that_are_not_of_the_hub(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"hf download owner/none --repo-type dataset$"):
        find("owner/none")
    for name in ("owner/none.jsonl", "a/b/c", "nowhere"):
        with pytest.raises(DataError, match=f"data.path {name}: No such file"):
            find(name)
    (tmp_path / "owner").mkdir()
    with pytest.raises(DataError, match=r"data\.path owner/chats: No such file"):
        find("owner/chats")
    with pytest.raises(DataError, match=r"files of this machine; .*filesystem\('s3'\)\.get"):
        find("s3://bucket/data")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub, or hf download other/chats "):
        find("other/chats")


def test_a_run_records_the_commit_and_the_day(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = byte_level_tokenizer(tmp_path / "tokenizer", Path(__file__).read_text(), "x", "<eos>")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    words = ["data.path=owner/chats", f"data.tokenizer={folder}", "model.vocab_size=300"]
    run = tmp_path / "run"

    def config(*more: str) -> RunConfig:
        resolved = load_run([], [*words, *more], environ={})
        return RunRequest(resolved=resolved, out=run).config

    today = datetime.date.today()
    first = config()
    assert (first.data.path, first.data.date) == (f"owner/chats@{COMMIT}", str(today))
    run.mkdir()
    (run / "config.toml").write_text(
        resolved_toml(first).replace(str(today), "2026-02-28").replace(COMMIT, "f" * 40)
    )
    later = config()
    assert (later.data.path, later.data.date) == (f"owner/chats@{'f' * 40}", "2026-02-28")
    assert config("data.date=2026-03-01").data.date == "2026-03-01"
    (folder / "chat_template.jinja").write_text("x")
    run = tmp_path / "other"
    assert config().data.date is None
