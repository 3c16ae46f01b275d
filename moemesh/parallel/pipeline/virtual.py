"""A virtual clock: simulated time carried in the executor's real messages.

Every message brings the virtual end of its producer; an entry starts when its rank is free and its
inputs are there, and takes what the costs say. The same maxima and sums as the simulator's, in the
same order, so that both agree to the last bit: what is executed is what was simulated.
"""

from __future__ import annotations

from moemesh.schedule.action import Entry, Op, Schedule
from moemesh.schedule.costs import Costs
from moemesh.trace.timeline import Timeline, TimelineRecorder


class VirtualClock:
    """The clock of pipeline rank `rank` under `costs`."""

    def __init__(self, schedule: Schedule, costs: Costs, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self._costs = costs.bind(schedule)
        self._now: float = 0
        self._ends: dict[Op, float] = {}
        self._recorder = TimelineRecorder(rank, source="virtual", unit="ticks")

    def carried(self, producer: Op, end: float) -> None:
        """A message of `producer` has arrived."""
        self._ends[producer] = end

    def run(self, entry: Entry) -> None:
        """All inputs of `entry` are here: let its time pass."""
        start = self._now
        for op in entry:
            for needed in self.schedule.dependencies(op):
                ready = self._ends[needed]
                if self.schedule.rank_of(needed) != self.rank:
                    ready = ready + self._costs.message(needed, op)
                start = max(start, ready)
        end = start + self._costs.entry(entry)
        self._ends.update(dict.fromkeys(entry, end))
        record(self._recorder, self.schedule, entry, start, end, wait=start - self._now)
        self._now = end

    def end_of(self, op: Op) -> float:
        """The virtual time at which `op` ended."""
        return self._ends[op]

    def timeline(self) -> Timeline:
        """The virtual timeline of this rank."""
        return self._recorder.timeline()


def record(
    recorder: TimelineRecorder,
    schedule: Schedule,
    entry: Entry,
    start: float,
    end: float,
    wait: float,
) -> None:
    """Enter the operations of `entry`, which ran from `start` to `end` after a `wait`."""
    for op in entry:
        recorder.add(
            name=str(op),
            start=start,
            end=end,
            wait=wait,
            kind=op.kind,
            stage=op.stage,
            microbatch=schedule.sample(op),
            pipe=op.pipe,
            slice=op.slice,
        )
