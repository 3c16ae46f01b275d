"""Programs: the computation of each schedule operation, as a protocol and for the transformer.

An executor (:mod:`moemesh.parallel.pipeline.executor`) decides when an operation runs; a program
runs it. The executor moves lists of tensors between stages and keeps a :class:`BackwardState` from
a forward to its backward.

Legend: B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moemesh.model.balance_loss import shape_of_sums
from moemesh.model.batch import Batch
from moemesh.model.seams import PLAIN_FLOW, Flow
from moemesh.model.transformer import ModelPart, Output, Transformer
from moemesh.ops.weight_gradient import WeightGradientQueue
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.expert.replicas import replicated
from moemesh.parallel.segments import PausingFlow, SegmentTape, Steps, finish, run_backward
from moemesh.schedule.action import Entry, Op, Schedule

# Gradient hooks: the sum over replicas of a gradient starts after its last backward of a step.


class GradientHooks:
    """Passes complete gradients to a reducer, at the positions that the schedule fixes.

    `parameters`: stage -> its parameters on this rank; a tied embedding belongs to two stages.
    `in_parts`: parameters for which autograd accumulates several gradients in one backward: their
    sums are complete only after it.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        reducer: GradientReducer,
        in_parts: Collection[nn.Parameter] = (),
    ) -> None:
        self._reducer = reducer
        #: Optional hook, called with each operation before it begins.
        self.watch: Callable[[Op], None] | None = None
        #: Operation -> parameters whose gradients are complete after it.
        self._last: dict[Op, list[nn.Parameter]] = {}
        completing = [op for op in schedule.ops(rank) if op.kind in ("B", "W")]
        if reducer.is_per_backward:
            self._last = {op: list(parameters[op.stage]) for op in completing}
        else:
            last: dict[nn.Parameter, Op] = {}
            for op in completing:
                last.update(dict.fromkeys(parameters[op.stage], op))
            for parameter, op in last.items():
                self._last.setdefault(op, []).append(parameter)
        #: The same parameters, split into those with gradients in one part and in several.
        parts = set(in_parts)
        self._whole = {op: [p for p in ended if p not in parts] for op, ended in self._last.items()}
        self._in_parts = {op: [p for p in ended if p in parts] for op, ended in self._last.items()}

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Add a deferred weight gradient, which autograd did not accumulate."""
        assert isinstance(weight, nn.Parameter)
        self._reducer.accumulate(weight, gradient)

    def starting(self, op: Op) -> None:
        """Called before each operation. A full backward passes its gradients to the reducer one by
        one, so sums start while it runs."""
        if self.watch is not None:
            self.watch(op)
        if op.kind == "B" and op in self._last:
            if self._reducer.is_per_backward:
                self._reducer.expect(self._last[op])
            self._reducer.arm(self._whole[op])

    def finished(self, op: Op) -> None:
        """Called after each operation. After a W all gradients of its parameters are complete;
        after a B only those in several parts are left."""
        if op not in self._last:
            return
        if op.kind == "W":
            if self._reducer.is_per_backward:
                self._reducer.expect(self._last[op])
            self._reducer.complete(self._last[op])
        elif self._in_parts[op]:
            self._reducer.complete(self._in_parts[op])
        if self._reducer.is_per_backward:
            self._reducer.close()


# The work of operations.


class TensorSpec(NamedTuple):
    """One tensor of a message: known to both sides before it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class BackwardState:
    """State of a forward for its backward. `roots`: edges of the outputs in the graph (None without
    a gradient); the outputs themselves are freed after they are sent. `state`: the program's."""

    inputs: list[Tensor]
    roots: list[GradientEdge | None]
    objective: GradientEdge | None = None
    pending: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    state: Any = None


class Forward(NamedTuple):
    """Results of a forward: tensors for the next stage, and this stage's part of the objective."""

    outputs: list[Tensor]
    objective: Tensor | None
    state: Any = None


class Program(Protocol):
    """Called by an executor, one operation after the other."""

    def output_specs(self, op: Op) -> Sequence[TensorSpec]:
        """The outputs of the forward `op`; its backward receives gradients of the floating ones."""

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        """Run a stage on the previous stage's outputs (none on the first); `inputs` are leaves."""

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of the inputs from gradients of the outputs; weight gradients go to the
        reducer, or into ``context.pending`` if `op` is an ``I``."""

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        """Compute what an ``I`` has left in ``context.pending``."""

    def starting(self, op: Op) -> None:
        """Called before each operation, after its inputs have arrived."""

    def finished(self, op: Op) -> None:
        """Called after each operation, with its outputs in flight."""


def make_context(inputs: list[Tensor], forward: Forward) -> BackwardState:
    """The state of a forward on `inputs` for its backward."""
    objective = forward.objective
    return BackwardState(
        inputs=[x for x in inputs if x.requires_grad],
        roots=[_edge(x) for x in forward.outputs if x.is_floating_point()],
        objective=_edge(objective) if objective is not None else None,
        state=forward.state,
    )


def _edge(x: Tensor) -> GradientEdge | None:
    return get_gradient_edge(x) if x.requires_grad else None


def differentiate(context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
    """Run the backward of one stage, once; zeros for an input that no gradient reached."""
    run_backward(*roots_of(context, gradients))
    return input_gradients(context)


def roots_of(
    context: BackwardState, gradients: list[Tensor]
) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Roots of the backward: the outputs with their gradients, and the stage's objective."""
    roots: list[GradientEdge] = []
    values: list[Tensor | None] = []
    # A stage before the first one that trains receives no gradients, and its roots are None.
    for root, gradient in zip(context.roots, gradients or [None] * len(context.roots), strict=True):
        if root is not None:
            roots.append(root)
            values.append(gradient)
    if context.objective is not None:
        roots.append(context.objective)
        values.append(None)
    return roots, values


def input_gradients(context: BackwardState) -> list[Tensor]:
    """The gradients of the inputs, after the backward; empties the context."""
    gradients_of_inputs: list[Tensor] = []
    for x in context.inputs:
        gradients_of_inputs.append(torch.zeros_like(x) if x.grad is None else x.grad)
        x.grad = None
    context.roots, context.objective, context.inputs = [], None, []
    return gradients_of_inputs


def stream_specs(model: Transformer, batch: Batch) -> Sequence[TensorSpec]:
    """Tensors of a stage's message to the next: this rank's residual stream, and the sums of the
    auxiliary loss if one is for all layers."""
    config = model.config
    specs = [TensorSpec(*spec) for spec in model.stream_specs(batch)]
    if config.has_joint_aux_loss:
        shape = shape_of_sums(config, model.num_sequences(batch))
        specs.append(TensorSpec(shape, torch.float64))
    return specs


#: Function of (part, output, microbatch) that returns the part's share of the objective, a scalar.
Objective = Callable[[ModelPart, Output, Batch], Tensor]


class ModelProgram:
    """Stages of the transformer over the microbatches of one step. `batches` are ordered by sample;
    `objective` returns this rank's part of the differentiated scalar."""

    def __init__(
        self,
        schedule: Schedule,
        model: Transformer,
        parts: dict[int, ModelPart],
        batches: Sequence[Batch],
        objective: Objective,
        hooks: GradientHooks,
    ) -> None:
        if len(batches) != schedule.total_microbatches:
            raise ValueError(
                f"{len(batches)} microbatches for a schedule of {schedule.total_microbatches}"
            )
        self.schedule, self.model, self.parts = schedule, model, parts
        self.starting, self.finished = hooks.starting, hooks.finished
        # Batches with this rank's positions of the sequences (context parallelism).
        self.batches = [
            batch.take(model.tokens.runs(batch.tokens_BS.shape[1])) for batch in batches
        ]
        self.objective, self.hooks = objective, hooks

    def output_specs(self, op: Op) -> Sequence[TensorSpec]:
        if op.stage == self.schedule.num_stages - 1:
            return ()
        return stream_specs(self.model, self.batch_of(op))

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        return self.forward_of(op, self.batch_of(op), inputs)

    def batch_of(self, op: Op) -> Batch:
        return self.batches[self.schedule.sample(op)]

    def forward_of(
        self, op: Op, batch: Batch, inputs: list[Tensor], flow: Flow = PLAIN_FLOW
    ) -> Forward:
        """Run the forward of the stage of `op` on `batch`."""
        part = self.parts[op.stage]
        output = self.model(batch, part, *inputs, flow=flow)
        return Forward(output.for_next, self.objective(part, output, batch))

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        if op.kind == "B":
            return differentiate(context, gradients)
        with context.pending:
            return differentiate(context, gradients)

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        context.pending.run(self.hooks.accumulate)


# Overlapped blocks: a forward and a backward take turns, each while the other's exchange runs.
#
# DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1) pairs the forward of
# one microbatch with the backward of another. Both pause (:mod:`moemesh.parallel.segments`) when an
# exchange has started; at every pause of the forward the backward runs to its next one:
#
#     forward    attention, router | experts                | sum, attention, router | experts ...
#     in flight        B's combine ^        F's dispatch ^           B's dispatch ^
#     backward                     sum | experts            | router, attention, sum | experts ...
#
# The number of turns depends on the layers, never on tokens, so all ranks of a stage start their
# exchanges in one order. The operations of each microbatch and their order are the same as without
# turns, and so are the results, bit for bit.
#
# Only exchanges that a dispatcher starts and waits for later overlap with the other's compute: the
# first hop of rows and weights, or the gather of tokens. Without such exchanges forward and
# backward run one after the other: with ``combine = exact``, with deepep, and in layers that are
# recomputed as a whole (``recompute = full``). With transient replicas (``spare_slots``) the
# forward pauses but the backward does not: the weights of an expert are sent in one segment and
# used in the next, and a weight must have one gradient, not two.


def is_overlapped(entry: Entry) -> bool:
    """Whether the entry is a block of one forward and one full backward."""
    return len(entry) == 2 and {op.kind for op in entry} == {"B", "F"}


class SteppedModelProgram(ModelProgram):
    """A program whose forwards and backwards may take turns. Both pause where an exchange may be in
    flight, equally often on all ranks of the stage. The graph of a forward is cut at its pauses if
    its backward is in an overlapped block, unless experts have transient replicas."""

    def __init__(self, schedule: Schedule, model: Transformer, *rest: Any) -> None:
        super().__init__(schedule, model, *rest)
        blocks = [entry for order in schedule.orders for entry in order if is_overlapped(entry)]
        #: (stage, microbatch, ...) of the operations whose graph is cut: an Op without its kind.
        self._cut = {op[1:] for block in blocks for op in block if op.kind == "B"}
        if replicated(model):
            self._cut.clear()

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        return self.forward_with_pauses(op, inputs, lambda: None)

    def forward_with_pauses(
        self, op: Op, inputs: list[Tensor], pause: Callable[[], None]
    ) -> Forward:
        """Same as ``forward``; calls `pause` at every pause."""
        part, tape = self.parts[op.stage], SegmentTape(pause) if op[1:] in self._cut else None
        # A head that is the embedding would get two gradients: from the first and the last segment.
        assert tape is None or not (part.first and part.last and self.model.head is None), "tied"
        forward_result = self.forward_of(op, self.batch_of(op), inputs, tape or PausingFlow(pause))
        return forward_result._replace(state=tape)

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        if context.state is None:
            return super().backward(op, context, gradients)
        return finish(self.backward_steps(op, context, gradients))

    def backward_steps(
        self, op: Op, context: BackwardState, gradients: list[Tensor]
    ) -> Steps[list[Tensor]]:
        """Same as ``backward`` of a ``B``; yields at every pause."""
        assert op.kind == "B"
        if context.state is None:
            return super().backward(op, context, gradients)
        assert isinstance(context.state, SegmentTape)
        yield from context.state.backward(*roots_of(context, gradients))
        return input_gradients(context)
