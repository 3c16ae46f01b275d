"""The files of an indexed dataset: names, index, sidecar, and how they are written and checked.

``PREFIX.idx``, little-endian (Megatron-LM, ``core/datasets/indexed_dataset.py``):

    9 bytes  "MMIDIDX" and two zero bytes
    8        version, 1
    1        code of the dtype of the ids
    8        number of sequences n
    8        length d of the document index: documents and one more
    4 n      length of each sequence in tokens
    8 n      byte of ``PREFIX.bin`` at which it begins
    8 d      number of the first sequence of each document, and n

``PREFIX.meta.json`` is ours: sizes, checksums, the tokenizer's fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from moemesh.config.paths import nearest_path
from moemesh.data.tokenizer import DataError

MAGIC, VERSION = b"MMIDIDX\0\0", 1
#: After the magic: version, dtype code, sequences, entries of the document index.
HEADER = struct.Struct("<9sQBQQ")
#: Megatron's codes of dtypes; 6 and 7 are floats, which are no ids.
DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
#: Lengths of sequences are int32; longer documents are several sequences.
MAX_SEQUENCE = 2**31 - 1
#: Most bytes of a sidecar.
MAX_SIDECAR = 1 << 20
SIDECAR_FORMAT, SIDECAR_VERSION = "moemesh tokens", 1
SUFFIXES = BIN, IDX, MASK, META = ".bin", ".idx", ".mask.bin", ".meta.json"


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The facts in ``PREFIX.meta.json``.

    `tokenizer` is the fingerprint of :class:`moemesh.data.tokenizer.Tokenizer`; `vocab_size` counts
    its ids, and `max_id` is the largest in the file. `end_of_document` are the ids behind each
    document (behind the last one where `ends_last`). `files` has bytes and blake2b-128 by suffix;
    `made_from` says what of, in the words of who wrote it.
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
    """A file under a temporary name, with the checksum of what was written."""

    def __init__(self, path: Path) -> None:
        self.path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._digest, self._bytes = new_digest(), 0
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
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def prefix_of(path: str | Path) -> Path:
    """The prefix of a pair, given itself or one of the files."""
    path = Path(path).expanduser()
    for suffix in (MASK, META, BIN, IDX):
        if path.name.endswith(suffix):
            return path.with_name(path.name[: -len(suffix)])
    return path


def beside(prefix: Path, suffix: str) -> Path:
    """The file of `prefix` with `suffix`; a dot in the prefix stays."""
    return prefix.with_name(prefix.name + suffix)


def new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def size_of(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file ({nearest_path(path)})")
    return path.stat().st_size


def read_index(path: Path) -> tuple[np.dtype[Any], np.ndarray, np.ndarray, np.ndarray]:
    """(dtype of the ids, lengths [n], pointers [n], document index [d]), memory-mapped."""
    size = size_of(path)
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
    return DTYPES[code], lengths, pointers, documents


def offsets_of(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> np.ndarray:
    """Begin of each sequence, in tokens, and the end: int64 [n + 1]."""
    if (lengths < 0).any():
        number = int(np.argmax(lengths < 0))
        raise DataError(f"{path}: sequence {number} has {int(lengths[number])} tokens")
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    # Between 2**32 sequences of 2**31 tokens the sums stay far below 2**63.
    wrong = pointers != offsets[:-1] * itemsize
    if wrong.any():
        number = int(np.argmax(wrong))
        raise DataError(
            f"{path}: sequence {number} begins at byte {int(pointers[number])} of the .bin; behind "
            f"the sequences before it is byte {int(offsets[number]) * itemsize} (sequences must "
            "lie one behind the other, without gaps)"
        )
    return offsets


def write_index(file: HashedFile, lengths: np.ndarray, dtype: np.dtype[Any]) -> None:
    """The index of documents of these `lengths` int64 [documents]."""
    counts = np.maximum(1, -(-lengths // MAX_SEQUENCE))
    documents = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
    sequences = np.repeat(lengths, counts)
    if len(sequences) > len(lengths):
        sequences = np.full(len(sequences), MAX_SEQUENCE, dtype=np.int64)
        sequences[documents[1:] - 1] = lengths - (counts - 1) * MAX_SEQUENCE
    code = next(code for code, known in DTYPES.items() if known == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, len(sequences), len(documents)))
    file.write(sequences.astype("<i4"))
    file.write(((np.cumsum(sequences) - sequences) * dtype.itemsize).astype("<i8"))
    file.write(documents)


def read_sidecar(prefix: Path) -> Sidecar | None:
    path = beside(prefix, META)
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_SIDECAR:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes; a sidecar has {MAX_SIDECAR} at most"
        )
    try:
        found = json.loads(path.read_bytes())
        if found.pop("format") != SIDECAR_FORMAT or found.pop("version") != SIDECAR_VERSION:
            raise ValueError(
                f'"format" and "version" must be "{SIDECAR_FORMAT}" and {SIDECAR_VERSION}'
            )
        known = Sidecar(**found)
        numbers = (known.vocab_size, known.max_id, known.num_tokens, known.num_documents)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("counts must be numbers")
        if not isinstance(known.tokenizer, str) or not isinstance(known.made_from, dict):
            raise ValueError('"tokenizer" must be a text, and "made_from" an object')
        if BIN not in known.files or not set(known.files) <= {BIN, IDX, MASK}:
            raise ValueError(f'"files" must name {BIN}, {IDX} and {MASK} at most')
        for facts in known.files.values():
            if type(facts["bytes"]) is not int or not isinstance(facts["blake2b-128"], str):
                raise ValueError('"files" must have "bytes" and "blake2b-128" of each')
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not a sidecar of tokens: {error}") from error
    return known


def check_sidecar(
    prefix: Path, facts: Sidecar, num_tokens: int, num_documents: int, dtype: np.dtype[Any]
) -> None:
    """Raises DataError where the sidecar contradicts the files."""
    path = beside(prefix, META)
    if (facts.num_tokens, facts.num_documents) != (num_tokens, num_documents):
        raise DataError(
            f"{path} is of {facts.num_tokens} tokens in {facts.num_documents} documents, and the "
            f"index of {num_tokens} in {num_documents}: the files do not belong together"
        )
    if facts.max_id > np.iinfo(dtype).max:
        raise DataError(f"{path}: the largest id, {facts.max_id}, is not a number of {dtype.name}")
    for suffix, known in facts.files.items():
        if (size := size_of(beside(prefix, suffix))) != known["bytes"]:
            raise DataError(
                f"{beside(prefix, suffix)} has {size} bytes, and {path} has {known['bytes']}: the "
                "files do not belong together, or one is incomplete"
            )


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
