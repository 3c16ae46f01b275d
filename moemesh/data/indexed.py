"""Tokens in files, memory-mapped: Megatron's indexed dataset with a sidecar, read and written.

``PREFIX.bin`` is the stream of token ids, document after document, with nothing between them. If
documents are conversations, ``PREFIX.mask.bin`` has one byte a token, 1 for tokens that carry loss
as targets; Megatron ignores it. ``PREFIX.meta.json`` is ours: sizes, checksums, the tokenizer's
fingerprint. ``PREFIX.idx``, little-endian (Megatron-LM,
``core/datasets/indexed_dataset.py``):

    9 bytes  "MMIDIDX" and two zero bytes
    8        version, 1
    1        code of the dtype of the ids
    8        number of sequences n
    8        length d of the document index: documents and one more
    4 n      length of each sequence in tokens
    8 n      byte of ``PREFIX.bin`` at which it begins
    8 d      number of the first sequence of each document, and n
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from moemesh.config.limits import parse_json
from moemesh.config.suggest import nearest_path
from moemesh.data.tokenizer import DataError

MAGIC, VERSION = b"MMIDIDX\0\0", 1
#: Magic, version, dtype code, number of sequences, number of entries of the document index.
HEADER = struct.Struct("<9sQBQQ")
#: Megatron's codes of integer dtypes; 6 and 7 are floats, which cannot be ids.
DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
#: Most tokens of a sequence, whose length is an int32; a longer document is several sequences.
MAX_SEQUENCE = 2**31 - 1
#: Largest sidecar in bytes.
MAX_SIDECAR = 1 << 20
SIDECAR_FORMAT, SIDECAR_VERSION = "moemesh tokens", 1
SUFFIXES = BIN, IDX, MASK, META = ".bin", ".idx", ".mask.bin", ".meta.json"


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The facts in ``PREFIX.meta.json``.

    `tokenizer` is the fingerprint of :class:`moemesh.data.tokenizer.Tokenizer`; `vocab_size` counts
    its ids, and `max_id` is the largest in the file. `end_of_document` are the ids after each text
    but the last document, or (`ends_last`) after each document. `files` has bytes and blake2b-128
    by suffix; `made_from` describes the source, in the form of the writing program.
    """

    tokenizer: str
    vocab_size: int
    max_id: int
    num_tokens: int
    num_documents: int
    end_of_document: tuple[int, ...]
    ends_last: bool
    files: dict[str, dict[str, Any]]
    made_from: dict[str, Any] = field(default_factory=dict[str, Any])


class HashedFile:
    """A file under a temporary name until :meth:`commit`, with the checksum of what was written.
    Methods raise DataError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._digest, self._bytes = hashlib.blake2b(digest_size=16), 0
        try:
            self._file: IO[bytes] = self._temporary.open("wb")
        except OSError as error:
            raise DataError(f"{self._temporary}: {error.strerror or error}") from error

    def write(self, content: bytes | np.ndarray) -> None:
        view = memoryview(content).cast("B") if len(content) else b""
        try:
            self._file.write(view)
        except OSError as error:
            raise DataError(f"{self._temporary}: {error.strerror or error}") from error
        self._digest.update(view)
        self._bytes += len(view)

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "blake2b-128": self._digest.hexdigest()}

    def commit(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise DataError(f"{self._temporary}: {error.strerror or error}") from error

    def abandon(self) -> None:
        """Removes the temporary file."""
        with suppress(OSError):  # closing writes the rest of the buffer, as on a full disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def prefix_of(path: str | Path) -> Path:
    """The prefix of a pair of files; `path` is the prefix or one of the files."""
    path = Path(path).expanduser()
    for suffix in (MASK, META, BIN, IDX):
        if path.name.endswith(suffix):
            return path.with_name(path.name[: -len(suffix)])
    return path


def path_with(prefix: Path, suffix: str) -> Path:
    """The file of `prefix` with `suffix`; a dot in the prefix stays."""
    return prefix.with_name(prefix.name + suffix)


def size_of(path: Path) -> int:
    """Size of a file in bytes. Raises DataError for a missing file."""
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist ({nearest_path(path)})")
    return path.stat().st_size


def read_index(path: Path) -> tuple[np.dtype[Any], np.ndarray, np.ndarray]:
    """(dtype of the ids, first token of each of n sequences and the end [n + 1], document index
    [d]), both int64. Raises DataError for a damaged index."""
    size = size_of(path)
    # The header, and the size of the file that it determines.
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise DataError(
            f"{path} does not begin as an index of Megatron does ({MAGIC!r} and 25 bytes of counts)"
        )
    _, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the index; only version {VERSION} is read")
    if code not in DTYPES:
        known = ", ".join(f"{key} ({value.name})" for key, value in DTYPES.items())
        raise DataError(f"{path}: dtype code {code} is not one of integers: {known}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if size == expected + num_sequences:
        raise DataError(f"{path} is an index of a multimodal dataset, which is not read")
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, and its header ({num_sequences} sequences, {num_entries} "
            f"entries of the document index) needs {expected}: the file is incomplete or damaged"
        )
    if not num_sequences or num_entries < 2:
        raise DataError(
            f"{path}: the header has {num_sequences} sequences and {num_entries} entries of the "
            "document index; it must have at least one document"
        )
    # The three arrays, which must agree with each other.
    content = np.memmap(path, dtype=np.uint8, mode="r")
    lengths_end = HEADER.size + 4 * num_sequences
    pointers_end = lengths_end + 8 * num_sequences
    lengths = content[HEADER.size : lengths_end].view("<i4")
    pointers = content[lengths_end:pointers_end].view("<i8")
    documents = content[pointers_end:].view("<i8")
    if documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
        raise DataError(
            f"{path}: the document index must ascend from 0 to {num_sequences}, the number of "
            f"sequences; it goes from {documents[0]} to {documents[-1]}"
        )
    if (lengths < 0).any():
        number = int(np.argmax(lengths < 0))
        raise DataError(f"{path}: sequence {number} has {int(lengths[number])} tokens")
    offsets, itemsize = np.zeros(num_sequences + 1, dtype=np.int64), DTYPES[code].itemsize
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    # For n < 2**29 sequences of 2**31 tokens of 8 bytes, the offsets in bytes fit int64.
    wrong = pointers != offsets[:-1] * itemsize
    if wrong.any():
        number = int(np.argmax(wrong))
        raise DataError(
            f"{path}: sequence {number} begins at byte {int(pointers[number])} of the .bin; the "
            f"sequences before it end at byte {int(offsets[number]) * itemsize} (sequences must "
            "follow each other without gaps)"
        )
    return DTYPES[code], offsets, documents


def read_sidecar(prefix: Path) -> Sidecar | None:
    """The sidecar of `prefix`, if it has one. Raises DataError for an invalid one."""
    path = path_with(prefix, META)
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_SIDECAR:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes; a sidecar has {MAX_SIDECAR} at most"
        )
    try:
        content = parse_json(path.read_bytes())
        if content.pop("format") != SIDECAR_FORMAT or content.pop("version") != SIDECAR_VERSION:
            raise ValueError(
                f'"format" and "version" must be "{SIDECAR_FORMAT}" and {SIDECAR_VERSION}'
            )
        sidecar = Sidecar(**content)
        numbers = (sidecar.vocab_size, sidecar.max_id, sidecar.num_tokens, sidecar.num_documents)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("counts must be numbers")
        if not isinstance(sidecar.tokenizer, str) or not isinstance(sidecar.made_from, dict):
            raise ValueError('"tokenizer" must be a text, and "made_from" an object')
        if BIN not in sidecar.files or not set(sidecar.files) <= {BIN, IDX, MASK}:
            raise ValueError(f'"files" must name {BIN}, {IDX} and {MASK} at most')
        for facts in sidecar.files.values():
            if type(facts["bytes"]) is not int or not isinstance(facts["blake2b-128"], str):
                raise ValueError('"files" must have "bytes" and "blake2b-128" of each')
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a sidecar of tokens: {error}") from error
    return sidecar


#: Tokens processed at once in passes over a whole file: bounds the extra memory.
CHUNK = 1 << 24
#: Tokens of documents that a writer buffers, since most documents are short.
BUFFERED = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedTokens:
    """An open pair of files.

    ``tokens`` [num_tokens], memory-mapped, in the dtype of the file; ``starts`` int64: the first
    token of each document (empty ones left out); ``learned`` bool [num_tokens]: tokens that carry
    loss as targets, memory-mapped; None: all. ``sidecar`` is None for files of other programs.
    """

    prefix: Path
    tokens: np.ndarray
    starts: np.ndarray
    learned: np.ndarray | None
    sidecar: Sidecar | None

    @staticmethod
    def open(path: str | Path) -> IndexedTokens:
        """`path` is the prefix or one of the two files. Raises DataError for files that are
        missing, of another format, or inconsistent; counts are checked against the file sizes
        before use."""
        # Tokens and index.
        prefix = prefix_of(path)
        bin_path, idx_path = path_with(prefix, BIN), path_with(prefix, IDX)
        bin_bytes = size_of(bin_path)
        dtype, offsets, documents = read_index(idx_path)
        num_tokens = int(offsets[-1])
        if bin_bytes != num_tokens * dtype.itemsize:
            raise DataError(
                f"{bin_path} has {bin_bytes} bytes, and {idx_path} describes {num_tokens} tokens "
                f"of {dtype.itemsize} bytes: the files do not belong together, or one is incomplete"
            )
        if not num_tokens:
            raise DataError(f"{bin_path}: the file has no tokens")
        # The sidecar, if there is one.
        facts, meta_path = read_sidecar(prefix), path_with(prefix, META)
        starts = np.unique(offsets[documents])
        starts = starts[starts < num_tokens]
        if facts is not None:
            if (facts.num_tokens, facts.num_documents) != (num_tokens, len(starts)):
                raise DataError(
                    f"{meta_path} is of {facts.num_tokens} tokens in {facts.num_documents} "
                    f"documents, and the index of {num_tokens} in {len(starts)}: the files do not "
                    "belong together"
                )
            if facts.max_id > np.iinfo(dtype).max:
                raise DataError(
                    f"{meta_path}: the largest id, {facts.max_id}, is not a number of {dtype.name}"
                )
            for suffix, file in facts.files.items():
                if (size := size_of(path_with(prefix, suffix))) != file["bytes"]:
                    raise DataError(
                        f"{path_with(prefix, suffix)} has {size} bytes, and {meta_path} has "
                        f"{file['bytes']}: the files do not belong together, or one is incomplete"
                    )
        # The loss mask: its bytes become bool without a copy, so they must be 0 or 1.
        mask_path, learned = path_with(prefix, MASK), None
        has_mask = mask_path.is_file() if facts is None else MASK in facts.files
        if facts is not None and not has_mask and mask_path.exists():
            raise DataError(f"{mask_path}: {meta_path} describes no loss mask")
        if has_mask:
            if (size := size_of(mask_path)) != num_tokens:
                raise DataError(
                    f"{mask_path} has {size} bytes; a loss mask has one for each of {num_tokens}"
                )
            mask = np.memmap(mask_path, dtype=np.uint8, mode="r")
            for start in range(0, num_tokens, CHUNK):
                if (mask[start : start + CHUNK] > 1).any():
                    offset = start + int(np.argmax(mask[start : start + CHUNK] > 1))
                    value = int(mask[offset])
                    raise DataError(f"{mask_path}, byte {offset}: {value} is neither 0 nor 1")
            learned = mask.view(np.bool_)
        return IndexedTokens(
            prefix=prefix,
            tokens=np.memmap(bin_path, dtype=dtype, mode="r"),
            starts=starts,
            learned=learned,
            sidecar=facts,
        )

    @cached_property
    def max_id(self) -> int:
        """The largest id: that of the sidecar, else by reading the file once."""
        if self.sidecar is not None:
            return self.sidecar.max_id
        return max(int(self.tokens[i : i + CHUNK].max()) for i in range(0, len(self.tokens), CHUNK))

    def check(self, vocab_size: int, tokenizer: str | None = None) -> None:
        """Raises DataError if an id is not below `vocab_size`, or if the ids were made by a
        tokenizer with another fingerprint than `tokenizer` (None: any)."""
        facts, bin_path = self.sidecar, path_with(self.prefix, BIN)
        if facts is not None and tokenizer not in (None, facts.tokenizer):
            raise DataError(
                f"{bin_path} was made with the tokenizer {facts.tokenizer}, and data.tokenizer is "
                f"{tokenizer}: name the tokenizer that made the file, or retokenize the text"
            )
        may_be_negative = np.iinfo(self.tokens.dtype).min < 0 and facts is None
        if self.max_id < vocab_size and not may_be_negative:
            return
        for start in range(0, len(self.tokens), CHUNK):
            chunk = self.tokens[start : start + CHUNK]
            wrong = (chunk < 0) | (chunk >= vocab_size)
            if wrong.any():
                offset = start + int(np.argmax(wrong))
                document = int(np.searchsorted(self.starts, offset, side="right"))
                raise DataError(
                    f"{bin_path}, token {offset} (document {document}): id "
                    f"{int(self.tokens[offset])} is not in 0..{vocab_size - 1}, the ids of "
                    f"model.vocab_size {vocab_size}; set model.vocab_size to "
                    f"{max(self.max_id + 1, 1)} or more, or use the tokenizer of the model"
                )
        if self.max_id >= vocab_size:
            raise DataError(
                f"{path_with(self.prefix, META)}: max_id is {self.max_id}, and "
                f"{bin_path} has none above {vocab_size - 1}: the files do not belong together"
            )

    def verify(self) -> None:
        """Reads all bytes and raises DataError for a file that differs from the sidecar; no-op
        without one."""
        for suffix, facts in (self.sidecar.files if self.sidecar else {}).items():
            path = path_with(self.prefix, suffix)
            with path.open("rb") as file:
                hash_ = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            if (digest := hash_.hexdigest()) != facts["blake2b-128"]:
                raise DataError(
                    f"{path}: the checksum is {digest}, and {path_with(self.prefix, META)} has "
                    f"{facts['blake2b-128']}: the file was changed or damaged"
                )


class IndexedWriter:
    """Writes documents under temporary names; :meth:`commit` renames the files, the ``.idx`` last.
    As a context manager it commits, or on an exception removes its files."""

    def __init__(
        self,
        prefix: Path,
        *,
        vocab_size: int,
        tokenizer: str,
        end_of_document: np.ndarray,
        ends_last: bool,
        made_from: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` is a fingerprint. `end_of_document` (ids, may be empty) is written after
        every text, as a part of it, except for the last document; with `ends_last` also after the
        last document and after conversations. `made_from` goes into the sidecar.

        Ids are uint8 up to a vocabulary of 256, uint16 up to one of 65,536, then int32. Raises
        DataError if the files exist.
        """
        self.prefix = prefix
        for suffix in SUFFIXES:
            if path_with(prefix, suffix).exists():
                raise DataError(
                    f"{path_with(prefix, suffix)} exists: name another output, or move it"
                )
        self.dtype = np.dtype(
            "u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<i4"
        )
        self.vocab_size, self._tokenizer = vocab_size, tokenizer
        self._made_from = dict(made_from or {})
        self._end, self._ends_last = end_of_document.astype(self.dtype), ends_last
        self._lengths = array("q")  # tokens of each document
        self._buffer: list[tuple[np.ndarray, np.ndarray | None]] = []
        self._num_buffered = self._num_written = 0
        self._max_id = 0
        #: Whether the end of the newest document has to be written before the next one.
        self._owes_end = False
        #: Whether the newest document is a text.
        self.ends_text = True
        #: Every file that the writer has begun, by suffix.
        self._files: dict[str, HashedFile] = {}
        self._begin(BIN)

    def add(
        self, ids: np.ndarray, learned: np.ndarray | None = None, *, continues: bool = False
    ) -> None:
        """Write a document, or (`continues`) more of the newest text: `ids` [n], and `learned` bool
        [n] for a conversation; None: a text, which carries loss completely, its end included. Empty
        documents are dropped."""
        if len(ids):
            if not continues or not self._lengths:
                self._write_end()
                self._lengths.append(0)
            self._append(ids, learned)
            self.ends_text = learned is None
            self._owes_end = self.ends_text or self._ends_last

    def extend(self, part: IndexedTokens, *, ends_text: bool) -> None:
        """Write all documents of `part`; `ends_text`: whether its last document is a text."""
        assert part.tokens.dtype == self.dtype
        self._write_end()
        self._flush()
        lengths = np.diff(np.append(part.starts, len(part.tokens)))
        self._write(part.tokens, part.learned)
        self._lengths.extend(lengths.tolist())
        self.ends_text = ends_text
        self._owes_end = ends_text and not self._ends_last

    def _begin(self, suffix: str) -> HashedFile:
        self._files[suffix] = HashedFile(path_with(self.prefix, suffix))
        return self._files[suffix]

    def _write_end(self) -> None:
        """Write the end of the newest document. The end of a conversation carries no loss."""
        if self._owes_end and len(self._end):
            self._append(
                self._end, None if self.ends_text else np.zeros(len(self._end), dtype=bool)
            )
        self._owes_end = False

    def _append(self, ids: np.ndarray, learned: np.ndarray | None) -> None:
        self._lengths[-1] += len(ids)
        self._buffer.append((ids, learned))
        self._num_buffered += len(ids)
        if self._num_buffered >= BUFFERED:
            self._flush()

    def _flush(self) -> None:
        parts, self._buffer, self._num_buffered = self._buffer, [], 0
        if parts:
            self._write(np.concatenate([ids for ids, _ in parts]), joined_mask(parts))

    def _write(self, ids: np.ndarray, learned: np.ndarray | None) -> None:
        if learned is not None and MASK not in self._files:
            mask_file = self._begin(MASK)
            for start in range(0, self._num_written, CHUNK):  # all documents so far are texts
                mask_file.write(np.ones(min(CHUNK, self._num_written - start), dtype=np.uint8))
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            self._max_id = max(self._max_id, int(chunk.max()))
            self._files[BIN].write(np.ascontiguousarray(chunk, dtype=self.dtype))
            if MASK in self._files:
                mask = mask_of(
                    None if learned is None else learned[start : start + CHUNK], len(chunk)
                )
                self._files[MASK].write(np.ascontiguousarray(mask).view(np.uint8))
        assert self._max_id < self.vocab_size
        self._num_written += len(ids)

    def commit(self) -> None:
        """Writes index and sidecar, renames all files. Raises DataError without a token."""
        if not self._lengths:
            raise DataError(f"{self.prefix}: the documents have no tokens")
        if self._ends_last:
            self._write_end()
        self._flush()
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        # Sequences of each document: all but the last one of MAX_SEQUENCE tokens.
        counts = np.maximum(1, -(-lengths // MAX_SEQUENCE))
        documents = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
        sequences = np.full(int(documents[-1]), MAX_SEQUENCE, dtype=np.int64)
        sequences[documents[1:] - 1] = lengths - (counts - 1) * MAX_SEQUENCE
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        index = self._begin(IDX)
        index.write(HEADER.pack(MAGIC, VERSION, code, len(sequences), len(documents)))
        index.write(sequences.astype("<i4"))
        index.write(((np.cumsum(sequences) - sequences) * self.dtype.itemsize).astype("<i8"))
        index.write(documents)
        facts = Sidecar(
            tokenizer=self._tokenizer,
            vocab_size=self.vocab_size,
            max_id=self._max_id,
            num_tokens=int(lengths.sum()),
            num_documents=len(lengths),
            end_of_document=tuple(self._end.tolist()),
            ends_last=self._ends_last,
            files={suffix: file.facts() for suffix, file in self._files.items()},
            made_from=self._made_from,
        )
        content = {"format": SIDECAR_FORMAT, "version": SIDECAR_VERSION, **asdict(facts)}
        self._begin(META).write((json.dumps(content, indent=2) + "\n").encode())
        # The index comes last: if it exists, the other files are complete.
        for suffix in sorted(self._files, key=IDX.__eq__):
            self._files[suffix].commit()
        folder = os.open(self.prefix.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self) -> None:
        """Removes the temporary files, and the renamed ones unless all are."""
        is_complete = path_with(self.prefix, IDX).exists()
        for file in self._files.values():
            file.abandon()
            if not is_complete:
                file.path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abandon()


def joined_mask(parts: Sequence[tuple[np.ndarray, np.ndarray | None]]) -> np.ndarray | None:
    """The mask of consecutive `parts` (ids, mask); None if all of their tokens carry loss."""
    if all(mask is None for _, mask in parts):
        return None
    return np.concatenate([mask_of(mask, len(ids)) for ids, mask in parts])


def mask_of(learned: np.ndarray | None, count: int) -> np.ndarray:
    """`learned`, or the mask of `count` tokens that all carry loss if it is None."""
    return np.ones(count, dtype=bool) if learned is None else learned
