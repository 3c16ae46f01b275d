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

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.config.errors import UserError
from moemesh.config.run import RunConfig
from moemesh.model.batch import Batch
from moemesh.parallel.parallelize import ParallelModel
from moemesh.parallel.pipeline.asynchronous import AsynchronousProgram, StreamExecutor
from moemesh.parallel.pipeline.message_driven import MessageDrivenExecutor
from moemesh.parallel.pipeline.versions import WeightVersions
from moemesh.schedule.action import Schedule
from moemesh.schedule.ampnet import ampnet
from moemesh.schedule.check import check
from moemesh.schedule.pipedream import pipedream
from moemesh.schedule.pipedream_2bw import pipedream_2bw
from moemesh.schedule.text import digest, from_text, to_text
from moemesh.trace.run import MetricsRow
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.artifacts import Artifacts
from moemesh.train.folder import RunFolder
from moemesh.train.optimizer import Optimizer, learning_rate
from moemesh.train.routing_faults import refuse_bad_logits
from moemesh.train.step import StepResult
from moemesh.train.stream import StreamRecorder, TrainingStream

#: Operations of all ranks in one segment, at most: its lists stay small beside the weights.
SEGMENT_OPERATIONS = 50_000

#: A file of the run folder: the orders that AMPNet took, from which step to which.
_RECORDED = re.compile(r"schedule-(\d+)-(\d+)\.txt")


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the training loop does around a stream. ``batches(step)``: this rank's microbatches;
    ``save(step)``: a checkpoint; ``finished(row)``: tell the user; the others as they say."""

    batches: Callable[[int], Sequence[Batch]]
    stop_requested: Callable[[], bool]
    validate: Callable[[], float]
    save: Callable[[int], None]
    finished: Callable[[MetricsRow], None]
    say: Callable[[str], None]


def train(
    config: RunConfig,
    parallel: ParallelModel,
    optimizer: Optimizer,
    artifacts: Artifacts,
    folder: RunFolder,
    hooks: Hooks,
    done: int,
) -> int:
    """Train from step `done` to the last, or until asked to stop; the last step saved."""
    run = _Run(config, parallel, optimizer, artifacts, folder, hooks)
    saved, total = done, config.train.steps
    while done < total:
        done, stopping = run.segment(done + 1)
        every = config.train.checkpoint_every
        if stopping or done == total or (every and done % every == 0):
            hooks.save(done)
            saved = done
        if stopping:
            break
    return saved


class _Run:
    """One rank's segments, one after the other."""

    def __init__(
        self,
        config: RunConfig,
        parallel: ParallelModel,
        optimizer: Optimizer,
        artifacts: Artifacts,
        folder: RunFolder,
        hooks: Hooks,
    ) -> None:
        self.config, self.parallel, self.optimizer = config, parallel, optimizer
        self.artifacts, self.folder, self.hooks = artifacts, folder, hooks

    def segment(self, first: int) -> tuple[int, bool]:
        """Steps from `first` to a drain: (the last one, whether to stop there)."""
        config, plan = self.config, self.config.plan
        schedule, last = self._plan_segment(first)
        assert schedule.update is not None
        recorder = StreamRecorder(
            self.parallel.mesh.rank, first=first, num_microbatches=plan.microbatches
        )

        def record(step: int, result: StepResult, seconds: float) -> None:
            self._record(step, result, seconds, recorder)

        stream = TrainingStream(
            self.parallel,
            self.optimizer,
            config.train,
            num_microbatches=plan.microbatches,
            window=schedule.update.window,
            reach=max(plan.pp, int(schedule.parameters.get("max_in_flight", 0))),
            first=first,
            last=last,
            batches=self.hooks.batches,
            stop_requested=self.hooks.stop_requested,
            on_step=record,
        )
        with ExitStack() as first_window:
            first_window.enter_context(self.artifacts.first_step_memory(first))
            self._run(schedule, _Measured(stream, first_window), recorder)
        *results, (step, result, seconds) = stream.drain()
        for earlier in results:
            record(*earlier)
        if stream.skipped:
            assert stream.fault_L is not None
            refuse_bad_logits(self.parallel, stream.fault_L, config.data.seq_len)
        self._record(step, result, seconds, recorder, validates=True)
        requested = torch.tensor([int(stream.stopped or self.hooks.stop_requested())])
        all_reduce_(requested, self.parallel.mesh.control, op="max", caller="stop", phase="control")
        return step, bool(requested.item())

    def _plan_segment(self, first: int) -> tuple[Schedule, int]:
        """The schedule from step `first` to the next drain, and that step."""
        config, plan = self.config, self.config.plan
        if plan.replay is not None:
            schedule, last = recorded_segment(Path(plan.replay), first)
            _check_replay(schedule, config, first, last)
        else:
            last = segment_end(config, first)
            schedule = stream_schedule(config, last - first + 1)
        digests = gather_json([digest(schedule), last], self.parallel.mesh.control)
        assert all(other == digests[0] for other in digests), f"ranks differ: {digests}"
        return schedule, last

    def _run(self, schedule: Schedule, stream: _Measured, recorder: TimelineRecorder) -> None:
        plan, parallel = self.config.plan, self.parallel
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
                write_recorded(self.folder, recorded, stream.stream.first, stream.stream.last)
        program.versions.close()

    def _record(
        self,
        step: int,
        result: StepResult,
        seconds: float,
        recorder: TimelineRecorder,
        *,
        validates: bool = False,
    ) -> None:
        train, validation = self.config.train, None
        if result.skipped:
            self.hooks.say(f"step {step}: a gradient is not finite; its stage skipped that update")
        every = train.validate_every
        if validates and (step == train.steps or (every and step % every == 0)):
            validation = self.hooks.validate()
        row = MetricsRow(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            aux_loss=result.aux_loss,
            tokens=result.num_tokens,
            tokens_per_second=result.num_tokens / seconds,
            lr=learning_rate(train, step),
            seconds=seconds,
            validation_loss=validation,
        )
        self.artifacts.record(row, result, recorder)
        self.hooks.finished(row)


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


def write_recorded(folder: RunFolder, schedule: Schedule, first: int, last: int) -> None:
    """Keep the order of steps `first` to `last`; what an earlier run recorded behind goes."""
    for other, path in _recorded(folder.path).items():
        if other[1] >= first:
            path.unlink()
    folder.write_text(f"schedule-{first}-{last}.txt", to_text(schedule))


def recorded_segment(folder: Path, first: int) -> tuple[Schedule, int]:
    """What an AMPNet run did from step `first` on, and the step behind which it drained."""
    found = _recorded(folder)
    for (start, last), path in found.items():
        if start == first:
            return from_text(path.read_text(encoding="utf-8")), last
    known = ", ".join(f"{start} to {last}" for start, last in sorted(found)) or "none"
    raise UserError(
        f"{folder} has no recorded order that starts at step {first}: it has steps {known}"
    )


def _recorded(folder: Path) -> dict[tuple[int, int], Path]:
    """(first step, last step) -> file."""
    found: dict[tuple[int, int], Path] = {}
    for path in folder.glob("schedule-*.txt"):
        if match := _RECORDED.fullmatch(path.name):
            found[int(match[1]), int(match[2])] = path
    return found


def _check_replay(schedule: Schedule, config: RunConfig, first: int, last: int) -> None:
    """Raise UserError when a recorded order is none of this plan, or cannot run."""
    plan = config.plan
    wanted = (plan.pp, (last - first + 1) * plan.microbatches, plan.num_update_microbatches)
    window = schedule.update.window if schedule.update else 0
    found = (schedule.num_ranks, schedule.total_microbatches, window)
    if wanted != found or last > config.train.steps:
        raise UserError(
            f"the recorded order of steps {first} to {last} has {found[0]} ranks, {found[1]} "
            f"microbatches and update windows of {found[2]}; this run has {wanted[0]}, {wanted[1]} "
            f"and {wanted[2]}, and {config.train.steps} steps"
        )
    check(schedule)
