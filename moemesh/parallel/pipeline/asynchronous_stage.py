"""Asynchronous programs: weights are updated while microbatches are in flight, without a drain.

| rule | forward uses | backward uses | a stage updates |
|---|---|---|---|
| stash (PipeDream) | newest | its forward's version | after every backward |
| two_versions (2BW) | the version before the newest | its forward's version | after a window |
| newest (AMPNet) | newest | newest, see below | after a window of its own backwards |

AMPNet's backward can be done in two ways. ``recompute``, the default, runs the stage a second time
on its saved input with the current weights and differentiates that: a gradient of the current
weights, for any module. ``live`` keeps the activations of the forward, and the backward reads the
current weights: no second forward, but the result is the gradient of neither version.

Each stage updates without waiting for others. Ranks with shards or replicas of one stage update at
the same points.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor

from moemesh.comm.point_to_point import Channels
from moemesh.config.errors import UserError
from moemesh.model.batch import Batch
from moemesh.model.transformer import ModelPart, Output, Transformer
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.pipeline.executor import Executor
from moemesh.parallel.pipeline.messenger import OrderedMessenger
from moemesh.parallel.pipeline.program import (
    BackwardState,
    Forward,
    TensorSpec,
    differentiate,
    make_context,
    stream_specs,
)
from moemesh.parallel.pipeline.versions import WeightVersions
from moemesh.schedule.action import Op, Schedule, UpdateRule
from moemesh.trace.timeline import TimelineRecorder

#: Ways of AMPNet's backward to read weights.
Backward = Literal["recompute", "live"]


class Stream(Protocol):
    """The microbatches of an asynchronous program, numbered from 0, and its updates."""

    def batch(self, sample: int) -> Batch:
        """Microbatch number `sample`; may be called before its forward, for shapes of messages."""

    def objective(self, sample: int, part: ModelPart, output: Output, *, recompute: bool) -> Tensor:
        """This part's share of the objective, divided by the counts of its update window;
        `recompute`: its forward has been run, and counted, before."""

    def update(self, window: int, versions: WeightVersions) -> None:
        """All gradients of update window `window` are in the reducer: make the next version."""

    def end(self, sample: int) -> int:
        """Number of microbatches that exist; at most `sample` after the end of the stream."""

    def finished(self, sample: int) -> None:
        """Called after the backward of `sample` and the update that it completes, if any."""


class AsynchronousProgram:
    """One stage of the transformer under an update rule."""

    def __init__(
        self,
        rule: UpdateRule,
        model: Transformer,
        part: ModelPart,
        reducer: GradientReducer,
        stream: Stream,
        *,
        backward: Backward = "recompute",
    ) -> None:
        self.rule, self.model, self.part = rule, model, part
        self.reducer, self.stream = reducer, stream
        self._recomputes = rule.kind == "newest" and backward == "recompute"
        in_place = rule.kind == "newest" and not self._recomputes
        self.versions = WeightVersions(
            model, rule, reducer.accumulate, renew=reducer.renew, in_place=in_place
        )
        self._parameters = list(model.parameters())
        self._num_gradients = 0
        reducer.begin()

    def output_specs(self, op: Op) -> Sequence[TensorSpec]:
        return stream_specs(self.model, self.stream.batch(op.microbatch))

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        version = self.versions.take(op.microbatch)
        if not self._recomputes:
            forward = self._run(version, op.microbatch, inputs, recompute=False)
            return forward._replace(state=(version, []))
        with torch.no_grad():
            forward = self._run(version, op.microbatch, inputs, recompute=False)
        return Forward(forward.outputs, None, (version, inputs))

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        # Version of the forward, and its inputs if the stage is rerun.
        forward_version, inputs = context.state
        version = self.versions.newest if self.rule.kind == "newest" else forward_version
        if self._recomputes:
            recomputed = make_context(
                inputs, self._run(version, op.microbatch, inputs, recompute=True)
            )
            context.roots, context.objective = recomputed.roots, recomputed.objective
        # A layer that is recomputed in its backward must find the weights of its forward.
        with self.versions.using(version), context.pending if op.kind == "I" else nullcontext():
            input_gradients = differentiate(context, gradients)
        self.versions.release(forward_version)
        return input_gradients

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        context.pending.run(
            lambda weight, gradient: self.reducer.accumulate(
                self.versions.original(weight), gradient
            )
        )

    def starting(self, op: Op) -> None:
        if op.kind == "B" and self._completes_window():
            self.reducer.arm(self._parameters)

    def finished(self, op: Op) -> None:
        if op.kind not in ("B", "W"):
            return
        if self._completes_window():
            self.stream.update(self._num_gradients // self.rule.window, self.versions)
            self.reducer.begin()
        self._num_gradients += 1
        self.stream.finished(op.microbatch)

    def _completes_window(self) -> bool:
        """Whether the next gradient is the last of its window."""
        return (self._num_gradients + 1) % self.rule.window == 0

    def _run(self, version: int, sample: int, inputs: list[Tensor], *, recompute: bool) -> Forward:
        with self.versions.using(version):
            output = self.model(self.stream.batch(sample), self.part, *inputs)
            objective = self.stream.objective(sample, self.part, output, recompute=recompute)
        return Forward(output.for_next, objective)


class StreamExecutor:
    """The executor of a stream that may end before its schedule does. Before each forward the
    program's stream returns the number of existing microbatches, the same on every rank. Operations
    after the end are skipped, and receives are never posted for them."""

    def __init__(self, schedule: Schedule, channels: Channels) -> None:
        placed = [len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
        if schedule.num_pipes > 1 or schedule.num_slices > 1 or max(placed) > 1:
            raise UserError(
                f"an asynchronous schedule has one stage on a rank, one pipe and whole sequences; "
                f"{schedule.name} has {max(placed)}, {schedule.num_pipes} and slices of 1 in "
                f"{schedule.num_slices}"
            )
        self.schedule, self._rank = schedule, channels.axis.index
        #: Last result of `Stream.end`: number of microbatches that exist.
        self._num_existing = 0
        messenger = OrderedMessenger(
            schedule, channels, may_receive=lambda op: op.microbatch < self._num_existing
        )
        self._executor = Executor(schedule, channels, messenger)

    def run(self, program: AsynchronousProgram, recorder: TimelineRecorder) -> None:
        """Run the whole stream until all microbatches have ended."""
        self._num_existing = 0
        for entry in self.schedule.orders[self._rank]:
            first = min(op.microbatch for op in entry)
            if any(op.kind == "F" for op in entry):
                self._num_existing = program.stream.end(first)
            if first < self._num_existing:
                self._executor.run_entry(program, entry, recorder)
        self._executor.finish()
