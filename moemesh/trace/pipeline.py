"""Pipeline figures from a timeline: messages, activations held, deferred weight gradients.

All figures are computed from the records only, so simulated, virtual and measured timelines are
treated alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from moemesh.trace.timeline import Timeline, WorkRecord

#: Step function: (time, value from that time on).
Steps = Sequence[tuple[float, float]]


class PipelineMessage(NamedTuple):
    """A message from the record that produces it to the record that consumes it."""

    producer: WorkRecord
    consumer: WorkRecord


def flows(timeline: Timeline) -> tuple[PipelineMessage, ...]:
    """The messages between ranks, grouped by operation, in the order of the first producers.

    The forward of a stage feeds that of the next one, a backward (``B`` or ``I``) that of the
    previous stage. If several ranks run one operation (data or tensor parallel peers), they are
    paired in order; operations that are missing on one side are left out.
    """
    # Key: direction, stage, and identity of the microbatch.
    by_operation: defaultdict[tuple[bool, int, object], list[WorkRecord]] = defaultdict(list)
    for record in timeline.records:
        if record.stage is not None and record.kind in ("F", "B", "I"):
            piece = (record.step, record.microbatch, record.pipe, record.slice)
            by_operation[record.kind == "F", record.stage, piece].append(record)
    pairs: list[PipelineMessage] = []
    for (forward, stage, piece), producers in by_operation.items():
        consumers = by_operation.get((forward, stage + (1 if forward else -1), piece), [])
        if len(consumers) == len(producers):
            pairs += map(PipelineMessage, producers, consumers)
    return tuple(flow for flow in pairs if flow.producer.rank != flow.consumer.rank)


def places(records: Iterable[WorkRecord]) -> dict[tuple[int, int], int]:
    """(pipe, stage) of one rank's records -> index of the rank's chunk, from 0.

    Chunks of a pipe are ordered by stage; the second pipe follows the first.
    """
    stages = {(record.pipe, record.stage) for record in records if record.stage is not None}
    return {place: index for index, place in enumerate(sorted(stages))}


def blocks(records: Sequence[WorkRecord]) -> list[list[WorkRecord]]:
    """Records of one rank, grouped by equal start and end, in the timeline's order."""
    return [list(group) for _, group in groupby(records, key=lambda r: (r.start, r.end))]


def activations(timeline: Timeline, *, held: float = 1.0) -> dict[int, Steps]:
    """Activations held by each rank over time, in microbatches of its whole share of layers.

    A forward adds one at its start, a full backward releases it at its end. ``I`` releases all but
    the share `held`, which ``W`` releases. A pass of one of n chunks of a pipe counts 1/n, and so
    does one of n slices. Ranks without pipeline records are left out.
    """
    changes = {"F": (1.0, 0.0), "B": (0.0, -1.0), "I": (0.0, held - 1.0), "W": (0.0, -held)}
    return _summed(timeline, changes, whole=True)


def backlog(timeline: Timeline) -> dict[int, Steps]:
    """Deferred weight gradients of each rank over time; ranks without split backwards are left out.

    Raised by one at the end of each ``I``, lowered at the end of each ``W``.
    """
    changes = {"I": (0.0, 1.0), "W": (0.0, -1.0)}
    counts = _summed(timeline, changes, whole=False)
    return {rank: steps for rank, steps in counts.items() if any(value for _, value in steps)}


def _summed(
    timeline: Timeline, changes: Mapping[str, tuple[float, float]], *, whole: bool
) -> dict[int, Steps]:
    """Rank -> the running sum of `changes` (kind -> change at a record's start, at its end). The
    unit is the rank's share of all layers if `whole`, else a chunk or slice."""
    sums: dict[int, Steps] = {}
    for rank, records in timeline.by_rank().items():
        ops = [r for r in records if r.kind in changes and r.stage is not None]
        if not ops:
            continue
        # A record of length 0 comes before the next one, which starts at the same time.
        ops.sort(key=lambda record: (record.start, record.end))
        stages: defaultdict[int, set[int | None]] = defaultdict(set)
        for record in ops:
            stages[record.pipe].add(record.stage)
        slices = len({record.slice for record in ops})
        parts = max(map(len, stages.values())) * slices if whole else 1
        total, steps = 0.0, [(timeline.start, 0.0)]
        for block in blocks(ops):
            for time, side in ((block[0].start, 0), (block[0].end, 1)):
                change = sum(changes[record.kind][side] for record in block)
                if change:
                    total += change
                    # Round, so that sums of fractions such as thirds return to 0.
                    steps.append((time, round(total / parts, 12)))
        sums[rank] = steps
    return sums
