"""Lines through measured collectives: α and β of the closed form, and the same with a term √S.

| model | time of S bytes |
|---|---|
| alpha-beta | hops(n) α + volume(n, S) β, both of the ring or direct form |
| with a root | a + b √S + c S: what bandwidth grows with, as messages grow |

Fitted to relative errors, so that a microsecond counts as much as a second; no term is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """`alpha` seconds a hop and `beta` seconds a byte on the wire of a rank; `root`: (a, b, c) of
    the model with √S; mean relative errors of both."""

    alpha: float
    beta: float
    error: float
    root: tuple[float, float, float]
    root_error: float


def hops_and_volume(operation: str, ranks: int) -> tuple[float, float]:
    """(messages that follow one another, bytes a rank sends over those of the tensor)."""
    share = (ranks - 1) / ranks
    match operation:
        case "all_reduce":
            return 2 * (ranks - 1), 2 * share
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return ranks - 1, share
        case "send":
            return 1, 1.0
        case _:
            raise UserError(f"no operation {operation!r} is measured on links")


def fit(operation: str, ranks: int, sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Both lines through the medians of one group. Raises UserError for no or broken numbers."""
    if not sizes or len(sizes) != len(seconds) or min(sizes) <= 0 or min(seconds) <= 0:
        raise UserError(
            f"{operation} of {ranks} ranks: {len(sizes)} sizes and {len(seconds)} times above 0 "
            "are needed, as many of each"
        )
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    hops, volume = hops_and_volume(operation, ranks)
    line = np.stack([np.full_like(size, hops), volume * size], axis=1)
    (alpha, beta), error = _least_relative(line, time)
    curve = np.stack([np.ones_like(size), np.sqrt(size), size], axis=1)
    (a, b, c), root_error = _least_relative(curve, time)
    return LinkFit(alpha=alpha, beta=beta, error=error, root=(a, b, c), root_error=root_error)


def _least_relative(
    terms: NDArray[np.float64], time: NDArray[np.float64]
) -> tuple[list[float], float]:
    """Non-negative weights of the columns of `terms` [n, k], and the mean relative error."""
    # Slow to load, and only this needs it.
    from scipy.optimize import nnls

    # Columns of one size: else a byte and a microsecond differ by ten powers of ten.
    relative = terms / time[:, None]
    scale = np.abs(relative).max(axis=0)
    found: Any = nnls(relative / scale, np.ones_like(time))[0]
    weights = found / scale
    return [float(w) for w in weights], float(np.abs(terms @ weights / time - 1).mean())
