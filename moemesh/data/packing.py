"""Whole conversations in sequences: cut by nothing but the length of a sequence, and padded.

The longest come first, each into the fullest sequence that has room (best fit, decreasing): a pure
function of the lengths, so that no layout, seed or epoch changes which share a sequence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from moemesh.config.data import LongConversations
from moemesh.data.corpus import Corpus
from moemesh.data.tokenizer import DataError

#: The place of padding.
PADDING = -1


class Packed(NamedTuple):
    """The documents of a stream in sequences: ``begins`` and ``sizes`` int64 [pieces] are places in
    the stream, ``bounds`` int64 [sequences + 1] the pieces of each sequence. A conversation is one
    piece, a text beside it as many as it is long. `num_learned` targets carry loss; `without_loss`
    counts the pieces that have none and are left out, `note` tells of long conversations."""

    begins: np.ndarray
    sizes: np.ndarray
    bounds: np.ndarray
    num_learned: int
    without_loss: int
    note: str | None

    def places(self, numbers: np.ndarray, width: int) -> np.ndarray:
        """Places in the stream of the tokens of the sequences `numbers` [n], and PADDING behind:
        int64 [n, width]."""
        found = np.full((len(numbers), width), PADDING, dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            own = slice(self.bounds[number], self.bounds[number + 1])
            pieces = zip(self.begins[own].tolist(), self.sizes[own].tolist(), strict=True)
            places = np.concatenate([np.arange(begin, begin + size) for begin, size in pieces])
            found[row, : len(places)] = places
        return found


def packed(corpus: Corpus, seq_len: int, long: LongConversations, at_least: int = 1) -> Packed:
    """The documents of `corpus`, which has conversations, in sequences of up to `seq_len` tokens;
    of few documents in shorter ones, about `at_least`. Raises DataError for conversations that are
    longer where `long` is "fail"."""
    learned, starts = corpus.learned, corpus.starts
    assert learned is not None
    lengths = np.diff(starts, append=len(corpus.tokens))
    is_text = learned[starts]  # a conversation begins with a header, or with what is asked
    is_long = (lengths > seq_len) & ~is_text
    note = None
    if is_long.any():
        number = int(np.argmax(np.where(is_long, lengths, 0)))
        count, longest = int(is_long.sum()), int(lengths[number])
        held = (
            f"{corpus.source}: {count:,} of {len(lengths):,} documents are conversations longer "
            f"than data.seq_len = {seq_len:,} (the longest, document {number + 1:,}, has "
            f"{longest:,} tokens)"
        )
        if long == "fail":
            other = 'data.long_conversations to "truncate" or "skip"'
            raise DataError(f"{held}: set data.seq_len to {longest}, or {other}")
        lost = int(lengths[is_long].sum()) - (count * seq_len if long == "truncate" else 0)
        done = "truncated" if long == "truncate" else "left out"
        how = f'data.long_conversations = "{long}"'
        note = f"{held} and {done} ({how}): {lost:,} tokens are not read"
    pieces = np.where(is_text, -(-lengths // seq_len), 1)
    if long == "skip":
        pieces[is_long] = 0
    owners = np.repeat(np.arange(len(starts)), pieces)
    offsets = (np.arange(len(owners)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
    begins, sizes = starts[owners] + offsets, np.minimum(lengths[owners] - offsets, seq_len)
    edges = np.stack([begins, begins + sizes], axis=1).reshape(-1)
    counts = np.add.reduceat(learned, edges[edges < len(learned)], dtype=np.int64)[::2]
    counts -= learned[begins]  # the first token of a piece is no target
    kept = counts > 0
    begins, sizes = begins[kept], sizes[kept]
    capacity = max(int(sizes.max(initial=1)), int(sizes.sum()) // at_least)
    numbers = _best_fit(sizes, min(seq_len, capacity))
    # Sequences are numbered in the order of their first documents.
    _, firsts, numbers = np.unique(numbers, return_index=True, return_inverse=True)
    numbers = np.argsort(np.argsort(firsts))[numbers]
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(len(firsts) + 1))
    return Packed(begins[order], sizes[order], bounds, int(counts.sum()), int((~kept).sum()), note)


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The number of each piece's sequence, int64 [pieces]."""
    found = np.empty(len(sizes), dtype=np.int64)
    rooms: list[int] = []  # ascending: the rooms that sequences have left
    free: dict[int, list[int]] = {}  # the sequences by room
    num_opened = 0
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        room, number = capacity, num_opened
        if (at := bisect_left(rooms, size)) < len(rooms):
            room = rooms[at]
            number = free[room].pop()
            if not free[room]:
                del free[room], rooms[at]
        num_opened += number == num_opened
        found[piece] = number
        if room > size:
            if room - size not in free:
                insort(rooms, room - size)
            free.setdefault(room - size, []).append(number)
    return found
