"""Token streams into training samples, in an order that no layout can change.

    token streams ──windows──▶ samples 0..n-1 ──held-out blocks──▶ validation
                                      └──seeded permutation an epoch and source──▶
                                         sources interleaved by weight──▶ steps

Window `i` of a stream reads its tokens ``i*seq_len .. (i+1)*seq_len``: seq_len inputs and, shifted
by one, seq_len targets. Neighbours share one token, so a token is a target at most once. In a
stream with conversations a window holds documents, whole unless they are longer than a window, and
padding. Windows of all streams are numbered consecutively. The order is in
:mod:`moemesh.data.order`. Legend: B samples, N packed sequences of S tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moemesh.config.data import Documents, LongConversations
from moemesh.config.errors import refuse_together
from moemesh.data.corpus import Corpus
from moemesh.data.indexed import mask_of
from moemesh.data.order import Epochs, IdRanges, Interleaving, held_out_blocks
from moemesh.data.tokenizer import DataError, has_chat_template

#: Tokens counted at once in a pass over a whole stream: bounds the extra memory.
CHUNK_TOKENS = 1 << 20
#: Most tokens counted for the unigram model of a source; of a larger source, evenly spread windows
#: are counted.
UNIGRAM_TOKENS = 1 << 26
#: Version in the fingerprint, raised with every change of the order of the same data.
ORDER_VERSION = 1
#: Versions of the packing of conversations into sequences. The first cut long conversations that
#: begin with loss like texts; without any the order is the same, and has its number.
PACKING_VERSIONS = 1, 2
#: Least number of samples that few conversations are spread over: one held-out sample is then a
#: small share of them.
FEWEST_SAMPLES = 20
#: Place, and number of the document, of a padding token.
PADDING = -1


class Windows:
    """The windows of token streams in order, `num_samples` in all."""

    def __init__(
        self,
        corpora: Corpus | Sequence[Corpus],
        seq_len: int,
        *,
        documents: Documents = "auto",
        long: LongConversations = "truncate",
        at_least: int = 1,
    ) -> None:
        """`documents` and `long` are ``data.documents`` and ``data.long_conversations``;
        `at_least`: least number of windows of a stream that has enough conversations. Raises
        DataError for a too long conversation if `long` is "fail"."""
        self.corpora = (corpora,) if isinstance(corpora, Corpus) else tuple(corpora)
        self.seq_len = seq_len
        self.packed = [
            None if corpus.learned is None else packed(corpus, seq_len, long, at_least)
            for corpus in self.corpora
        ]
        #: Whether the documents of each stream are masked from one another.
        self._masked = [
            documents == "mask" or (documents == "auto" and pack is not None)
            for pack in self.packed
        ]
        #: Whether the documents of any stream are.
        self.masks_documents = any(self._masked)
        self.num_tokens = sum(len(corpus.tokens) for corpus in self.corpora)
        sizes = [
            max(0, (len(corpus.tokens) - 1) // seq_len) if pack is None else len(pack.bounds) - 1
            for corpus, pack in zip(self.corpora, self.packed, strict=True)
        ]
        #: Number of the first window of each stream, and of all: int64 [streams + 1].
        self.firsts = np.cumsum([0, *sizes], dtype=np.int64)
        self.num_samples = int(self.firsts[-1])
        #: Samples that are only padding, numbered after the others.
        self.num_empty = 0

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: on conversations that are too long or have no target that carries
        loss, and on steps that are not full."""
        notes = [pack.note for pack in self.packed if pack is not None and pack.note is not None]
        if self.num_empty:
            notes.append(
                f"{self.corpora[0].source}: a step reads all training conversations, and "
                f"{self.num_empty} of its sequences are padding"
            )
        return notes

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, seq_len] and targets [B, seq_len], int64, of the samples `ids` [B]."""
        windows = self.windows(ids)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def arrays(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a batch of the samples `ids` by name: tokens and targets, and if they are
        needed, documents, valid and loss_mask."""
        tokens, targets = self.batch(ids)
        masks = {"documents": self.documents(ids), "valid": self.valid(ids)}
        masks["loss_mask"] = self.loss_mask(ids)
        masks = {name: np.ascontiguousarray(x) for name, x in masks.items() if x is not None}
        return {"tokens": tokens, "targets": targets} | masks

    def documents(self, ids: np.ndarray) -> np.ndarray | None:
        """Number of the document, in its stream, of each token of the samples `ids` [B] and of the
        last target: int64 [B, seq_len + 1], -1 at padding; None if documents are ignored."""
        return self._numbers(ids, self._masked) if self.masks_documents else None

    def valid(self, ids: np.ndarray) -> np.ndarray | None:
        """Tokens of the samples `ids` [B] other than padding, bool [B, seq_len]; None: all."""
        return self.places(ids)[1][:, :-1] >= 0 if any(self.packed) else None

    def loss_mask(self, ids: np.ndarray) -> np.ndarray | None:
        """Targets of the samples `ids` [B] that carry loss, bool [B, seq_len]; None: all. If
        documents are masked or packed, the first token of a document is not predicted from the
        previous one."""

        def learned(stream: int, places: np.ndarray) -> np.ndarray:
            mask = self.corpora[stream].learned
            return mask_of(None if mask is None else mask[places], len(places))

        # For each stream, whether the first token of a document carries no loss.
        numbered = [
            bool(pack) or masked for pack, masked in zip(self.packed, self._masked, strict=True)
        ]
        if not any(numbered):
            return None
        documents = self._numbers(ids, numbered)
        inside = documents[:, 1:] == documents[:, :-1]
        return self._gather(ids, learned, np.bool_)[:, 1:] & inside if any(self.packed) else inside

    def windows(self, ids: np.ndarray) -> np.ndarray:
        """The windows [B, seq_len + 1] of `ids` [B], int64. Raises DataError for ids outside the
        vocabulary: the file may have been damaged since it was checked."""
        windows = self._gather(
            ids, lambda stream, places: self.corpora[stream].tokens[places], np.int64
        )
        vocab_size = self.corpora[0].vocab_size
        wrong = (windows < 0) | (windows >= vocab_size)
        if wrong.any():
            row, place = (int(index) for index in np.argwhere(wrong)[0])
            streams, places = self.places(ids)
            raise DataError(
                f"{self.corpora[streams[row]].source}, token {places[row, place]}: id "
                f"{windows[row, place]} is not below model.vocab_size {vocab_size}, though the "
                "file was checked: it was changed or damaged"
            )
        return windows

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream of each of the samples `ids` [B], and the places of its tokens in the stream,
        int64 [B, seq_len + 1], -1 at padding. Samples after the last one are only padding."""
        ids = np.asarray(ids, dtype=np.int64)
        assert ids.ndim == 1
        assert ((ids >= 0) & (ids < self.num_samples + self.num_empty)).all(), (
            "sample id outside the data"
        )
        last = len(self.corpora) - 1
        streams = np.minimum(np.searchsorted(self.firsts, ids, side="right") - 1, last)
        places = np.full((len(ids), self.seq_len + 1), PADDING)
        for stream in np.unique(streams).tolist():
            rows = (streams == stream) & (ids < self.num_samples)
            numbers, pack = ids[rows] - self.firsts[stream], self.packed[stream]
            if pack is None:
                places[rows] = numbers[:, None] * self.seq_len + np.arange(self.seq_len + 1)
            else:
                places[rows] = pack.places(numbers, self.seq_len + 1)
        return streams, places

    def _numbers(self, ids: np.ndarray, numbered: Sequence[bool]) -> np.ndarray:
        """The document numbers of :meth:`documents`, but 0 in streams that are not `numbered`."""

        def numbers(stream: int, places: np.ndarray) -> np.ndarray:
            starts = self.corpora[stream].starts if numbered[stream] else [0]
            return np.searchsorted(starts, places, side="right") - 1

        return self._gather(ids, numbers, np.int64, padding=PADDING)

    def _gather(
        self,
        ids: np.ndarray,
        take: Callable[[int, np.ndarray], np.ndarray],
        dtype: type[np.generic],
        padding: int = 0,
    ) -> np.ndarray:
        """The values of ``take(stream, places [n])`` for the windows `ids`: [B, seq_len + 1] of
        `dtype`."""
        streams, places = self.places(ids)
        gathered = np.full(places.shape, padding, dtype=dtype)
        for stream in np.unique(streams).tolist():
            mask = (streams == stream)[:, None] & (places >= 0)
            gathered[mask] = take(stream, places[mask])
        return gathered


class SampleSource(NamedTuple):
    """The streams of one source: one of its texts, or one for each pair of token files. Sources are
    sampled in proportion to the weights."""

    name: str
    corpora: tuple[Corpus, ...]
    weight: float = 1.0


class WindowSplit(NamedTuple):
    """The windows of one source: those for training, in the order of each epoch, and held-out ones.
    `num_learned` tokens carry loss (None: all); `without_loss` conversations have no token with
    loss and are left out."""

    source: SampleSource
    training: Epochs
    held_out: IdRanges
    num_learned: int | None
    without_loss: int

    @property
    def num_tokens(self) -> int:
        return sum(len(corpus.tokens) for corpus in self.source.corpora)


class Samples(Windows):
    """The windows of all sources, split into training and validation, in a seeded order. All
    methods are pure functions of their arguments and those of the constructor: ranks, layout and
    earlier calls have no effect."""

    def __init__(
        self,
        sources: Corpus | Sequence[SampleSource],
        *,
        seq_len: int,
        seed: int,
        held_out: float = 0.05,
        global_batch: int = 1,
        documents: Documents = "auto",
        long: LongConversations = "truncate",
        validation: Sequence[Corpus] = (),
    ) -> None:
        """All samples of the `validation` streams are for validation; without such streams, a share
        `held_out` of each source (at least one sample) is kept from training. If a single source of
        conversations makes fewer than `global_batch` training samples, padding fills the step.

        Raises DataError for fewer than `global_batch` training samples, none in some source, or
        none for validation.
        """
        if seq_len < 1:
            raise DataError(f"data.seq_len is {seq_len}; it must be at least 1")
        if not 0 <= held_out < 1:
            raise DataError(f"data.held_out is {held_out}; it must be a share in [0, 1)")
        if isinstance(sources, Corpus):
            sources = [SampleSource(sources.source, (sources,))]
        streams = [corpus for source in sources for corpus in source.corpora]
        super().__init__(
            [*streams, *validation],
            seq_len,
            documents=documents,
            long=long,
            at_least=1 if validation else FEWEST_SAMPLES,
        )
        # Split the windows of each source.
        self.seed, self.held_out = seed, held_out
        self.interleaving = Interleaving([source.weight for source in sources])
        self.splits: list[WindowSplit] = []
        first = 0
        for source in sources:
            last, number = first + len(source.corpora), len(self.splits)
            usable = IdRanges(self.firsts[first : first + 1], self.firsts[last : last + 1])
            count = 0 if validation else max(1, round(len(usable) * held_out))
            blocks = held_out_blocks(len(usable), min(count, len(usable)), seed, number)
            held, training = usable.divided(blocks)
            chats = [pack for pack in self.packed[first:last] if pack is not None]
            pairs = zip(self.corpora[first:last], self.packed[first:last], strict=True)
            num_plain = sum(len(corpus.tokens) for corpus, pack in pairs if pack is None)
            self.splits.append(
                WindowSplit(
                    source=source,
                    training=Epochs(training, seed, number),
                    held_out=held,
                    num_learned=(
                        num_plain + sum(pack.num_learned for pack in chats) if chats else None
                    ),
                    without_loss=sum(pack.without_loss for pack in chats),
                )
            )
            first = last
        self.long = long
        if len(sources) == 1 and self.splits[0].num_learned and self.num_training:
            # Fill a step with samples of padding: without them it would read a sample twice.
            (split,) = self.splits
            self.num_empty = max(0, global_batch - len(split.training))
            bounds = self.num_samples + np.array([0, self.num_empty])
            ids = IdRanges.joined([split.training.ids, IdRanges(bounds[:1], bounds[1:])])
            self.splits = [split._replace(training=Epochs(ids, seed))]
        # The validation samples, and too small sources.
        problems = [*self._size_problems(global_batch, None if validation else held_out)]
        if validation:
            self._held_out = IdRanges(self.firsts[first : first + 1], self.firsts[-1:])
            if not len(self._held_out):
                longest = max(len(corpus.tokens) for corpus in validation)
                problems.append(
                    f"data.validation {validation[0].source} holds {longest} tokens and makes no "
                    f"sample of data.seq_len {seq_len}, which takes {seq_len + 1}, with a target "
                    f"that carries loss"
                    + (f": lower data.seq_len to {longest - 1}" if 1 < longest <= seq_len else "")
                )
        else:
            self._held_out = IdRanges.joined([split.held_out for split in self.splits])
        refuse_together([DataError(problem) for problem in problems])
        self._own_validation = bool(validation)
        #: Number of samples for validation.
        self.num_validation = len(self._held_out)

    @property
    def num_training(self) -> int:
        """Training samples of all sources."""
        return sum(len(split.training) for split in self.splits)

    @property
    def num_learned(self) -> int | None:
        """Tokens of the training sources that carry loss by their masks; None without a mask."""
        if all(split.num_learned is None for split in self.splits):
            return None
        return sum(
            split.num_tokens if split.num_learned is None else split.num_learned
            for split in self.splits
        )

    def ids_at(self, position: int, count: int) -> np.ndarray:
        """Sample ids [count], int64, of the global positions ``position .. position+count-1``."""
        positions = np.arange(position, position + count, dtype=np.int64)
        sources, draws = self.interleaving.draws(positions)
        ids = np.empty(count, dtype=np.int64)
        for number, split in enumerate(self.splits):
            drawn = sources == number
            if drawn.any():
                ids[drawn] = split.training.at(draws[drawn])
        return ids

    def validation_ids(self, count: int) -> np.ndarray:
        """Up to `count` validation samples, evenly spread over the validation files, or over the
        held-out part of each source in the shares of the sources."""
        if self._own_validation or len(self.splits) == 1:
            return self._held_out.spread(count)
        counts = self.interleaving.drawn(count).tolist()
        parts = [split.held_out.spread(n) for split, n in zip(self.splits, counts, strict=True)]
        return np.concatenate(parts)

    def epochs(self, num_samples: int) -> list[float]:
        """Epochs of each source that a run of `num_samples` reads."""
        drawn = self.interleaving.drawn(num_samples).tolist()
        return [n / len(split.training) for n, split in zip(drawn, self.splits, strict=True)]

    def steps(self, epochs: float, global_batch: int) -> int:
        """Steps of a run that reads `epochs` times the number of training samples of all sources;
        the epochs of one source depend on its weight."""
        return math.ceil(epochs * self.num_training / global_batch)

    def loss_lines(self, tokenizer: str) -> list[str]:
        """Lines for the terminal: the number of tokens that bear loss, if not all of them do."""
        if (learned := self.num_learned) is None:
            return []
        total = sum(split.num_tokens for split in self.splits)
        line = f"{learned:,} of {total:,} tokens bear loss ({learned / total:.1%})"
        if not has_chat_template(tokenizer):
            return [f"loss     of completions: {line}"]
        return [f"chat     conversations by the template of {tokenizer}", f"         {line}"]

    def reading(self, steps: int, global_batch: int) -> list[str]:
        """Lines for the terminal: each source with its tokens, and the epochs that a run reads."""
        batch = f"{global_batch} x {self.seq_len} a step"
        epochs = self.epochs(steps * global_batch)
        shares = self.interleaving.counts / self.interleaving.period
        lines: list[str] = []
        for split, share, times in zip(self.splits, shares, epochs, strict=True):
            text = f"{split.source.name}: {split.num_tokens:,} tokens"
            if len(self.splits) == 1:
                return [f"data     {text}, {batch}, {times:.3g} epochs"]
            lines.append(f"         {share:6.2%}  {text}, {times:.3g} epochs")
        return [f"data     {len(self.splits)} sources, {batch}", *lines]

    def unigram_loss(self) -> float:
        """Cross-entropy of the validation targets, in nats a token, under a unigram model: the
        frequencies of training targets, with add-one smoothing in each source, mixed by the shares
        of the sources.

        A training run with a higher loss has not even learned the frequency of each token.
        """
        num_samples = max(1, UNIGRAM_TOKENS // self.seq_len)
        validation_V = self._count_targets(self._held_out.spread(num_samples))
        probability_V = np.zeros(len(validation_V))
        shares = self.interleaving.counts / self.interleaving.period
        for share, split in zip(shares, self.splits, strict=True):
            counts_V = self._count_targets(split.training.ids.spread(num_samples))
            probability_V += share * (counts_V + 1.0) / (int(counts_V.sum()) + len(counts_V))
        total = max(validation_V.sum(), 1)
        return float(-(validation_V * np.log(probability_V)).sum() / total)

    def _count_targets(self, ids: np.ndarray) -> np.ndarray:
        """Number of times each token is a target with loss in the samples `ids`, int64 [V]."""
        counts_V = np.zeros(self.corpora[0].vocab_size, dtype=np.int64)
        rows = max(1, CHUNK_TOKENS // self.seq_len)
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            targets, mask = self.windows(chunk)[:, 1:], self.loss_mask(chunk)
            learned = targets.reshape(-1) if mask is None else targets[mask]
            counts_V += np.bincount(learned, minlength=len(counts_V))
        return counts_V

    def fingerprint(self) -> dict[str, str]:
        """Digests of the tokens of each source ("source 1") and of the order ("order"): equal only
        for runs that read the same samples in the same order."""
        digests: dict[str, str] = {}
        for number, split in enumerate(self.splits, start=1):
            digest = hashlib.blake2b(digest_size=16)
            for corpus in split.source.corpora:
                digest.update(corpus.fingerprint().encode())
            digests[f"source {number}"] = digest.hexdigest()
        facts = [
            ORDER_VERSION,
            self.seq_len,
            self.seed,
            None if self._own_validation else self.held_out,
            self.interleaving.counts.tolist(),
            [len(split.training) for split in self.splits],
        ]
        if versions := [pack.version for pack in self.packed if pack is not None]:
            facts.append([max(versions), self.long])
        digests["order"] = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
        return digests

    def _size_problems(self, global_batch: int, held_out: float | None) -> Iterator[str]:
        for number, split in enumerate(self.splits):
            if len(self.splits) > 1 and not len(split.training):
                yield (
                    f"data.sources[{number}] {split.source.name} holds {split.num_tokens} tokens, "
                    f"which leave no training sample of data.seq_len {self.seq_len}"
                    f"{_left_out(split)}: add data to it, {_other_length(split)}, or leave it out"
                )
        if self.num_training >= global_batch:
            return
        split = self.splits[0]
        names = ", ".join(split.source.name for split in self.splits)
        if held_out is None:
            needed = global_batch * self.seq_len + 1
        else:
            # Fewest samples with enough for training besides the held-out share, which is rounded:
            # search upwards from one training sample less.
            samples = max(global_batch + 1, int((global_batch - 1) / (1 - held_out)))
            while samples - max(1, round(samples * held_out)) < global_batch:
                samples += 1
            needed = samples * self.seq_len + 1
        # A sequence of conversations holds whole ones, whatever their lengths, and padding.
        is_text, is_alone = split.num_learned is None, len(self.splits) == 1
        exactly = f", so at least {needed} tokens" if is_text and is_alone else ""
        yield (
            f"data.path {names} holds {sum(split.num_tokens for split in self.splits)} tokens, "
            f"which make {self.num_training} training samples of data.seq_len {self.seq_len}"
            f"{_left_out(split)}; a step needs {1 if is_alone and not is_text else global_batch}"
            f"{' besides the held-out ones' if held_out is not None else ''}{exactly}: add data, "
            f"or {_other_length(split)}"
            f"{', or lower' if split.without_loss else ' or'} data.global_batch"
        )


def _left_out(split: WindowSplit) -> str:
    if not split.without_loss:
        return ""
    has = "conversation has" if split.without_loss == 1 else "conversations have"
    return f" ({split.without_loss} {has} no target that carries loss)"


def _other_length(split: WindowSplit) -> str:
    return f"{'raise' if split.without_loss else 'lower'} data.seq_len"


# Whole conversations in sequences: cut only at the length of a sequence, and padded.
#
# The longest come first, each into the fullest sequence with room (best fit, decreasing): a pure
# function of the lengths, so layout, seed and epoch do not change which documents share a sequence.


class DocumentPacks(NamedTuple):
    """The documents of a stream in sequences. A conversation is one piece; a text has a piece for
    each started sequence length. ``begins`` (place in the stream) and ``sizes`` (tokens) are int64
    [pieces]; ``bounds`` int64 [sequences + 1]: sequence i has the pieces bounds[i]..bounds[i+1]-1.
    `num_learned` targets carry loss; `without_loss` pieces have no such target and are left out;
    `note` is a sentence on them and on conversations that are too long; `version` is one of
    :data:`PACKING_VERSIONS`."""

    begins: np.ndarray
    sizes: np.ndarray
    bounds: np.ndarray
    num_learned: int
    without_loss: int
    note: str | None
    version: int

    def places(self, numbers: np.ndarray, width: int) -> np.ndarray:
        """Places of the tokens of sequences `numbers` [n], then PADDING: int64 [n, width]."""
        places_NS = np.full((len(numbers), width), PADDING, dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            part = slice(self.bounds[number], self.bounds[number + 1])
            pieces = zip(self.begins[part].tolist(), self.sizes[part].tolist(), strict=True)
            places = np.concatenate([np.arange(begin, begin + size) for begin, size in pieces])
            places_NS[row, : len(places)] = places
        return places_NS


def packed(
    corpus: Corpus, seq_len: int, long: LongConversations, at_least: int = 1
) -> DocumentPacks:
    """The documents of `corpus`, which has conversations, in sequences of up to `seq_len` tokens,
    or shorter ones if there would be fewer than about `at_least`. Raises DataError for longer
    conversations if `long` is "fail"."""
    learned, starts = corpus.learned, corpus.starts
    assert learned is not None
    lengths = np.diff(starts, append=len(corpus.tokens))
    # All tokens of a text carry loss. A conversation may begin with loss, too, such as segments
    # whose first one is learned; one of loss alone is cut like a text.
    is_text = np.add.reduceat(learned, starts, dtype=np.int64) == lengths
    is_long = (lengths > seq_len) & ~is_text
    note = None
    if is_long.any():
        number = int(np.argmax(np.where(is_long, lengths, 0)))
        count, longest = int(is_long.sum()), int(lengths[number])
        text = (
            f"{corpus.source}: {count:,} of {len(lengths):,} documents are conversations longer "
            f"than data.seq_len = {seq_len:,} (the longest, document {number + 1:,}, has "
            f"{longest:,} tokens)"
        )
        if long == "fail":
            other = 'data.long_conversations to "truncate" or "skip"'
            raise DataError(f"{text}: set data.seq_len to {longest}, or {other}")
        lost = int(lengths[is_long].sum()) - (count * seq_len if long == "truncate" else 0)
        done = "truncated" if long == "truncate" else "left out"
        how = f'data.long_conversations = "{long}"'
        note = f"{text} and {done} ({how}): {lost:,} tokens are not read"
    # Pieces of each document; of each piece its document, its offset there, begin and size.
    pieces = np.where(is_text, -(-lengths // seq_len), 1)
    if long == "skip":
        pieces[is_long] = 0
    owners = np.repeat(np.arange(len(starts)), pieces)
    offsets = (np.arange(len(owners)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
    begins, sizes = starts[owners] + offsets, np.minimum(lengths[owners] - offsets, seq_len)
    # Tokens with loss in each piece: the sums from even edges (begins) to odd ones (ends). reduceat
    # takes no index at the end of the stream, and sums to that end without it.
    edges = np.stack([begins, begins + sizes], axis=1).reshape(-1)
    counts = np.add.reduceat(learned, edges[edges < len(learned)], dtype=np.int64)[::2]
    counts -= learned[begins]  # the first token of a piece is never a target
    has_loss = counts > 0
    begins, sizes = begins[has_loss], sizes[has_loss]
    capacity = max(int(sizes.max(initial=1)), int(sizes.sum()) // at_least)
    numbers = _best_fit(sizes, min(seq_len, capacity))
    # Sequences are numbered in the order of their first documents.
    _, firsts, numbers = np.unique(numbers, return_index=True, return_inverse=True)
    numbers = np.argsort(np.argsort(firsts))[numbers]
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(len(firsts) + 1))
    if without_loss := int((~has_loss).sum()):
        text = f"{without_loss:,} conversations have no target that carries loss and are left out"
        note = f"{note}; {text}" if note else f"{corpus.source}: {text}"
    version = PACKING_VERSIONS[int((is_long & learned[starts]).any())]
    return DocumentPacks(
        begins[order], sizes[order], bounds, int(counts.sum()), without_loss, note, version
    )


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Index of each piece's sequence, int64 [pieces]."""
    numbers = np.empty(len(sizes), dtype=np.int64)
    rooms: list[int] = []  # free lengths of sequences, ascending
    free: dict[int, list[int]] = {}  # sequences by free length
    num_opened = 0  # number of sequences so far
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        room, number = capacity, num_opened
        if (fullest := bisect_left(rooms, size)) < len(rooms):
            room = rooms[fullest]
            number = free[room].pop()
            if not free[room]:
                del free[room], rooms[fullest]
        else:
            num_opened += 1
        numbers[piece] = number
        if room > size:
            if room - size not in free:
                insort(rooms, room - size)
            free.setdefault(room - size, []).append(number)
    return numbers
