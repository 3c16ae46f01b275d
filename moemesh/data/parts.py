"""The parts of ``moemesh tokenize``: the tokens of one input file each, made once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from moemesh.config.data import BadRecords
from moemesh.data.corpus import between, encoded
from moemesh.data.indexed import HashedFile, IndexedTokens, IndexedWriter, beside
from moemesh.data.input_files import DataFile
from moemesh.data.records import BadRecordLog, Record, Where, read
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.trace.machine import usable_cores

#: Bytes of a file between two reports of progress.
REPORT_BYTES = 1 << 20
#: Seconds between two looks at the progress of other processes.
LOOK_SECONDS = 0.2
#: The name of the tokenizer's own token for the end of a text.
EOS = "eos"

#: Told about progress: bytes of input, tokens, files.
Advance: TypeAlias = Callable[[int, int, int], None]


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """Rules by which text becomes tokens.

    Behind each text but the last document stands a newline, as in a corpus that a run reads; with
    `end_of_document`, the name of a token or "eos" (the tokenizer's own), that token instead,
    behind conversations and the last one, too. The others are as in the section ``[data]``.
    """

    tokenizer: str
    text_key: str = "text"
    end_of_document: str | None = None
    bad_records: BadRecords = "fail"
    bad_record_share: float = 0.01

    def end(self, tokenizer: Tokenizer) -> np.ndarray:
        """The ids behind a document."""
        if self.end_of_document is None:
            return between(tokenizer)
        if self.end_of_document == EOS:
            return np.array([tokenizer.end_of_text()])
        return np.array([tokenizer.id_of(self.end_of_document)])


class TokenPart(NamedTuple):
    """An input file, with its size in bytes and its time of change, and the prefix of its tokens
    in the folder of parts."""

    file: DataFile
    size: int
    changed: int
    prefix: Path

    @staticmethod
    def of(file: DataFile, folder: Path) -> TokenPart:
        """The part of `file`. Raises DataError for a file that cannot be read."""
        name = "\0".join((str(file.path), file.format, file.compression))
        digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        paths = [path for path in file.path.rglob("*") if path.is_file()] or [file.path]
        try:
            found = [path.stat() for path in paths]
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read ({error.strerror})") from error
        size, changed = sum(one.st_size for one in found), max(one.st_mtime_ns for one in found)
        return TokenPart(file, size, changed, folder / digest)

    @property
    def facts_path(self) -> Path:
        """Written last: whoever finds it finds the tokens."""
        return beside(self.prefix, ".done.json")

    def facts(self) -> dict[str, Any] | None:
        """Those of a finished part whose file has not changed since."""
        try:
            found = json.loads(self.facts_path.read_bytes())
            if (found["size"], found["changed"]) != (self.size, self.changed):
                return None
            if found["num_tokens"]:
                IndexedTokens.open(self.prefix)
        except (OSError, ValueError, KeyError, TypeError):  # a DataError is a ValueError
            return None
        return found

    def make(
        self, settings: TokenSettings, tokenizer: Tokenizer, advance: Advance
    ) -> dict[str, Any]:
        """Writes the tokens and returns the facts. Raises DataError."""
        for path in self.prefix.parent.glob(f"{self.prefix.name}.*"):
            path.unlink()
        log = BadRecordLog(settings.bad_records, 1.0, str(self.file.path))
        writer = IndexedWriter(
            self.prefix,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.fingerprint,
            end_of_document=settings.end(tokenizer),
            ends_last=settings.end_of_document is not None,
        )
        meter = _Meter(self, advance)
        found = read(self.file, settings.text_key, on_bad=log.unreadable)
        records = meter.records(found, log)
        try:
            for where, ids, learned in encoded(records, tokenizer, on_bad=log.add):
                writer.add(ids, learned, continues=where.continues)
                meter.tokens += len(ids)
            if meter.tokens:
                writer.commit()
            else:
                writer.abandon()
        except BaseException:
            writer.abandon()
            raise
        facts = {
            "size": self.size,
            "changed": self.changed,
            "num_tokens": meter.tokens,
            "ends_text": writer.ends_text,
            "records": log.total,
            "bad": log.bad,
            "places": log.places,
        }
        done = HashedFile(self.facts_path)
        done.write(json.dumps(facts).encode())
        done.commit()
        meter.tell(self.size, files=1)
        return facts


class _Meter:
    """Reports how much of a file is done: by the places of its records where those are places in
    the file itself."""

    def __init__(self, part: TokenPart, advance: Advance) -> None:
        self._part, self._advance = part, advance
        self.tokens = self._told_bytes = self._told_tokens = 0

    def records(
        self, records: Iterator[tuple[Where, Record]], log: BadRecordLog
    ) -> Iterator[tuple[Where, Record]]:
        for where, record in records:
            if not where.continues:
                log.total += 1
            if self._part.file.compression == "none" and where.byte is not None:
                self.tell(where.byte)
            yield where, record

    def tell(self, place: int, files: int = 0) -> None:
        if files or place - self._told_bytes >= REPORT_BYTES:
            self._advance(place - self._told_bytes, self.tokens - self._told_tokens, files)
            self._told_bytes, self._told_tokens = place, self.tokens


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that start meanwhile import nothing from the current directory (``python -P``)."""
    given = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = given  # an empty text counts as none


@_safe_path()
def make_all(
    parts: Sequence[TokenPart],
    settings: TokenSettings,
    tokenizer: Tokenizer,
    advance: Advance,
    *,
    processes: int = 1,
) -> list[dict[str, Any]]:
    """The facts of all `parts`, made by this process or by several, one file each at a time."""
    processes = min(processes, len(parts))
    if processes <= 1:
        return [part.make(settings, tokenizer, advance) for part in parts]
    context = multiprocessing.get_context("spawn")
    told: Any = context.SimpleQueue()
    ends, alive = context.Pipe(duplex=False)
    threads = max(1, usable_cores() // processes)
    pool = ProcessPoolExecutor(processes, context, _start, (told, ends, settings, threads))
    try:
        futures = [pool.submit(_make_here, part) for part in parts]
        left: set[Future[dict[str, Any]]] = set(futures)
        while left:
            finished, left = wait(left, LOOK_SECONDS, FIRST_COMPLETED)
            while not told.empty():
                advance(*told.get())
            for future in finished:
                future.result()
        pool.shutdown()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenized was killed (for want of memory?): the same command goes on "
            "where it stopped, and fewer --processes need less memory"
        ) from error
    finally:
        alive.close()
        pool.shutdown(cancel_futures=True)


#: Of a process that makes parts for another.
_here: tuple[TokenSettings, Tokenizer, Advance] | None = None


def _start(told: Any, ends: Any, settings: TokenSettings, threads: int) -> None:
    """First in such a process: it ends when the other end of `ends` does, and leaves Ctrl-C to the
    one that started it."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        ends.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # Read when the threads of tokenizers start.
    os.environ["RAYON_NUM_THREADS"] = str(threads)

    def advance(*done: int) -> None:
        told.put(done)

    _here = (settings, Tokenizer.open(settings.tokenizer), advance)


def _make_here(part: TokenPart) -> dict[str, Any]:
    assert _here is not None
    try:
        return part.make(*_here)
    except DataError as error:
        # Of its kinds only this one has nothing but a message, and can go to another process.
        raise DataError(str(error)) from None
