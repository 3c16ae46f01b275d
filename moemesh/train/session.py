"""A training session: the state of a run on one rank, and the work between its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from moemesh.checkpoint.store import Checkpoint, CheckpointError
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Mesh
from moemesh.config.run import RunConfig
from moemesh.data.samples import Samples
from moemesh.model.batch import Batch
from moemesh.monitor import progress
from moemesh.monitor.failures import is_disk_full
from moemesh.monitor.progress import CHECK, DATA, SAVE, STEP, VALIDATE
from moemesh.monitor.supervisor import StopRequest
from moemesh.parallel.expert.kernels import set_kernel
from moemesh.schedule.action import Schedule
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.console import Console
from moemesh.train.early_stop import EarlyStop
from moemesh.train.migration import ExpertMigration
from moemesh.train.numerics import nan_check
from moemesh.train.numerics.hub_proof import prove
from moemesh.train.numerics.nan_policy import Diverged, NaNPolicy
from moemesh.train.numerics.replica_checksums import CopiesDiffer, ReplicaChecksums
from moemesh.train.numerics.repro_bundle import begin_bundle, finish_bundle
from moemesh.train.opening import construct, own_batches
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.artifacts import Artifacts
from moemesh.train.records.expert_loads import RowBounds
from moemesh.train.records.failure import newest_step
from moemesh.train.records.provenance import record_return
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.step import (
    FinishedStep,
    Observer,
    StepBoundary,
    evaluate,
    gradients_of_step,
    update,
)
from moemesh.train.weights import saving
from moemesh.train.weights.saving import Checkpoints

#: Seconds between two attempts to save the last step on a disk that is full.
_ROOM_SECONDS = 5.0


class Steps(Protocol):
    """A way to take optimizer steps."""

    def advance(self, first: int) -> FinishedStep:
        """Take steps from number `first` (from 1) on until all stages hold the weights of one step;
        returns that step. Earlier ones are passed to :meth:`Session.report`, in order."""
        ...

    def is_stopping(self) -> bool:
        """Whether any rank has a stop request at the end of :meth:`advance`: all ranks call, and
        get the same result."""
        ...


class Session:
    """One rank of a run. `done`: the step that it resumed from, 0 for a new run; `saved`: the step
    of the newest checkpoint; `last`: the last step, below ``train.steps`` after an early stop."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        folder: RunFolder,
        samples: Samples,
        console: Console,
        stop: StopRequest,
        schedule: Schedule,
    ) -> None:
        """Build the model and its optimizer, and resume from the newest checkpoint, if any.

        All ranks call. Raises ValueError for a plan that cannot be carried out, CheckpointError if
        all checkpoints are unreadable, or weights that the run starts from.
        """
        train, plan = config.train, config.plan
        self.config, self.mesh, self.folder, self.samples = config, mesh, folder, samples
        self.console, self.stop = console, stop
        # Modelling code of transformers on several ranks may compute something else than on one.
        needs_proof = config.model.architecture is not None and mesh.world_size > 1
        if needs_proof and (note := prove(config, mesh)):
            console.log(note)
        self.parallel = parallel = construct(config, mesh, schedule)
        tokens = plan.tokens_per_rank(config.data.seq_len, config.data.global_batch)
        model, defers = parallel.model, schedule.split_backwards
        kernel = set_kernel(model, train.experts, mesh, tokens_per_rank=tokens, defers=defers)
        parallel.notes.extend(kernel)
        offload = plan.offload == "optimizer"
        self.optimizer = optimizer = Optimizer.of(parallel, train, offload=offload)
        self.artifacts = Artifacts(folder, config, parallel, optimizer, console.log)
        self.migration = ExpertMigration(parallel, optimizer, train.rebalance_every, console.log)
        self.nan_policy = NaNPolicy(train, console.log)
        self.early_stop = EarlyStop(train.patience)
        # Weights: those of a checkpoint, or else of the folders that the run starts from.
        self.done = self.saved = position = 0
        self.last = train.steps
        if (checkpoint := self._restore()) is not None:
            self.done = self.saved = checkpoint.step
            position = int(checkpoint.state["position"])
        #: Entry of a checkpoint's state: fingerprint of the packed base, whose weights a checkpoint
        #: does not hold; empty without one.
        self._base: dict[str, str] = {}
        if config.lora.is_packed:
            from moemesh.train.weights.conversion import load_base

            state = None if checkpoint is None else checkpoint.state
            self._base = {"base": load_base(config, parallel, state)}
        if checkpoint is None and (config.model_path is not None or config.lora.path is not None):
            # A late import: most runs start from random weights or a checkpoint.
            from moemesh.train.weights.conversion import keep_source, open_adapters, open_weights

            if config.model_path is not None:
                weights = open_weights(config, console.log)
                saving.load_weights(weights, parallel, optimizer)
                if mesh.rank == 0:
                    keep_source(weights, folder)
            if (adapters := open_adapters(config)) is not None:
                saving.load_weights(adapters, parallel, optimizer)
        #: A further step of :meth:`next_drain`; a function that gets the steps of :meth:`report`.
        self.drains_after: int | None = None
        self.on_report: Callable[[FinishedStep], object] = lambda step: None
        #: (step, position in the data order after that step). A return to an earlier step sets the
        #: step back, but not the position: the samples read since are skipped.
        self._cursor = self.done, position
        self.checkpoints = Checkpoints(folder, parallel, optimizer, train, console)
        self.checksums = ReplicaChecksums(parallel, optimizer, train, console.log)
        self.row_bounds = RowBounds(
            parallel, plan.microbatches, self.done, keep=console.keep, log=console.log
        )

    def _restore(self) -> Checkpoint | None:
        """Load the newest readable checkpoint, if any; all ranks call."""

        def warn(step: int, why: str) -> None:
            self.console.warn(f"checkpoint {step} skipped: {why}")

        checkpoint = saving.newest(self.folder, self.parallel, warn)
        if checkpoint is not None:
            self.migration.load_state(checkpoint.state)
            self.nan_policy.load_state(checkpoint.state)
            self.early_stop.load_state(checkpoint.state)
            saving.load(checkpoint, self.parallel, self.optimizer)
        return checkpoint

    def train(self, steps: Steps) -> int:
        """Train to the last step of the run, or until a stop request; returns the last saved step.

        All ranks call.
        """
        step = self.done

        def validate_and_record(boundary: StepBoundary) -> None:
            loss = None
            if boundary.is_due(self.config.train.validate_every):
                loss = self.validate()
                self.early_stop.add(boundary.number, loss)
            self.record(boundary.step, loss)
            if self.early_stop.reason is not None:
                self.last, boundary.is_last = boundary.number, True

        def decide(boundary: StepBoundary) -> None:
            boundary.stopping = steps.is_stopping() or boundary.number == self.stop.after
            # Not while steps are skipped: the weights may be the cause, and their checkpoint would
            # replace an older one.
            is_due = boundary.is_due(self.config.train.checkpoint_every)
            is_due = is_due or self.early_stop.improved_at(boundary.number)
            wanted = is_due and (boundary.is_last or not self.nan_policy.skipped)
            boundary.saves = boundary.stopping or wanted

        def save(boundary: StepBoundary) -> str | None:
            if not boundary.saves:
                return None
            if damage := nan_check.examine_state(self.parallel, self.optimizer):
                return self.nan_policy.damaged(boundary.number, damage)
            self.save(boundary.number, is_last=boundary.stopping or boundary.is_last)
            self.saved = boundary.number
            return None

        # All work between two steps, in this order.
        observers: Sequence[Observer] = (
            lambda _: self.nan_policy.decide(self.examine),
            validate_and_record,
            self.migration.after,
            decide,
            lambda _: self.checkpoints.report_problems(),
            self.checksums.after,
            self.row_bounds.after,
            save,
        )
        try:
            while step < self.last:
                progress.at_step(step + 1, self.mesh["pp"].index)
                finished = steps.advance(step + 1)
                progress.stepped()
                is_last = finished.number == self.last
                boundary = StepBoundary(step=finished, began=step, is_last=is_last)
                # The observers after one that returns a reason are not called.
                if reason := next(filter(None, (observe(boundary) for observe in observers)), None):
                    step = self.saved = self.go_back(finished.number, reason)
                    continue
                step = finished.number
                if boundary.stopping:
                    break
            return self.saved
        except KeyboardInterrupt:
            self.checkpoints.abandon()
            raise
        except (Diverged, CopiesDiffer):
            # Raised on all ranks. The next start resumes from the newest checkpoint, so it must be
            # complete.
            self.checkpoints.finish(hurry=True)
            raise
        finally:
            self.artifacts.close()

    def report(self, step: FinishedStep) -> None:
        """Record a finished step that is not the last of :meth:`Steps.advance`."""
        progress.stepped()
        self.on_report(step)
        self.record(step)
        progress.at_step(step.number + 1, self.mesh["pp"].index)

    def batches(self, step: int) -> list[Batch]:
        """This rank's microbatches of step `step` (from 1)."""
        progress.phase(DATA)
        ids, number = self.sample_ids(step), self.config.plan.microbatches
        seed = self.config.train.seed
        batches = own_batches(self.samples, self.mesh, ids, number, seed=seed, step=step)
        progress.phase(STEP)
        return batches

    def num_read(self, step: int) -> int:
        """Number of samples read by the steps up to `step`, with those that a return skipped."""
        at, position = self._cursor
        return position + (step - at) * self.config.data.global_batch

    def sample_ids(self, step: int) -> np.ndarray:
        """The ids of all samples of step `step` (from 1)."""
        return self.samples.ids_at(self.num_read(step - 1), self.config.data.global_batch)

    def examine(
        self, step: int, wants_bundle: bool
    ) -> tuple[nan_check.NonfiniteOrigin, str | None]:
        """The first non-finite value of step `step`, which was not applied (by the stage concerned,
        if the schedule is asynchronous), and the path of its replay bundle, if any; all ranks
        call, after the step."""
        progress.phase(CHECK)
        ids, num_updates = self.sample_ids(step), self.optimizer.num_updates
        parameters = nan_check.nonfinite_gradients(self.parallel)
        bundle, run = None, self.folder.path
        if wants_bundle:
            bundle = begin_bundle(
                run, self.config, self.parallel, self.optimizer, step, self.samples, ids
            )
        batches = self.batches(step)
        progress.phase(CHECK)
        origin = nan_check.examine(self.parallel, self.optimizer, batches, ids.tolist(), parameters)
        if bundle is not None:
            finish_bundle(bundle, origin, num_updates, self.mesh)
        return origin, None if bundle is None else str(bundle)

    def go_back(self, step: int, reason: str) -> int:
        """Return from step `step` to the newest checkpoint, whose step is returned; the samples
        read since are skipped. All ranks call. Raises Diverged without a checkpoint, or after too
        many returns to it."""
        progress.phase(CHECK)
        self.checkpoints.finish()
        checkpoint = self._restore()
        if checkpoint is None:
            self.nan_policy.returned(reason, None, range(0))  # raises Diverged
        assert checkpoint is not None
        skipped = range(self.num_read(checkpoint.step), self.num_read(step))
        self._cursor = checkpoint.step, skipped.stop
        self.last = self.config.train.steps  # an early stop after that checkpoint is void
        self.nan_policy.returned(reason, checkpoint.step, skipped)
        self.artifacts.go_back(checkpoint.step)
        if self.mesh.rank == 0:
            record_return(self.folder, checkpoint.step)
        return checkpoint.step

    def record(self, step: FinishedStep, validation_loss: float | None = None) -> None:
        """Write and show a finished step; all ranks call, for every step in order."""
        epoch = self.num_read(step.number) / self.samples.num_training
        row = self.artifacts.record(step, epoch=epoch, validation_loss=validation_loss)
        self.console.step(row, self.config.train.steps)

    def validate(self) -> float:
        """Loss on the held-out split: up to `validation_batches` global batches of it."""
        progress.phase(VALIDATE)
        size, train = self.config.data.global_batch, self.config.train
        ids = self.samples.validation_ids(train.validation_batches * size)
        batches: list[Batch] = []
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            batches += own_batches(self.samples, self.mesh, part, 1, seed=train.seed)
        return self.largest(evaluate(self.parallel, batches))  # the same bits on all ranks

    def save(self, step: int, *, is_last: bool) -> None:
        """Write a checkpoint of step `step`; all ranks call."""
        progress.phase(SAVE)
        self.folder.check_lease()
        self.artifacts.flush()
        state: dict[str, object] = {
            **self.artifacts.identity,
            **self._base,
            "step": step,
            "position": self.num_read(step),
            **self.migration.state(),
            **self.nan_policy.state(),
            **self.early_stop.state(step),
        }
        is_first = True
        # Only a stop request during the save hurries it: an earlier one is the reason to save.
        was_requested = bool(self.stop.requested)

        def hurries() -> bool:
            return is_last and not was_requested and bool(self.stop.requested)

        while True:
            try:
                return self.checkpoints.save(step, state, is_last=is_last, hurries=hurries)
            except CheckpointError as error:
                # The same error on all ranks. Only the last step of the run waits for space.
                if step < self.last or not is_disk_full(str(error)):
                    raise
                lost = f"steps {(newest_step(self.folder.path) or 0) + 1} to {step} are lost"
                if self.largest(self.stop.requested):
                    raise CheckpointError(f"{error}; {lost}", error.facts) from error
                if is_first and self.mesh.rank == 0:
                    self.console.warn(
                        f"{error}; the run waits for room on the disk; Ctrl-C ends it, and {lost}"
                    )
            is_first = False
            end = time.monotonic() + _ROOM_SECONDS
            while time.monotonic() < end and not self.stop.requested:
                time.sleep(0.1)

    def next_drain(self, first: int) -> int:
        """The first step from `first` on after which a validation, a checkpoint, the end,
        ``--stop-after`` or an end of a profile is due: all stages must then hold the weights of
        that step."""
        train = self.config.train
        ends = [train.steps]
        for every in filter(None, (train.checkpoint_every, train.validate_every)):
            ends.append(-(-first // every) * every)
        others = (self.stop.after, self.drains_after)
        ends += [after for after in others if after is not None and after >= first]
        return min(ends)

    def exit_code(self) -> int:
        """The exit code of a stopped run, whichever rank had the request; all ranks call."""
        local = self.stop.exit_code if self.stop.requested else 0
        return int(self.largest(local)) or self.stop.exit_code

    def largest(self, number: float) -> float:
        """The largest `number` of any rank; all ranks call."""
        numbers = torch.tensor([number], dtype=torch.float64)
        all_reduce_(numbers, self.mesh.control, op="max", caller="stop", phase="control")
        return numbers.item()


class SynchronousSteps:
    """Steps that reduce all gradients, then update all stages, before the next one begins."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def advance(self, first: int) -> FinishedStep:
        session, train, start = self._session, self._session.config.train, time.perf_counter()
        recorder = TimelineRecorder(session.mesh.rank)
        recorder.step = first
        with recorder.span("data"):
            batches = session.batches(first)
        with session.artifacts.first_step_memory():
            result = gradients_of_step(session.parallel, batches, recorder, refuses=False)
        result = session.nan_policy.judge(first, result)
        lr = train.learning_rate(first)
        with recorder.span("optimizer"):
            update(session.parallel, session.optimizer, result, lr=lr, clip=train.clip)
        seconds = time.perf_counter() - start
        return FinishedStep(number=first, result=result, recorder=recorder, seconds=seconds)

    def is_stopping(self) -> bool:
        return bool(self._session.largest(self._session.stop.requested))
