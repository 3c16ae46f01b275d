"""Schedules by name, one row each: generator, kind, options, conditions, closed formulas.

A schedule is a generator and a row of :data:`SCHEDULES`. Configuration, planner, `moemesh schedule`
and its documentation read the row.

Symbols of the formulas: p ranks, m microbatches, v chunks per rank, r a rank from 0; tF, tI, tW the
times of forward and of the two halves of the backward for one microbatch on one rank's whole share
of layers, tB = tI + tW, tFB an overlapped block; M_a the activations of one microbatch on that
share, M_w the part of them that a weight gradient still needs after the input gradient. Stages are
alike and messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moemesh.config.conditions import (
    ALWAYS,
    Condition,
    at_least,
    divisible,
    one_of,
    require,
)

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


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    """Everything about a schedule that code outside of its generator reads."""

    #: "module:function" of the generator: numbers of ranks and microbatches, then its options.
    make: str
    form: Form
    #: Conditions on the numbers of ranks, microbatches, stages and options.
    conditions: Sequence[Condition] = ALWAYS
    #: Options of the generator, named as in :func:`moemesh.schedule.build.build`.
    options: tuple[str, ...] = ()
    #: Legal numbers of stages a rank, empty if all are legal. 1, the default, is always legal.
    stages_per_rank: tuple[int, ...] = (1,)
    #: Stages on the ranks: one after the other, in a V with two on each rank, or two pipes from
    #: both ends, so that two ranks hold every stage and sum its gradients.
    stages: Literal["line", "v", "mirrored"] = "line"
    #: Weights are updated while microbatches are in flight: the results of training differ.
    is_asynchronous: bool = False
    #: The nearest schedule without deferred weight gradients; empty: this one defers none.
    undeferred: str = ""
    #: A forward and a backward take turns in one block.
    has_blocks: bool = False
    #: A rank never holds more than `form.peak` microbatches, weight gradients included; else its
    #: operations are counted.
    holds_form_peak: bool = False
    #: `moemesh plan` proposes it. GPipe takes as long as 1F1B and holds more; the bubble of Chimera
    #: is larger than that of zero-bubble schedules; TeraPipe has no time model in columns.
    is_proposed: bool = False

    def rules(self, numbers: Mapping[str, int]) -> list[Condition]:
        """The conditions that these numbers decide."""
        rules = [rule for rule in self.conditions if numbers.keys() >= set(rule.names)]
        if self.stages_per_rank and "stages_per_rank" in numbers:
            rules.append(one_of("stages_per_rank", *self.stages_per_rank))
        return rules


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


#: Schedules by name, in the order of messages and tables.
SCHEDULES: dict[str, ScheduleRow] = {
    "1f1b": ScheduleRow(
        make="moemesh.schedule.generators:one_f_one_b",
        holds_form_peak=True,
        is_proposed=True,
        form=Form(
            bubble_text="(p-1)(tF+tB)",
            peak_text="min(m, p-r)",
            bubble=_filling,
            peak=_in_flight,
        ),
    ),
    "gpipe": ScheduleRow(
        make="moemesh.schedule.generators:gpipe",
        holds_form_peak=True,
        form=Form(
            bubble_text="(p-1)(tF+tB)",
            peak_text="m",
            bubble=_filling,
            peak=lambda n, rank: n.microbatches,
        ),
    ),
    "interleaved_1f1b": ScheduleRow(
        make="moemesh.schedule.generators:interleaved_1f1b",
        conditions=(
            *ALWAYS,
            at_least("stages_per_rank", 1),
            divisible("microbatches", "ranks"),
        ),
        options=("stages_per_rank",),
        stages_per_rank=(),
        is_proposed=True,
        form=Form(
            bubble_text="(p-1)(tF+tB)/v",
            peak_text="min(mv, 2(p-1-r)+(v-1)p+1)/v",
            bubble=lambda n: _filling(n) / n.chunks,
            peak=lambda n, rank: (
                min(
                    n.microbatches * n.chunks,
                    2 * (n.ranks - 1 - rank) + (n.chunks - 1) * n.ranks + 1,
                )
                / n.chunks
            ),
        ),
    ),
    "terapipe": ScheduleRow(
        make="moemesh.schedule.terapipe:terapipe",
        conditions=(*ALWAYS, at_least("num_slices", 1)),
        options=("num_slices",),
        holds_form_peak=True,
        form=Form(
            bubble_text="(p-1)(max tF + max tB) over the slices",
            peak_text="m (every slice of every sequence)",
            bubble=lambda n: _filling(n) * n.slice_share,
            peak=lambda n, rank: n.microbatches,
        ),
    ),
    "chimera": ScheduleRow(
        make="moemesh.schedule.generators:chimera",
        conditions=(*ALWAYS, divisible("ranks", 2), divisible("microbatches", "ranks")),
        stages="mirrored",
        form=Form(
            bubble_text="(p-2) tF",
            where_text="tF = tB",
            peak_text="p/2 + 1 + min(r, p-1-r)",
            copies_text="2, gradients summed",
            bubble=lambda n: (n.ranks - 2) * n.times.forward,
            bubble_holds=lambda n: n.times.forward == n.times.backward,
            peak=lambda n, rank: n.ranks / 2 + 1 + min(rank, n.ranks - 1 - rank),
            copies=lambda n, rank: 2,
        ),
    ),
    "zb_h1": ScheduleRow(
        make="moemesh.schedule.generators:zb_h1",
        undeferred="1f1b",
        holds_form_peak=True,
        is_proposed=True,
        form=Form(
            bubble_text="(p-1)(tF+tI-tW)",
            where_text="m >= p, tW <= tF",
            peak_text="(p-r) + r M_w/M_a",
            metric="span",
            bubble=lambda n: (n.ranks - 1) * (n.times.forward + n.times.dgrad - n.times.wgrad),
            bubble_holds=lambda n: n.microbatches >= n.ranks and n.times.wgrad <= n.times.forward,
            peak=lambda n, rank: n.ranks - rank + rank * n.held,
            peak_holds=lambda n: n.microbatches >= n.ranks,
        ),
    ),
    "zb_h2": ScheduleRow(
        make="moemesh.schedule.generators:zb_h2",
        undeferred="1f1b",
        holds_form_peak=True,
        is_proposed=True,
        form=Form(
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
    ),
    "zb_v": ScheduleRow(
        make="moemesh.schedule.generators:zb_v",
        stages="v",
        stages_per_rank=(1, 2),
        undeferred="1f1b",
        is_proposed=True,
        form=Form(
            bubble_text="0",
            where_text="m >= 2p-1, tF = tI = tW",
            peak_text="p",
            metric="span",
            bubble_holds=lambda n: (
                n.microbatches >= 2 * n.ranks - 1
                and n.times.forward == n.times.dgrad == n.times.wgrad
            ),
            peak=lambda n, rank: n.ranks,
            peak_holds=lambda n: n.microbatches >= 2 * n.ranks - 1,
        ),
    ),
    "dualpipe": ScheduleRow(
        make="moemesh.schedule.generators:dualpipe",
        conditions=(
            *ALWAYS,
            divisible("ranks", 2),
            divisible("microbatches", 2),
            at_least("microbatches", 2, "ranks"),
        ),
        stages="mirrored",
        undeferred="chimera",
        has_blocks=True,
        is_proposed=True,
        form=Form(
            bubble_text="(p/2-1)(tFB+tB-3tW)",
            where_text="tF = tI, tW <= tI, tB <= tFB <= tF+tB",
            peak_text="p+1",
            copies_text="2, gradients summed",
            bubble=lambda n: (n.ranks / 2 - 1) * _dualpipe_gap(n),
            bubble_holds=_dualpipe_holds,
            peak=lambda n, rank: n.ranks + 1,
            copies=lambda n, rank: 2,
        ),
    ),
    "dualpipe_v": ScheduleRow(
        make="moemesh.schedule.generators:dualpipe_v",
        conditions=(*ALWAYS, at_least("microbatches", 2, "ranks")),
        stages="v",
        stages_per_rank=(1, 2),
        undeferred="1f1b",
        has_blocks=True,
        is_proposed=True,
        form=Form(
            bubble_text="(p-1)/2 (tFB+tB-3tW)",
            where_text="tF = tI, tW <= tI, tB <= tFB <= tF+tB",
            peak_text="p + 1/2",
            bubble=lambda n: (n.ranks - 1) / 2 * _dualpipe_gap(n),
            bubble_holds=_dualpipe_holds,
            peak=lambda n, rank: n.ranks + 0.5,
        ),
    ),
    "pipedream": ScheduleRow(
        make="moemesh.schedule.generators:pipedream",
        is_asynchronous=True,
        form=Form(
            bubble_text="0 in the steady state",
            where_text="an endless stream",
            peak_text="p-r",
            copies_text="p-r",
            bubble_holds=lambda n: False,
            peak=_in_flight,
            copies=lambda n, rank: min(n.microbatches, n.ranks - rank),
        ),
    ),
    "pipedream_2bw": ScheduleRow(
        make="moemesh.schedule.generators:pipedream_2bw",
        conditions=(
            *ALWAYS,
            at_least("microbatches", 1, "ranks"),
            at_least("window", 1, "ranks"),
            divisible("microbatches", "window"),
        ),
        options=("window",),
        is_asynchronous=True,
        form=Form(
            bubble_text="0 in the steady state",
            where_text="an endless stream",
            peak_text="p-r",
            copies_text="2",
            bubble_holds=lambda n: False,
            peak=_in_flight,
            copies=lambda n, rank: 2,
        ),
    ),
    "ampnet": ScheduleRow(
        make="moemesh.schedule.ampnet:ampnet",
        conditions=(*ALWAYS, at_least("max_in_flight", 1), at_least("window", 1)),
        options=("max_in_flight", "window", "cost", "latency"),
        is_asynchronous=True,
        form=Form(
            bubble_text="depends on K, the microbatches in flight",
            where_text="-",
            peak_text="<= K",
            copies_text="1, inconsistent",
            bubble_holds=lambda n: False,
            peak=lambda n, rank: 0.0,
            peak_holds=lambda n: False,
        ),
    ),
}


def require_numbers(name: str, **numbers: int) -> None:
    """Raise ScheduleConditionError with every condition of the schedule that `numbers` break."""
    require(name, SCHEDULES[name].rules(numbers), **numbers)
