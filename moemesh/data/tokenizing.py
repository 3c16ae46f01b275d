"""Text files into token files: the token cache of a run, and ``moemesh tokenize``.

The cache keeps the tokens of a run's text, so that a text is tokenized once, by one process. An
entry is a pair of token files whose name follows from the names, sizes and times of the files, the
tokenizer, its chat template and the settings of reading. The first process writes the entry under a
lock; every other process waits, and maps it into memory. Entries can be deleted at any time.

``moemesh tokenize`` processes files in one process or several and can resume: each input file
becomes a part in the folder ``OUT.parts``; at the end the parts are joined under temporary names,
which are renamed, and the folder is removed. A resumed run makes the missing parts; its result has
the bytes of an uninterrupted run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from moemesh.config.data import BadRecords
from moemesh.config.limits import parse_json
from moemesh.data.corpus import Document, between, check_ids, documents_of
from moemesh.data.indexed import (
    IDX,
    SUFFIXES,
    HashedFile,
    IndexedTokens,
    IndexedWriter,
    path_with,
    prefix_of,
    read_sidecar,
)
from moemesh.data.input_files import (
    CHECKED_FILES,
    DataFile,
    check_head,
    find,
    notes_on,
    reading,
)
from moemesh.data.records import NAMED, BadRecordLog
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.trace.machine import usable_cores

Log = Callable[[str], None]
#: Progress callback: increments of bytes of input, tokens, files.
Advance: TypeAlias = Callable[[int, int, int], None]


def token_writer(
    prefix: Path,
    tokenizer: Tokenizer,
    end: np.ndarray | None = None,
    made_from: Mapping[str, Any] | None = None,
) -> IndexedWriter:
    """A writer of token files: `end` follows each document, or (None) a newline separates texts."""
    return IndexedWriter(
        prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        end_of_document=between(tokenizer) if end is None else end,
        ends_last=end is not None,
        made_from=made_from,
    )


def write_tokens(
    writer: IndexedWriter,
    documents: Iterable[Document],
    on_document: Callable[[Document, int], None],
) -> int:
    """Writes `documents`; no file if they have no token. `on_document` receives each document and
    the number of tokens up to its end. Returns the number of all tokens."""
    count = 0
    try:
        for document in documents:
            writer.add(document.ids, document.learned, continues=document.where.continues)
            count += len(document.ids)
            on_document(document, count)
        if count:
            writer.commit()
    finally:
        writer.abandon()
    return count


@contextmanager
def _locked(path: Path, on_busy: Callable[[], None], problem: str) -> Iterator[None]:
    """Exclusive access to `path` among the processes of all machines that share the file system, as
    far as its locks reach; its folder is made. `on_busy` is called before waiting for another
    process. `problem`: format of the DataError for a folder that cannot be written; {0} is the
    folder, {1} the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_busy()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DataError(problem.format(path.parent, error.strerror or error)) from error


def _digest(value: object, size: int = 16) -> str:
    """The digest, of `size` bytes, of bytes or of the JSON of another value."""
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.blake2b(content, digest_size=size).hexdigest()


# The token cache of runs.

#: Version in the name of every entry; raised when the same text makes other tokens.
CACHE_VERSION = 4
#: Seconds between two lines of progress.
REPORT_EVERY = 10.0


def cache_beside(run: Path) -> Path:
    """The cache folder of the run folder `run`, shared by all runs in the same parent folder."""
    return run.absolute().parent / "token_cache"


def cached_tokens(
    folder: Path,
    files: Sequence[DataFile],
    tokenizer: Tokenizer,
    bad_records: BadRecordLog,
    text_key: str,
    vocab_size: int,
    log: Log,
    log_progress: Log,
) -> IndexedTokens:
    """The tokens of `files`, from their entry in `folder`, which is written if it is missing or
    damaged. Raises DataError for faults of the files, and for a folder that cannot be written."""
    # The name of the entry.
    source = bad_records.source
    stats: list[object] = []
    for file in files:
        with reading(file.path):
            parts = sorted(file.path.rglob("*")) if file.path.is_dir() else [file.path]
            if file.is_on_hub:  # the key has the name only, so that later starts need no network
                parts = []
            sizes = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in parts]
        stats.append([str(file.path.absolute()), file.format, file.compression, sizes])
    template = _digest(tokenizer.template_facts)
    facts = [CACHE_VERSION, stats, tokenizer.fingerprint, template, text_key, bad_records.policy]
    name = _digest(facts, 12)
    prefix, notes = folder / name, folder / f"{name}.skipped.txt"

    def documents() -> Iterator[Document]:
        for document in documents_of(files, tokenizer, text_key, bad_records):
            check_ids(document, vocab_size)
            yield document
        notes.unlink(missing_ok=True)
        if note := bad_records.note():
            notes.write_text(note + "\n", encoding="utf-8")

    start = reported = time.monotonic()

    def report(document: Document, count: int) -> None:
        nonlocal reported
        if (now := time.monotonic()) - reported >= REPORT_EVERY:
            reported = now
            rate = count / (now - start)
            log_progress(f"tokens   {count:,} so far, {rate:,.0f} a second, at {document.where}")

    # The entry itself.
    problem = (
        "{0}: cannot keep tokens there ({1}): set data.cache to a folder that can be written and "
        "locked"
    )
    busy = f"tokens   {source}: another process is tokenizing them; waiting"
    with _locked(folder / f".{name}.lock", lambda: log(busy), problem):
        tokens = None
        if path_with(prefix, IDX).exists():
            with suppress(DataError):
                tokens = IndexedTokens.open(prefix)
        if tokens is None:
            for suffix in SUFFIXES:  # remove an unusable entry completely
                path_with(prefix, suffix).unlink(missing_ok=True)
            size = sum(file.num_bytes for file in files if not file.is_on_hub) / 1e6
            amount = f"{len(files)} file(s), {size:,.1f} MB, " if size else ""
            log_progress(f"tokens   {source}: {amount}into {folder}")
            start = reported = time.monotonic()
            count = write_tokens(token_writer(prefix, tokenizer), documents(), report)
            if not count:
                raise DataError(f"data.path {source}: {len(files)} file(s), but no text in them")
            seconds = time.monotonic() - start
            log_progress(f"tokens   {count:,} of {source} in {seconds:.1f} s")
            tokens = IndexedTokens.open(prefix)
    if notes.exists():
        log(f"note: {notes.read_text(encoding='utf-8').strip()}")
    return tokens


# `moemesh tokenize`: a part for each input file, made once, and the joined result.

#: Version in the digest of the settings: another number makes parts of earlier versions invalid.
PARTS_VERSION = 4
#: Bytes of a file between two progress reports.
REPORT_BYTES = 1 << 20
#: Seconds between two checks of the progress of other processes.
POLL_SECONDS = 0.2
#: File with the facts of a part, written last: if it exists, the tokens are complete.
_DONE = ".done.json"
#: Value of `end_of_document` for the tokenizer's own end-of-text token.
EOS = "eos"


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """Rules by which text becomes tokens.

    A newline follows each text but the last document, as in a corpus that a run reads. With
    `end_of_document`, the name of a token or "eos" (the tokenizer's own), that token follows
    instead, and also conversations and the last document. Other fields: see ``[data]``.
    """

    tokenizer: str
    text_key: str = "text"
    end_of_document: str | None = None
    bad_records: BadRecords = "fail"
    bad_record_share: float = 0.01

    def end(self, tokenizer: Tokenizer) -> np.ndarray | None:
        """The ids after every document; None without any."""
        if self.end_of_document is None:
            return None
        if self.end_of_document == EOS:
            return np.array([tokenizer.end_of_text()])
        return np.array([tokenizer.id_of(self.end_of_document)])


class TokenPart(NamedTuple):
    """An input file, its size in bytes, its modification time in nanoseconds, and the prefix of its
    tokens in the folder of parts."""

    file: DataFile
    size: int
    changed: int
    prefix: Path

    @staticmethod
    def of(file: DataFile, folder: Path) -> TokenPart:
        """The part of `file`. Raises DataError for a file that cannot be read."""
        name = "\0".join((str(file.path), file.format, file.compression))
        digest = _digest(name.encode(errors="surrogateescape"))
        paths = [path for path in file.path.rglob("*") if path.is_file()] or [file.path]
        with reading(file.path):
            stats = [path.stat() for path in paths]
        size, changed = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
        return TokenPart(file, size, changed, folder / digest)

    def facts(self) -> dict[str, Any] | None:
        """The facts of a finished part whose file has not changed since, else None."""
        try:
            facts = parse_json(path_with(self.prefix, _DONE).read_bytes())
            if (facts["size"], facts["changed"]) != (self.size, self.changed):
                return None
            if facts["num_tokens"]:
                IndexedTokens.open(self.prefix)
        except (OSError, ValueError, KeyError, TypeError):  # a DataError is a ValueError
            return None
        return facts

    def make(
        self, settings: TokenSettings, tokenizer: Tokenizer, advance: Advance
    ) -> dict[str, Any]:
        """Writes the tokens and returns the facts. Raises DataError."""
        for path in self.prefix.parent.glob(f"{self.prefix.name}.*"):
            path.unlink()
        bad_records = BadRecordLog(settings.bad_records, 1.0, str(self.file.path))
        reported_bytes = reported_tokens = 0

        def report(document: Document, count: int) -> None:
            # Offsets of records are offsets in the file itself only if it is not compressed.
            nonlocal reported_bytes, reported_tokens
            place = document.where.byte if self.file.compression == "none" else None
            if place is not None and place - reported_bytes >= REPORT_BYTES:
                advance(place - reported_bytes, count - reported_tokens, 0)
                reported_bytes, reported_tokens = place, count

        writer = token_writer(self.prefix, tokenizer, settings.end(tokenizer))
        documents = documents_of([self.file], tokenizer, settings.text_key, bad_records)
        num_tokens = write_tokens(writer, documents, report)
        facts = {
            "size": self.size,
            "changed": self.changed,
            "num_tokens": num_tokens,
            "ends_text": writer.ends_text,
            "records": bad_records.total,
            "bad": bad_records.bad,
            "places": bad_records.places,
        }
        _write(path_with(self.prefix, _DONE), json.dumps(facts))
        advance(self.size - reported_bytes, num_tokens - reported_tokens, 1)
        return facts


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """Files that become the dataset `prefix`."""

    source: str
    prefix: Path
    parts: tuple[TokenPart, ...]
    settings: TokenSettings
    tokenizer: Tokenizer

    @staticmethod
    def open(source: str, out: str, settings: TokenSettings, format: str = "auto") -> TokenizeJob:
        """Lists the files of `source` (file, folder or glob; `format` as ``data.format``) and opens
        the tokenizer; `out` is a prefix or a folder. Reads only the first bytes of texts. Raises
        DataError."""
        prefix = output_prefix(source, out)
        tokenizer = Tokenizer.open(settings.tokenizer)
        settings.end(tokenizer)
        folder = path_with(prefix, ".parts")
        root = Path(source).expanduser()
        if root.is_dir() and prefix.resolve().is_relative_to(root.resolve()):
            raise DataError(
                f"the output {prefix} is inside the folder {root} that is read: name another place"
            )
        files = find(source, format)
        for file in files[:CHECKED_FILES]:  # before anything is written
            check_head(file)
        parts = tuple(TokenPart.of(file, folder) for file in files)
        return TokenizeJob(
            source=source, prefix=prefix, parts=parts, settings=settings, tokenizer=tokenizer
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all files on disk."""
        return sum(part.size for part in self.parts)

    def run(
        self,
        *,
        processes: int = 1,
        on_note: Callable[[str], None] = lambda _: None,
        advance: Advance = lambda *_: None,
    ) -> dict[str, Any]:
        """Makes the dataset and returns its facts; no-op if it exists.

        `on_note` receives sentences for the user, `advance` the progress. Raises DataError for
        files that cannot be read or written, and if another dataset has this name.
        """
        folder, made_from = path_with(self.prefix, ".parts"), self._made_from()
        obsolete = path_with(self.prefix, ".parts.old")
        shutil.rmtree(obsolete, ignore_errors=True)
        if not folder.exists() and path_with(self.prefix, IDX).exists():
            facts = self._facts()
            if {key: facts["made_from"].get(key) for key in made_from} != made_from:
                raise DataError(
                    f"{path_with(self.prefix, IDX)} exists, and was made of other files or with "
                    "other settings: name another output, or move it"
                )
            on_note(f"{self.prefix} is complete: it was made of these files with these settings")
            return facts

        for note in notes_on(self.source, [part.file for part in self.parts]):
            on_note(note)

        def refuse() -> None:
            raise DataError(f"another process is writing {folder}")

        with _locked(folder / "lock", refuse, "{0}: {1}"):
            # Keep earlier parts of these settings; remove files of an interrupted renaming.
            settings = made_from["settings"]
            settings_file = folder / "settings"
            earlier = settings_file.read_text() if settings_file.is_file() else None
            if earlier is not None and earlier != settings:
                on_note(f"{folder} has parts of other settings: they are replaced")
            if earlier != settings:
                for path in folder.iterdir():
                    if path.name != "lock":
                        path.unlink()
                _write(settings_file, settings)
            for suffix in SUFFIXES:
                if (folder / "renaming").exists():
                    path_with(self.prefix, suffix).unlink(missing_ok=True)
                if path_with(self.prefix, suffix).exists():
                    raise DataError(
                        f"{path_with(self.prefix, suffix)} exists: name another output, or move it"
                    )
            bad_records, num_tokens = self._make_parts(processes, on_note, advance)
            if not num_tokens:
                raise DataError(f"{self.source}: {len(self.parts)} file(s), but no text in them")
            end = self.settings.end(self.tokenizer)
            facts = made_from | {"records": bad_records.total, "bad_records": bad_records.bad}
            with token_writer(self.prefix, self.tokenizer, end, facts) as writer:
                for part in self.parts:
                    if (record := part.facts()) is not None and record["num_tokens"]:
                        tokens = IndexedTokens.open(part.prefix)
                        writer.extend(tokens, ends_text=record["ends_text"])
                _write(folder / "renaming", "")  # exists while the result is renamed
        # Renamed before it is removed, so that the next run never finds a half-removed folder.
        folder.rename(obsolete)
        shutil.rmtree(obsolete, ignore_errors=True)
        return self._facts()

    def _made_from(self) -> dict[str, Any]:
        """Facts that determine the result: digests of the settings, and of names and sizes."""
        template = self.tokenizer.template_facts
        settings = asdict(self.settings) | {"tokenizer": self.tokenizer.fingerprint}
        end = self.settings.end(self.tokenizer)
        following = (between(self.tokenizer) if end is None else end).tolist()
        top = os.path.commonpath([part.file.path.absolute().parent for part in self.parts])
        inputs = [
            (os.path.relpath(part.file.path, top), part.file.format, part.size)
            for part in self.parts
        ]
        return {
            "settings": _digest([PARTS_VERSION, settings, following, template]),
            "inputs": _digest(inputs),
            "files": len(self.parts),
            "bytes": self.num_bytes,
        }

    def _make_parts(
        self, processes: int, on_note: Callable[[str], None], advance: Advance
    ) -> tuple[BadRecordLog, int]:
        """Make the missing parts. Returns the counts of records and the number of tokens of all
        parts."""
        facts = {part: part.facts() for part in self.parts}
        missing = [part for part, record in facts.items() if record is None]
        if len(missing) < len(facts):
            on_note(f"{len(facts) - len(missing):,} of {len(facts):,} files are tokenized already")
        for part, record in facts.items():
            if record is not None:
                advance(part.size, record["num_tokens"], 1)
        new = make_all(missing, self.settings, self.tokenizer, advance, processes=processes)
        facts |= dict(zip(missing, new, strict=True))
        all_facts = [record for record in facts.values() if record is not None]
        settings = self.settings
        bad_records = BadRecordLog(settings.bad_records, settings.bad_record_share, self.source)
        bad_records.bad = sum(part["bad"] for part in all_facts)
        bad_records.total = sum(part["records"] for part in all_facts)
        bad_records.places = [place for part in all_facts for place in part["places"]][:NAMED]
        bad_records.check()
        if note := bad_records.note():
            on_note(note)
        return bad_records, sum(record["num_tokens"] for record in all_facts)

    def _facts(self) -> dict[str, Any]:
        facts = read_sidecar(self.prefix)
        if facts is None:
            raise DataError(
                f"{path_with(self.prefix, IDX)} exists, and was not made by moemesh: name another "
                "output, or move it"
            )
        return {"prefix": str(self.prefix), **asdict(facts)}


def output_prefix(source: str, out: str) -> Path:
    """The prefix that `out` means: itself, or the name of `source` in the folder `out`."""
    path = Path(out).expanduser()
    if not path.is_dir() and not out.endswith(os.sep):
        return prefix_of(path)
    name = Path(source).expanduser().resolve().name.partition(".")[0]
    return path / ("tokens" if has_magic(source) or not name else name)


def make_all(
    parts: Sequence[TokenPart],
    settings: TokenSettings,
    tokenizer: Tokenizer,
    advance: Advance,
    *,
    processes: int = 1,
) -> list[dict[str, Any]]:
    """Makes `parts`, in this process or in several, each one file at a time; returns their facts,
    in order."""
    processes = min(processes, len(parts))
    if processes <= 1:
        return [part.make(settings, tokenizer, advance) for part in parts]
    # Processes that start now, including the helper process of the first queue, import nothing from
    # the current directory (as with ``python -P``); an empty value counts as unset.
    earlier = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    context = multiprocessing.get_context("spawn")
    progress: Any = context.SimpleQueue()  # arguments of `advance`
    # `ends` becomes readable when `alive` is closed: below, or when this process ends.
    ends, alive = context.Pipe(duplex=False)
    threads = max(1, usable_cores() // processes)
    pool = ProcessPoolExecutor(processes, context, _start, (progress, ends, settings, threads))
    try:
        futures = [pool.submit(_make_in_worker, part) for part in parts]
        pending: set[Future[dict[str, Any]]] = set(futures)
        while pending:
            finished, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            while not progress.empty():
                advance(*progress.get())
            for future in finished:
                future.result()
        pool.shutdown()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenized was killed (for want of memory?): the same command resumes "
            "where it stopped, and fewer --processes need less memory"
        ) from error
    finally:
        alive.close()
        pool.shutdown(cancel_futures=True)
        os.environ["PYTHONSAFEPATH"] = earlier


#: Settings, tokenizer and progress callback in a process that makes parts.
_of_worker: tuple[TokenSettings, Tokenizer, Advance] | None = None


def _start(progress: Any, ends: Any, settings: TokenSettings, threads: int) -> None:
    """Initializer of a process that makes parts: it ends with its parent (the other end of `ends`),
    and ignores Ctrl-C, which the parent handles."""
    global _of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        ends.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # Read when the threads of tokenizers start.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    _of_worker = (settings, Tokenizer.open(settings.tokenizer), lambda *done: progress.put(done))


def _make_in_worker(part: TokenPart) -> dict[str, Any]:
    assert _of_worker is not None
    try:
        return part.make(*_of_worker)
    except DataError as error:
        # A DataError with only a message can be pickled; its subclasses cannot.
        raise DataError(str(error)) from None


def _write(path: Path, text: str) -> None:
    file = HashedFile(path)
    try:
        file.write(text.encode())
        file.commit()
    finally:
        file.abandon()
