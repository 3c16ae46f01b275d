"""Bubble, memory and weight copies of each schedule by formula, and where the formula holds.

Symbols of the formulas: p ranks, m microbatches, v chunks per rank, r a rank from 0; tF, tI, tW the
times of forward and of the two halves of the backward for one microbatch on one rank's whole share
of layers, tB = tI + tW, tFB an overlapped block; M_a the activations of one microbatch on that
share, M_w the part of them that a weight gradient still needs after the input gradient. Stages are
alike and messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

#: ``span``: the longest span of a rank minus its work; ``rank_idle``: the makespan minus a rank's
#: work, at its largest.
Metric = Literal["span", "rank_idle"]


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """Times of one microbatch on one rank's share; `block` None means the sum of its parts."""

    forward: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    block: float | None = None

    @property
    def backward(self) -> float:
        return self.dgrad + self.wgrad

    @property
    def overlapped(self) -> float:
        return self.forward + self.backward if self.block is None else self.block


@dataclass(frozen=True, kw_only=True)
class FormNumbers:
    """Sizes and times to evaluate formulas for. `held` is M_w / M_a, `slice_share` the share of a
    sequence that a slice is."""

    ranks: int
    microbatches: int
    chunks: int
    times: MicrobatchTimes
    held: float = 1.0
    slice_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Form:
    """The formulas of one schedule, written and to be evaluated.

    `bubble_holds` is the condition under which the bubble is exact, `peak_holds` that of the
    memory (activations in M_a per rank). `copies` is the number of weight copies on each rank.
    """

    bubble_text: str
    where_text: str = "always"
    peak_text: str
    copies_text: str = "1"
    metric: Metric = "rank_idle"
    bubble: Callable[[FormNumbers], float] = lambda n: 0.0
    bubble_holds: Callable[[FormNumbers], bool] = lambda n: True
    peak: Callable[[FormNumbers, int], float]
    peak_holds: Callable[[FormNumbers], bool] = lambda n: True
    copies: Callable[[FormNumbers, int], int] = lambda n, rank: 1


def _filling(n: FormNumbers) -> float:
    """Every stage waits once for the forward and once for the backward of the others."""
    return (n.ranks - 1) * (n.times.forward + n.times.backward)


def _in_flight(n: FormNumbers, rank: int) -> float:
    return min(n.microbatches, n.ranks - rank)


def _dualpipe_holds(n: FormNumbers) -> bool:
    """Overlap saves time and no more than the shorter of the two."""
    times = n.times
    parts = (times.forward, times.backward)
    overlaps = max(parts) <= times.overlapped <= sum(parts)
    return times.forward == times.dgrad and times.wgrad <= times.dgrad and overlaps


def _dualpipe_gap(n: FormNumbers) -> float:
    return n.times.overlapped + n.times.backward - 3 * n.times.wgrad


FORMS: Mapping[str, Form] = {
    "gpipe": Form(
        bubble_text="(p-1)(tF+tB)",
        peak_text="m",
        bubble=_filling,
        peak=lambda n, rank: n.microbatches,
    ),
    "1f1b": Form(
        bubble_text="(p-1)(tF+tB)",
        peak_text="min(m, p-r)",
        bubble=_filling,
        peak=_in_flight,
    ),
    "interleaved_1f1b": Form(
        bubble_text="(p-1)(tF+tB)/v",
        peak_text="min(mv, 2(p-1-r)+(v-1)p+1)/v",
        bubble=lambda n: _filling(n) / n.chunks,
        peak=lambda n, rank: (
            min(n.microbatches * n.chunks, 2 * (n.ranks - 1 - rank) + (n.chunks - 1) * n.ranks + 1)
            / n.chunks
        ),
    ),
    "terapipe": Form(
        bubble_text="(p-1)(max tF + max tB) over the slices",
        peak_text="m (every slice of every sequence)",
        bubble=lambda n: _filling(n) * n.slice_share,
        peak=lambda n, rank: n.microbatches,
    ),
    "chimera": Form(
        bubble_text="(p-2) tF",
        where_text="tF = tB",
        peak_text="p/2 + 1 + min(r, p-1-r)",
        copies_text="2, gradients summed",
        bubble=lambda n: (n.ranks - 2) * n.times.forward,
        bubble_holds=lambda n: n.times.forward == n.times.backward,
        peak=lambda n, rank: n.ranks / 2 + 1 + min(rank, n.ranks - 1 - rank),
        copies=lambda n, rank: 2,
    ),
    "zb_h1": Form(
        bubble_text="(p-1)(tF+tI-tW)",
        where_text="m >= p, tW <= tF",
        peak_text="(p-r) + r M_w/M_a",
        metric="span",
        bubble=lambda n: (n.ranks - 1) * (n.times.forward + n.times.dgrad - n.times.wgrad),
        bubble_holds=lambda n: n.microbatches >= n.ranks and n.times.wgrad <= n.times.forward,
        peak=lambda n, rank: n.ranks - rank + rank * n.held,
        peak_holds=lambda n: n.microbatches >= n.ranks,
    ),
    "zb_h2": Form(
        bubble_text="(p-1)(tF+tI-2tW)",
        where_text="m >= 2p-1, tW <= min(tF, tI)",
        peak_text="(2p-2r-1) + 2r M_w/M_a",
        metric="span",
        bubble=lambda n: (n.ranks - 1) * (n.times.forward + n.times.dgrad - 2 * n.times.wgrad),
        bubble_holds=lambda n: (
            n.microbatches >= 2 * n.ranks - 1
            and n.times.wgrad <= min(n.times.forward, n.times.dgrad)
        ),
        peak=lambda n, rank: 2 * (n.ranks - rank) - 1 + 2 * rank * n.held,
        peak_holds=lambda n: n.microbatches >= 2 * n.ranks - 1,
    ),
    "zb_v": Form(
        bubble_text="0",
        where_text="m >= 2p-1, tF = tI = tW",
        peak_text="p",
        metric="span",
        bubble_holds=lambda n: (
            n.microbatches >= 2 * n.ranks - 1 and n.times.forward == n.times.dgrad == n.times.wgrad
        ),
        peak=lambda n, rank: n.ranks,
        peak_holds=lambda n: n.microbatches >= 2 * n.ranks - 1,
    ),
    "dualpipe": Form(
        bubble_text="(p/2-1)(tFB+tB-3tW)",
        where_text="tF = tI, tW <= tI, tB <= tFB <= tF+tB",
        peak_text="p+1",
        copies_text="2, gradients summed",
        bubble=lambda n: (n.ranks / 2 - 1) * _dualpipe_gap(n),
        bubble_holds=_dualpipe_holds,
        peak=lambda n, rank: n.ranks + 1,
        copies=lambda n, rank: 2,
    ),
    "dualpipe_v": Form(
        bubble_text="(p-1)/2 (tFB+tB-3tW)",
        where_text="tF = tI, tW <= tI, tB <= tFB <= tF+tB",
        peak_text="p + 1/2",
        bubble=lambda n: (n.ranks - 1) / 2 * _dualpipe_gap(n),
        bubble_holds=_dualpipe_holds,
        peak=lambda n, rank: n.ranks + 0.5,
    ),
    "pipedream": Form(
        bubble_text="0 in the steady state",
        where_text="an endless stream",
        peak_text="p-r",
        copies_text="p-r",
        bubble_holds=lambda n: False,
        peak=_in_flight,
        copies=lambda n, rank: min(n.microbatches, n.ranks - rank),
    ),
    "pipedream_2bw": Form(
        bubble_text="0 in the steady state",
        where_text="an endless stream",
        peak_text="p-r",
        copies_text="2",
        bubble_holds=lambda n: False,
        peak=_in_flight,
        copies=lambda n, rank: 2,
    ),
    "ampnet": Form(
        bubble_text="depends on K, the microbatches in flight",
        where_text="-",
        peak_text="<= K",
        copies_text="1, inconsistent",
        bubble_holds=lambda n: False,
        peak=lambda n, rank: 0.0,
        peak_holds=lambda n: False,
    ),
}
