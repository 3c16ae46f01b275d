"""80 % intervals of predicted seconds and memory, from errors on held-out sources.

``presets/calibration/intervals.toml`` holds the errors of each published source's runs relative to
a fit without that source (`moemesh.planner.accuracy.calibrate` writes it). A source is one draw:
its errors share one weight, independent of its number of rows. The interval of a prediction x is
[x / e^w, x e^w], symmetric because the sign of the next source's bias is unknown:

    seconds   w: quantile of |log(measured / predicted)| of similar sources; the level is chosen so
              that on average 80 % of a held-out source's runs are inside
    memory    w: the width at which, on average over sources, 80 % of the runs are inside

Sources are similar if both their device generations were measured by at least three sources, or
both by fewer. Most memory labels record only whether a run fitted. The share of such a source's
runs that need at most e^x times the prediction is then the isotonic regression of "it ran" on
x = log(memory / predicted).

Memory has a second, narrower width for software stacks whose allocation is calibrated. A cluster
with own runs has the quantile of their leave-one-out errors and of two errors of the size of the
published width: with four runs the interval is nearly the published one, with fifty it is the
cluster's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, log
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from moemesh.config.sources import read_preset_table

LEVEL = 0.8
#: Least number of sources that have measured a device generation that counts as well measured.
ENOUGH_SOURCES = 3


class Interval(NamedTuple):
    """Bounds of the measurement in 80 % of cases, if the next source resembles the past ones."""

    low: float
    high: float

    @classmethod
    def around(cls, value: float, width: float) -> Interval:
        """The interval whose half is `width` in logarithms."""
        return cls(value / exp(width), value * exp(width))


@dataclass(frozen=True, kw_only=True)
class SecondsErrors:
    """Logs of measured over predicted step times of one source on one device generation."""

    source: str
    generation: str
    errors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryErrors:
    """Errors of one source: logs of measured over predicted bytes; or logs of the device's memory
    over predicted bytes, for runs that `ran` and for runs that ran `out` of memory."""

    source: str
    errors: tuple[float, ...] = ()
    ran: tuple[float, ...] = ()
    out: tuple[float, ...] = ()

    def within(self, width: float) -> float:
        """Share of this source's runs whose memory is in the interval."""
        if self.errors:
            return sum(abs(error) <= width for error in self.errors) / len(self.errors)
        return self._needing_at_most(width) - self._needing_at_most(-width)

    def _needing_at_most(self, x: float) -> float:
        """Share of runs that need at most e^x times the prediction."""
        margins, shares = self._isotonic
        if x >= margins[-1]:
            return 1.0
        below = bisect_right(margins, x)
        return shares[below - 1] if below else 0.0

    @cached_property
    def _isotonic(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(log margin, share that ran), ascending: pooled adjacent violators."""
        margins = sorted({*self.ran, *self.out})
        pools: list[tuple[float, int, int]] = []  # share, runs, margins
        for margin in margins:
            ran, out = self.ran.count(margin), self.out.count(margin)
            pools.append((ran / (ran + out), ran + out, 1))
            while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
                (left, left_runs, left_margins), (right, right_runs, right_margins) = pools[-2:]
                runs = left_runs + right_runs
                share = (left * left_runs + right * right_runs) / runs
                pools[-2:] = [(share, runs, left_margins + right_margins)]
        shares = [share for share, _, count in pools for _ in range(count)]
        return tuple(margins), tuple(shares)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Share of every source's runs inside the intervals from the other sources; `rows` is the
    number of runs of each source with an error."""

    by_source: Mapping[str, float]
    rows: Mapping[str, int]

    @property
    def of_sources(self) -> float:
        """The mean over sources."""
        return sum(self.by_source.values()) / len(self.by_source)

    @property
    def of_rows(self) -> float:
        """The mean over runs."""
        weighted = sum(share * self.rows[name] for name, share in self.by_source.items())
        return weighted / sum(self.rows.values())


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Interval widths from the errors on held-out sources."""

    seconds: tuple[SecondsErrors, ...]
    memory: tuple[MemoryErrors, ...]
    #: Errors of the same runs, predicted with the calibrated allocation of their stack.
    known: tuple[MemoryErrors, ...] = ()

    @cached_property
    def well_measured(self) -> frozenset[str]:
        """Device generations with at least :data:`ENOUGH_SOURCES` sources."""
        names = [source.generation for source in self.seconds]
        return frozenset(name for name in names if names.count(name) >= ENOUGH_SOURCES)

    def seconds_width(
        self, generation: str, *, without: str = "", level: float | None = None
    ) -> float:
        """Half the interval in logarithms; `without` is a source to leave out, `level` the quantile
        of errors, with equal weight for each source."""
        is_well_measured = generation in self.well_measured
        others = [source for source in self.seconds if source.source != without]
        similar = [
            source
            for source in others
            if (source.generation in self.well_measured) == is_well_measured
        ]
        by_source: dict[str, list[float]] = {}
        for item in similar or others:
            by_source.setdefault(item.source, []).extend(abs(error) for error in item.errors)
        weighted = [(size, 1 / len(sizes)) for sizes in by_source.values() for size in sizes]
        sizes, weights = (np.array(column) for column in zip(*sorted(weighted), strict=True))
        # The quantile of each size is the middle of its step of the distribution.
        quantiles = (np.cumsum(weights) - weights / 2) / weights.sum()
        level = self._seconds_quantile if level is None else level
        return float(np.interp(level, quantiles, sizes))

    @cached_property
    def _seconds_quantile(self) -> float:
        """Quantile at which held-out sources are covered to 80 %: a little above 0.8, because the
        next source differs from the measured ones."""
        levels = (LEVEL + step / 100 for step in range(20))
        return next(
            (level for level in levels if self.seconds_coverage(level).of_sources >= LEVEL), LEVEL
        )

    @cached_property
    def memory_width(self) -> float:
        """Half the memory interval in logarithms."""
        return _memory_width(self.memory)

    @cached_property
    def known_width(self) -> float:
        """Half the memory interval of stacks with a calibrated allocation. It covers 80 % of the
        runs of each stack, because a mean over few sources hides an outlier. Without such stacks it
        is :attr:`memory_width`."""
        return max((_memory_width([source]) for source in self.known), default=self.memory_width)

    def seconds_coverage(self, level: float | None = None) -> Coverage:
        """Coverage of each source's step times by the widths from the other sources."""
        hits: dict[str, list[bool]] = {}
        for item in self.seconds:
            width = self.seconds_width(item.generation, without=item.source, level=level)
            hits.setdefault(item.source, []).extend(abs(error) <= width for error in item.errors)
        return Coverage(
            by_source={name: sum(inside) / len(inside) for name, inside in hits.items()},
            rows={name: len(inside) for name, inside in hits.items()},
        )

    def memory_coverage(self, *, known: bool = False) -> Coverage:
        """Coverage of each source's memory by the width from the other sources; `known` stacks by
        the width from all of them, because an allocation is calibrated with the stack's own
        runs."""
        sources = self.known if known else self.memory
        within: dict[str, float] = {}
        for item in sources:
            others = [other for other in sources if other is not item]
            within[item.source] = item.within(self.known_width if known else _memory_width(others))
        rows = {item.source: len(item.errors) or len(item.ran) + len(item.out) for item in sources}
        return Coverage(by_source=within, rows=rows)


#: Number of errors of the size of the published width that are added to those of own runs.
_NUM_PUBLISHED = 2
#: Half the 80 % interval of a normal distribution, in standard deviations.
_NORMAL_80 = 1.2816


def fits_chance(needed: float, capacity: float, width: float) -> float:
    """Probability, 0 to 1, that `capacity` bytes suffice if the error is normal; `width` is half of
    its 80 % interval, in logarithms."""
    return NormalDist(0.0, width / _NORMAL_80).cdf(log(capacity / needed))


def own_width(errors: Sequence[float], published: float) -> float:
    """Half the interval, in logarithms, of a cluster whose runs have the leave-one-out `errors`;
    `published` is the width without own runs."""
    if not errors:
        return published
    sizes = [*map(abs, errors), *[published] * _NUM_PUBLISHED]
    return float(np.quantile(sizes, LEVEL))


def _memory_width(sources: Sequence[MemoryErrors]) -> float:
    """The least width that covers 80 % of the runs on average over sources."""
    widths = {abs(x) for item in sources for x in (*item.errors, *item.ran, *item.out)}

    def share(width: float) -> float:
        return sum(item.within(width) for item in sources) / len(sources)

    return next((width for width in sorted(widths) if share(width) >= LEVEL), max(widths))


def read_intervals(table: Mapping[str, Any]) -> Intervals:
    """Intervals from parsed TOML with the errors of held-out sources."""
    known = {"known": table.get("known_memory", ())}
    return TypeAdapter(Intervals).validate_python({**table, **known})


@cache
def shipped_intervals() -> Intervals:
    """The packaged intervals, from published runs."""
    return read_intervals(read_preset_table("intervals", "calibration"))
