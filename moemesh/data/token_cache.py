"""Tokenized text kept on the disk, so that a text is tokenized once, by one process.

An entry is a pair of token files (:mod:`moemesh.data.indexed`) whose name follows from the names,
sizes and times of the files, the tokenizer, its chat template and the settings of reading. Whoever
comes first writes it under a lock; every other process waits, and maps it into memory. Entries can
be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moemesh.config.data import BadRecords
from moemesh.data.chat import TEMPLATE
from moemesh.data.corpus import between, check_ids, documents_of
from moemesh.data.indexed import IDX, SUFFIXES, IndexedTokens, IndexedWriter, beside
from moemesh.data.input_files import DataFile, reading
from moemesh.data.records import BadRecordLog
from moemesh.data.tokenizer import SETTINGS, DataError, Tokenizer

#: Part of every name: another way to make tokens of text has another number.
VERSION = 2
#: Seconds between two lines about how far the tokenizing is.
REPORT_EVERY = 10.0

Say = Callable[[str], None]


def cache_beside(run: Path) -> Path:
    """The folder of the cache of a run: one for all runs in a folder."""
    return run.absolute().parent / "token_cache"


def cached_tokens(
    folder: Path,
    files: Sequence[DataFile],
    reader: Tokenizer,
    log: BadRecordLog,
    *,
    source: str,
    text_key: str,
    bad_records: BadRecords,
    vocab_size: int,
    say: Say,
    say_progress: Say,
) -> IndexedTokens:
    """The tokens of `files`, from the entry for them in `folder`, which is written first where
    there is none or it is damaged. Raises DataError for whatever is wrong with the files, and for a
    folder that cannot be written."""
    stats: list[object] = []
    for file in files:
        with reading(file.path):
            parts = sorted(file.path.rglob("*")) if file.path.is_dir() else [file.path]
            if file.is_on_hub:  # the entry of a name stays, so that later starts need no network
                parts = []
            sizes = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in parts]
        stats.append([str(file.path.absolute()), file.format, file.compression, sizes])
    beside_tokenizer = [
        hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for name in (TEMPLATE, SETTINGS)
        if reader.folder is not None and (path := reader.folder / name).is_file()
    ]
    facts = [VERSION, stats, reader.fingerprint, beside_tokenizer, text_key, bad_records]
    name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()
    prefix = folder / name
    with _locked(folder / f".{name}.lock", source, say):
        found = None
        if beside(prefix, IDX).exists():
            with suppress(DataError):
                found = IndexedTokens.open(prefix)
        if found is None:
            for suffix in SUFFIXES:  # nothing is left of an entry that cannot be used
                beside(prefix, suffix).unlink(missing_ok=True)
            _write(prefix, files, reader, log, source, text_key, vocab_size, say_progress)
            found = IndexedTokens.open(prefix)
    notes = prefix.with_name(f"{name}.skipped.txt")
    if notes.exists():
        say(f"note: {notes.read_text(encoding='utf-8').strip()}")
    return found


def _write(
    prefix: Path,
    files: Sequence[DataFile],
    reader: Tokenizer,
    log: BadRecordLog,
    source: str,
    text_key: str,
    vocab_size: int,
    say: Say,
) -> None:
    size = sum(file.num_bytes for file in files if not file.is_on_hub) / 1e6
    held = f"{len(files)} file(s), {size:,.1f} MB, " if size else ""
    say(f"tokens   {source}: {held}into {prefix.parent}")
    start = reported = time.monotonic()
    count = 0
    with IndexedWriter(
        prefix,
        vocab_size=reader.vocab_size,
        tokenizer=reader.fingerprint,
        end_of_document=between(reader),
        ends_last=False,
    ) as writer:
        for document in documents_of(files, reader, text_key, log):
            check_ids(document, vocab_size)
            writer.add(document.ids, document.learned, continues=document.where.continues)
            count += len(document.ids)
            if time.monotonic() - reported >= REPORT_EVERY:
                reported = time.monotonic()
                rate = count / (reported - start)
                say(f"tokens   {count:,} so far, {rate:,.0f} a second, at {document.where}")
        if not count:
            raise DataError(f"data.path {source}: {len(files)} file(s), but no text in them")
        notes = prefix.with_name(f"{prefix.name}.skipped.txt")
        notes.unlink(missing_ok=True)
        if note := log.note():
            notes.write_text(note + "\n", encoding="utf-8")
    say(f"tokens   {count:,} of {source} in {time.monotonic() - start:.1f} s")


@contextmanager
def _locked(path: Path, source: str, say: Say) -> Iterator[None]:
    """Alone with `path` among the processes of all machines that share the file system."""
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"tokens   {source}: another process is at work on them; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if file is not None:
            file.close()
        raise DataError(
            f"{path.parent}: cannot keep tokens there ({error.strerror or error}): set data.cache "
            "to a folder that can be written and locked"
        ) from error
    with file:
        yield
