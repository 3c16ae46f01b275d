"""The simulated timeline beside a measured one: same operations, same durations, ideal waiting.

Every operation is given the median time that its kind took on its stage; what then differs from the
measurement is what the schedule does not explain: messages, uneven microbatches, a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from moemesh.schedule.action import Entry, Op, Schedule
from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate
from moemesh.trace.timeline import Record, Timeline


def measured_costs(records: Sequence[Record], schedule: Schedule) -> Costs:
    """Median seconds by kind and stage; of an overlapped block by its two stages.

    A kind that a stage has only run inside blocks is taken as half of them.
    """
    moments: dict[tuple[int, float, float], list[Record]] = {}
    for record in records:
        moments.setdefault((record.rank, record.start, record.end), []).append(record)
    alone: dict[tuple[str, int], list[float]] = {}
    blocks: dict[tuple[int, ...], list[float]] = {}
    for (_, start, end), block in moments.items():
        stages = [(record.kind, record.stage or 0) for record in block]
        if len(block) == 1:
            alone.setdefault(stages[0], []).append(end - start)
            continue
        blocks.setdefault(tuple(stage for _, stage in sorted(stages)), []).append(end - start)
        for key in stages:
            alone.setdefault(key, [])
    halves = [time / 2 for times in blocks.values() for time in times]
    table = {key: median(times or halves) for key, times in alone.items()}

    def of(op: Op) -> float:
        return table.get((op.kind, op.stage), 0.0)

    def of_block(entry: Entry) -> float:
        stages = tuple(op.stage for op in sorted(entry))
        return median(blocks[stages]) if stages in blocks else sum(map(of, entry))

    return Costs(
        forward=of, input_gradient=of, weight_gradient=of, backward=of, overlapped=of_block
    )


def simulated(schedule: Schedule, measured: Timeline, ranks: Sequence[int]) -> Timeline:
    """What `schedule` takes with the durations of one pipeline, whose ranks are `ranks`.

    Of a synchronous schedule the last step counts, of a stream all steps that were kept.
    """
    kept = measured if schedule.update is not None else measured.last_step()
    own = [record for record in kept.records if record.rank in ranks and record.kind in "FBIW"]
    costs = measured_costs([record for record in own if record.kind], schedule)
    ideal = simulate(schedule, costs, unit="seconds").timeline
    records = tuple(replace(record, rank=ranks[record.rank]) for record in ideal.records)
    return replace(ideal, ranks=tuple(ranks), records=records)
