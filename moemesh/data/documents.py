"""Records into documents of token ids, many records at a time.

All texts of a training run take this way, read at its start or by ``moemesh tokenize``. The
tokenizer's own threads work on one batch of records while Python reads the next.

Documents follow one another in a stream, with the ids of :func:`between` behind each text but the
last document; behind a conversation stands what its template writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from moemesh.data.chat import ChatTemplate, Rendered
from moemesh.data.records import BadRecordError, Record, Where, refuse
from moemesh.data.tokenizer import Tokenizer
from moemesh.trace.machine import usable_cores

#: A batch has so many characters for each core, or so many records, and a little more: few, so that
#: little time passes before the first batch and behind the last.
BATCH_CHARACTERS, BATCH_RECORDS = (1 << 17) * usable_cores(), 1 << 12
#: Batches that are read ahead.
AHEAD = 2


class Document(NamedTuple):
    """Ids [n] of a record, uint8 of bytes, else int32, and which of them carry loss as targets,
    bool [n]; None: all. Where ``where.continues``, they go on with the document before."""

    where: Where
    ids: np.ndarray
    learned: np.ndarray | None


def between(tokenizer: Tokenizer) -> np.ndarray:
    """The ids between a text and the next document: those of one newline."""
    return tokenizer.encode(b"\n", "newline")


def encoded(
    records: Iterable[tuple[Where, Record]],
    tokenizer: Tokenizer,
    *,
    on_bad: Callable[[BadRecordError], None] = refuse,
) -> Iterator[Document]:
    """The documents of `records`, in order; those without a token are left out.

    Of a conversation only the assistant turns carry loss (:mod:`moemesh.data.chat`). A record that
    cannot be encoded goes to `on_bad` and is left out when that returns. Raises DataError for
    conversations without a chat template.
    """
    texts = _texts(records, tokenizer, on_bad)
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting: deque[Future[list[Document]]] = deque()
        for batch in _batches(texts):
            waiting.append(thread.submit(_encode, batch, tokenizer))
            while len(waiting) > AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


#: A text; bytes where ids are bytes, too, and no pass over the content is needed.
_Text = tuple[Where, str | bytes | Rendered]


def _texts(
    records: Iterable[tuple[Where, Record]],
    tokenizer: Tokenizer,
    on_bad: Callable[[BadRecordError], None],
) -> Iterator[_Text]:
    template: ChatTemplate | None = None
    for where, record in records:
        try:
            if not isinstance(record, bytes):
                template = template or ChatTemplate.open(tokenizer)
                yield where, template.render(record, where)
            elif tokenizer.folder is None:
                yield where, record
            else:
                yield where, record.decode()
        except BadRecordError as error:
            on_bad(error)
        except UnicodeDecodeError as error:
            reason = f"not valid UTF-8 ({error.reason})"
            if where.unit == "file":
                reason = f"byte offset {(where.byte or 0) + error.start}: {reason}"
            on_bad(BadRecordError(where, reason))


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    size = 0
    for where, text in texts:
        batch.append((where, text))
        size += len(text.text if isinstance(text, Rendered) else text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[_Text], tokenizer: Tokenizer) -> list[Document]:
    plain = iter(tokenizer.encode_batch([text for _, text in batch if isinstance(text, str)]))
    chats = [text for _, text in batch if isinstance(text, Rendered)]
    conversations = iter(tokenizer.encode_with_offsets([one.text for one in chats]))
    found: list[Document] = []
    for where, text in batch:
        learned = None
        if isinstance(text, Rendered):
            ids, offsets = next(conversations)
            learned = text.mask(offsets)
        else:
            ids = tokenizer.encode(text, where) if isinstance(text, bytes) else next(plain)
        if len(ids):
            found.append(Document(where, ids, learned))
    return found
