"""Text files into one indexed dataset, file by file, so that a run that was ended can go on.

Each input file becomes a part in the folder ``OUT.parts``; at the end the parts are put together
under temporary names, which are renamed, and the folder is removed. A run that goes on makes the
parts that are missing, and its result has the bytes of one that was never ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

from moemesh.data.chat import TEMPLATE
from moemesh.data.indexed import (
    IDX,
    SUFFIXES,
    HashedFile,
    IndexedTokens,
    IndexedWriter,
    beside,
    prefix_of,
    read_sidecar,
)
from moemesh.data.input_files import CHECKED_FILES, check_head, find
from moemesh.data.parts import Advance, TokenPart, TokenSettings, make_all
from moemesh.data.records import NAMED, BadRecordLog
from moemesh.data.tokenizer import SETTINGS, DataError, Tokenizer

#: Enters the digest of the settings: another number makes the parts of earlier versions useless.
PARTS_VERSION = 2


def output_prefix(source: str, out: str) -> Path:
    """The prefix that `out` names: itself, or in a folder one by the name of `source`."""
    path = Path(out).expanduser()
    if not path.is_dir() and not out.endswith(os.sep):
        return prefix_of(path)
    name = Path(source).expanduser().resolve().name.partition(".")[0]
    return path / ("tokens" if has_magic(source) or not name else name)


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
        """Finds the files of `source` (file, folder or glob; `format` as ``data.format``) and opens
        the tokenizer; `out` is a prefix or a folder. Reads no text. Raises DataError."""
        prefix = output_prefix(source, out)
        tokenizer = Tokenizer.open(settings.tokenizer)
        settings.end(tokenizer)
        folder = beside(prefix, ".parts")
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
        """Bytes of all files, as they are on disk."""
        return sum(part.size for part in self.parts)

    def run(
        self,
        *,
        processes: int = 1,
        on_note: Callable[[str], None] = lambda _: None,
        advance: Advance = lambda *_: None,
    ) -> dict[str, Any]:
        """Makes the dataset and returns its facts; nothing is done where it is there already.

        `on_note` gets sentences for the user. Raises DataError for whatever cannot be read or
        written, and where there is another dataset.
        """
        folder, made_from = beside(self.prefix, ".parts"), self._made_from()
        useless = beside(self.prefix, ".parts.old")
        shutil.rmtree(useless, ignore_errors=True)
        if not folder.exists() and beside(self.prefix, IDX).exists():
            facts = self._facts()
            if {key: facts["made_from"].get(key) for key in made_from} != made_from:
                raise DataError(
                    f"{beside(self.prefix, IDX)} exists, and was made of other files or with other "
                    "settings: name another output, or move it"
                )
            on_note(f"{self.prefix} is complete: it was made of these files with these settings")
            return facts
        with _locked(folder):
            # Earlier parts that these settings have made are kept, and what an end in the middle of
            # the renaming left is removed.
            settings = made_from["settings"]
            own = folder / "settings"
            earlier = own.read_text() if own.is_file() else None
            if earlier is not None and earlier != settings:
                on_note(f"{folder} is of other settings: its parts are made again")
            if earlier != settings:
                for path in folder.iterdir():
                    if path.name != "lock":
                        path.unlink()
                _write(own, settings)
            if (folder / "renaming").exists():
                for suffix in SUFFIXES:
                    beside(self.prefix, suffix).unlink(missing_ok=True)
            for suffix in SUFFIXES:
                if beside(self.prefix, suffix).exists():
                    raise DataError(
                        f"{beside(self.prefix, suffix)} exists: name another output, or move it"
                    )
            log, num_tokens = self._make_parts(processes, on_note, advance)
            if not num_tokens:
                raise DataError(f"{self.source}: {len(self.parts)} file(s), but no text in them")
            writer = IndexedWriter(
                self.prefix,
                vocab_size=self.tokenizer.vocab_size,
                tokenizer=self.tokenizer.fingerprint,
                end_of_document=self.settings.end(self.tokenizer),
                ends_last=self.settings.end_of_document is not None,
                made_from=made_from | {"records": log.total, "bad_records": log.bad},
            )
            with writer:
                for part in self.parts:
                    if (known := part.facts()) is not None and known["num_tokens"]:
                        writer.extend(IndexedTokens.open(part.prefix), ends_text=known["ends_text"])
                _write(folder / "renaming", "")
        # Removed at once, as far as the next run can see.
        folder.rename(useless)
        shutil.rmtree(useless, ignore_errors=True)
        return self._facts()

    def _made_from(self) -> dict[str, Any]:
        """Facts that the result depends on: digests of the settings, and of names and sizes."""
        template = [
            (self.tokenizer.folder / name).read_bytes().hex()
            for name in (TEMPLATE, SETTINGS)
            if self.tokenizer.folder is not None and (self.tokenizer.folder / name).is_file()
        ]
        own = asdict(self.settings) | {"tokenizer": self.tokenizer.fingerprint}
        end = self.settings.end(self.tokenizer).tolist()
        top = os.path.commonpath([part.file.path.absolute().parent for part in self.parts])
        inputs = [
            (os.path.relpath(part.file.path, top), part.file.format, part.size)
            for part in self.parts
        ]
        return {
            "settings": _digest([PARTS_VERSION, own, end, template]),
            "inputs": _digest(inputs),
            "files": len(self.parts),
            "bytes": self.num_bytes,
        }

    def _make_parts(
        self, processes: int, on_note: Callable[[str], None], advance: Advance
    ) -> tuple[BadRecordLog, int]:
        """(Counts of the records, number of tokens) of all parts."""
        facts = {part: part.facts() for part in self.parts}
        missing = [part for part, known in facts.items() if known is None]
        if len(missing) < len(facts):
            on_note(f"{len(facts) - len(missing):,} of {len(facts):,} files are tokenized already")
        for part, known in facts.items():
            if known is not None:
                advance(part.size, known["num_tokens"], 1)
        made = make_all(missing, self.settings, self.tokenizer, advance, processes=processes)
        facts |= dict(zip(missing, made, strict=True))
        found = [known for known in facts.values() if known is not None]
        settings = self.settings
        log = BadRecordLog(settings.bad_records, settings.bad_record_share, self.source)
        log.bad = sum(known["bad"] for known in found)
        log.total = sum(known["records"] for known in found)
        log.places = [place for known in found for place in known["places"]][:NAMED]
        log.check()
        if note := log.note():
            on_note(note)
        return log, sum(known["num_tokens"] for known in found)

    def _facts(self) -> dict[str, Any]:
        facts = read_sidecar(self.prefix)
        if facts is None:
            raise DataError(
                f"{beside(self.prefix, IDX)} exists, and was not made by moemesh: name another "
                "output, or move it"
            )
        return {"prefix": str(self.prefix), **asdict(facts)}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes `folder` and holds its lock. Raises DataError where another process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(f"another process is writing {folder}") from error
            yield
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}") from error


def _write(path: Path, text: str) -> None:
    file = HashedFile(path)
    file.write(text.encode())
    file.commit()


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
