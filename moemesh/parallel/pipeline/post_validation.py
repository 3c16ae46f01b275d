"""Post-validation: the global gradient norm travels along the pipeline instead of stopping it.

Global clipping and the check for infinities need the norm over all stages, which no rank has when
it is ready to update. A reduction over all stages would be a barrier in every step and cost what a
zero-bubble schedule gains. Instead (P. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, on
optimizer synchronisation) each rank adds its part to the sum of the previous ranks, and decides by
this partial sum: a sum of squares only grows, so a rank whose partial norm already exceeds the clip
value defers its update. The whole sum returns during the next warm-up, which consists of forwards
alone. If the whole step is to be clipped or skipped, ranks that have updated undo that, all update
by the whole sum (or skip), undo that warm-up, and repeat it.

| step k of rank r | message |
|---|---|
| end | receives the sum of ranks 0 to r-1 from r-1, sends that of 0 to r to r+1 |
| after the warm-up of step k+1 | receives the whole sum from r+1, sends it to r-1 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.comm.point_to_point import Channels
from moemesh.model.batch import Batch
from moemesh.parallel.pipeline.executor import Executor
from moemesh.parallel.pipeline.messenger import OrderedMessenger
from moemesh.parallel.pipeline.pipeline import Pipeline
from moemesh.parallel.pipeline.program import Objective, Program
from moemesh.schedule.action import Schedule
from moemesh.schedule.check import check
from moemesh.trace.timeline import TimelineRecorder

_LEDGER = {"phase": "optimizer", "caller": "validation"}


class Chain:
    """Sum of one vector a step over the ranks of ``pp``: partial sums go from the first rank to the
    last, the whole sum returns.

    Ranks add in their order, and every rank gets the same bits. Vectors are float64 on the host. In
    each step every rank calls :meth:`pass_on`, then :meth:`answer`. All ranks of the mesh construct
    it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._rank, self._last = mesh["pp"].index, mesh["pp"].size - 1
        neighbours = [(rank, rank + 1) for rank in range(self._last)]
        pairs = neighbours + [(after, before) for before, after in neighbours]
        self._channels = Channels(mesh, "pp", pairs, on_host=True)
        self._answer = torch.empty(0, dtype=torch.float64)
        #: Pending answer: its receive, the send of the partial sum, and that sum, which must live
        #: until it is sent.
        self._pending: tuple[dist.Work, dist.Work, Tensor] | None = None

    def pass_on(self, own: Tensor) -> Tensor:
        """Add `own` to the sum of the previous ranks, and pass it on; returns the sum over ranks 0
        to this one. Waits for the previous rank."""
        total = own
        if self._rank > 0:
            before = torch.empty_like(own)
            self._channels.receive(before, self._rank - 1, **_LEDGER).wait()
            total = before + own
        if self._rank < self._last:
            self._answer = torch.empty_like(own)
            receive = self._channels.receive(self._answer, self._rank + 1, **_LEDGER)
            send = self._channels.send(total, self._rank + 1, **_LEDGER)
            self._pending = receive, send, total
        else:
            self._answer = total
            self._send_back()
        return total

    def answer(self) -> Tensor:
        """The sum over all ranks; waits for it."""
        if self._pending is not None:
            receive, send, _ = self._pending
            receive.wait()
            send.wait()
            self._pending = None
            self._send_back()
        return self._answer

    def _send_back(self) -> None:
        # The previous rank has been ready to receive since it passed on its sum: this never waits.
        if self._rank > 0:
            self._channels.send(self._answer, self._rank - 1, **_LEDGER).wait()


class ValidatedExecutor:
    """An executor whose warm-up, the entries before a rank's first backward, can be undone.

    Until the warm-up is confirmed, a rank receives only messages that other ranks send in their
    warm-ups. To undo, all ranks receive and drop the remaining ones, so that both ends of every
    queue have counted the same messages. Raises ScheduleError for a schedule whose warm-ups need
    other messages.
    """

    def __init__(self, schedule: Schedule, channels: Channels) -> None:
        check(schedule, post_validation=True)
        rank, self._confirmed = channels.axis.index, True
        warm_ups = [
            list(takewhile(lambda entry: all(op.kind == "F" for op in entry), order))
            for order in schedule.orders
        ]
        early = {op for warm_up in warm_ups for entry in warm_up for op in entry}
        self._warm_up = warm_ups[rank]
        self._rest = schedule.orders[rank][len(self._warm_up) :]
        self._messenger = OrderedMessenger(
            schedule, channels, may_receive=lambda op: self._confirmed or op in early
        )
        self._executor = Executor(schedule, channels, self._messenger)

    def warm_up(self, program: Program, recorder: TimelineRecorder) -> None:
        """The first part of a step. :meth:`take_back` or :meth:`finish` comes next."""
        self._confirmed = False
        self._executor.run_entries(program, self._warm_up, recorder)

    def take_back(self, program: Program) -> None:
        """Undo the warm-up, and drop the messages of other ranks' warm-ups; all ranks call."""
        self._messenger.drop(program)
        self._executor.forget()

    def finish(self, program: Program, recorder: TimelineRecorder) -> None:
        """The rest of the step."""
        self._confirmed = True
        self._executor.run_entries(program, self._rest, recorder)
        self._executor.finish()


class ValidatedPipeline:
    """The steps of a pipeline, each of which starts before the previous one is confirmed."""

    def __init__(self, pipeline: Pipeline, mesh: Mesh) -> None:
        """All ranks of the mesh call this."""
        self._pipeline = pipeline
        self._executor = ValidatedExecutor(pipeline.schedule, pipeline.channels)
        self.chain = Chain(mesh)

    def run(
        self,
        batches: Sequence[Batch],
        begin: Callable[[], Objective],
        recorder: TimelineRecorder,
        confirm: Callable[[], bool],
    ) -> None:
        """Same as :meth:`Pipeline.run`, but the last step's gradients stay until `confirm`.

        `confirm` is called after the warm-up. It returns True if the warm-up ran with the right
        weights; else it corrects the weights and returns False, and the warm-up is repeated.
        `begin` returns the objective of a warm-up; results of an earlier objective are discarded.
        """
        pipeline, executor = self._pipeline, self._executor
        start = recorder.clock()
        program = pipeline.program(batches, begin())
        executor.warm_up(program, recorder)
        if not confirm():
            executor.take_back(program)
            recorder.replace_since(start, "taken back", kind="redo")
            program = pipeline.program(batches, begin())
            executor.warm_up(program, recorder)
        pipeline.reducer.begin()
        executor.finish(program, recorder)
