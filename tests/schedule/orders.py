"""Schedules that no generator makes: random orders that can run, for any placement."""

from __future__ import annotations

import random
from dataclasses import replace

from moemesh.schedule.action import Entry, Op, Schedule
from moemesh.schedule.check import ScheduleError, check


def random_schedule(
    placement: tuple[tuple[int, ...], ...],
    num_microbatches: tuple[int, ...],
    seed: int,
    *,
    num_slices: int = 1,
) -> Schedule:
    """Operations in a random order in which each finds its inputs; some backwards are split, some
    forwards share a block with a backward. The first of several tries that passes the checker."""
    source = random.Random(seed)
    for _ in range(500):
        schedule = _one(placement, num_microbatches, num_slices, source)
        try:
            check(schedule)
        except ScheduleError:  # rendezvous sends may still block each other
            continue
        return schedule
    raise AssertionError(f"no order of seed {seed} can run")


def _one(
    placement: tuple[tuple[int, ...], ...],
    counts: tuple[int, ...],
    num_slices: int,
    source: random.Random,
) -> Schedule:
    stages, ranks = len(placement[0]), 1 + max(max(ranks) for ranks in placement)
    keys = [
        (stage, microbatch, pipe, part)
        for pipe, count in enumerate(counts)
        for stage in range(stages)
        for microbatch in range(count)
        for part in range(num_slices)
    ]
    ops = [Op("F", *key) for key in keys]
    for key in keys:
        split = source.random() < 0.5
        ops += [Op("I", *key), Op("W", *key)] if split else [Op("B", *key)]
    shape = Schedule(
        name=f"random {num_slices}",
        num_ranks=ranks,
        num_stages=stages,
        placement=placement,
        orders=(tuple((op,) for op in ops), *((),) * (ranks - 1)),
        num_microbatches=counts,
        num_slices=num_slices,
    )
    orders: list[list[Entry]] = [[] for _ in range(ranks)]
    done: set[Op] = set()
    while len(done) < len(ops):
        ready = [op for op in ops if op not in done and done.issuperset(shape.dependencies(op))]
        op = source.choice(ready)
        entry: Entry = (op,)
        partner = [
            other
            for other in ready
            if {op.kind, other.kind} == {"F", "B"} and shape.rank_of(other) == shape.rank_of(op)
        ]
        if partner and source.random() < 0.5:
            entry = (op, source.choice(partner))
        orders[shape.rank_of(op)].append(entry)
        done.update(entry)
    return replace(shape, orders=tuple(map(tuple, orders)))
