"""The executor: one loop over a rank's list of operations, for all schedules.

| op | receives | runs | sends |
|---|---|---|---|
| F | outputs of the stage before | the stage | its outputs |
| B, I | gradients of its outputs | the backward, or its input half | gradients of its inputs |
| W | nothing | weight gradients that its I has deferred | nothing |

Callers other than :meth:`Executor.run` choose the entries: those of a stream that may end early, of
a warm-up that may be rolled back, or in the order in which messages arrive (AMPNet).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from torch import Tensor

from moemesh.comm.point_to_point import Channels
from moemesh.config.errors import UserError
from moemesh.monitor.progress import at_microbatch
from moemesh.parallel.pipeline.messenger import Messenger, OrderedMessenger
from moemesh.parallel.pipeline.program import (
    BackwardState,
    Forward,
    Program,
    SteppedModelProgram,
    is_overlapped,
    make_context,
)
from moemesh.schedule.action import Entry, Op, Schedule
from moemesh.trace.timeline import TimelineRecorder

P = ParamSpec("P")
R = TypeVar("R")


class PipelineError(RuntimeError):
    """An operation of the pipeline failed; the message names it."""


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


class Executor:
    """Runs the entries of one pipeline rank, and keeps the states of forwards for their backwards.
    `messenger`: by default messages in the order of the schedule. `has_backward`: whether states
    are kept; by default, whether the rank's list has a backward."""

    def __init__(
        self,
        schedule: Schedule,
        channels: Channels,
        messenger: Messenger | None = None,
        *,
        has_backward: bool | None = None,
    ) -> None:
        self._schedule, self._rank = schedule, channels.axis.index
        self._messenger = messenger or OrderedMessenger(schedule, channels)
        if has_backward is None:
            has_backward = any(op.kind != "F" for op in schedule.ops(self._rank))
        self._has_backward = has_backward
        #: State of each forward with a pending backward, by (stage, microbatch, ...) of its `Op`.
        self._contexts: dict[tuple[int, int, int, int], BackwardState] = {}

    def run(self, program: Program, recorder: TimelineRecorder) -> None:
        """One step: every entry of this rank, in order.

        On several pipeline ranks exceptions name the operation that failed: a UserError by a note,
        others as a PipelineError.
        """
        self.run_entries(program, self._schedule.orders[self._rank], recorder)
        self.finish()

    def run_entries(
        self, program: Program, entries: Iterable[Entry], recorder: TimelineRecorder
    ) -> None:
        """A part of a step; :meth:`finish` ends it."""
        for entry in entries:
            self.run_entry(program, entry, recorder)

    def run_entry(self, program: Program, entry: Entry, recorder: TimelineRecorder) -> None:
        """Wait for the inputs of an entry, then run its operations: one after the other, or a
        forward and a backward in turns if the program can."""
        wait_start = recorder.clock()
        received = [self._named(op, self._messenger.take, program, op) for op in entry]
        start = recorder.clock()
        if isinstance(program, SteppedModelProgram) and is_overlapped(entry):
            self._take_turns(program, dict(zip(entry, received, strict=True)))
        else:
            for op, inputs in zip(entry, received, strict=True):
                self._named(op, self._run_op, program, op, inputs)
        record(recorder, self._schedule, entry, start, recorder.clock(), wait=start - wait_start)

    def _run_op(self, program: Program, op: Op, inputs: list[Tensor]) -> None:
        at_microbatch(self._schedule.sample(op))
        program.starting(op)
        outputs: list[Tensor] = []
        key = op[1:]
        if op.kind == "F":
            leaves = self._leaves(op, inputs)
            outputs = self._keep(op, leaves, program.forward(op, leaves))
        elif op.kind == "W":
            program.weight_gradients(op, self._contexts.pop(key))
        else:
            context = self._contexts.pop(key) if op.kind == "B" else self._contexts[key]
            outputs = program.backward(op, context, inputs)
        self._messenger.send(op, outputs)
        program.finished(op)

    def finish(self) -> None:
        """End a step: wait for sends, and check that every forward has had its backward."""
        self._messenger.finish()
        left = list(self._contexts)
        assert not left, f"without a backward at the end of a step: {left}"

    def forget(self) -> None:
        """Drop the states of forwards whose backwards will not run."""
        self._contexts.clear()

    def _named(self, op: Op, run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``run(...)``; exceptions name the operation, unless there is only one pipeline rank."""
        if self._schedule.num_ranks == 1:
            return run(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            where = f"operation {op} (stage {op.stage}, microbatch {self._schedule.sample(op)})"
            problem = f"{where} failed on pipeline rank {self._rank}"
            if isinstance(error, PipelineError):  # of the other operation of a block
                raise
            if isinstance(error, UserError):
                error.add_note(problem)
                raise
            raise PipelineError(f"{problem}: {error}") from error

    def _leaves(self, op: Op, received: list[Tensor]) -> list[Tensor]:
        """Received tensors as the inputs of a stage: leaves, if an earlier stage trains."""
        if op.stage <= self._schedule.first_trained_stage:
            return received
        return [x.requires_grad_() if x.is_floating_point() else x for x in received]

    def _keep(self, op: Op, leaves: list[Tensor], forward: Forward) -> list[Tensor]:
        """Keep the state of a forward for its backward; returns the outputs to send."""
        if self._has_backward:
            self._contexts[op[1:]] = make_context(leaves, forward)
        return [x.detach() for x in forward.outputs]

    # Blocks.

    def _take_turns(self, program: SteppedModelProgram, received: dict[Op, list[Tensor]]) -> None:
        """Run a forward; at each of its pauses, and after it, the backward runs one step."""
        forward, backward = sorted(received, key=lambda op: op.kind, reverse=True)  # "F", "B"
        at_microbatch(self._schedule.sample(forward))
        program.starting(forward)
        program.starting(backward)
        context = self._contexts.pop(backward[1:])
        steps = program.backward_steps(backward, context, received[backward])
        unsent, ended = list(received), dict[Op, list[Tensor]]()

        def continue_backward() -> None:
            try:
                next(steps)
            except StopIteration as end:
                ended[backward] = end.value

        def send(op: Op) -> None:
            self._messenger.send(op, ended.pop(op))
            program.finished(op)

        def turn() -> None:
            if backward in unsent and backward not in ended:
                self._named(backward, continue_backward)
            # Sends are in the order of the entry, as the receiver expects, not in that of ends.
            while unsent and unsent[0] in ended:
                op = unsent.pop(0)
                self._named(op, send, op)

        def run_forward() -> None:
            leaves = self._leaves(forward, received[forward])
            forward_result = program.forward_with_pauses(forward, leaves, turn)
            ended[forward] = self._keep(forward, leaves, forward_result)

        self._named(forward, run_forward)
        while unsent:
            turn()
