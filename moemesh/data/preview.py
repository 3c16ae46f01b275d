"""Training samples as text, document by document, with the targets that carry loss.

Legend: B samples, S tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moemesh.config.data import NUM_BYTES
from moemesh.data.samples import PADDING, Samples
from moemesh.data.tokenizer import Tokenizer


class TokenRun(NamedTuple):
    """Neighbouring tokens of one document: its number, their text, and whether they carry loss as
    targets."""

    document: int
    text: str
    learned: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A sample as training reads it.

    `position`: number of the run's samples before it; `sample`: its number among all windows;
    `offset`: place of its first token in the stream `stream`. ``tokens`` int64 [S + 1]: inputs
    and shifted targets; ``learned`` bool [S]: targets that carry loss; ``documents`` int64 [S + 1]:
    the number of each token's document in the stream, -1 at padding; ``positions`` int64 [S]:
    inputs of the model's position embedding. `continued`: tokens of the first document before the
    sample. `pieces`: runs of tokens without padding.
    """

    position: int
    sample: int
    source: str
    stream: str
    offset: int
    continued: int
    tokens: np.ndarray
    learned: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    pieces: tuple[TokenRun, ...]


def previews(samples: Samples, tokenizer: Tokenizer, position: int, count: int) -> list[Preview]:
    """The samples of the global positions ``position .. position + count - 1``."""
    ids = samples.ids_at(position, count)
    windows, mask = samples.windows(ids), samples.loss_mask(ids)
    learned_BS = np.ones((count, samples.seq_len), dtype=bool) if mask is None else mask
    sources = [
        (split.source.name, corpus) for split in samples.splits for corpus in split.source.corpora
    ]
    results: list[Preview] = []
    numbers = samples.documents(ids)
    streams, places_BS = samples.places(ids)
    for row, sample in enumerate(ids.tolist()):
        places = places_BS[row]
        source, corpus = sources[streams[row]]
        documents = np.searchsorted(corpus.starts, places, side="right") - 1
        documents[places < 0] = PADDING
        positions = np.arange(samples.seq_len)
        if numbers is not None:  # documents are masked: positions restart at each
            # -2 differs from all numbers, so that the first token is a begin.
            begins = np.flatnonzero(np.diff(numbers[row, :-1], prepend=-2))
            positions -= np.repeat(begins, np.diff(np.append(begins, samples.seq_len)))
        valid = slice(0, int(np.count_nonzero(places >= 0)))  # padding is at the end
        results.append(
            Preview(
                position=position + row,
                sample=sample,
                source=source,
                stream=corpus.source,
                offset=int(places[0]),
                continued=int(places[0] - corpus.starts[documents[0]]) if places[0] > 0 else 0,
                tokens=windows[row],
                learned=learned_BS[row],
                documents=documents,
                positions=positions,
                pieces=_pieces(tokenizer, windows[row][valid], learned_BS[row], documents[valid]),
            )
        )
    return results


def _pieces(
    tokenizer: Tokenizer, tokens: np.ndarray, learned: np.ndarray, documents: np.ndarray
) -> tuple[TokenRun, ...]:
    """The runs of a sample. The first token is never a target; it belongs to the run of the second
    one."""
    if not len(tokens):
        return ()
    marks = np.concatenate([learned[:1], learned])[: len(tokens)]
    changes = (np.diff(documents) != 0) | (np.diff(marks) != 0)
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]
    ids = tokens.tolist()
    if tokenizer.folder is None and max(ids) >= NUM_BYTES:
        # Token files of other programs: their tokenizer is unknown.
        texts = ["".join(f"{id_} " for id_ in ids[start:end]) for start, end in pairwise(borders)]
    else:
        # A token may be a part of a character, and a decoder may treat the first token specially:
        # the text of a run is what its tokens add to the text of all tokens before.
        whole = tokenizer.decode(ids, special=True)
        ends = [0]
        for border in borders[1:-1]:
            before = tokenizer.decode(ids[:border], special=True).rstrip("\ufffd")
            ends.append(max(ends[-1], min(len(before), len(whole))))
        ends.append(len(whole))
        texts = [whole[start:end] for start, end in pairwise(ends)]
    return tuple(
        TokenRun(int(documents[start]), text, bool(marks[start]))
        for start, text in zip(borders[:-1], texts, strict=True)
    )
