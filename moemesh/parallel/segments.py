"""A forward that pauses while an exchange is in flight, and a backward that pauses there, too.

A MoE layer pauses twice, even without tokens: while its dispatch and while its combine are in
flight. The code between two pauses is a segment. A :class:`SegmentTape` cuts the autograd graph at
pauses: a tensor that later segments read is replaced by a leaf. The backward runs the segments in
reverse order, each from the gradients of the leaves that it made, and pauses between them, while
the transposed exchange is in flight.

| segment of a layer | reads | its backward ends by starting |
|---|---|---|
| attention, router, shared experts, dispatch starts | the stream | (continues one layer earlier) |
| dispatch ends, experts, combine starts | rows and weights in flight | the dispatch's backward |
| combine ends, sums | results in flight, stream, shared experts | the combine's backward |

Cutting does not change the results: inside a segment autograd runs the same nodes in the same
order, and adds to the gradients of later segments, whose backward runs first in the uncut graph,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moemesh.model.seams import Flow
from moemesh.ops.pending import Pending

T = TypeVar("T")
P = ParamSpec("P")
#: A backward that yields at each pause, and returns a value at its end.
Steps: TypeAlias = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """Run `steps` to the end without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class PausingFlow(Flow):
    """The graph stays whole; ``on_pause`` is called at every pause."""

    def __init__(self, on_pause: Callable[[], None]) -> None:
        self._on_pause = on_pause

    def pause(self) -> None:
        self._on_pause()


@dataclass(frozen=True)
class _Crossing:
    """A tensor that leaves its segment: its edge in the graph, and the leaf that replaces it. If it
    is in flight, its gradient comes with the exchange: the leaf has none."""

    edge: GradientEdge
    leaf: Tensor
    is_in_flight: bool

    def gradient(self) -> Tensor | None:
        """The sum of the gradients of later segments; expanded zeros for a tensor in flight."""
        if self.is_in_flight:
            return self.leaf.new_zeros(()).expand(self.leaf.shape)
        gradient, self.leaf.grad = self.leaf.grad, None
        return gradient


class SegmentTape(PausingFlow):
    """Cuts one forward into segments, and runs their backwards. A weight that several segments use
    gets a gradient from each, not one from the whole backward: see ``in_parts`` of
    :mod:`moemesh.parallel.pipeline.program`."""

    def __init__(self, on_pause: Callable[[], None]) -> None:
        super().__init__(on_pause)
        #: Crossings out of each segment that has ended, and out of the current one.
        self._closed: list[list[_Crossing]] = []
        self._open: list[_Crossing] = []

    def start(self, send: Callable[P, Pending[T]], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        pending = send(*args, **kwargs)
        exchanges = [exchange for exchange in pending.exchanges if not exchange.is_waited]
        if not exchanges:
            # Nothing is in flight: this segment computed the value, a tensor or a named tuple.
            value: Any = pending.wait()
            if isinstance(value, Tensor):
                return Pending.ready(cast(T, self.cut(value)))
            tensors = {name: x for name, x in value._asdict().items() if isinstance(x, Tensor)}
            return Pending.ready(
                value._replace(**{name: self.cut(x) for name, x in tensors.items()})
            )
        for exchange in exchanges:
            exchange.place = self.cut(exchange.place, is_in_flight=True)
        return pending

    def cut(self, x: Tensor, *, is_in_flight: bool = False) -> Tensor:
        if not x.requires_grad:
            return x
        leaf = x.detach().requires_grad_()
        self._open.append(_Crossing(get_gradient_edge(x), leaf, is_in_flight))
        return leaf

    def pause(self) -> None:
        self._closed.append(self._open)
        self._open = []
        super().pause()

    def backward(
        self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor | None]
    ) -> Steps[None]:
        """Run the backward of all segments, once; `roots` are outputs of the last one."""
        crossings, self._open = self._open, []
        if crossings and roots:
            # Tensors cut after the last pause are in the last segment, too. They become roots, with
            # the gradients of the given roots at the cuts.
            cut_gradients = torch.autograd.grad(
                roots,
                [crossing.leaf for crossing in crossings],
                gradients,
                retain_graph=True,
                allow_unused=True,
            )
            pairs = zip(crossings, cut_gradients, strict=True)
            reached = [(cut.edge, gradient) for cut, gradient in pairs if gradient is not None]
            roots = [*roots, *(edge for edge, _ in reached)]
            gradients = [*gradients, *(gradient for _, gradient in reached)]
        run_backward(roots, gradients)
        while self._closed:
            yield
            crossings = self._closed.pop()
            pairs = [(crossing.edge, crossing.gradient()) for crossing in crossings]
            reached = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
            run_backward([edge for edge, _ in reached], [gradient for _, gradient in reached])


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """``torch.autograd.backward``; nothing without roots."""
    if roots:
        torch.autograd.backward(roots, gradients)
