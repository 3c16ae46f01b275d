"""The overlapped exchange of a MoE layer: chunks of tokens whose rows travel while others compute.

While the experts of one chunk compute, the rows of the next are under way, and the results of the
one before; the shared experts run under the first dispatch. The number of exchanges and their order
follow from `num_chunks` alone, never from tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moemesh.config.layout import shard_sizes
from moemesh.model.dispatcher import Dispatcher, ExpertRows
from moemesh.model.experts import Experts
from moemesh.model.moe import Runner
from moemesh.model.seams import Flow
from moemesh.ops.expert_mlp import defer
from moemesh.ops.pending import Pending


class OverlappedExchange:
    """A :class:`~moemesh.model.moe.ExpertExchange` in `num_chunks` chunks, that pauses twice.

    `defers`: weight gradients wait until the gradients of tokens are on their way.
    """

    def __init__(
        self, dispatcher: Dispatcher, flow: Flow, *, num_chunks: int, defers: bool
    ) -> None:
        self.dispatcher, self.flow = dispatcher, flow
        self.num_chunks, self.defers = num_chunks, defers

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, is_complete: bool = False
    ) -> list[Pending[ExpertRows]]:
        """Start the first chunk. All plans come first, so that their small exchanges do not wait
        behind rows."""
        self.sizes = shard_sizes(len(x_TH), self.num_chunks)
        xs, weights = x_TH.split(self.sizes), weights_TK.split(self.sizes)
        chunks = experts_TK.split(self.sizes)
        self.plans = self.flow.once(self.dispatcher.plan_chunks, chunks, is_complete=is_complete)
        first = self.flow.start(self.dispatcher.dispatch, xs[0], weights[0], self.plans[0])
        self._waiting = [
            (self.flow.cut(x), self.flow.cut(weight))
            for x, weight in zip(xs[1:], weights[1:], strict=True)
        ]
        return [first]

    def compute(self, experts: Experts, rows: list[Pending[ExpertRows]]) -> list[Pending[Tensor]]:
        """Chunk by chunk, each behind the start of the next one's dispatch."""
        self.flow.pause()
        deferred, leaving = None, list[Pending[Tensor]]()
        for chunk, plan in enumerate(self.plans):
            if chunk < len(self._waiting):
                waiting = *self._waiting[chunk], self.plans[chunk + 1]
                rows.append(self.dispatcher.dispatch(*waiting))
            if deferred is None and self.defers:
                # Made here, behind starts of dispatches and before their ends, these gradients are
                # computed while those of tokens are on their way back.
                deferred = defer(experts.weights)
            y_RH = experts(rows[chunk].wait(), deferred)
            sent = self.flow.start(
                self.flow.unread, self.dispatcher.combine, y_RH, plan, self.sizes[chunk]
            )
            leaving.append(sent)
        return leaving

    def combine(self, results: list[Pending[Tensor]]) -> Tensor:
        self.flow.pause()
        return torch.cat([pending.wait() for pending in results])


def overlapped(num_chunks: int = 1, *, defers: bool = True) -> Runner:
    """A value for :attr:`MoE.runner`."""
    options: dict[str, Any] = {"num_chunks": num_chunks, "defers": defers}
    return partial(OverlappedExchange, **options)
