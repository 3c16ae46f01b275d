"""80 % intervals of predicted seconds and memory, from errors on sources that no fit had seen.

``presets/calibration/intervals.toml`` holds, for each published source, how its runs deviate from
a prediction by a fit without that source (`moemesh.planner.accuracy.calibrate` writes it). A source
is one draw, however many rows it has: its errors share one weight. The interval of a prediction x
is [x / e^w, x e^w], symmetric because nobody knows the sign of the next source's bias:

    seconds   w: quantile of |log(measured / predicted)|, of sources alike; the quantile with which
              the mean share of a left-out source within reaches 80 %
    memory    w: where the mean over sources of the share of runs within reaches 80 %

Alike are device generations: one that at least three sources measured, or one that fewer did. Most
memory labels say only whether a run fitted. What share of such a source's runs needs at most e^x
times the prediction is then the isotonic regression of "it ran" on x = log(memory / predicted).

Memory has a second, narrower width: that of stacks whose habits the calibration knows. And a
cluster with runs of its own has the quantile of *their* errors, each left out, and of two more that
are those of strangers: with four runs the interval is the strangers', with fifty its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, log
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from moemesh.config.sources import read_preset_table

LEVEL = 0.8
#: Sources that make a device generation a well-measured one.
ENOUGH_SOURCES = 3


class Interval(NamedTuple):
    """Bounds of the measurement in 80 % of cases, if the next source is like those of the past."""

    low: float
    high: float

    @classmethod
    def around(cls, value: float, width: float) -> Interval:
        """The interval of `width` in logarithms."""
        return cls(value / exp(width), value * exp(width))


@dataclass(frozen=True, kw_only=True)
class SecondsErrors:
    """Log of measured over predicted step times, of one source on one device generation."""

    source: str
    generation: str
    errors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryErrors:
    """One source: logs of measured over predicted bytes; or logs of the device's memory over the
    predicted bytes, of runs that `ran` and of those that ran `out` of memory."""

    source: str
    errors: tuple[float, ...] = ()
    ran: tuple[float, ...] = ()
    out: tuple[float, ...] = ()

    def within(self, width: float) -> float:
        """The share of this source's runs whose memory lies in the interval."""
        if self.errors:
            return sum(abs(error) <= width for error in self.errors) / len(self.errors)
        return self._needing_at_most(width) - self._needing_at_most(-width)

    def _needing_at_most(self, x: float) -> float:
        """The share of runs that need at most e^x times the prediction."""
        places, shares = self._isotonic
        if x >= places[-1]:
            return 1.0
        below = bisect_right(places, x)
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
                (high, many, left), (low, more, right) = pools[-2:]
                share = (high * many + low * more) / (many + more)
                pools[-2:] = [(share, many + more, left + right)]
        shares = [share for share, _, count in pools for _ in range(count)]
        return tuple(margins), tuple(shares)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The share of every source's runs within intervals that the other sources give; `rows` is how
    many runs of each source have an error of their own."""

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
    """The widths that errors on left-out sources give."""

    seconds: tuple[SecondsErrors, ...]
    memory: tuple[MemoryErrors, ...]
    #: The same runs, predicted with the habits of their stack.
    known: tuple[MemoryErrors, ...] = ()

    @cached_property
    def well_measured(self) -> frozenset[str]:
        """Generations of devices that enough sources measured."""
        names = [one.generation for one in self.seconds]
        return frozenset(name for name in names if names.count(name) >= ENOUGH_SOURCES)

    def of_seconds(self, value: float, generation: str, own: Sequence[float] = ()) -> Interval:
        """The interval of a step time on a device of that generation ("" is an unknown one); `own`
        are the errors of a cluster's own runs, each left out."""
        return Interval.around(value, own_width(own, self.seconds_width(generation)))

    def of_memory(self, value: float, *, known: bool = False) -> Interval:
        """The interval of the bytes that a device needs, under a stack that is `known` or not."""
        return Interval.around(value, self.known_width if known else self.memory_width)

    def fits_chance(self, needed: float, capacity: float, *, known: bool = False) -> float:
        """The chance that a device of `capacity` bytes has enough, 0 to 1: of a normal error whose
        80 % interval is that of memory."""
        deviation = (self.known_width if known else self.memory_width) / _NORMAL_80
        return NormalDist(0.0, deviation).cdf(log(capacity / needed))

    def seconds_width(
        self, generation: str, *, without: str = "", level: float | None = None
    ) -> float:
        """Half the interval in logarithms; `without` leaves a source out, `level` is the quantile
        of errors."""
        known = generation in self.well_measured
        others = [one for one in self.seconds if one.source != without]
        alike = [one for one in others if (one.generation in self.well_measured) == known]
        by_source: dict[str, list[float]] = {}
        for one in alike or others:
            by_source.setdefault(one.source, []).extend(abs(error) for error in one.errors)
        return _quantile(by_source.values(), self._seconds_quantile if level is None else level)

    @cached_property
    def _seconds_quantile(self) -> float:
        """The next source is not among those whose errors are known: a little more than 80 %."""
        levels = (LEVEL + step / 100 for step in range(20))
        return next(
            (one for one in levels if self.seconds_coverage(one).of_sources >= LEVEL), LEVEL
        )

    @cached_property
    def memory_width(self) -> float:
        """The same of memory."""
        return _memory_width(self.memory)

    @cached_property
    def known_width(self) -> float:
        """The same of stacks whose habits are known, wide enough for 80 % of the runs of each: a
        mean over few sources hides the one that is off. That of any stack where none is known."""
        return max((_memory_width([one]) for one in self.known), default=self.memory_width)

    def seconds_coverage(self, level: float | None = None) -> Coverage:
        """Each source against the widths that the others give."""
        hits: dict[str, list[bool]] = {}
        for one in self.seconds:
            width = self.seconds_width(one.generation, without=one.source, level=level)
            hits.setdefault(one.source, []).extend(abs(error) <= width for error in one.errors)
        return Coverage(
            by_source={name: sum(found) / len(found) for name, found in hits.items()},
            rows={name: len(found) for name, found in hits.items()},
        )

    def memory_coverage(self, *, known: bool = False) -> Coverage:
        """The same of memory; of stacks that are `known` within the width that all of them give,
        for nobody's habits are known without a run of theirs."""
        sources = self.known if known else self.memory
        within: dict[str, float] = {}
        for one in sources:
            others = [other for other in sources if other is not one]
            within[one.source] = one.within(self.known_width if known else _memory_width(others))
        rows = {one.source: len(one.errors) or len(one.ran) + len(one.out) for one in sources}
        return Coverage(by_source=within, rows=rows)


#: Errors of strangers among those of own runs.
_STRANGERS = 2
#: Half the interval that holds four fifths of a normal distribution, in deviations.
_NORMAL_80 = 1.2816


def own_width(own: Sequence[float], strangers: float) -> float:
    """Half the interval of a cluster with runs whose errors, left out, are `own`."""
    if not own:
        return strangers
    sizes = [*(abs(error) for error in own), *[strangers] * _STRANGERS]
    return float(np.quantile(sizes, LEVEL))


def _quantile(sources: Iterable[Sequence[float]], level: float) -> float:
    """A quantile of numbers of which each source has the same weight in all: between the
    middles of the steps of their distribution."""
    rows = [(value, 1 / len(found)) for found in sources for value in found]
    values, weights = (np.array(column) for column in zip(*sorted(rows), strict=True))
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    return float(np.interp(level, places, values))


def _memory_width(sources: Sequence[MemoryErrors]) -> float:
    """The least width that holds 80 % of the runs of the mean source."""
    places = {abs(x) for one in sources for x in (*one.errors, *one.ran, *one.out)}

    def share(width: float) -> float:
        return sum(one.within(width) for one in sources) / len(sources)

    return next((width for width in sorted(places) if share(width) >= LEVEL), max(places))


def read_intervals(table: Mapping[str, Any]) -> Intervals:
    """Errors of left-out sources from parsed TOML."""

    def of(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}  # pyright: ignore[reportUnknownArgumentType]

    return Intervals(
        seconds=tuple(SecondsErrors(**of(row)) for row in table["seconds"]),
        memory=tuple(MemoryErrors(**of(row)) for row in table["memory"]),
        known=tuple(MemoryErrors(**of(row)) for row in table.get("known_memory", ())),
    )


@cache
def shipped_intervals() -> Intervals:
    """The shipped intervals, from published runs."""
    return read_intervals(read_preset_table("intervals", "calibration"))
