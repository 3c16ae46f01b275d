"""Ascending ids as ranges: as small for a trillion tokens as for a thousand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class IdRanges:
    """Ascending ids without repetition, as ranges. ``len`` counts the ids, and a
    *place* is the number of an id among them, from 0."""

    def __init__(self, firsts: np.ndarray, lasts: np.ndarray) -> None:
        """Ranges ``firsts[i] .. lasts[i] - 1``, int64, ascending; empty ones are left out."""
        kept = lasts > firsts
        self._firsts = firsts[kept].astype(np.int64)
        self._ends = np.cumsum((lasts - firsts)[kept], dtype=np.int64)

    @staticmethod
    def joined(parts: Sequence[IdRanges]) -> IdRanges:
        """The ids of all `parts`, each of which begins behind the one before."""
        firsts = [part._firsts for part in parts]
        lasts = [part._firsts + np.diff(part._ends, prepend=0) for part in parts]
        none = [np.empty(0, dtype=np.int64)]
        return IdRanges(np.concatenate(none + firsts), np.concatenate(none + lasts))

    @staticmethod
    def of(ids: np.ndarray) -> IdRanges:
        """The ascending `ids` [n]."""
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        firsts, lasts = np.r_[0, breaks], np.r_[breaks, len(ids)]
        if not len(ids):
            return IdRanges(ids, ids)
        return IdRanges(ids[firsts], ids[lasts - 1] + 1)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, places: np.ndarray) -> np.ndarray:
        """The ids at `places` [n], int64."""
        ranges = np.searchsorted(self._ends, places, side="right")
        before = self._ends[ranges] - np.diff(self._ends, prepend=0)[ranges]
        return self._firsts[ranges] + (places - before)

    def all(self) -> np.ndarray:
        """Every id, int64."""
        return self.at(np.arange(len(self), dtype=np.int64))

    def spread(self, count: int) -> np.ndarray:
        """`count` of the ids, evenly spread, int64; all of them if there are fewer."""
        count = min(count, len(self))
        return self.at(np.arange(count, dtype=np.int64) * len(self) // max(count, 1))

    def divided(self, blocks: np.ndarray) -> tuple[IdRanges, IdRanges]:
        """The ids at the places ``blocks[i, 0] .. blocks[i, 1] - 1``, and the others. `blocks`
        int64 [n, 2], ascending, not overlapping."""
        bounds = np.r_[0, blocks.reshape(-1), len(self)]
        inside = IdRanges.joined([self._between(*block) for block in blocks.tolist()])
        gaps = bounds.reshape(-1, 2).tolist()
        return inside, IdRanges.joined([self._between(*gap) for gap in gaps])

    def _between(self, start: int, stop: int) -> IdRanges:
        """The ids at the places start..stop-1."""
        starts = np.diff(self._ends, prepend=0)
        begins = self._ends - starts
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(begins, stop, side="left")
        rows = slice(first, last)
        low = np.maximum(start, begins[rows]) - begins[rows]
        high = np.minimum(stop, self._ends[rows]) - begins[rows]
        return IdRanges(self._firsts[rows] + low, self._firsts[rows] + high)
