"""Simulate the schedule of a run with its measured operation times, for comparison.

Every operation takes the median time of its kind on its stage. The remaining difference from the
measurement is due to messages, uneven microbatches and a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moemesh.schedule.action import Schedule
from moemesh.schedule.simulate import simulate
from moemesh.schedule.stage_times import measured_costs
from moemesh.trace.timeline import Timeline


def simulated(schedule: Schedule, measured: Timeline, ranks: Sequence[int]) -> Timeline:
    """The simulated timeline of `schedule` on one pipeline of the run, whose ranks are `ranks`.

    The times are those of the last step or, of a stream, of all steps that the timeline has kept.
    """
    kept = measured if schedule.update is not None else measured.last_step()
    own = [record for record in kept.records if record.rank in ranks and record.kind in "FBIW"]
    costs = measured_costs([record for record in own if record.kind])
    ideal = simulate(schedule, costs, unit="seconds").timeline
    records = tuple(replace(record, rank=ranks[record.rank]) for record in ideal.records)
    return replace(ideal, ranks=tuple(ranks), records=records)
