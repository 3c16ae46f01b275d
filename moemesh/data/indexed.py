"""Tokens in files, memory-mapped: Megatron's indexed dataset with a sidecar, read and written.

``PREFIX.bin`` is the stream of token ids, document after document, with nothing between them.
:mod:`moemesh.data.index_file` describes ``PREFIX.idx``, which says where they begin, and our
sidecar. If documents are conversations, ``PREFIX.mask.bin`` has one byte a token, 1 where the token
carries loss as a target; Megatron does not look at it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from moemesh.data.index_file import (
    BIN,
    IDX,
    MASK,
    META,
    SIDECAR_FORMAT,
    SIDECAR_VERSION,
    SUFFIXES,
    HashedFile,
    Sidecar,
    beside,
    check_sidecar,
    new_digest,
    offsets_of,
    prefix_of,
    read_index,
    read_sidecar,
    size_of,
    sync_folder,
    write_index,
)
from moemesh.data.tokenizer import DataError

#: Tokens handled at once where a whole file is gone through: bounds the extra memory.
CHUNK = 1 << 24
#: Tokens of documents that a writer holds back, since most documents are short.
HELD = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedTokens:
    """An open pair of files.

    ``tokens`` [num_tokens], memory-mapped, in the dtype of the file; ``starts`` int64: where each
    document begins (empty ones left out); ``learned`` bool [num_tokens]: which tokens carry loss as
    targets, memory-mapped; None: all. ``sidecar`` is None for files that other programs wrote.
    """

    prefix: Path
    tokens: np.ndarray
    starts: np.ndarray
    learned: np.ndarray | None
    sidecar: Sidecar | None

    @staticmethod
    def open(path: str | Path) -> IndexedTokens:
        """`path` is the prefix or one of the two files. Raises DataError for whatever is missing,
        is of another format, or contradicts itself; no count is believed before it fits the sizes
        of the files."""
        prefix = prefix_of(path)
        bin_path, idx_path = beside(prefix, BIN), beside(prefix, IDX)
        bin_bytes = size_of(bin_path)
        dtype, lengths, pointers, documents = read_index(idx_path)
        offsets = offsets_of(idx_path, lengths, pointers, dtype.itemsize)
        num_tokens = int(offsets[-1])
        if bin_bytes != num_tokens * dtype.itemsize:
            raise DataError(
                f"{bin_path} has {bin_bytes} bytes, and {idx_path} describes {num_tokens} tokens "
                f"of {dtype.itemsize} bytes: the files do not belong together, or one is incomplete"
            )
        if not num_tokens:
            raise DataError(f"{bin_path}: there is no token in it")
        sidecar = read_sidecar(prefix)
        starts = np.unique(offsets[documents])
        starts = starts[starts < num_tokens]
        if sidecar is not None:
            check_sidecar(prefix, sidecar, num_tokens, len(starts), dtype)
        return IndexedTokens(
            prefix=prefix,
            tokens=np.memmap(bin_path, dtype=dtype, mode="r"),
            starts=starts,
            learned=_open_mask(prefix, num_tokens, sidecar),
            sidecar=sidecar,
        )

    @cached_property
    def max_id(self) -> int:
        """The largest id: from the sidecar, or by reading the file once."""
        if self.sidecar is not None:
            return self.sidecar.max_id
        return max(int(self.tokens[i : i + CHUNK].max()) for i in range(0, len(self.tokens), CHUNK))

    def check(self, vocab_size: int, tokenizer: str | None = None) -> None:
        """Raises DataError when an id is not below `vocab_size`, or when the ids were made by
        another tokenizer than the one of the fingerprint `tokenizer` (None: any)."""
        facts, bin_path = self.sidecar, beside(self.prefix, BIN)
        if facts is not None and tokenizer not in (None, facts.tokenizer):
            raise DataError(
                f"{bin_path} was made with the tokenizer {facts.tokenizer}, and data.tokenizer is "
                f"{tokenizer}: name the tokenizer that made the file, or tokenize the text again"
            )
        signed = np.iinfo(self.tokens.dtype).min < 0 and facts is None
        if self.max_id < vocab_size and not signed:
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
                f"{beside(self.prefix, META)}: the largest id is said to be {self.max_id}, and "
                f"{bin_path} has none above {vocab_size - 1}: the files do not belong together"
            )

    def verify(self) -> None:
        """Reads all bytes and raises DataError for a file that is not as the sidecar says."""
        for suffix, facts in (self.sidecar.files if self.sidecar else {}).items():
            path = beside(self.prefix, suffix)
            digest = new_digest()
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            if digest.hexdigest() != facts["blake2b-128"]:
                raise DataError(
                    f"{path}: the checksum is {digest.hexdigest()}, and "
                    f"{beside(self.prefix, META)} has {facts['blake2b-128']}: the file was "
                    "changed or damaged"
                )


class IndexedWriter:
    """Writes documents under temporary names; :meth:`commit` gives the files their names, the
    ``.idx`` last. As a context manager it commits, or on an exception removes what it wrote."""

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
        """`tokenizer` is a fingerprint. `end_of_document` (ids, may be empty) is written behind
        every text and counted to it, but for the last document; with `ends_last` behind that and
        behind conversations, too. `made_from` goes into the sidecar.

        Ids are uint8 up to a vocabulary of 256, then uint16 as far as it goes, then int32. Raises
        DataError where there are such files.
        """
        self.prefix = prefix
        for suffix in SUFFIXES:
            if beside(prefix, suffix).exists():
                raise DataError(f"{beside(prefix, suffix)} exists: name another output, or move it")
        self.dtype = np.dtype(
            "u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<i4"
        )
        self.vocab_size, self._tokenizer = vocab_size, tokenizer
        self._made_from = dict(made_from or {})
        self._end, self._ends_last = end_of_document.astype(self.dtype), ends_last
        self._lengths = array("q")
        self._held: list[tuple[np.ndarray, np.ndarray | None]] = []
        self._num_held = self._num_written = 0
        self._max_id, self._owes_end = 0, False
        #: Whether the newest document is a text.
        self.ends_text = True
        self._mask: HashedFile | None = None
        self._bin = HashedFile(beside(prefix, BIN))

    def add(
        self, ids: np.ndarray, learned: np.ndarray | None = None, *, continues: bool = False
    ) -> None:
        """One document, or where it `continues` more of the newest text: `ids` [n], and `learned`
        bool [n] of a conversation, None: of a text, all of which carries loss, its end, too. Empty
        ones are dropped."""
        if len(ids):
            if not continues or not self._lengths:
                self._write_end()
                self._lengths.append(0)
            self._hold(ids, learned)
            self.ends_text = learned is None
            self._owes_end = self.ends_text or self._ends_last

    def extend(self, part: IndexedTokens, *, ends_text: bool) -> None:
        """All documents of `part`, which the same settings have written; `ends_text`: whether the
        last of them is a text."""
        assert part.tokens.dtype == self.dtype
        self._write_end()
        self._write_held()
        lengths = np.diff(np.append(part.starts, len(part.tokens)))
        self._write(part.tokens, part.learned)
        self._lengths.extend(lengths.tolist())
        self.ends_text, self._owes_end = ends_text, ends_text and not self._ends_last

    def _write_end(self) -> None:
        """The end of the newest document. That of a conversation carries no loss."""
        if self._owes_end and len(self._end):
            self._hold(self._end, None if self.ends_text else np.zeros(len(self._end), dtype=bool))
        self._owes_end = False

    def _hold(self, ids: np.ndarray, learned: np.ndarray | None) -> None:
        self._lengths[-1] += len(ids)
        self._held.append((ids, learned))
        self._num_held += len(ids)
        if self._num_held >= HELD:
            self._write_held()

    def _write_held(self) -> None:
        held, self._held, self._num_held = self._held, [], 0
        if held:
            learned = None
            if any(mask is not None for _, mask in held):
                learned = np.concatenate(
                    [np.ones(len(ids), dtype=bool) if mask is None else mask for ids, mask in held]
                )
            self._write(np.concatenate([ids for ids, _ in held]), learned)

    def _write(self, ids: np.ndarray, learned: np.ndarray | None) -> None:
        if learned is not None and self._mask is None:
            self._mask = HashedFile(beside(self.prefix, MASK))
            self._write_mask(self._mask, None, self._num_written)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            self._max_id = max(self._max_id, int(chunk.max()))
            self._bin.write(np.ascontiguousarray(chunk, dtype=self.dtype))
        assert self._max_id < self.vocab_size
        if self._mask is not None:
            self._write_mask(self._mask, learned, len(ids))
        self._num_written += len(ids)

    def _write_mask(self, mask: HashedFile, learned: np.ndarray | None, count: int) -> None:
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            part = np.ones(size, dtype=bool) if learned is None else learned[start : start + size]
            mask.write(np.ascontiguousarray(part).view(np.uint8))

    def commit(self) -> None:
        """Writes index and sidecar, and gives all files their names. Raises DataError when no
        document has a token."""
        if not self._lengths:
            raise DataError(f"{self.prefix}: there is no token to write")
        if self._ends_last:
            self._write_end()
        self._write_held()
        index = HashedFile(beside(self.prefix, IDX))
        num_tokens, num_documents = sum(self._lengths), len(self._lengths)
        write_index(index, np.frombuffer(self._lengths, dtype=np.int64), self.dtype)
        written = {BIN: self._bin, IDX: index} | ({MASK: self._mask} if self._mask else {})
        facts = Sidecar(
            tokenizer=self._tokenizer,
            vocab_size=self.vocab_size,
            max_id=self._max_id,
            num_tokens=num_tokens,
            num_documents=num_documents,
            end_of_document=tuple(self._end.tolist()),
            ends_last=self._ends_last,
            files={suffix: file.facts() for suffix, file in written.items()},
            made_from=self._made_from,
        )
        text = {"format": SIDECAR_FORMAT, "version": SIDECAR_VERSION, **asdict(facts)}
        meta = HashedFile(beside(self.prefix, META))
        meta.write((json.dumps(text, indent=2) + "\n").encode())
        # Whoever finds the index finds everything else.
        for file in (*(file for suffix, file in written.items() if suffix != IDX), meta, index):
            file.commit()
        sync_folder(self.prefix.parent)

    def abandon(self) -> None:
        """Removes the temporary files."""
        for file in (self._bin, self._mask):
            if file is not None:
                file.abandon()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
            return
        try:
            self.commit()
        except BaseException:
            self.abandon()
            raise


def _open_mask(prefix: Path, num_tokens: int, sidecar: Sidecar | None) -> np.ndarray | None:
    path = beside(prefix, MASK)
    if sidecar is not None and MASK not in sidecar.files:
        if path.exists():
            raise DataError(f"{path}: {beside(prefix, META)} knows nothing of a loss mask")
        return None
    if sidecar is None and not path.is_file():
        return None
    if (size := size_of(path)) != num_tokens:
        raise DataError(f"{path} has {size} bytes; a loss mask has one for each of {num_tokens}")
    mask = np.memmap(path, dtype=np.uint8, mode="r")
    for start in range(0, num_tokens, CHUNK):
        if (mask[start : start + CHUNK] > 1).any():
            offset = start + int(np.argmax(mask[start : start + CHUNK] > 1))
            raise DataError(f"{path}, byte {offset}: {int(mask[offset])} is neither 0 nor 1")
    return mask.view(np.bool_)
