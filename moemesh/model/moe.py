"""The mixture-of-experts layer: route, dispatch, compute, combine.

Legend: T tokens, E experts, L experts held here, H hidden, F expert width, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.model.balance_loss import auxiliary_loss
from moemesh.model.batch import Context
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP
from moemesh.model.router import Router, Routing
from moemesh.model.seams import LocalTokens, Tokens
from moemesh.model.segments import Steps, finish
from moemesh.ops.expert_mlp import later


class MoEOutput(NamedTuple):
    """``y_TH``; this rank's part of the auxiliary losses summed over their scopes (a scalar); the
    tokens that this rank's rows sent to each expert, int64 [E]; its choices for which an expert had
    no room, and its first fault (:mod:`moemesh.model.faults`), int64 scalars."""

    y_TH: Tensor
    aux: Tensor
    counts_E: Tensor
    num_dropped: Tensor
    fault: Tensor


class MoE(nn.Module):
    """Routed experts and, beside them, shared experts that every token visits."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, layer)
        self.experts = Experts(
            config.num_experts, config.hidden_size, config.expert_intermediate_size
        )
        self.shared = MLP(config.hidden_size, config.shared_width) if config.shared_width else None
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)
        self.num_chunks = 1
        #: The place of each expert among those of all ranks (int64 [E]); None: they are in order.
        self.place_E: Tensor | None = None
        self.tokens: Tokens = LocalTokens()

    def forward(self, x_TH: Tensor, context: Context) -> MoEOutput:
        return finish(self.steps(x_TH, context))

    def steps(self, x_TH: Tensor, context: Context) -> Steps[MoEOutput]:
        """The forward; it pauses while the dispatch, and while the combine is under way."""
        routing = self.router(x_TH, context, self.tokens)
        aux = auxiliary_loss(routing, self.config, context, self.tokens, self.router.layer)
        aux = context.segments.cut(aux)
        y_TH = yield from self.expert_steps(x_TH, routing, context)
        counts_E = torch.bincount(
            routing.experts_TK.flatten() + 1, minlength=self.config.num_experts + 1
        )[1:]
        return MoEOutput(y_TH, aux, counts_E, routing.num_dropped, routing.fault)

    @property
    def _is_local(self) -> bool:
        return isinstance(self.dispatcher, LocalDispatcher)

    def _places(self, experts_TK: Tensor) -> Tensor:
        """From logical ids, which the router and its losses know, to the dispatcher's."""
        if self.place_E is None:
            return experts_TK
        places_TK = self.place_E[experts_TK.clamp(min=0)]
        return torch.where(experts_TK < 0, experts_TK, places_TK)

    def apply_experts(self, x_TH: Tensor, routing: Routing, context: Context) -> Tensor:
        """What of the forward follows the router."""
        return finish(self.expert_steps(x_TH, routing, context))

    def expert_steps(self, x_TH: Tensor, routing: Routing, context: Context) -> Steps[Tensor]:
        """Dispatch, compute, combine, in `num_chunks` chunks of tokens.

        While the experts of one chunk compute, the rows of the next are under way, and the results
        of the one before; the shared experts run under the first dispatch. All plans come first,
        so that their small exchanges do not wait behind rows.
        """
        sizes = shard_sizes(len(x_TH), self.num_chunks)
        weights, xs = routing.weights_TK.split(sizes), x_TH.split(sizes)
        plans = [
            context.replay.once(self.dispatcher.plan, experts_TK)
            for experts_TK in self._places(routing.experts_TK).split(sizes)
        ]
        segments = context.segments
        arriving = [segments.start(self.dispatcher.dispatch, xs[0], weights[0], plans[0])]
        shared_TH = None
        if self.shared is not None:
            shared_TH = segments.cut(self.shared(x_TH, context.num_tokens))
        others = [tuple(map(segments.cut, pair)) for pair in zip(xs[1:], weights[1:], strict=True)]
        yield from segments.pause()
        put_off = None
        leaving = []
        for chunk, plan in enumerate(plans):
            if (after := chunk + 1) < len(plans):
                arriving.append(self.dispatcher.dispatch(*others[chunk], plans[after]))
            if put_off is None and (len(plans) > 1 or not self._is_local):
                # Made here, behind starts of dispatches and before their ends, these gradients are
                # computed while those of tokens are on their way back.
                put_off = later(self.experts.gate_up, self.experts.down)
            rows = arriving[chunk].wait()
            y_RH = self.experts(rows, put_off)
            combine = self.dispatcher.combine
            leaving.append(segments.start(context.replay.unread, combine, y_RH, plan, sizes[chunk]))
        yield from segments.pause()
        y_TH = torch.cat([pending.wait() for pending in leaving])
        if self.config.router_scale_on == "output":
            y_TH = y_TH * self.config.router_scale
        if shared_TH is None:
            return y_TH
        return y_TH + shared_TH if self.config.shared_combine == "sum" else (y_TH + shared_TH) / 2
