"""Order of training samples: a function of seed, epoch and position, not of layout or platform.

Random numbers are raw 64-bit words of the Philox counter generator, with the key (seed, purpose)
and the epoch in the counter: the same on every platform and under every version of numpy
(`Generator.permutation` promises neither).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np


class IdRanges:
    """Ascending ids without repetition, stored as ranges, so that the size in memory does not grow
    with the number of ids. ``len`` counts the ids; a *place* is the index of an id among them."""

    def __init__(self, firsts: np.ndarray, lasts: np.ndarray) -> None:
        """Ranges ``firsts[i] .. lasts[i] - 1``, int64, ascending; empty ones are left out."""
        filled = lasts > firsts
        self._firsts = firsts[filled].astype(np.int64)
        #: Place after the last id of each range.
        self._ends = np.cumsum((lasts - firsts)[filled], dtype=np.int64)

    @staticmethod
    def joined(parts: Sequence[IdRanges]) -> IdRanges:
        """The ids of all `parts`, each of which begins after the end of the previous one."""
        firsts = [part._firsts for part in parts]
        lasts = [part._firsts + np.diff(part._ends, prepend=0) for part in parts]
        empty = [np.empty(0, dtype=np.int64)]  # without parts
        return IdRanges(np.concatenate(empty + firsts), np.concatenate(empty + lasts))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, places: np.ndarray) -> np.ndarray:
        """The ids at `places` [n], int64."""
        ranges = np.searchsorted(self._ends, places, side="right")
        begins = self._ends[ranges] - np.diff(self._ends, prepend=0)[ranges]
        return self._firsts[ranges] + (places - begins)

    def spread(self, count: int) -> np.ndarray:
        """`count` of the ids, evenly spread, int64; all of them if there are fewer."""
        count = min(count, len(self))
        return self.at(np.arange(count, dtype=np.int64) * len(self) // max(count, 1))

    def divided(self, blocks: np.ndarray) -> tuple[IdRanges, IdRanges]:
        """The ids at the places ``blocks[i, 0] .. blocks[i, 1] - 1``, and the others. `blocks`
        int64 [n, 2], ascending, not overlapping."""
        # Edges of the gaps before, between and after the blocks.
        bounds = np.r_[0, blocks.reshape(-1), len(self)]
        inside = IdRanges.joined([self._between(*block) for block in blocks.tolist()])
        gaps = bounds.reshape(-1, 2).tolist()
        return inside, IdRanges.joined([self._between(*gap) for gap in gaps])

    def _between(self, start: int, stop: int) -> IdRanges:
        """The ids at the places start..stop-1."""
        begins = self._ends - np.diff(self._ends, prepend=0)  # place of the first id of each range
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(begins, stop, side="left")
        ranges = slice(first, last)
        low = np.maximum(start, begins[ranges]) - begins[ranges]
        high = np.minimum(stop, self._ends[ranges]) - begins[ranges]
        return IdRanges(self._firsts[ranges] + low, self._firsts[ranges] + high)


#: Purposes that key the random streams of all runs; source i adds i * SOURCE_STRIDE.
HELD_OUT_STREAM, ORDER_STREAM = 1, 2
SOURCE_STRIDE = 1 << 16
#: Longest exact period of an interleaving. Weights that need a longer one are rounded to shares of
#: it; rounding may change its length a little.
LONGEST_PERIOD = 1 << 16
#: Largest size of a permutation that is stored as a table; rounds of the network for larger ones.
LARGEST_TABLE, ROUNDS = 1 << 20, 8


class Permutation:
    """A permutation of 0..size-1, a pure function of its arguments on every platform.

    A small one is a table: the order of `size` random words. A large one cannot be stored, and a
    rank needs few of its entries, so each is computed: a Feistel network permutes the numbers below
    a power of four, and is repeated until the result is below `size`.
    """

    def __init__(self, size: int, seed: int, purpose: int, epoch: int) -> None:
        key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, purpose], dtype=np.uint64)
        # The epoch is the counter's highest word: epochs never share numbers.
        counter = np.array([0, 0, 0, epoch], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=counter)
        self._size = size
        self._table: np.ndarray | None = None
        if size <= LARGEST_TABLE:
            self._table = np.argsort(words.random_raw(size), kind="stable")
        else:
            self._keys = words.random_raw(ROUNDS)
            self._half = np.uint64(((size - 1).bit_length() + 1) // 2)

    def at(self, places: np.ndarray) -> np.ndarray:
        """The entries at `places` [n], int64."""
        if self._table is not None:
            return self._table[places]
        numbers = self._network(places.astype(np.uint64))
        while (outside := numbers >= np.uint64(self._size)).any():
            numbers[outside] = self._network(numbers[outside])
        return numbers.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        """The Feistel network: `numbers` uint64 of 2 * `_half` bits to the same, one to one."""
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = numbers >> self._half, numbers & mask
        for key in self._keys:
            # SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014): every bit of a word
            # influences every bit of the result.
            words = right ^ key
            words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            words ^= words >> np.uint64(31)
            left, right = right, left ^ (words & mask)
        return (left << self._half) | right


class Interleaving:
    """The source that each position of a run draws from.

    A period of positions repeats; in it, source s is drawn ``counts[s]`` times, as evenly spaced as
    whole numbers allow. The shares equal the weights over every period (exactly, unless the period
    would exceed LONGEST_PERIOD), and nearly over any stretch. `counts` int64 [sources], `period`
    their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` are positive."""
        # The smallest whole numbers in the ratio of the weights; if their sum is too large, the
        # nearest positive ones for a sum of about LONGEST_PERIOD. Weights are decimal: 0.3 means
        # three tenths, not the nearest binary number.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        divisor = int(np.gcd.reduce(np.array(whole, dtype=object)))
        whole = [weight // divisor for weight in whole]
        if sum(whole) > LONGEST_PERIOD:
            total = sum(whole)
            whole = [max(1, round(Fraction(weight * LONGEST_PERIOD, total))) for weight in whole]
        self.counts = np.array(whole, dtype=np.int64)
        self.period = int(self.counts.sum())
        # The time of draw j of c is the middle of the j-th of c equal parts of the period. Division
        # rounds correctly, so equal times compare as equal, and the first source then goes first.
        times = [(2 * np.arange(count) + 1) / (2 * count) for count in self.counts]
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        #: Source of each position of a period, and the number of its earlier draws in the period.
        self._source = sources[np.argsort(np.concatenate(times), kind="stable")]
        self._draw = np.empty(self.period, dtype=np.int64)
        for source, count in enumerate(self.counts):
            self._draw[self._source == source] = np.arange(count)

    def draws(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each position [n], and number of earlier draws of that source, int64 [n]."""
        periods, places = np.divmod(positions, self.period)
        sources = self._source[places]
        return sources, periods * self.counts[sources] + self._draw[places]

    def drawn(self, position: int) -> np.ndarray:
        """Number of draws of each source before `position`, int64 [sources]."""
        periods, place = divmod(position, self.period)
        in_last = np.bincount(self._source[:place], minlength=len(self.counts))
        return periods * self.counts + in_last


def held_out_blocks(size: int, count: int, seed: int, source: int = 0) -> np.ndarray:
    """`count` of the places 0..size-1 in 32 to 64 blocks (or `count`, if fewer) at random
    positions, [begin, end) int64 [n, 2], ascending. Only the ends of a block are next to training
    text, so blocks keep the two apart better than single places would."""
    if not count:
        return np.empty((0, 2), dtype=np.int64)
    block = max(1, count // 32)
    num_blocks = -(-size // block)
    purpose = HELD_OUT_STREAM + source * SOURCE_STRIDE
    drawn = min(-(-count // block) + 1, num_blocks)  # one more: the last may be short
    starts = block * Permutation(num_blocks, seed, purpose, 0).at(np.arange(drawn, dtype=np.int64))
    stops = np.minimum(starts + block, size)
    surplus = np.cumsum(stops - starts) - count  # cut from the blocks that were drawn last
    stops -= np.clip(surplus, 0, stops - starts)
    blocks = np.stack([starts, stops], axis=1)[stops > starts]
    return blocks[np.argsort(blocks[:, 0])]


class Epochs:
    """The ids of one source, in a new order in each epoch."""

    def __init__(self, ids: IdRanges, seed: int, source: int = 0) -> None:
        self.ids, self._seed = ids, seed
        self._purpose = ORDER_STREAM + source * SOURCE_STRIDE
        self._orders: dict[int, Permutation] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, draws: np.ndarray) -> np.ndarray:
        """Ids at `draws` [n], which ascend. Draw d is in epoch ``d // len(ids)``; an epoch has each
        id once."""
        epochs, places = np.divmod(draws, len(self.ids))
        ids = np.empty(len(draws), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            # The orders of the two newest epochs stay cached: most batches span no more.
            if epoch not in self._orders:
                for old in [key for key in self._orders if key != epoch - 1]:
                    del self._orders[old]
                self._orders[epoch] = Permutation(len(self.ids), self._seed, self._purpose, epoch)
            ids[in_epoch] = self.ids.at(self._orders[epoch].at(places[in_epoch]))
        return ids
