"""The mixture-of-experts layer: route, dispatch, compute, combine.

Legend: T tokens of this rank, K slots per token, E experts, H hidden, Q scopes of the auxiliary
losses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemesh.config.model import ModelConfig
from moemesh.model.balance_loss import auxiliary_loss, auxiliary_sums
from moemesh.model.batch import Context
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher, LocalRows
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP
from moemesh.model.router import Router, Routing
from moemesh.model.seams import NO_SLICES, Flow, Tokens
from moemesh.ops.expert_mlp import expert_mlp_of_few
from moemesh.ops.linear import linear
from moemesh.ops.permute import count_ids
from moemesh.ops.swiglu import SwigluForm


def swiglu_form(config: ModelConfig) -> SwigluForm:
    """The form of every MLP of the model."""
    return SwigluForm(config.swiglu_limit, config.swiglu_alpha, config.swiglu_offset)


class MoEOutput(NamedTuple):
    """Results of the layer on this rank's tokens. ``aux``: this rank's part of the auxiliary
    losses, a scalar summed over their scopes; if one loss is for all layers, the sums that this
    layer adds to it (float64 [Q, 2E + 1]); None without such losses. ``counts_E`` int64: choices of
    each expert. ``num_dropped`` and ``fault``: see :class:`~moemesh.model.router.Routing`."""

    y_TH: Tensor
    aux: Tensor | None
    counts_E: Tensor
    num_dropped: Tensor | None
    fault: Tensor


#: x [T, H], and the weights and experts of each token [T, K].
RoutedTokens: TypeAlias = tuple[Tensor, Tensor, Tensor]


class ExpertExchange(Protocol):
    """One forward of the experts through a dispatcher."""

    def __call__(
        self,
        dispatcher: Dispatcher,
        flow: Flow,
        experts: Experts,
        tokens: RoutedTokens,
        *,
        meanwhile: Callable[[], Tensor] | None = None,
        is_complete: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' outputs, summed for each token [T, H], and the result of `meanwhile`, if
        given, which is called while rows are in flight; `is_complete`: no expert is -1."""
        ...


def plain_exchange(
    dispatcher: Dispatcher,
    flow: Flow,
    experts: Experts,
    tokens: RoutedTokens,
    *,
    meanwhile: Callable[[], Tensor] | None = None,
    is_complete: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The default :class:`ExpertExchange`: dispatch, compute and combine, one after the other. For
    local :class:`Experts` one operation does all three; those of transformers do not accept
    :class:`LocalRows`."""
    x_TH, weights_TK, experts_TK = tokens
    plan = flow.once(dispatcher.plan_complete if is_complete else dispatcher.plan, experts_TK)
    if isinstance(dispatcher, LocalDispatcher) and isinstance(experts, Experts):
        result = None if meanwhile is None else meanwhile()
        return experts(LocalRows(x_TH, plan.tokens, weights_TK, plan)), result
    rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    result = None if meanwhile is None else meanwhile()
    return dispatcher.combine(experts(rows), plan).wait(), result


#: Called with the weights [T, K] and the experts [T, K] of a forward.
Observer: TypeAlias = Callable[[Tensor, Tensor], None]


class MoE(nn.Module):
    """Routed experts, and shared experts that every token visits."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.has_aux_loss = config, config.has_aux_loss
        self.router = Router(config, layer)
        form = swiglu_form(config)
        self.experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.expert_intermediate_size,
            bias=config.expert_bias,
            form=form,
            lora=config.lora,
        )
        width = config.shared_width
        self.shared = MLP(config.hidden_size, width, form, config.lora) if width else None
        #: Gate weight of the shared experts' output, [1, H]; None without one.
        self.shared_gate = (
            nn.Parameter(torch.empty(1, config.hidden_size)) if config.shared_gate else None
        )
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)
        self.exchange: ExpertExchange = plain_exchange
        #: Place of each logical expert among those of all ranks (int64 [E]); None: in order.
        self.place_E: Tensor | None = None
        self.tokens = Tokens()

    def observe(self, observer: Observer) -> RemovableHandle:
        """Call `observer` in every forward, until the handle is removed."""

        def hook(router: nn.Module, inputs: Any, routing: Routing) -> None:
            observer(routing.weights_TK, routing.experts_TK)

        return self.router.register_forward_hook(hook)

    def forward(self, x_TH: Tensor, context: Context) -> MoEOutput:
        routing = self.router(x_TH, context, self.tokens)
        aux = None
        if self.has_aux_loss:
            if self.config.has_joint_aux_loss:
                aux = auxiliary_sums(routing, self.config, context, self.router.layer)
            else:
                aux = auxiliary_loss(routing, self.config, context, self.tokens, self.router.layer)
            aux = None if aux is None else context.flow.cut(aux)
        y_TH = self.apply_experts(x_TH, routing, context)
        counts_E = count_ids(routing.experts_TK.flatten(), self.config.num_experts)
        return MoEOutput(y_TH, aux, counts_E, routing.num_dropped, routing.fault)

    def apply_experts(self, x_TH: Tensor, routing: Routing, context: Context) -> Tensor:
        """The layer after its router: dispatch, compute, combine."""
        config, experts_TK = self.config, routing.experts_TK
        if self.place_E is not None:
            # From logical ids, those of the router and its losses, to places of the dispatcher.
            places_TK = self.place_E[experts_TK.clamp(min=0)]
            experts_TK = torch.where(experts_TK < 0, experts_TK, places_TK)
        tokens = x_TH, routing.weights_TK, experts_TK
        shared = None
        if self.shared is not None:
            shared = partial(self._shared_experts, self.shared, x_TH, context)
        # A few tokens of generated text on a CPU, with all experts local: few rows share an expert,
        # and sorting them by expert would cost more than it saves.
        if (
            not (context.training or context.slices is NO_SLICES or torch.is_grad_enabled())
            and isinstance(self.dispatcher, LocalDispatcher)
            and routing.is_complete
            and experts_TK.device.type == "cpu"
            and experts_TK.numel() <= config.num_experts
            and self.experts.rest is None
        ):
            shared_TH = None if shared is None else shared()
            y_TH = expert_mlp_of_few(*tokens, self.experts.weights)
        else:
            y_TH, shared_TH = self.exchange(
                self.dispatcher,
                context.flow,
                self.experts,
                tokens,
                meanwhile=shared,
                is_complete=routing.is_complete,
            )
        if config.router_scale_on == "output":
            y_TH = y_TH * config.router_scale
        if shared_TH is None:
            return y_TH
        return y_TH + shared_TH if config.shared_combine == "sum" else (y_TH + shared_TH) / 2

    def _shared_experts(self, shared: MLP, x_TH: Tensor, context: Context) -> Tensor:
        """The output of the shared experts, for use after the next pause."""
        shared_TH = shared(x_TH, context.num_tokens)
        if self.shared_gate is not None:
            shared_TH = linear(x_TH, self.shared_gate).sigmoid() * shared_TH
        return context.flow.cut(shared_TH)
