"""Asynchronous training: segments of a stream that is not drained inside.

The pipeline drains only where a run needs one state of all stages: at a validation, a checkpoint,
the end, a request to stop, and after :data:`SEGMENT_OPERATIONS` operations. Between drains stages
update by themselves, by the schedule's rule. Each clips the gradient of an update by the norm of
its own parameters (a norm over all stages would be a barrier): with `train.clip` = c and p stages
an update's whole norm is at most sqrt(p) c. A row of metrics is about the microbatches of one step,
with the losses of their forwards; `grad_norm` is the root of the sum over stages of their mean
squared norm over the step's updates.

Where it drains is part of what is computed: after a drain the first microbatches find fresh
weights. A run that is stopped and resumed therefore differs from one that is not, by one drain.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from moemesh.comm.collectives import gather_json
from moemesh.config.run import RunConfig
from moemesh.parallel.pipeline.asynchronous import AsynchronousProgram, StreamExecutor
from moemesh.parallel.pipeline.message_driven import MessageDrivenExecutor
from moemesh.parallel.pipeline.versions import WeightVersions
from moemesh.schedule.action import Schedule
from moemesh.schedule.ampnet import ampnet
from moemesh.schedule.pipedream import pipedream
from moemesh.schedule.pipedream_2bw import pipedream_2bw
from moemesh.schedule.text import digest
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.recorded_orders import check_recorded, recorded_segment, write_recorded
from moemesh.train.session import Report, Session
from moemesh.train.step import FinishedStep, StepResult
from moemesh.train.stream import KEPT_STEPS, StreamRecorder, TrainingStream

#: Operations of all ranks in one segment, at most: its lists stay small beside the weights.
SEGMENT_OPERATIONS = 50_000


class StreamedSteps:
    """Segments of a stream, one after the other; each ends with the pipeline drained."""

    def __init__(self, session: Session) -> None:
        self._session = session
        train = session.config.train
        kept = min(train.steps - session.done, KEPT_STEPS)
        session.artifacts.drawn = stream_schedule(session.config, kept)
        self._stopped = False

    def advance(self, first: int, report: Report) -> FinishedStep:
        session, plan = self._session, self._session.config.plan
        schedule, last = self._segment(first)
        assert schedule.update is not None
        recorder = StreamRecorder(
            session.mesh.rank, first=first, num_microbatches=plan.microbatches
        )

        def finished(step: int, result: StepResult, seconds: float) -> FinishedStep:
            # Stages have updated by themselves: now all steps since can be taken back, not one.
            result = session.guard.judge(step, result)
            return FinishedStep(number=step, result=result, recorder=recorder, seconds=seconds)

        stream = TrainingStream(
            session.parallel,
            session.optimizer,
            session.config.train,
            num_microbatches=plan.microbatches,
            window=schedule.update.window,
            reach=max(plan.pp, int(schedule.parameters.get("max_in_flight", 0))),
            first=first,
            last=last,
            batches=session.batches,
            stop_requested=lambda: session.stop.requested,
            on_step=lambda *step: report(finished(*step)),
        )
        with ExitStack() as first_window:
            first_window.enter_context(session.artifacts.first_step_memory())
            self._run(schedule, _Measured(stream, first_window), recorder)
        *earlier, newest = stream.drain()
        for step in earlier:
            report(finished(*step))
        self._stopped = stream.stopped
        return finished(*newest)

    def is_stopping(self) -> bool:
        return self._session.any_rank(self._stopped or self._session.stop.requested)

    def _segment(self, first: int) -> tuple[Schedule, int]:
        """The schedule from step `first` to the next drain, and that step."""
        config = self._session.config
        if config.plan.replay is not None:
            schedule, last = recorded_segment(Path(config.plan.replay), first)
            check_recorded(schedule, config, first, last)
        else:
            last = segment_end(config, first)
            if (after := self._session.stop.after) is not None and after >= first:
                last = min(last, after)
            schedule = stream_schedule(config, last - first + 1)
        digests = gather_json([digest(schedule), last], self._session.mesh.control)
        assert all(other == digests[0] for other in digests), f"ranks differ: {digests}"
        return schedule, last

    def _run(self, schedule: Schedule, stream: _Measured, recorder: TimelineRecorder) -> None:
        plan, parallel = self._session.config.plan, self._session.parallel
        assert schedule.update is not None
        (part,) = parallel.pipeline.parts.values()
        program = AsynchronousProgram(
            schedule.update,
            parallel.model,
            part,
            parallel.reducer,
            stream,
            backward=plan.ampnet_backward,
        )
        channels = parallel.pipeline.channels
        if schedule.name != "ampnet" or plan.replay is not None:
            StreamExecutor(schedule, channels).run(program, recorder)
        else:
            executor = MessageDrivenExecutor(
                channels,
                parallel.mesh,
                schedule.total_microbatches,
                window=schedule.update.window,
                max_in_flight=int(schedule.parameters["max_in_flight"]),
            )
            executor.run(program, recorder)
            recorded = executor.recorded()
            if parallel.mesh.rank == 0:
                steps = stream.stream.first, stream.stream.last
                write_recorded(self._session.folder, recorded, *steps)
        artifacts = self._session.artifacts
        artifacts.weight_versions = max(artifacts.weight_versions, program.versions.most_bytes)
        program.versions.close()


class _Measured:
    """A stream that ends the measurement of the first window's memory with its first update."""

    def __init__(self, stream: TrainingStream, first_window: ExitStack) -> None:
        self.stream, self._first_window = stream, first_window
        self.batch, self.objective = stream.batch, stream.objective
        self.end, self.finished = stream.end, stream.finished

    def update(self, window: int, versions: WeightVersions) -> None:
        self._first_window.close()
        self.stream.update(window, versions)


def segment_end(config: RunConfig, first: int) -> int:
    """The step behind which the stream that starts with `first` drains."""
    train, plan = config.train, config.plan
    ends = [train.steps]
    for every in (train.checkpoint_every, train.validate_every):
        if every:
            ends.append(-(-first // every) * every)
    operations = 2 * plan.pp * plan.microbatches
    ends.append(first - 1 + max(SEGMENT_OPERATIONS // operations, 1))
    return min(ends)


def stream_schedule(config: RunConfig, num_steps: int) -> Schedule:
    """The schedule of `num_steps` steps. AMPNet's orders are an example of what may happen."""
    plan = config.plan
    count, window = num_steps * plan.microbatches, plan.num_update_microbatches
    match plan.schedule:
        case "pipedream":
            return pipedream(plan.pp, count)
        case "pipedream_2bw":
            return pipedream_2bw(plan.pp, count, window=window)
        case _:
            return ampnet(plan.pp, count, max_in_flight=plan.max_in_flight, window=window)
