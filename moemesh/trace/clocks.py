"""Clocks of several machines, aligned by exchanges that no rank leaves before all have begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Clock readings of one rank around each exchange: (before it, after it), in seconds.
Readings = Sequence[tuple[float, float]]


class Offset(NamedTuple):
    """A clock is `seconds` ahead of another one, give or take `uncertainty`."""

    seconds: float
    uncertainty: float


def offset_of(reference: Readings, other: Readings) -> Offset:
    """How far the clock of `other` is ahead of that of `reference`.

    Nobody leaves an exchange before everybody has begun it, so every exchange bounds the offset:
    other's begin lies before reference's end, and reference's begin before other's end. The answer
    is the middle of what all bounds leave. Raises ValueError without an exchange.
    """
    if not reference or len(reference) != len(other):
        raise ValueError(f"{len(reference)} and {len(other)} exchanges: one at least, and as many")
    low = max(begin - end for (_, end), (begin, _) in zip(reference, other, strict=True))
    high = min(end - begin for (begin, _), (_, end) in zip(reference, other, strict=True))
    return Offset((low + high) / 2, max((high - low) / 2, 0.0))
