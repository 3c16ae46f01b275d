"""Post-validated steps: update before the whole gradient norm is known, and correct afterwards.

At the end of a step each pipeline rank knows the squared gradients of its own stages and of those
before it (:mod:`moemesh.parallel.pipeline.post_validation`). When these give no reason to clip or
skip, the rank copies the state that an update changes, updates, and continues with the warm-up of
the next step, during which it receives the whole sum. If the update was right, the copy is dropped;
otherwise the update is undone from the copy and repeated correctly, clipped or skipped, and the
warm-up is repeated. The result is that of a synchronous run, bit by bit.

An AdamW step could also be inverted without a copy, but not safely: ``(v - (1 - b2) g g) / b2``
cancels where the gradient has just jumped, which is when a step is undone, and in fp32 gives second
moments with large errors, negative ones among them.

All reports of ranks about a step share one vector with the squares: losses, loads, a stop request.
So after :data:`ARM_AFTER` clean steps none waits for all stages; in return its row of metrics is
written a step later, and a stop request takes effect one step later.

Legend: B sequences, S positions, L MoE layers of the model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moemesh.comm.collectives import all_reduce_
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel.norm import gradient_squares, norm_of
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.pipeline.post_validation import ValidatedPipeline
from moemesh.parallel.pipeline.program import Objective
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.session import Session
from moemesh.train.step import (
    FinishedStep,
    StepCounts,
    StepResult,
    StepSums,
    count_over_step,
    forget_rank_tokens,
    pack_sums,
    refuse_bad_logits,
    refuse_replayed,
    step_result,
    update,
)

#: Consecutive steps without a clip or a skip after which ranks step early. While most steps are
#: clipped (at the start of a run, for example), stepping early would repeat most warm-ups.
ARM_AFTER = 3


@dataclass(kw_only=True)
class Step:
    """A step, with its recorder and this rank's `seconds`. `result` is set when the step is
    confirmed; `undo` exists from the early step until then."""

    number: int
    lr: float
    recorder: TimelineRecorder
    seq_len: int
    counts: StepCounts
    sums: StepSums
    seconds: float = 0.0
    result: StepResult | None = None
    undo: _Undo | None = None


class _Undo:
    """A copy of the state that an update changes: that of the optimizer, and routers' biases."""

    def __init__(self, parallel: RankModel, optimizer: Optimizer) -> None:
        self._optimizer, self._snapshot = optimizer, optimizer.snapshot()
        self._buffers = [(buffer, buffer.clone()) for buffer in parallel.model.buffers()]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies, without the scalars that count updates."""
        kinds = self._optimizer.state_names()
        state = self._snapshot["torch"]["state"].values()
        copies = [
            *self._snapshot["masters"].values(),
            *(values.get(kind) for values in state for kind in kinds),
            *(before for _, before in self._buffers),
        ]
        return sum(copy.numel() * copy.element_size() for copy in copies if copy is not None)

    def __call__(self) -> None:
        self._optimizer.restore(self._snapshot)
        for buffer, before in self._buffers:
            buffer.copy_(before)


class PostValidation:
    """The steps of one rank; :meth:`take` returns the confirmed ones. `stopping` is set, on all
    ranks in the same step, when any rank has a stop request.

    `arm_after`: see :data:`ARM_AFTER`; it changes the timing, not the results.
    """

    def __init__(
        self,
        parallel: RankModel,
        optimizer: Optimizer,
        train: TrainConfig,
        stop_requested: Callable[[], bool],
        *,
        arm_after: int = ARM_AFTER,
        judge: Callable[[int, StepResult], StepResult] | None = None,
    ) -> None:
        """All ranks call this. ``judge(number, result)``: the result of each whole step, marked as
        skipped if no rank may apply it; None: only non-finite steps are skipped, and non-finite
        router logits raise RoutingError."""
        self.parallel, self.optimizer, self.train = parallel, optimizer, train
        self.stopping = False
        self._stop_requested, self._arm_after = stop_requested, arm_after
        self._judge = judge
        self._pipeline = ValidatedPipeline(parallel.pipeline, parallel.mesh)
        #: Consecutive confirmed steps without a clip or a skip.
        self._num_clean = 0
        #: The last step, if it has run and the sum over all ranks is pending.
        self.waiting: Step | None = None
        self._confirmed: list[Step] = []
        #: Largest size in bytes of the copy of a step's state (`undo`).
        self.snapshot_bytes = 0

    def run(self, number: int, batches: Sequence[Batch], recorder: TimelineRecorder) -> None:
        """Run step `number` (from 1) on `batches`. Raises RoutingError, on all ranks, for an
        invalid routing to replay; without `judge` also if a router of this step, or, detected
        late, of the previous one, gave a non-finite logit."""
        start, parallel = time.perf_counter(), self.parallel
        refuse_replayed(parallel, batches)
        counts = count_over_step(parallel, batches)
        step = Step(
            number=number,
            lr=self.train.learning_rate(number),
            recorder=recorder,
            seq_len=batches[0].tokens_BS.shape[1],
            counts=counts,
            sums=StepSums(parallel, counts),
        )

        def begin() -> Objective:
            forget_rank_tokens(parallel)
            step.sums = StepSums(parallel, counts)
            return step.sums.objective

        def confirm() -> bool:
            return self.waiting is None or self._validate(self.waiting, recorder)

        self._pipeline.run(batches, begin, recorder, confirm)
        self._end(step)
        step.seconds = time.perf_counter() - start
        if self._num_clean < self._arm_after:
            self.flush()

    def flush(self) -> None:
        """Wait until the last step is confirmed: before weights are read, and at the end."""
        step, start = self.waiting, time.perf_counter()
        if step is not None:
            self._validate(step, step.recorder)
            step.seconds += time.perf_counter() - start

    def take(self) -> list[Step]:
        """The confirmed steps that were not taken yet, in order."""
        taken, self._confirmed = self._confirmed, []
        return taken

    def _end(self, step: Step) -> None:
        """Add this rank's vector to the sum of the ranks before it and pass the sum on; update
        early if it and the last :data:`ARM_AFTER` steps are clean."""
        parallel, recorder = self.parallel, step.recorder
        with recorder.span("reduce"):
            parallel.reducer.finish()
            # The vector that is summed over all ranks, in float64: a stop request, the squares, the
            # losses, and the loads (exact).
            reducer = parallel.reducer
            squares = gradient_squares(
                reducer.gradients, parallel.norm_addends(), parallel.mesh, step.sums.losses
            )
            stop = squares.new_tensor([float(self._stop_requested())])
            vector = pack_sums([stop, squares], step.sums.losses, step.sums.loads)
            all_reduce_(vector, parallel.mesh["stage"], caller="step.report", phase="optimizer")
            so_far = self._read(step, self._pipeline.chain.pass_on(vector.cpu()))
        self.waiting = step
        if self._num_clean >= self._arm_after and self._is_clean(so_far):
            with recorder.span("optimizer"):
                step.undo = _Undo(parallel, self.optimizer)
                self.snapshot_bytes = max(self.snapshot_bytes, step.undo.num_bytes)
                self._step(step, so_far)

    def _validate(self, step: Step, recorder: TimelineRecorder) -> bool:
        """Receive the whole sum of `step`, and update, or correct the early update if needed;
        returns whether the step was clean."""
        with recorder.span("validate"):
            total = self._pipeline.chain.answer()
        step.result = self._read(step, total)
        if self._judge is not None:
            step.result = self._judge(step.number, step.result)
        self.stopping |= bool(total[0] > 0)
        self.waiting = None
        self._confirmed.append(step)
        clean = self._is_clean(step.result)
        self._num_clean = self._num_clean + 1 if clean else 0
        if step.undo is None or not clean:
            with recorder.span("optimizer"):
                if step.undo is not None:
                    step.undo()
                if self._judge is None and step.result.skipped:
                    refuse_bad_logits(self.parallel, step.sums.fault_L, step.seq_len)
                self._step(step, step.result)
        step.undo = None
        return clean

    def _step(self, step: Step, result: StepResult) -> None:
        update(self.parallel, self.optimizer, result, lr=step.lr, clip=self.train.clip)

    def _is_clean(self, result: StepResult) -> bool:
        """Whether a step is neither clipped nor skipped. Squares only add up, and a rounded sum
        never falls when a summand grows: if a partial sum requires a clip or a skip, so does the
        whole sum."""
        clip = self.train.clip
        return not result.skipped and not 0 < clip < result.grad_norm

    def _read(self, step: Step, report: Tensor) -> StepResult:
        """The result of a step from its vector (`report`), summed over some ranks or over all."""
        loads = step.sums.loads
        size = step.sums.losses.numel() + sum(part.numel() for part in loads)
        squares, packed = report[1:-size], report[-size:]
        return step_result(counts=step.counts, packed=packed, like=loads, norm=norm_of(squares))


class ValidatedSteps:
    """Steps that a rank may take before it has the whole gradient norm, and corrects if needed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = PostValidation(
            session.parallel,
            session.optimizer,
            session.config.train,
            lambda: session.stop.requested,
            judge=session.nan_policy.judge,
        )

    def advance(self, first: int) -> FinishedStep:
        session, steps = self._session, self._steps
        finished: list[FinishedStep] = []
        for number in itertools.count(first):
            recorder = TimelineRecorder(session.mesh.rank)
            recorder.step = number
            with recorder.span("data"):
                batches = session.batches(number)
            with session.artifacts.first_step_memory():
                steps.run(number, batches, recorder)
            session.artifacts.snapshots = steps.snapshot_bytes
            if session.next_drain(number) == number or steps.stopping:
                steps.flush()
            for step in steps.take():
                assert step.result is not None
                facts = {"recorder": step.recorder, "seconds": step.seconds}
                finished.append(FinishedStep(number=step.number, result=step.result, **facts))
            # Without a pending sum all stages hold the last step's weights: that step is returned.
            num_returned = int(steps.waiting is None)
            while len(finished) > num_returned:
                session.report(finished.pop(0))
            if num_returned:
                break
        return finished[0]

    def is_stopping(self) -> bool:
        return self._steps.stopping
