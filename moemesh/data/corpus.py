"""Streams of token ids: files read as text and tokenized, or files of tokens.

A document is a record of :mod:`moemesh.data.records`. In conversations only the assistant turns
carry loss (:mod:`moemesh.data.chat`). Empty documents are dropped; a newline follows each text but
the last document: a newline byte, or the tokenizer's ids of it. Each pair of token files is an
unchanged stream (:mod:`moemesh.data.indexed`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from moemesh.data.chat import ChatTemplate, Rendered, completed
from moemesh.data.conversions import MESSAGES
from moemesh.data.indexed import IndexedTokens, joined_mask
from moemesh.data.input_files import DataFile, check_head, find, reading
from moemesh.data.records import BadRecordError, BadRecordLog, Where, read
from moemesh.data.tokenizer import DataError, Tokenizer, read_whole
from moemesh.trace.machine import usable_cores

#: A single text file at least this large is memory-mapped instead of read.
MAP_FROM_BYTES = 64 << 20
#: Largest number of tokens of a memory-mapped file that the digest covers completely; of a larger
#: file it covers `SAMPLED_BLOCKS` evenly spread blocks of `BLOCK` tokens.
DIGEST_WHOLE, SAMPLED_BLOCKS, BLOCK = 1 << 26, 256, 1 << 14


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A stream of token ids [num_tokens] with its source: uint8 or int32 for texts, the dtype of
    the file for token files.

    ``starts`` int64: the first token of each document; the newline after a text belongs to it.
    ``learned`` bool: tokens that carry loss as targets; None: all, without conversations.
    ``digest``: digest of the files of the three arrays, if their writer has computed it.
    """

    tokens: np.ndarray
    vocab_size: int
    source: str
    learned: np.ndarray | None = None
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    digest: str | None = None

    @staticmethod
    def open(
        path: str | None = None,
        format: str = "auto",
        tokenizer: str | Tokenizer = "bytes",
        vocab_size: int = 256,
        *,
        text_key: str = "text",
        log: BadRecordLog | None = None,
    ) -> Corpus:
        """Reads `path` (file, folder or glob; None: the standard library sources of this Python)
        into memory; the bytes of one large file are memory-mapped.

        `tokenizer` is "bytes" (ids 0..255) or what :meth:`Tokenizer.open` takes. Raises DataError
        with file and place for anything that cannot be read or does not fit `vocab_size`; bad
        records that `log` accepts are left out.
        """
        files, source = find(path, format), "standard library" if path is None else path
        reader = Tokenizer.open(tokenizer) if isinstance(tokenizer, str) else tokenizer
        reader.check(vocab_size)
        if is_whole_file(files, reader):
            # The bytes of the file, memory-mapped if it is large.
            (file,) = files
            check_head(file)
            if file.num_bytes < MAP_FROM_BYTES:
                content = np.frombuffer(read_whole(file.path), dtype=np.uint8)
            else:
                with reading(file.path):
                    content = np.memmap(file.path, dtype=np.uint8, mode="r")
            where = Where(str(file.path), "file", 1, 0)
            documents: Iterable[Document] = [Document(where, content, None)]
        else:
            documents = documents_of(files, reader, text_key, log or BadRecordLog(source=source))
        newline = between(reader)
        parts: list[tuple[np.ndarray, np.ndarray | None]] = []
        starts: list[int] = []
        num_tokens, after_text = 0, False
        for document in documents:
            check_ids(document, vocab_size)
            added = [(document.ids, document.learned)]
            # The newline of a text is added before the next document, so that the last has none.
            if not (document.where.continues and starts):
                added = [(newline, None), *added] if after_text else added
                starts.append(num_tokens + (len(newline) if after_text else 0))
                after_text = document.learned is None
            parts += added
            num_tokens += sum(len(ids) for ids, _ in added)
        if not num_tokens:
            raise DataError(f"data.path {source}: {len(files)} file(s), but no text in them")
        return Corpus(
            tokens=parts[0][0] if len(parts) == 1 else np.concatenate([ids for ids, _ in parts]),
            vocab_size=vocab_size,
            source=source,
            learned=joined_mask(parts),
            starts=np.array(starts, dtype=np.int64),
        )

    @staticmethod
    def indexed(tokens: IndexedTokens, vocab_size: int, source: str) -> Corpus:
        """The tokens of a file, memory-mapped."""
        facts = tokens.sidecar
        digest = None
        if facts is not None:
            digests = sorted((suffix, file["blake2b-128"]) for suffix, file in facts.files.items())
            digest = hashlib.blake2b(repr(digests).encode(), digest_size=16).hexdigest()
        return Corpus(
            tokens=tokens.tokens,
            vocab_size=vocab_size,
            source=source,
            learned=tokens.learned,
            starts=tokens.starts,
            digest=digest,
        )

    def fingerprint(self) -> str:
        """A digest of tokens, documents and loss mask: `digest`, else computed from all of them,
        or, for a large memory-mapped file, from its size and evenly spread blocks."""
        if self.digest is not None:
            return self.digest
        hash_ = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.starts, self.learned):
            if array is None:
                continue
            hash_.update(repr((array.dtype.str, len(array))).encode())
            if len(array) <= DIGEST_WHOLE or not isinstance(array, np.memmap):
                hash_.update(np.ascontiguousarray(array).data)
                continue
            for start in np.linspace(0, len(array) - BLOCK, SAMPLED_BLOCKS).astype(np.int64):
                hash_.update(np.ascontiguousarray(array[start : start + BLOCK]).data)
        return hash_.hexdigest()


def check_ids(document: Document, vocab_size: int) -> None:
    """Raises DataError at the first id >= `vocab_size`, which only bytes can have: other tokenizers
    are checked before (:meth:`Tokenizer.check`)."""
    ids = document.ids
    if not len(ids) or int(ids.max()) < vocab_size:
        return
    offset = int(np.argmax(ids >= vocab_size))
    raise DataError(
        f"{document.where}, byte offset {offset}: id {int(ids[offset])} is not below "
        f"model.vocab_size {vocab_size}; set model.vocab_size to 256 or more"
    )


def is_whole_file(files: Sequence[DataFile], reader: Tokenizer) -> bool:
    """Whether the tokens of the stream are the bytes of one file."""
    file = files[0]
    is_text = file.format in ("text", "bytes") and file.compression == "none"
    return len(files) == 1 and is_text and reader.folder is None


# Records into documents of token ids, many records at a time.
#
# All texts pass through this code, at the start of a run or in ``moemesh tokenize``, except a
# single file whose bytes are the tokens (:func:`is_whole_file`). The tokenizer's own threads
# process one batch of records while Python reads the next.
#
# Documents follow one another in a stream; the ids of :func:`between` follow each text but the last
# document, and the text of a template follows a conversation.

#: Characters, and records, at which a batch is full: few, so that the first batch comes early.
BATCH_CHARACTERS, BATCH_RECORDS = (1 << 17) * usable_cores(), 1 << 12
#: Batches that are read while earlier ones are tokenized.
AHEAD = 2


class Document(NamedTuple):
    """`ids` [n] of a record, uint8 for bytes, else int32; `learned`: those that carry loss as
    targets, bool [n]; None: all. If ``where.continues``, they continue the previous document."""

    where: Where
    ids: np.ndarray
    learned: np.ndarray | None


def between(tokenizer: Tokenizer) -> np.ndarray:
    """The ids between a text and the next document: those of one newline."""
    return tokenizer.encode(b"\n", "newline")


#: The place of a record and its content: bytes if these are the ids, which need no tokenizer; else
#: the text, or the rendered text of a conversation or completion.
_Text = tuple[Where, str | bytes | Rendered]


def documents_of(
    files: Sequence[DataFile], tokenizer: Tokenizer, text_key: str, log: BadRecordLog
) -> Iterator[Document]:
    """Every document of the files, in order, without empty ones. `log` counts the records, and
    raises or collects the errors of bad ones.

    In a conversation only the assistant turns carry loss (:mod:`moemesh.data.chat`). Raises
    DataError for conversations without a chat template.
    """
    template: ChatTemplate | None = None
    batch, size = list[_Text](), 0
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting: deque[Future[list[Document]]] = deque()
        for where, record in chain.from_iterable(read(file, text_key, log) for file in files):
            log.total += not where.continues
            try:
                if not isinstance(record, bytes) and MESSAGES in record:
                    template = template or ChatTemplate.open(tokenizer)
                    text = template.render(record, where)
                elif not isinstance(record, bytes):
                    text = completed(record, tokenizer)
                else:
                    text = record if tokenizer.folder is None else record.decode()
            except BadRecordError as error:
                log.add(error)
                continue
            except UnicodeDecodeError as error:
                reason = f"not valid UTF-8 ({error.reason})"
                if where.unit == "file":
                    reason = f"byte offset {(where.byte or 0) + error.start}: {reason}"
                log.add(BadRecordError(where, reason))
                continue
            batch.append((where, text))
            size += len(text.text if isinstance(text, Rendered) else text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
                waiting.append(thread.submit(_encode, batch, tokenizer))
                batch, size = [], 0
            while len(waiting) > AHEAD:
                yield from waiting.popleft().result()
        waiting.append(thread.submit(_encode, batch, tokenizer))
        while waiting:
            yield from waiting.popleft().result()
    log.check()


def _encode(batch: list[_Text], tokenizer: Tokenizer) -> list[Document]:
    """The documents of a batch, in order, without empty ones."""
    plain = iter(tokenizer.encode_batch([text for _, text in batch if isinstance(text, str)]))
    chats = [text for _, text in batch if isinstance(text, Rendered)]
    conversations = iter(tokenizer.encode_with_offsets([chat.text for chat in chats]))
    documents: list[Document] = []
    for where, text in batch:
        learned = None
        if isinstance(text, Rendered):
            ids, offsets = next(conversations)
            learned = text.mask(offsets)
        else:
            ids = tokenizer.encode(text, where) if isinstance(text, bytes) else next(plain)
        if len(ids):
            documents.append(Document(where, ids, learned))
    return documents
