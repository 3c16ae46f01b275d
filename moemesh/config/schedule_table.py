"""Schedules by name, one row each: generator, kind, options, conditions, closed formulas.

A schedule is a generator and a row of :data:`SCHEDULES`. Configuration, planner, `moemesh schedule`
and its documentation read the row.

Symbols of the formulas: p ranks, m microbatches, v chunks per rank, r a rank from 0; tF, tI, tW the
times of forward and of the two halves of the backward for one microbatch on one rank's whole share
of layers, tB = tI + tW, tFB an overlapped block; M_a the activations of one microbatch on that
share, M_w the part of them that a weight gradient still needs after the input gradient; s the share
of a sequence that a slice is. Stages are alike and messages take no time. The text of a formula is
what is printed and what is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Literal

from moemesh.config.conditions import (
    ALWAYS,
    Condition,
    at_least,
    divisible,
    one_of,
    require,
)

#: Kind of bubble. ``span``: longest span of a rank minus its work; ``rank_idle``: makespan minus
#: the work of a rank.
Metric = Literal["span", "rank_idle"]


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """Times of one microbatch on one rank's share of layers. `block`: time of an overlapped forward
    and backward; None: the sum of both."""

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
    """Sizes and times for formulas; `held`: M_w / M_a, `slice_share`: share of a slice."""

    ranks: int
    microbatches: int
    chunks: int
    times: MicrobatchTimes
    held: float = 1.0
    slice_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    """Everything about a schedule that code outside of its generator reads."""

    #: "module:function" of the generator: numbers of ranks and microbatches, then its options.
    make: str
    #: Bubble, and the condition under which it is exact; `metric` is how it is measured.
    bubble: str
    bubble_where: str = "always"
    metric: Metric = "rank_idle"
    #: Activations at the peak of rank r, in M_a, and the condition under which they are exact.
    peak: str
    peak_where: str = "always"
    #: Copies of the weights on rank r.
    copies: str = "1"
    #: Conditions on the numbers of ranks, microbatches, stages and options.
    conditions: Sequence[Condition] = ALWAYS
    #: Options of the generator, named as in :func:`moemesh.schedule.build.build`.
    options: tuple[str, ...] = ()
    #: Legal numbers of stages a rank, empty if all are legal. 1, the default, is always legal.
    stages_per_rank: tuple[int, ...] = (1,)
    #: Stages on the ranks: one after the other, in a V with two on each rank, or two pipes from
    #: both ends, so that two ranks hold every stage and sum its gradients.
    stages: Literal["line", "v", "mirrored"] = "line"
    #: Whether weights are updated while microbatches are in flight: the results of training differ.
    is_asynchronous: bool = False
    #: The nearest schedule without deferred weight gradients; empty: this one defers none.
    undeferred: str = ""
    #: Whether a forward and a backward alternate in one block.
    has_blocks: bool = False
    #: Whether a rank holds at most `peak` microbatches at any moment; if not, the planner replays
    #: its operations to count them.
    holds_form_peak: bool = False
    #: Whether `moemesh plan` proposes it. GPipe takes as long as 1F1B and holds more; the bubble of
    #: Chimera is larger than that of zero-bubble schedules; TeraPipe has no time model in columns;
    #: asynchronous schedules change the results.
    is_proposed: bool = False

    def rules(self, numbers: Mapping[str, int]) -> list[Condition]:
        """The conditions that these numbers decide."""
        rules = [rule for rule in self.conditions if numbers.keys() >= set(rule.names)]
        if self.stages_per_rank and "stages_per_rank" in numbers:
            rules.append(one_of("stages_per_rank", *self.stages_per_rank))
        return rules


#: Schedules by name, in the order of messages and tables.
SCHEDULES: dict[str, ScheduleRow] = {
    "1f1b": ScheduleRow(
        make="moemesh.schedule.generators:one_f_one_b",
        holds_form_peak=True,
        is_proposed=True,
        bubble="(p-1)(tF+tB)",
        peak="min(m, p-r)",
    ),
    "gpipe": ScheduleRow(
        make="moemesh.schedule.generators:gpipe",
        holds_form_peak=True,
        bubble="(p-1)(tF+tB)",
        peak="m",
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
        bubble="(p-1)(tF+tB)/v",
        peak="min(2(p-1-r)+(v-1)p+1, m v)/v",
    ),
    "terapipe": ScheduleRow(
        make="moemesh.schedule.terapipe:terapipe",
        conditions=(*ALWAYS, at_least("num_slices", 1)),
        options=("num_slices",),
        holds_form_peak=True,
        bubble="(p-1)(tF+tB) s, s the share of a slice",
        peak="m, every slice of every sequence",
    ),
    "chimera": ScheduleRow(
        make="moemesh.schedule.generators:chimera",
        conditions=(*ALWAYS, divisible("ranks", 2), divisible("microbatches", "ranks")),
        stages="mirrored",
        bubble="(p-2) tF",
        bubble_where="tF = tB",
        peak="p/2 + 1 + min(r, p-1-r)",
        copies="2, gradients summed",
    ),
    "zb_h1": ScheduleRow(
        make="moemesh.schedule.generators:zb_h1",
        undeferred="1f1b",
        holds_form_peak=True,
        is_proposed=True,
        bubble="(p-1)(tF+tI-tW)",
        bubble_where="m >= p, tW <= tF",
        metric="span",
        peak="(p-r) + r M_w/M_a",
        peak_where="m >= p",
    ),
    "zb_h2": ScheduleRow(
        make="moemesh.schedule.generators:zb_h2",
        undeferred="1f1b",
        holds_form_peak=True,
        is_proposed=True,
        bubble="(p-1)(tF+tI-2tW)",
        bubble_where="m >= 2p-1, tW <= min(tF, tI)",
        metric="span",
        peak="(2p-2r-1) + 2r M_w/M_a",
        peak_where="m >= 2p-1",
    ),
    "zb_v": ScheduleRow(
        make="moemesh.schedule.generators:zb_v",
        stages="v",
        stages_per_rank=(1, 2),
        undeferred="1f1b",
        is_proposed=True,
        bubble="0",
        bubble_where="m >= 2p-1, tF = tI = tW",
        metric="span",
        peak="p",
        peak_where="m >= 2p-1",
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
        bubble="(p/2-1)(tFB+tB-3tW)",
        bubble_where="tF = tI, tW <= tI, tB <= tFB <= tF+tB",
        peak="p+1",
        copies="2, gradients summed",
    ),
    "dualpipe_v": ScheduleRow(
        make="moemesh.schedule.generators:dualpipe_v",
        conditions=(*ALWAYS, at_least("microbatches", 2, "ranks")),
        stages="v",
        stages_per_rank=(1, 2),
        undeferred="1f1b",
        has_blocks=True,
        is_proposed=True,
        bubble="(p-1)/2 (tFB+tB-3tW)",
        bubble_where="tF = tI, tW <= tI, tB <= tFB <= tF+tB",
        peak="p + 1/2",
    ),
    "pipedream": ScheduleRow(
        make="moemesh.schedule.generators:pipedream",
        is_asynchronous=True,
        bubble="0 in the steady state",
        bubble_where="an endless stream",
        peak="min(m, p-r)",
        copies="min(m, p-r)",
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
        bubble="0 in the steady state",
        bubble_where="an endless stream",
        peak="min(m, p-r)",
        copies="2",
    ),
    "ampnet": ScheduleRow(
        make="moemesh.schedule.ampnet:ampnet",
        conditions=(*ALWAYS, at_least("max_in_flight", 1), at_least("window", 1)),
        options=("max_in_flight", "window", "cost", "latency"),
        is_asynchronous=True,
        bubble="depends on K, the microbatches in flight",
        bubble_where="-",
        peak="<= K",
        peak_where="never",
        copies="1, inconsistent",
    ),
}
#: Names of the rows that every rank has; a program may add others.
PACKAGED = frozenset(SCHEDULES)


def require_numbers(name: str, **numbers: int) -> None:
    """Raise ScheduleConditionError with every condition of the schedule that `numbers` break."""
    require(name, SCHEDULES[name].rules(numbers), **numbers)


@cache
def _compiled(formula: str) -> CodeType:
    """A formula as Python, with a sign for implied products, as in "2 p" and "(p-1)(tF+tB)". Text
    after a comma is a remark."""
    formula = _parts(formula)[0].replace("M_w/M_a", "held").replace(" = ", " == ")
    products = r"(?<=\)) *(?=[\w(])|(?<=\d) *(?=[A-Za-z(])|(?<=[A-Za-z]) +(?=[A-Za-z(])"
    return compile(re.sub(products, "*", formula), formula, "eval")


def _parts(text: str) -> list[str]:
    """The text between commas outside of brackets."""
    parts: list[str] = []
    for piece in text.split(", "):
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += f", {piece}"
        else:
            parts.append(piece)
    return parts


def value_of(formula: str, numbers: FormNumbers, rank: int = 0) -> float:
    """The value of a row's formula for these numbers."""
    times = numbers.times
    symbols = {
        "p": numbers.ranks,
        "m": numbers.microbatches,
        "v": numbers.chunks,
        "r": rank,
        "s": numbers.slice_share,
        "tF": times.forward,
        "tI": times.dgrad,
        "tW": times.wgrad,
        "tB": times.backward,
        "tFB": times.overlapped,
        "held": numbers.held,
    }
    return eval(_compiled(formula), {"min": min, "always": True, "never": False}, symbols)


def holds(conditions: str, numbers: FormNumbers) -> bool:
    """Whether all conditions of a row, with commas between, hold at these numbers."""
    return all(value_of(condition, numbers) for condition in _parts(conditions))
