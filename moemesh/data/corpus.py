"""Files into one stream of token ids.

A document is a whole file (format "text"), or the "text" or the conversation ("messages") of one
line ("jsonl"); format "auto" is jsonl where the path ends in .jsonl, or names a folder of nothing
else. Of conversations only the assistant turns carry loss (:mod:`moemesh.data.chat`). Empty
documents are dropped and the rest are joined by one newline: one newline byte, or the tokenizer's
ids of it.

Every rank opens the corpus for itself. One large text file is memory-mapped, so that the ranks of a
machine share it; everything else is read whole.
"""

from __future__ import annotations

import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from moemesh.data.chat import ChatTemplate
from moemesh.data.tokenizer import DataError, Tokenizer, nearest, read_whole

#: A single text file at least this large is memory-mapped instead of read.
MAP_FROM_BYTES = 64 << 20
#: The standard library's own tests are 19 of its 31 MB and leave the default corpus.
STANDARD_LIBRARY_SKIP = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A stream of token ids [num_tokens] (uint8; int32 with a tokenizer) and where it came from.

    ``starts`` int64: where each document begins; the newline between two belongs to the first.
    ``learned`` bool: which tokens carry loss as targets; None: all.
    """

    tokens: np.ndarray
    num_files: int
    num_bytes: int
    vocab_size: int
    tokenizer: str
    source: str
    learned: np.ndarray | None = None
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    @staticmethod
    def open(
        path: str | None = None,
        format: str = "auto",
        tokenizer: str = "bytes",
        vocab_size: int = 256,
    ) -> Corpus:
        """Reads `path` (file, folder or glob; None: the running Python's standard library sources).

        A folder gives its files in the order of their relative names, hidden ones left out (with
        `jsonl` only ``*.jsonl``). `tokenizer` is "bytes" (ids 0..255) or a folder that holds a
        tokenizer.json. Raises DataError for anything that cannot be read or does not fit
        `vocab_size`, naming the file and the place.
        """
        if format not in ("auto", "text", "jsonl"):
            raise DataError(f'data.format is "{format}"; it must be "auto", "text" or "jsonl"')
        if format == "auto":
            format = _format_of(path)
        files = _standard_library() if path is None else _find(path, format)
        source = "standard library" if path is None else path
        num_bytes = sum(file.stat().st_size for file in files)
        reader = Tokenizer.open(tokenizer)
        newline = reader.encode(b"\n", "newline")
        if format == "text" and tokenizer == "bytes" and len(files) == 1:
            documents: Iterator[_Document] = iter([(*_whole_file(files[0], num_bytes), None)])
        else:
            documents = _encoded(files, format, reader, tokenizer)
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        masks: list[np.ndarray | None] = []
        for where, ids, learned in documents:
            if len(ids):
                _check_ids(ids, vocab_size, where, tokenizer)
                parts += [newline, ids] if parts else [ids]
                lengths.append(len(ids))
                masks.append(learned)
        if not parts:
            raise DataError(f"data.path {source}: {len(files)} file(s), but no text in them")
        if len(parts) > 1:
            _check_ids(newline, vocab_size, "the newline between documents", tokenizer)
        return Corpus(
            tokens=parts[0] if len(parts) == 1 else np.concatenate(parts),
            num_files=len(files),
            num_bytes=num_bytes,
            vocab_size=vocab_size,
            tokenizer=reader.fingerprint,
            source=source,
            learned=_joined(masks, lengths, len(newline)),
            starts=np.cumsum([0, *(length + len(newline) for length in lengths[:-1])]),
        )


def _format_of(path: str | None) -> str:
    """ "jsonl" or "text", by the names of the files."""
    if path is None:
        return "text"
    root = Path(path).expanduser()
    names = [path]
    if root.is_dir():
        names = [file for _, _, files in os.walk(root) for file in files if file[0] != "."]
    return "jsonl" if names and all(name.endswith(".jsonl") for name in names) else "text"


def _check_ids(ids: np.ndarray, vocab_size: int, where: str, tokenizer: str) -> None:
    """Raises DataError at the first id of `ids` that is not below `vocab_size`."""
    if np.iinfo(ids.dtype).max < vocab_size or int(ids.max()) < vocab_size:
        return
    offset = int(np.argmax(ids >= vocab_size))
    unit = "byte" if tokenizer == "bytes" else "token"
    enough = 256 if unit == "byte" else int(ids.max()) + 1
    raise DataError(
        f"{where}, {unit} offset {offset}: id {int(ids[offset])} is not below model.vocab_size "
        f"{vocab_size}; set model.vocab_size to {enough} or more"
    )


#: Where a document is from, for errors; its ids; which of them carry loss (None: all).
_Document: TypeAlias = tuple[str, np.ndarray, np.ndarray | None]


def _encoded(
    files: Sequence[Path], format: str, reader: Tokenizer, tokenizer: str
) -> Iterator[_Document]:
    """Every document, in order: a text, or a conversation under the tokenizer's chat template."""
    template: ChatTemplate | None = None
    for file in files:
        content = read_whole(file)
        if format == "text":
            yield str(file), reader.encode(content, str(file)), None
            continue
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            record = _record(line, where)
            if "messages" in record:
                template = template or ChatTemplate.open(reader)
                yield where, *template.encode(record, reader, where)
            else:
                yield where, reader.encode(_text_of(record, where), where), None


def _joined(
    masks: Sequence[np.ndarray | None], lengths: Sequence[int], newline: int
) -> np.ndarray | None:
    """Which tokens of the stream carry loss; None where all do. Between documents none does."""
    if all(mask is None for mask in masks):
        return None
    parts: list[np.ndarray] = []
    for mask, length in zip(masks, lengths, strict=True):
        parts += [np.zeros(newline, dtype=bool)] if parts else []
        parts.append(np.ones(length, dtype=bool) if mask is None else mask)
    return np.concatenate(parts)


def _record(line: bytes, where: str) -> dict[str, Any]:
    """One JSON line, an object with a text or with messages."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    is_text = isinstance(record, dict) and isinstance(record.get("text"), str)
    if not is_text and not (isinstance(record, dict) and "messages" in record):
        raise DataError(
            f'{where}: expected an object with a text under the key "text", or a conversation '
            'under the key "messages"'
        )
    return record


def _text_of(record: dict[str, Any], where: str) -> bytes:
    """The UTF-8 bytes under the key "text"."""
    try:
        return record["text"].encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text is not valid Unicode ({error.reason})") from error


def _whole_file(file: Path, size: int) -> tuple[str, np.ndarray]:
    """The bytes of one text file, memory-mapped when it is large."""
    if size < MAP_FROM_BYTES:
        return str(file), np.frombuffer(read_whole(file), dtype=np.uint8)
    try:
        return str(file), np.memmap(file, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error


def _find(path: str, format: str) -> list[Path]:
    """The regular files that `path` (file, folder or glob) names, in their order."""
    root = Path(path).expanduser()
    suffix = ".jsonl" if format == "jsonl" else ""
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        if has_magic(path):
            matches = sorted(Path(match) for match in glob(str(root), recursive=True))
            if files := [match for match in matches if match.is_file()]:
                return files
            raise DataError(f"data.path {path}: the pattern matches no file") from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data.path {path}: {reason} ({nearest(root)})") from error
    if stat.S_ISREG(mode):
        return [root]
    if not stat.S_ISDIR(mode):
        raise DataError(f"data.path {path} is neither a regular file nor a folder")
    found = _walk(root, lambda name: name.startswith(".") or name == "__pycache__", suffix)
    if not found:
        raise DataError(f"data.path {path}: the folder holds no {suffix or 'readable'} file")
    return found


def _standard_library() -> list[Path]:
    """The ``*.py`` sources of the running Python, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = _walk(root, STANDARD_LIBRARY_SKIP.__contains__, ".py")
    if not found:
        raise DataError(f"this Python has no library sources under {root}: set data.path")
    return found


def _walk(root: Path, skip: Callable[[str], bool], suffix: str) -> list[Path]:
    """Regular files under `root` ending in `suffix`, sorted by relative name with ``/``."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not skip(name)]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not skip(name)]
    return sorted((f for f in found if f.is_file()), key=lambda f: f.relative_to(root).as_posix())
