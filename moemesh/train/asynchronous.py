"""Asynchronous training: a stream of microbatches, in segments between which the pipeline drains.

The pipeline drains where a run needs one state of all stages (at a validation, a checkpoint, the
end, a request to stop), some steps after a skipped update, and after :data:`SEGMENT_OPERATIONS`
operations. Between drains each stage updates when the schedule's rule lets it. It clips the
gradient of an update by the norm of its own parameters (a norm over all stages would be a barrier):
with `train.clip` = c and p stages an update's whole norm is at most sqrt(p) c. A row of metrics is
about the microbatches of one step, with the losses of their forwards. Its `grad_norm` is the root
of a sum over stages; the summand of a stage is its squared norm, averaged over the updates of the
step.

The result depends on where the pipeline drains: the first microbatches after a drain are computed
with current weights. A run that is stopped between drains and resumed has one more, so its results
differ from those of an uninterrupted one.

Legend: B sequences, S positions, L MoE layers of the model, E experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.model.transformer import ModelPart, Output
from moemesh.parallel.norm import GradientNorm, clip_gradients, gradient_norm
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.pipeline.asynchronous_stage import AsynchronousProgram, StreamExecutor
from moemesh.parallel.pipeline.message_driven import MessageDrivenExecutor
from moemesh.parallel.pipeline.versions import WeightVersions
from moemesh.schedule.action import Schedule
from moemesh.schedule.ampnet import ampnet
from moemesh.schedule.generators import pipedream, pipedream_2bw
from moemesh.schedule.text import digest
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.kept_schedules import check_recorded, recorded_segment, write_recorded
from moemesh.train.session import Session
from moemesh.train.step import (
    FinishedStep,
    StepCounts,
    StepResult,
    StepSums,
    count_over_step,
    forget_rank_tokens,
    move_selection_biases,
    pack_sums,
    step_result,
)

#: Steps whose operations a timeline of the stream keeps.
KEPT_STEPS = 4


@dataclass
class _OwnStep:
    """This rank's part of a step; the counts are those of all replicas. `squares`: the sum over
    updates of the stage's squared norm."""

    counts: StepCounts
    losses: Tensor
    loads: list[Tensor]
    squares: float
    num_skipped: int


class TrainingStream:
    """Steps `first` to `last` of a run, on one rank; the `Stream` of an asynchronous program.

    A step is ``plan.microbatches`` microbatches, as in a synchronous run, and has one row of
    metrics and one learning rate. An update window is the microbatches whose gradients one update
    of a stage sums: one (PipeDream) or several, never more than a step. The objective of a
    window is divided by the window's own counts (:mod:`moemesh.train.step` has the formula).

    Nothing waits for the whole pipeline. A rank that has finished a step adds its part to an
    asynchronous sum over all ranks. The sum is read some steps later, when every rank must have
    passed that step: then its row of metrics is written, and a pending stop request ends training
    at the same step on every rank.

    ``batches(step)`` returns this rank's microbatches, ``stop_requested()`` whether this rank has a
    stop request; ``on_step(step, result, seconds)`` is called on every rank for each step but the
    last few, which :meth:`drain` returns. `reach`: largest number of microbatches in flight.
    """

    def __init__(
        self,
        parallel: RankModel,
        optimizer: Optimizer,
        train: TrainConfig,
        *,
        num_microbatches: int,
        window: int,
        reach: int,
        first: int,
        last: int,
        batches: Callable[[int], Sequence[Batch]],
        stop_requested: Callable[[], bool],
        on_step: Callable[[int, StepResult, float], None],
    ) -> None:
        assert num_microbatches % window == 0
        self.parallel, self.optimizer, self.train = parallel, optimizer, train
        self.num_microbatches, self.window, self.first = num_microbatches, window, first
        self.stopped = self.skipped = False
        self.before_update: Callable[[], object] = lambda: None
        self._batches_of, self._stop_requested, self._on_step = batches, stop_requested, on_step
        self._end = (last - first + 1) * num_microbatches
        #: Number of steps between a step and the read of its sum: by then the step has passed all
        #: stages, and one more, so that the sum has arrived and the read does not wait.
        self._patience = 2 + math.ceil(reach / num_microbatches)
        #: Whole microbatches, by step.
        self._batches: dict[int, Sequence[Batch]] = {}
        #: The parts of microbatches that this rank holds, by number of the microbatch.
        self._held: dict[int, Batch] = {}
        #: Counts of an update window, and its sums; the second sums take the reports of recomputed
        #: forwards, and are never read.
        self._windows: dict[int, tuple[StepCounts, StepSums, StepSums]] = {}
        self._steps: dict[int, _OwnStep] = {}
        #: Pending sum of a step over all ranks: (sum, work, the step, time of its last operation).
        self._reports: dict[int, tuple[Tensor, dist.Work | None, _OwnStep, float]] = {}
        self._num_read = self._num_finished = 0
        self._read_at = time.perf_counter()
        forget_rank_tokens(parallel)
        pp = parallel.mesh["pp"].index
        #: Placements of the parameters of this pipeline rank that train.
        self._trained = {name: w for name, w in parallel.trained.items() if pp in w.holders}

    @property
    def last(self) -> int:
        """The last step that this rank has finished."""
        return self.first - 1 + self._num_finished

    def batch(self, sample: int) -> Batch:
        """The part of microbatch `sample` (from 0, over all steps) that this rank holds."""
        if sample not in self._held:
            whole = self._whole(sample)
            runs = self.parallel.model.tokens.runs(whole.tokens_BS.shape[1])
            self._held[sample] = whole.take(runs)
        return self._held[sample]

    def _whole(self, sample: int) -> Batch:
        step, index = divmod(sample, self.num_microbatches)
        if step not in self._batches:
            self._batches[step] = self._batches_of(self.first + step)
        return self._batches[step][index]

    def objective(self, sample: int, part: ModelPart, output: Output, *, recompute: bool) -> Tensor:
        index = sample // self.window
        if index not in self._windows:
            samples = range(index * self.window, (index + 1) * self.window)
            counts = count_over_step(self.parallel, [self._whole(sample_) for sample_ in samples])
            sums, unread = (StepSums(self.parallel, counts) for _ in range(2))
            self._windows[index] = counts, sums, unread
        _, sums, unread = self._windows[index]
        return (unread if recompute else sums).objective(part, output, self.batch(sample))

    def update(self, window: int, versions: WeightVersions) -> None:
        """Sum over the stage's replicas, clip by the stage's own norm, step, move the biases.

        A loss or a gradient that is not finite updates nothing, but the number of the version
        increases.
        """
        self.before_update()
        counts, sums, _ = self._windows.pop(window)
        reducer = self.parallel.reducer
        reducer.finish()
        mesh = self.parallel.mesh
        norm = gradient_norm(
            reducer.gradients, self._trained, reducer.owned, mesh, axis="stage", others=sums.losses
        )
        index = window * self.window // self.num_microbatches

        def step() -> None:
            clip_gradients(reducer.gradients, norm.value, self.train.clip)
            lr = self.train.learning_rate(self.first + index)
            self.optimizer.step(reducer.gradients, lr)
            moes = self.parallel.model.moe_layers().values()
            if any(moe.router.selection_bias is not None for moe in moes):
                counts_LE = sums.counts_LE.clone()
                all_reduce_(counts_LE, mesh["stage"], caller="stream.loads", phase="optimizer")
                move_selection_biases(self.parallel, counts_LE)

        versions.update(step if norm.is_finite else lambda: None)
        skips, squares = not norm.is_finite, norm.value * norm.value
        if (partial := self._steps.get(index)) is None:
            self._steps[index] = _OwnStep(counts, sums.losses, sums.loads, squares, skips)
        else:
            partial.counts = partial.counts.plus(counts)
            partial.losses = partial.losses + sums.losses
            partial.loads = [a + b for a, b in zip(partial.loads, sums.loads, strict=True)]
            partial.squares += squares
            partial.num_skipped += skips

    def end(self, sample: int) -> int:
        step, index = divmod(sample, self.num_microbatches)
        if index == 0 and sample < self._end:
            while self._num_read <= step - self._patience:
                self._on_step(*self._read())
            if self.stopped or self.skipped:  # on all ranks at the same step: their sums are equal
                self._end = sample
        return min(self._end, (step + 1) * self.num_microbatches)

    def finished(self, sample: int) -> None:
        self._held.pop(sample, None)
        step, index = divmod(sample, self.num_microbatches)
        if index == self.num_microbatches - 1:
            self._batches.pop(step, None)
            part, mesh = self._steps.pop(step), self.parallel.mesh
            # The sum over all ranks, in which counts are exact (float64), is read some steps later.
            # All ranks of a stage have its norm and its skips: only the first of them adds them.
            stop, is_first = float(self._stop_requested()), float(mesh["stage"].index == 0)
            scalars = [stop, is_first * part.num_skipped, is_first * part.squares]
            vector = torch.tensor(scalars, dtype=torch.float64, device=part.losses.device)
            total = pack_sums([vector], part.losses, part.loads).cpu()
            work = all_reduce_(
                total, mesh.control, caller="step.report", phase="optimizer", async_op=True
            )
            self._reports[step] = total, work, part, time.perf_counter()
            self._num_finished += 1

    def drain(self) -> list[tuple[int, StepResult, float]]:
        """(step, result, seconds) of the steps not yet passed to :attr:`on_step`."""
        return [self._read() for _ in range(self._num_read, self._num_finished)]

    def _read(self) -> tuple[int, StepResult, float]:
        """The next report: (step, its result, seconds since the report before it)."""
        index = self._num_read
        total, work, step, done_at = self._reports.pop(index)
        if work is not None:
            work.wait()
        self._num_read += 1
        seconds, self._read_at = done_at - self._read_at, done_at
        stop, skipped, squares = total[:3].tolist()
        self.stopped |= stop > 0
        self.skipped |= skipped > 0
        updates = self.num_microbatches // self.window
        value = math.sqrt(squares / updates) if squares >= 0 else math.nan
        norm = GradientNorm(value=value, is_finite=not skipped > 0)
        result = step_result(counts=step.counts, packed=total[3:], like=step.loads, norm=norm)
        return self.first + index, result, seconds


class StreamRecorder(TimelineRecorder):
    """Records a stream by step and keeps the last :data:`KEPT_STEPS`."""

    def __init__(self, rank: int, *, first: int, num_microbatches: int) -> None:
        super().__init__(rank)
        self.step = first
        self._first, self._num_microbatches = first, num_microbatches

    def add(
        self, *, name: str, start: float, end: float, microbatch: int | None = None, **details: Any
    ) -> None:
        # A record gets the step of its microbatch, which may be older than the newest step; a
        # record without a microbatch gets the newest.
        newest = self.step or self._first
        if microbatch is not None:
            self.step = self._first + microbatch // self._num_microbatches
        super().add(name=name, start=start, end=end, microbatch=microbatch, **details)
        if self.step is not None and self.step > newest:
            oldest = self.step - KEPT_STEPS
            self._records = [record for record in self._records if (record.step or 0) > oldest]
        self.step = max(self.step or newest, newest)


#: Largest number of operations of all ranks in one segment, so that its lists stay small; a
#: segment has at least one step.
SEGMENT_OPERATIONS = 50_000


class StreamedSteps:
    """Segments of a stream, one after the other; each ends with the pipeline drained."""

    def __init__(self, session: Session) -> None:
        self._session = session
        num_steps = min(session.config.train.steps - session.done, KEPT_STEPS)
        session.artifacts.drawn = stream_schedule(session.config, num_steps)
        self._stopped = False

    def advance(self, first: int) -> FinishedStep:
        session, config = self._session, self._session.config
        plan, parallel = config.plan, session.parallel
        # The schedule of steps `first` to `last`; the pipeline drains after `last`.
        if plan.replay is not None:
            schedule, last = recorded_segment(Path(plan.replay), first)
            check_recorded(schedule, config, first, last)
        else:
            num_steps = max(SEGMENT_OPERATIONS // (2 * plan.pp * plan.microbatches), 1)
            last = min(session.next_drain(first), first - 1 + num_steps)
            schedule = stream_schedule(config, last - first + 1)
        digests = gather_json([digest(schedule), last], session.mesh.control)
        assert all(other == digests[0] for other in digests), f"ranks differ: {digests}"
        assert schedule.update is not None
        rank, size = session.mesh.rank, plan.microbatches
        recorder = StreamRecorder(rank, first=first, num_microbatches=size)

        def finished(step: int, result: StepResult, seconds: float) -> FinishedStep:
            # Stages have updated already: only a return to a checkpoint can undo the step.
            result = session.nan_policy.judge(step, result)
            return FinishedStep(number=step, result=result, recorder=recorder, seconds=seconds)

        stream = TrainingStream(
            parallel,
            session.optimizer,
            config.train,
            num_microbatches=size,
            window=schedule.update.window,
            reach=max(plan.pp, int(schedule.parameters.get("max_in_flight", 0))),
            first=first,
            last=last,
            batches=session.batches,
            stop_requested=lambda: session.stop.requested,
            on_step=lambda *step: session.report(finished(*step)),
        )
        with ExitStack() as first_window:
            first_window.enter_context(session.artifacts.first_step_memory())
            # The measurement of the first window's memory ends with its first update.
            stream.before_update = first_window.close
            (part,) = parallel.pipeline.parts.values()
            model, reducer, backward = parallel.model, parallel.reducer, plan.ampnet_backward
            program = AsynchronousProgram(
                schedule.update, model, part, reducer, stream, backward=backward
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
                if rank == 0:
                    write_recorded(session.folder, recorded, first, stream.last)
        versions, artifacts = program.versions, session.artifacts
        artifacts.weight_versions = max(artifacts.weight_versions, versions.most_bytes)
        versions.close()
        *earlier, newest = stream.drain()
        for step in earlier:
            session.report(finished(*step))
        self._stopped = stream.stopped
        return finished(*newest)

    def is_stopping(self) -> bool:
        return bool(self._session.largest(self._stopped or self._session.stop.requested))


def stream_schedule(config: RunConfig, num_steps: int) -> Schedule:
    """The schedule of `num_steps` steps; for AMPNet, which runs operations in the order in which
    messages arrive, one possible order."""
    plan = config.plan
    count, window = num_steps * plan.microbatches, plan.num_update_microbatches
    match plan.schedule:
        case "pipedream":
            return pipedream(plan.pp, count)
        case "pipedream_2bw":
            return pipedream_2bw(plan.pp, count, window=window)
        case _:
            return ampnet(plan.pp, count, max_in_flight=plan.max_in_flight, window=window)
