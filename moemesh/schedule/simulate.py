"""Simulation of a schedule: its costs become starts, ends and bubbles.

Orders are fixed, so simulation is a longest path::

    start(e) = max(end of the rank's entry before, end(d) + message(d -> e) for what e waits for)
    end(e)   = start(e) + cost(e)

Two bubble metrics, never a bare "bubble". With ``span_r`` = last end minus first start of rank r
and ``busy_r`` = the sum of its costs: the *span bubble* ``max span_r - max busy_r`` leaves out the
stagger between ranks (it presumes that a rank may start the next step before others finish; the
metric of the Zero Bubble papers, arXiv:2401.10241), *rank idle* ``max(makespan - busy_r)`` counts
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from moemesh.config.errors import check_kind, public
from moemesh.config.shown import Shown
from moemesh.schedule.action import Schedule, successor
from moemesh.schedule.costs import BoundCosts, Costs
from moemesh.schedule.held_activations import Amount, HeldActivations, peak_memory
from moemesh.schedule.program import LoweredProgram, lower
from moemesh.schedule.text import digest
from moemesh.trace.timeline import Timeline, Unit, WorkRecord

#: ``latency`` delays the edge and occupies no rank. ``blocking`` also keeps the sender from its
#: next entry for that time. ``link`` lets the messages of an ordered pair of ranks go one after
#: the other, each taking its size over the bandwidth, and the latency on top.
Transport = Literal["latency", "blocking", "link"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation(Shown):
    """Start and end of every entry, ``starts[rank][index]``, and what follows from them. `busy` is
    the sum of each rank's costs, `peaks` what it holds at most. `relaxed` marks a timeline that
    leaves out wrap-around edges and cannot be executed as drawn."""

    shown = ("schedule", "makespan", "bubble_rate", "rank_idle", "peak_activation", "unit")

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    peaks: tuple[HeldActivations, ...]
    relaxed: bool
    unit: Unit

    @property
    def makespan(self) -> float:
        """Time from 0 until the last end on any rank."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def spans(self) -> tuple[float, ...]:
        """Last end minus first start of each rank."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(ends[-1] - starts[0] if ends else 0 for starts, ends in pairs)

    @property
    def span(self) -> float:
        """The largest of :attr:`spans`."""
        return max(self.spans, default=0)

    @property
    def span_bubble(self) -> float:
        """``max span_r - max busy_r``."""
        return self.span - max(self.busy, default=0)

    @property
    def bubble_rate(self) -> float:
        """Span bubble over span; 0.0 when nothing takes time."""
        return self.span_bubble / self.span if self.span else 0.0

    @property
    def rank_idle(self) -> float:
        """``max (makespan - busy_r)``: the synchronous metric."""
        makespan = self.makespan
        return max((makespan - busy for busy in self.busy), default=0)

    @property
    def peak_activation(self) -> tuple[float, ...]:
        """Most activation each rank holds, in the unit of M_a."""
        return tuple(peak.activation for peak in self.peaks)

    @cached_property
    def timeline(self) -> Timeline:
        """Every operation as a record; a block's operations share start and end."""
        records: list[WorkRecord] = []
        for rank, order in enumerate(self.schedule.orders):
            free = 0.0
            times = zip(order, self.starts[rank], self.ends[rank], strict=True)
            for entry, start, end in times:
                wait = max(start - free, 0)
                for op in entry:
                    times_of_op = {"start": float(start), "end": float(end), "wait": float(wait)}
                    records.append(
                        WorkRecord(rank=rank, name=str(op), **times_of_op, **op._asdict())
                    )
                    wait = 0.0  # A block waits once.
                free = end
        return Timeline(
            ranks=tuple(range(len(self.schedule.orders))),
            records=tuple(records),
            source="simulated",
            unit=self.unit,
            digest=digest(self.schedule),
        )


@public
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    transport: Transport = "latency",
    relax_wrap: bool = False,
    activation: Amount = 1,
    weight_memory: Amount = 1,
    unit: Unit = "ticks",
) -> Simulation:
    """Start and end of every entry. The default costs are one tick for F, I and W, none for
    messages.

    `relax_wrap` enforces the wrap-around edge of the looped placement (last rank to first, and
    back) only for the first microbatch of each group of num_ranks, as some published numbers do. No
    run can keep such times. Raises :class:`moemesh.schedule.program.Deadlock` (a ValueError)
    showing the entry at which every rank waits, and ValueError for costs that do not fit the
    schedule.
    """
    check_kind("schedule", schedule, Schedule, "schedules.zb_h1(4, 8), or another")
    program = lower(schedule, relax_wrap=relax_wrap)
    bound = (costs or Costs()).bind(schedule)
    starts, ends, seconds = entry_times(program, bound, transport)
    cuts = list(pairwise(program.first))
    busy: list[float] = []
    for a, b in cuts:
        # fsum rounds once; a sum of integers stays an integer.
        rounds = any(isinstance(cost, float) for cost in seconds[a:b])
        busy.append(math.fsum(seconds[a:b]) if rounds else sum(seconds[a:b]))
    return Simulation(
        schedule=schedule,
        starts=tuple(tuple(starts[a:b]) for a, b in cuts),
        ends=tuple(tuple(ends[a:b]) for a, b in cuts),
        busy=tuple(busy),
        peaks=peak_memory(schedule, activation=activation, weight_memory=weight_memory),
        relaxed=relax_wrap,
        unit=unit,
    )


def entry_times(
    program: LoweredProgram, bound: BoundCosts, transport: Transport
) -> tuple[list[float], list[float], list[float]]:
    """Starts, ends and costs of ``program.entries``, in their order."""
    entries, rank_of, num_ranks = program.entries, program.rank, len(program.schedule.orders)
    if bound.is_by_stage:  # entries that are alike cost the same
        example_costs = [bound.entry(entry) for entry in program.examples]
        costs = [example_costs[kind] for kind in program.alike]
    else:
        costs = [bound.entry(entry) for entry in entries]
    delays = None if transport == "link" or callable(bound.delays) else bound.delays
    link_free: dict[tuple[int, int], float] = {}
    starts: list[float] = [0] * len(entries)
    ends: list[float] = [0] * len(entries)
    clock: list[float] = [0] * num_ranks
    ready: list[float] = [0] * program.num_slots
    for entry, awaited, sent in program.walk:
        rank = rank_of[entry]
        start = clock[rank]
        for slot in awaited:
            if ready[slot] > start:
                start = ready[slot]
        starts[entry] = start
        ends[entry] = free = end = start + costs[entry]
        for slot, boundary, place in sent:
            if delays is not None:
                delay = delays[boundary]
            else:
                producer = entries[entry][place]
                consumer = successor(program.schedule, producer)
                assert consumer is not None
                delay = bound.message(producer, consumer)
                if transport == "link":
                    pair = rank, program.schedule.rank_of(consumer)
                    carried = max(end, link_free.get(pair, 0)) + bound.transfer(producer, consumer)
                    link_free[pair] = carried
                    ready[slot] = carried + delay
                    continue
            if transport == "latency":
                ready[slot] = end + delay
            else:
                # The outputs of a block leave one after the other.
                ready[slot] = free = free + delay
        clock[rank] = free
    return starts, ends, costs
