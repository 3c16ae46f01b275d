"""Overlapped blocks: a forward and a backward take turns, each while the other's exchange runs.

DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1) pairs the forward of one
microbatch with the backward of another. Both pause (:mod:`moemesh.parallel.segments`) when an
exchange has started; at every pause of the forward the backward runs to its next one:

    forward    attention, router | experts                | sum, attention, router | experts ...
    under way        B's combine ^        F's dispatch ^           B's dispatch ^
    backward                     sum | experts            | router, attention, sum | experts ...

The number of turns follows from the layers alone, never from tokens, so that all ranks of a stage
start their exchanges in one order. What is computed, and in which order inside of each microbatch,
is the same as one after the other: so are the results, bit for bit.

Only exchanges that a dispatcher starts and waits for later run under the other's compute: rows and
weights of all_to_all, low_latency and hierarchical (of its two hops the one between nodes), the
gather of all_gather. With ``combine = exact`` and with deepep, and in layers that are computed
again as a whole (``recompute = full``), the two run one after the other as far as these go. With
transient replicas (``spare_slots``) the forward pauses but the backward does not: the weights of an
expert are sent in one segment and used in the next, and a weight must have one gradient, not two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from moemesh.parallel.expert.replicas import replicated
from moemesh.parallel.pipeline.program import (
    BackwardState,
    Forward,
    ModelProgram,
    Program,
    input_gradients,
    roots_of,
)
from moemesh.parallel.segments import PausingFlow, SegmentTape, Steps, finish
from moemesh.schedule.action import Entry, Op


@runtime_checkable
class SteppedProgram(Program, Protocol):
    """A program whose forwards and backwards may take turns. Both pause only while an exchange is
    under way, equally often on all ranks of the stage."""

    def forward_with_pauses(
        self, op: Op, inputs: list[Tensor], pause: Callable[[], None]
    ) -> Forward:
        """As ``forward``; calls `pause` at every pause."""
        ...

    def backward_steps(
        self, op: Op, context: BackwardState, gradients: list[Tensor]
    ) -> Steps[list[Tensor]]:
        """As ``backward`` of a ``B``; yields at every pause."""
        ...


def is_overlapped(entry: Entry) -> bool:
    """Whether the entry is a block of one forward and one full backward."""
    return sorted(op.kind for op in entry) == ["B", "F"]


class SteppedModelProgram:
    """The program of a model in steps; its graph is cut where the backward lies in such a block."""

    def __init__(self, whole: ModelProgram) -> None:
        self._whole, self.output_specs = whole, whole.output_specs
        self.weight_gradients = whole.weight_gradients
        self.starting, self.finished = whole.starting, whole.finished
        #: Microbatches on a stage whose graph is cut.
        self._cut = {
            op[1:]
            for entries in whole.schedule.orders
            for entry in entries
            if is_overlapped(entry)
            for op in entry
            if op.kind == "B"
        }
        if replicated(whole.model):
            self._cut.clear()

    def forward(self, op: Op, inputs: list[Tensor]) -> Forward:
        return self.forward_with_pauses(op, inputs, lambda: None)

    def forward_with_pauses(
        self, op: Op, inputs: list[Tensor], pause: Callable[[], None]
    ) -> Forward:
        whole, tape = self._whole, SegmentTape(pause) if op[1:] in self._cut else None
        batch, part = whole.batch_of(op), whole.parts[op.stage]
        assert tape is None or not (part.first and part.last and whole.model.head is None), "tied"
        output = whole.model(batch, part, *inputs, flow=tape or PausingFlow(pause))
        return whole.result(op, batch, output)._replace(state=tape)

    def backward(self, op: Op, context: BackwardState, gradients: list[Tensor]) -> list[Tensor]:
        if context.state is None:
            return self._whole.backward(op, context, gradients)
        return finish(self.backward_steps(op, context, gradients))

    def backward_steps(
        self, op: Op, context: BackwardState, gradients: list[Tensor]
    ) -> Steps[list[Tensor]]:
        assert op.kind == "B"
        if context.state is None:
            return self._whole.backward(op, context, gradients)
        assert isinstance(context.state, SegmentTape)
        yield from context.state.backward(*roots_of(context, gradients))
        return input_gradients(context)
