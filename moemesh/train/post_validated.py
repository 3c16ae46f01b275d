"""Training whose ranks step before the whole gradient is known, and step again if they must not.

At the end of a step each pipeline rank judges by the squares of its own gradients and those of the
ranks before it (:mod:`moemesh.parallel.pipeline.post_validation`). With no reason to clip or skip
it keeps a copy of what a step changes, steps, and goes on to the next step's warm-up. There it
learns the whole sum: either that was right and the copy goes, or the step is undone from it and
done as it should have been, clipped or not at all, and the warm-up runs again. The result is that
of a run that reduces first and steps then, bit by bit.

An AdamW step could also be inverted without a copy, but not safely: ``(v - (1 - b2) g g) / b2``
cancels where the gradient has just jumped, which is when a step is undone, and in fp32 gives second
moments with large errors, negative ones among them.

Everything that ranks tell each other about a step travels in one vector with the squares: losses,
loads, a wish to stop. So no step waits for all stages; in return its row of metrics is written a
step later, and a wish to stop is obeyed a step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.norm import gradient_squares, norm_of
from moemesh.parallel.parallelize import ParallelModel
from moemesh.parallel.pipeline.post_validation import ValidatedPipeline
from moemesh.parallel.pipeline.program import Objective
from moemesh.trace.run import MetricsRow
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.artifacts import Artifacts
from moemesh.train.asynchronous import Hooks
from moemesh.train.optimizer import Optimizer, learning_rate
from moemesh.train.routing_faults import refuse_bad_logits, refuse_replayed
from moemesh.train.step import (
    StepResult,
    StepSums,
    count_over_step,
    forget_rank_tokens,
    update,
)

#: Steps in a row without a clip or a skip after which ranks step early. Where most steps are
#: clipped (the start of a run, say) stepping early would mean to run most warm-ups twice.
ARM_AFTER = 3


@dataclass(kw_only=True)
class Step:
    """A step, with its recorder and this rank's `seconds`. `result` comes when the step stands;
    `undo` is there from the time this rank steps early until then."""

    number: int
    lr: float
    recorder: TimelineRecorder
    seq_len: int
    num_tokens: int
    num_scopes: int
    sums: StepSums
    seconds: float = 0.0
    result: StepResult | None = None
    undo: _Undo | None = None


class _Undo:
    """What an update changes, as it was: all of the optimizer's, and the routers' biases."""

    def __init__(self, parallel: ParallelModel, optimizer: Optimizer) -> None:
        self._optimizer, self._snapshot = optimizer, optimizer.snapshot()
        self._buffers = [(buffer, buffer.clone()) for buffer in parallel.model.buffers()]

    def __call__(self) -> None:
        self._optimizer.restore(self._snapshot)
        for buffer, before in self._buffers:
            buffer.copy_(before)


class PostValidation:
    """The steps of one rank. `settled` holds those that stand and were not :meth:`taken <take>`;
    `stopping` is set, on all ranks with the same step, when one of them was asked to stop.

    `arm_after`: see :data:`ARM_AFTER`; it changes when things happen, not what comes out.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: Optimizer,
        train: TrainConfig,
        stop_requested: Callable[[], bool],
        *,
        arm_after: int = ARM_AFTER,
    ) -> None:
        """All ranks call this."""
        self.parallel, self.optimizer, self.train = parallel, optimizer, train
        self.stopping = False
        self._stop_requested, self._arm_after = stop_requested, arm_after
        self._pipeline = ValidatedPipeline(parallel.pipeline, parallel.mesh)
        self._num_clean = 0
        #: The step that has run here while other ranks' part in it is not known.
        self._waiting: Step | None = None
        self._settled: list[Step] = []

    def run(self, number: int, batches: Sequence[Batch], recorder: TimelineRecorder) -> None:
        """Step `number` (from 1) on `batches`. Raises RoutingError, on all ranks, when a router of
        this step or, found late, of the step before gave a logit that is not finite."""
        start, parallel = time.perf_counter(), self.parallel
        refuse_replayed(parallel, batches)
        counts = count_over_step(parallel, batches)
        step = Step(
            number=number,
            lr=learning_rate(self.train, number),
            recorder=recorder,
            seq_len=batches[0].tokens_BS.shape[1],
            num_tokens=counts[0],
            num_scopes=counts[1],
            sums=StepSums(parallel, *counts),
        )

        def begin() -> Objective:
            forget_rank_tokens(parallel)
            step.sums = StepSums(parallel, *counts)
            return step.sums.objective

        def confirm() -> bool:
            return self._waiting is None or self._settle(self._waiting, recorder)

        self._pipeline.run(batches, begin, recorder, confirm)
        self._end(step)
        step.seconds = time.perf_counter() - start
        if self._num_clean < self._arm_after:
            self.flush()

    def flush(self) -> None:
        """Wait until the last step stands: before anybody reads weights, and at the end."""
        step, start = self._waiting, time.perf_counter()
        if step is not None:
            self._settle(step, step.recorder)
            step.seconds += time.perf_counter() - start

    def take(self) -> list[Step]:
        """The steps that stand and were not taken yet, in order."""
        taken, self._settled = self._settled, []
        return taken

    def _end(self, step: Step) -> None:
        """Tell the others; step early if nothing speaks against it."""
        parallel, recorder = self.parallel, step.recorder
        with recorder.span("reduce"):
            parallel.reducer.finish()
            own = self._report(step)
            all_reduce_(own, parallel.mesh["stage"], caller="step.report", phase="optimizer")
            so_far = self._read(step, self._pipeline.chain.pass_on(own.cpu()))
        self._waiting = step
        if self._num_clean >= self._arm_after and self._is_clean(so_far):
            with recorder.span("optimizer"):
                step.undo = _Undo(parallel, self.optimizer)
                self._step(step, so_far)

    def _settle(self, step: Step, recorder: TimelineRecorder) -> bool:
        """Learn what became of `step`, and put right what it was not; whether it was."""
        with recorder.span("validate"):
            total = self._pipeline.chain.answer()
        step.result = self._read(step, total)
        self.stopping |= bool(total[0] > 0)
        self._waiting = None
        self._settled.append(step)
        clean = self._is_clean(step.result)
        self._num_clean = self._num_clean + 1 if clean else 0
        if step.undo is None or not clean:
            with recorder.span("optimizer"):
                if step.undo is not None:
                    step.undo()
                if step.result.skipped:
                    refuse_bad_logits(self.parallel, step.sums.fault_L, step.seq_len)
                self._step(step, step.result)
        step.undo = None
        return clean

    def _step(self, step: Step, result: StepResult) -> None:
        update(self.parallel, self.optimizer, result, lr=step.lr, clip=self.train.clip)

    def _is_clean(self, result: StepResult) -> bool:
        """Whether a step is neither clipped nor skipped. Squares only add up, and a rounded sum
        never falls when an addend grows: what is not clean for some ranks is not for all."""
        clip = self.train.clip
        return not result.skipped and not 0 < clip < result.grad_norm

    def _report(self, step: Step) -> Tensor:
        """What this rank adds to the vector of the step, float64: a wish to stop, the two losses,
        the loads (exact in float64), and the squares of :func:`gradient_squares`."""
        parallel = self.parallel
        squares = gradient_squares(parallel.reducer.gradients, parallel.placements, parallel.mesh)
        stop = torch.tensor([float(self._stop_requested())], device=squares.device)
        parts = [stop, step.sums.losses, *step.sums.loads, squares]
        return torch.cat([part.flatten().double() for part in parts])

    def _read(self, step: Step, report: Tensor) -> StepResult:
        """What a report says, be it of some ranks or of all."""
        loads = step.sums.loads
        sizes = [3, *(part.numel() for part in loads)]
        head, *parts, squares = report.split([*sizes, report.numel() - sum(sizes)])
        counts_LE, dropped_L, *rank_LP = (
            part.long().view(like.shape) for part, like in zip(parts, loads, strict=True)
        )
        _, loss, aux = head.tolist()
        norm = norm_of(squares)
        return StepResult(
            loss=loss / max(step.num_tokens, 1),
            aux_loss=aux / max(step.num_scopes, 1),
            grad_norm=norm.value,
            num_tokens=step.num_tokens,
            counts_LE=counts_LE,
            dropped_L=dropped_L,
            skipped=not norm.is_finite,
            rank_LP=rank_LP[0] if rank_LP else None,
        )


def train(
    config: RunConfig,
    parallel: ParallelModel,
    optimizer: Optimizer,
    artifacts: Artifacts,
    hooks: Hooks,
    done: int,
) -> int:
    """Train from step `done` to the last, or until asked to stop; the last step saved."""
    steps = PostValidation(parallel, optimizer, config.train, hooks.stop_requested)
    saved, settings = done, config.train
    for number in range(done + 1, settings.steps + 1):
        recorder = TimelineRecorder(parallel.mesh.rank)
        recorder.step = number
        with recorder.span("data"):
            batches = hooks.batches(number)
        is_first = number == done + 1
        with artifacts.first_step_memory(number) if is_first else nullcontext():
            steps.run(number, batches, recorder)
        saves = _is_due(number, settings.checkpoint_every, settings.steps)
        validates = _is_due(number, settings.validate_every, settings.steps)
        if saves or validates or steps.stopping:
            steps.flush()
        validation = hooks.validate() if validates else None
        for step in steps.take():
            _record(step, artifacts, hooks, validation if step.number == number else None)
        if saves or steps.stopping:
            hooks.save(number)
            saved = number
        if steps.stopping:
            break
    return saved


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def _record(step: Step, artifacts: Artifacts, hooks: Hooks, validation: float | None) -> None:
    """Write and tell of a step that stands."""
    result = step.result
    assert result is not None
    if result.skipped:
        hooks.say(f"step {step.number}: a gradient is not finite; no rank updates its weights")
    row = MetricsRow(
        step=step.number,
        loss=result.loss,
        grad_norm=result.grad_norm,
        aux_loss=result.aux_loss,
        tokens=result.num_tokens,
        tokens_per_second=result.num_tokens / step.seconds,
        lr=step.lr,
        seconds=step.seconds,
        validation_loss=validation,
    )
    artifacts.record(row, result, step.recorder)
    hooks.finished(row)
