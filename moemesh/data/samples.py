"""A token stream into training samples, in an order that no layout can change.

    token stream ──windows──▶ samples 0..n-1 ──held-out blocks──▶ validation
                                      └──seeded permutation an epoch──▶ steps

Sample `i` reads the tokens ``i*seq_len .. (i+1)*seq_len`` of the stream: seq_len inputs and, one
further, seq_len targets. Neighbours share one token, so a token is a target at most once.

Random numbers come from the Philox counter generator, keyed by (seed, purpose), counted by epoch.
Permutations sort its raw 64-bit words, so the order is the same on every platform and under every
version of numpy (`Generator.permutation` promises neither).
"""

from __future__ import annotations

import math

import numpy as np

from moemesh.config.data import Documents
from moemesh.data.corpus import Corpus
from moemesh.data.tokenizer import DataError

#: Tokens handled at once where a whole stream is counted: bounds the extra memory.
CHUNK_TOKENS = 1 << 20
#: Purposes that key the random streams of the order; changing one changes every run.
HELD_OUT_STREAM, ORDER_STREAM = 1, 2


class Windows:
    """The windows of a corpus, in its order: window i reads the tokens
    ``i*seq_len .. (i+1)*seq_len``. `num_samples` of them."""

    def __init__(self, corpus: Corpus, seq_len: int, *, documents: Documents = "ignore") -> None:
        self.corpus, self.seq_len = corpus, seq_len
        self.masks_documents = documents == "mask"
        self.num_samples = max(0, (len(corpus.tokens) - 1) // seq_len)

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, seq_len] and targets [B, seq_len], int64, of the samples `ids` [B]."""
        windows = self._windows(ids).astype(np.int64)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def documents(self, ids: np.ndarray) -> np.ndarray | None:
        """Number of the document of each token of the samples `ids` [B], and of the last target:
        int64 [B, seq_len + 1]; None where documents are ignored."""
        if not self.masks_documents:
            return None
        positions = np.asarray(ids)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return np.searchsorted(self.corpus.starts, positions, side="right") - 1

    def loss_mask(self, ids: np.ndarray) -> np.ndarray | None:
        """Which targets of the samples `ids` [B] carry loss, bool [B, seq_len]; None: all."""
        learned = self.corpus.learned
        if learned is None:
            return None
        positions = np.asarray(ids)[:, None] * self.seq_len + 1 + np.arange(self.seq_len)
        return learned[positions]

    def _windows(self, ids: np.ndarray) -> np.ndarray:
        """The windows [B, seq_len + 1] of `ids` [B], in the stream's own dtype."""
        ids = np.asarray(ids, dtype=np.int64)
        assert ids.ndim == 1
        assert ((ids >= 0) & (ids < self.num_samples)).all(), "sample id outside the corpus"
        return self.corpus.tokens[ids[:, None] * self.seq_len + np.arange(self.seq_len + 1)]


class Samples(Windows):
    """The windows of a corpus, split into training and held-out samples, in a seeded order.

    All answers are functions of (corpus, seq_len, seed, held_out) alone: no rank, layout or earlier
    call enters. `num_samples` windows; `training_ids` and `held_out_ids` are int64, ascending.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        seed: int,
        held_out: float = 0.05,
        global_batch: int = 1,
        documents: Documents = "ignore",
    ) -> None:
        """Raises DataError when the corpus has fewer than `global_batch` training samples.

        The held-out share (at least one sample) is cut in blocks of neighbouring windows, because a
        block meets training text at its two ends only.
        """
        if seq_len < 1:
            raise DataError(f"data.seq_len is {seq_len}; it must be at least 1")
        if not 0 <= held_out < 1:
            raise DataError(f"data.held_out is {held_out}; it must be a share in [0, 1)")
        super().__init__(corpus, seq_len, documents=documents)
        self.seed, self.held_out = seed, held_out
        num_held_out = max(1, round(self.num_samples * held_out))
        if self.num_samples - num_held_out < global_batch:
            raise DataError(
                f"data.path {corpus.source} holds {len(corpus.tokens)} tokens, which make "
                f"{max(0, self.num_samples - num_held_out)} training samples of data.seq_len "
                f"{seq_len}; a step needs {global_batch} besides the held-out ones, so at least "
                f"{_tokens_needed(seq_len, held_out, global_batch)} tokens: add data, or lower "
                "data.seq_len or data.global_batch"
            )
        self.held_out_ids = self._choose_held_out(num_held_out)
        is_training = np.ones(self.num_samples, dtype=bool)
        is_training[self.held_out_ids] = False
        self.training_ids = np.flatnonzero(is_training).astype(np.int64)
        self._epochs: dict[int, np.ndarray] = {}

    def _choose_held_out(self, count: int) -> np.ndarray:
        """`count` window ids, ascending, as about 32 blocks spread by seed."""
        block = max(1, count // 32)
        starts = np.arange(0, self.num_samples, block)
        order = starts[_permutation(len(starts), self.seed, HELD_OUT_STREAM, 0)]
        ids = (order[:, None] + np.arange(block)).reshape(-1)
        return np.sort(ids[ids < self.num_samples][:count]).astype(np.int64)

    def ids_at(self, position: int, count: int) -> np.ndarray:
        """Sample ids [count], int64, of the global positions ``position .. position+count-1``.

        Position p lies in epoch ``p // num_training``; each epoch holds every training id once.
        """
        per_epoch = len(self.training_ids)
        pieces = []
        while count > 0:
            epoch, start = divmod(position, per_epoch)
            piece = self._epoch(epoch)[start : start + count]
            pieces.append(piece)
            position, count = position + len(piece), count - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _epoch(self, epoch: int) -> np.ndarray:
        """The training ids in the order of `epoch`; the two epochs a batch can span stay cached."""
        if epoch not in self._epochs:
            for old in [key for key in self._epochs if key != epoch - 1]:
                del self._epochs[old]
            order = _permutation(len(self.training_ids), self.seed, ORDER_STREAM, epoch)
            self._epochs[epoch] = self.training_ids[order]
        return self._epochs[epoch]

    def validation_ids(self, count: int) -> np.ndarray:
        """`count` held-out ids [count], evenly spread over the split; all of it if it has fewer."""
        available = len(self.held_out_ids)
        count = min(count, available)
        return self.held_out_ids[np.arange(count, dtype=np.int64) * available // max(count, 1)]

    def unigram_loss(self) -> float:
        """Held-out cross-entropy, nats a token, of the training targets' add-one unigram model.

        What a model scores that has learned how often each token occurs and nothing of its context:
        a training run that does not get below it has learned nothing else.
        """
        num_targets = self.num_samples * self.seq_len
        counts_V = np.zeros(self.corpus.vocab_size, dtype=np.int64)
        for start in range(0, num_targets, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_targets)
            chunk = self.corpus.tokens[start + 1 : end + 1]
            counts_V += np.bincount(chunk, minlength=len(counts_V))
        held_V = np.zeros_like(counts_V)
        rows = max(1, CHUNK_TOKENS // self.seq_len)
        for start in range(0, len(self.held_out_ids), rows):
            windows = self._windows(self.held_out_ids[start : start + rows])
            held_V += np.bincount(windows[:, 1:].reshape(-1), minlength=len(counts_V))
        train_V = counts_V - held_V
        log_probability_V = np.log(train_V + 1.0) - math.log(int(train_V.sum()) + len(train_V))
        return float(-(held_V * log_probability_V).sum() / held_V.sum())


def _permutation(size: int, seed: int, purpose: int, epoch: int) -> np.ndarray:
    """A permutation of 0..size-1, a pure function of its arguments on every platform."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, purpose], dtype=np.uint64)
    # The epoch sits in the counter's highest word: no epoch can run into the next one's numbers.
    counter = np.array([0, 0, 0, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable")


def _tokens_needed(seq_len: int, held_out: float, training_samples: int) -> int:
    """The smallest stream that leaves `training_samples` beside the held-out share."""
    # Rounding moves the answer by less than one training sample's worth: start that far below.
    samples = max(training_samples + 1, int((training_samples - 1) / (1 - held_out)))
    while samples - max(1, round(samples * held_out)) < training_samples:
        samples += 1
    return samples * seq_len + 1
