"""A forward that pauses while an exchange is in flight, and a backward that pauses there, too.

A MoE layer pauses twice, whatever its tokens: while its dispatch and while its combine are in
flight. Between pauses is a segment. A :class:`SegmentTape` cuts the autograd graph there: every
tensor that a later segment reads continues as a leaf. The backward then runs the segments in
reverse order, each from the gradients of its leaves, and pauses in between, while a transposed
exchange that it has started is in flight.

| segment of a layer | reads | its backward ends by starting |
|---|---|---|
| attention, router, shared experts, dispatch starts | the stream | (continues one layer earlier) |
| dispatch ends, experts, combine starts | rows and weights in flight | the dispatch's backward |
| combine ends, sums | results in flight, stream, shared experts | the combine's backward |

Cutting does not change the results: inside a segment autograd runs the same nodes in the same
order, and adds to the gradients of later segments, which come first in the whole graph, too.
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
#: A backward that yields where it pauses, and returns a value at its end.
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
        """The sum of the gradients of later segments."""
        if self.is_in_flight:
            return self.leaf.new_zeros(()).expand(self.leaf.shape)
        gradient, self.leaf.grad = self.leaf.grad, None
        return gradient


class SegmentTape(PausingFlow):
    """Cuts one forward into segments, and runs their backwards. A weight that is used in several
    segments gets a gradient from each: others must not count on one from the whole backward
    (``in_parts`` of :mod:`moemesh.parallel.pipeline.program`)."""

    def __init__(self, on_pause: Callable[[], None]) -> None:
        super().__init__(on_pause)
        self._closed: list[list[_Crossing]] = []
        self._open: list[_Crossing] = []

    def start(self, send: Callable[P, Pending[T]], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        pending = send(*args, **kwargs)
        exchanges = [exchange for exchange in pending.exchanges if not exchange.is_waited]
        if not exchanges:
            # Nothing is in flight: the value, a tensor or a named tuple, belongs to this segment.
            value: Any = pending.wait()
            if isinstance(value, Tensor):
                return Pending.ready(cast(T, self.cut(value)))
            tensors = {name: x for name, x in value._asdict().items() if isinstance(x, Tensor)}
            return Pending.ready(
                value._replace(**{name: self.cut(x) for name, x in tensors.items()})
            )
        for exchange in exchanges:
            exchange.place = self._cut(exchange.place, is_in_flight=True)
        return pending

    def cut(self, x: Tensor) -> Tensor:
        return self._cut(x, is_in_flight=False)

    def _cut(self, x: Tensor, *, is_in_flight: bool) -> Tensor:
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
        """The backward of all segments; `roots` belong to the last one. Once."""
        crossings, self._open = self._open, []
        if crossings and roots:
            # Tensors cut after the last pause belong to the last segment, too: its roots are these
            # cuts, with the gradients that the given roots have there.
            pairs = torch.autograd.grad(
                roots,
                [crossing.leaf for crossing in crossings],
                gradients,
                retain_graph=True,
                allow_unused=True,
            )
            reached = [(c.edge, g) for c, g in zip(crossings, pairs, strict=True) if g is not None]
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
    """``torch.autograd.backward``, also of nothing."""
    if roots:
        torch.autograd.backward(roots, gradients)
