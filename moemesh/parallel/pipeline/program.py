"""Programs: the work of each schedule operation, as a protocol and for the transformer.

An executor (:mod:`moemesh.parallel.pipeline.executor`) decides when an operation runs; a program
runs it. The executor moves lists of tensors between stages and keeps a :class:`BackwardState` from
a forward to its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moemesh.model.balance_loss import num_scopes, width_of_sums
from moemesh.model.batch import Batch
from moemesh.model.transformer import ModelPart, Output, Transformer
from moemesh.ops.weight_gradient import WeightGradientQueue
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.segments import run_backward
from moemesh.schedule.action import Op, Schedule

# Gradient hooks: the sum over replicas of a gradient starts after its last backward of a step.


class GradientHooks:
    """Passes complete gradients to a reducer, at the positions that the schedule fixes.

    `parameters`: stage -> its parameters on this rank; a tied embedding belongs to two stages. The
    gradient of those `in_parts` comes in several parts: it is complete when the backward is over.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        reducer: GradientReducer,
        in_parts: Collection[nn.Parameter] = (),
    ) -> None:
        self._reducer, self._in_parts = reducer, set(in_parts)
        #: Told of each operation before it begins, where somebody looks on.
        self.watch: Callable[[Op], None] | None = None
        #: Operations behind which gradients are complete, and which: for a step, or each of them.
        self._last: dict[Op, list[nn.Parameter]] = {}
        completing = [op for op in schedule.ops(rank) if op.kind in ("B", "W")]
        if reducer.is_per_backward:
            self._last = {op: list(parameters[op.stage]) for op in completing}
            return
        last: dict[nn.Parameter, Op] = {}
        for op in completing:
            last.update(dict.fromkeys(parameters[op.stage], op))
        for parameter, op in last.items():
            self._last.setdefault(op, []).append(parameter)

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Take a weight gradient that did not come through autograd."""
        assert isinstance(weight, nn.Parameter)
        self._reducer.accumulate(weight, gradient)

    def starting(self, op: Op) -> None:
        """A full backward hands its gradients over one by one: sums start while it still runs."""
        if self.watch is not None:
            self.watch(op)
        if op.kind == "B" and op in self._last:
            self._expect(op)
            self._reducer.arm(p for p in self._last[op] if p not in self._in_parts)

    def finished(self, op: Op) -> None:
        """After a weight-gradient half everything of the microbatch has been added."""
        if op not in self._last:
            return
        if op.kind == "W":
            self._expect(op)
            self._reducer.complete(self._last[op])
        elif self._in_parts:
            self._reducer.complete(p for p in self._last[op] if p in self._in_parts)
        if self._reducer.is_per_backward:
            self._reducer.close()

    def _expect(self, op: Op) -> None:
        if self._reducer.is_per_backward:
            self._reducer.expect(self._last[op])


# The work of operations.


class TensorSpec(NamedTuple):
    """One tensor of a message: known to both sides before it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class BackwardState:
    """State from a forward for its backward. Outputs are freed once they are sent: their place in
    the graph is enough. `state` belongs to the program."""

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
        """The outputs of the forward `op`; its backward receives gradients of the same specs."""
        ...

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        """Run a stage on the previous stage's outputs (none on the first); `inputs` are leaves."""
        ...

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        """From gradients of the outputs to gradients of the inputs; weight gradients go to where
        they are summed, or into ``context.pending`` when `op` is an ``I``."""
        ...

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        """Compute what an ``I`` has left in ``context.pending``."""
        ...

    def starting(self, op: Op) -> None:
        """Called before each operation, before its inputs have arrived."""
        ...

    def finished(self, op: Op) -> None:
        """Called after each operation, its outputs on their way."""
        ...


def make_context(inputs: list[Tensor], forward: Forward) -> BackwardState:
    """The context of a forward."""
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
    # A stage before the first one that trains is given no gradients: its roots are None.
    given = gradients or [None] * len(context.roots)
    for root, gradient in zip(context.roots, given, strict=True):
        if root is not None:
            roots.append(root)
            values.append(gradient)
    if context.objective is not None:
        roots.append(context.objective)
        values.append(None)
    return roots, values


def input_gradients(context: BackwardState) -> list[Tensor]:
    """The gradients of the inputs, after the backward; empties the context."""
    found: list[Tensor] = []
    for x in context.inputs:
        found.append(torch.zeros_like(x) if x.grad is None else x.grad)
        x.grad = None
    context.roots, context.objective, context.inputs = [], None, []
    return found


def stream_specs(model: Transformer, batch: Batch, dtype: torch.dtype) -> Sequence[TensorSpec]:
    """The message of a stage to the next: the residual stream of this rank's tokens, and where all
    layers have one auxiliary loss the sums for it."""
    config = model.config
    found = [TensorSpec((len(model.tokens.local(batch.num_tokens)), config.hidden_size), dtype)]
    if config.has_joint_aux_loss:
        shape = num_scopes(config, len(batch.tokens_BS)), width_of_sums(config)
        found.append(TensorSpec(shape, torch.float64))
    return found


#: (a part, what it computed, its microbatch) -> its share of what is differentiated, a scalar.
Objective = Callable[[ModelPart, Output, Batch], Tensor]


class ModelProgram:
    """Stages of the transformer over the microbatches of one step.

    `batches` are ordered by sample; `objective` is this rank's part of what is differentiated.
    """

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
        # Of whole sequences, the positions that this rank holds.
        self.batches = [
            batch.take(model.tokens.runs(batch.tokens_BS.shape[1])) for batch in batches
        ]
        self.objective, self.hooks = objective, hooks
        # The stream's dtype: an embedding's or a norm's, which come before any fp32 router.
        self._dtype = next(model.parameters()).dtype

    def output_specs(self, op: Op) -> Sequence[TensorSpec]:
        return self.specs_of(op, self.batch_of(op))

    def specs_of(self, op: Op, batch: Batch) -> Sequence[TensorSpec]:
        """The outputs of the stage of `op` for `batch`."""
        if op.stage == self.schedule.num_stages - 1:
            return ()
        return stream_specs(self.model, batch, self._dtype)

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        return self.forward_of(op, self.batch_of(op), inputs)

    def batch_of(self, op: Op) -> Batch:
        """The microbatch of `op`."""
        return self.batches[self.schedule.sample(op)]

    def forward_of(self, op: Op, batch: Batch, inputs: list[Tensor]) -> Forward:
        """The stage of `op` on `batch`."""
        return self.result(op, batch, self.model(batch, self.parts[op.stage], *inputs))

    def result(self, op: Op, batch: Batch, output: Output) -> Forward:
        """The outputs and the objective of the stage of `op`."""
        objective = self.objective(self.parts[op.stage], output, batch)
        return Forward(output.for_next, objective)

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        if op.kind == "B":
            return differentiate(context, gradients)
        with context.pending:
            return differentiate(context, gradients)

    def weight_gradients(self, op: Op, context: BackwardState) -> None:
        context.pending.run(self.hooks.accumulate)

    def starting(self, op: Op) -> None:
        self.hooks.starting(op)

    def finished(self, op: Op) -> None:
        self.hooks.finished(op)
