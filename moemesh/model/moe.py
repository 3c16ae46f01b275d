"""The mixture-of-experts layer: route, dispatch, compute, combine.

Legend: T tokens, E experts, L experts held here, H hidden, F expert width, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemesh.config.model import ModelConfig
from moemesh.model.balance_loss import auxiliary_loss, auxiliary_sums
from moemesh.model.batch import Context
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, LocalDispatcher, LocalRows
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
    """``y_TH``; this rank's part of the auxiliary losses summed over their scopes (a scalar), or
    where all layers have one loss what this layer adds to it (float64 [Q, 2E + 1]), None without
    such losses; the tokens that this rank's rows sent to each expert, int64 [E]; its choices for
    which an expert had no room (None where all have), and its first fault
    (:mod:`moemesh.model.faults`), int64 scalars."""

    y_TH: Tensor
    aux: Tensor | None
    counts_E: Tensor
    num_dropped: Tensor | None
    fault: Tensor


class ExpertExchange(Protocol):
    """One forward of the experts through a dispatcher. `dispatch` returns rows, or pending ones in
    several chunks, for :meth:`compute` of the same exchange."""

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, is_complete: bool = False
    ) -> Any:
        """`is_complete`: no -1 in `experts_TK`."""
        ...

    def compute(self, experts: Experts, rows: Any) -> Tensor:
        """The experts' results, summed for each token [T, H]."""
        ...


class PlainExchange:
    """One step after the other."""

    def __init__(self, dispatcher: Dispatcher, flow: Flow) -> None:
        self.dispatcher, self.flow = dispatcher, flow

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, is_complete: bool = False
    ) -> DispatchedRows:
        plan = self.dispatcher.plan_complete if is_complete else self.dispatcher.plan
        self.plan = self.flow.once(plan, experts_TK)
        return self.dispatcher.dispatch(x_TH, weights_TK, self.plan).wait()

    def compute(self, experts: Experts, rows: DispatchedRows) -> Tensor:
        return self.dispatcher.combine(experts(rows), self.plan).wait()


class LocalExchange:
    """Dispatch, compute and combine in one operation: no row leaves the device."""

    def __init__(self, dispatcher: LocalDispatcher, flow: Flow) -> None:
        self.dispatcher, self.flow = dispatcher, flow

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, is_complete: bool = False
    ) -> LocalRows:
        plan = self.dispatcher.plan_complete if is_complete else self.dispatcher.plan
        slots = self.flow.once(plan, experts_TK)
        return LocalRows(x_TH, slots.tokens, weights_TK, slots)

    def compute(self, experts: Experts, rows: LocalRows) -> Tensor:
        return experts(rows)


def plain_exchange(dispatcher: Dispatcher, flow: Flow) -> ExpertExchange:
    """The exchange of a whole microbatch in one piece: the default."""
    if isinstance(dispatcher, LocalDispatcher):
        return LocalExchange(dispatcher, flow)
    return PlainExchange(dispatcher, flow)


#: Factory of exchanges, called once a forward.
Runner: TypeAlias = Callable[[Dispatcher, Flow], ExpertExchange]
#: (gates [T, K], experts [T, K]) of a forward.
Observer: TypeAlias = Callable[[Tensor, Tensor], None]


class MoE(nn.Module):
    """Routed experts and, beside them, shared experts that every token visits."""

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
        self.runner: Runner = plain_exchange
        #: The place of each expert among those of all ranks (int64 [E]); None: they are in order.
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
            # From logical ids, which the router and its losses know, to the dispatcher's.
            places_TK = self.place_E[experts_TK.clamp(min=0)]
            experts_TK = torch.where(experts_TK < 0, experts_TK, places_TK)
        given, rows = (x_TH, routing.weights_TK, experts_TK), None
        exchange = self.runner(self.dispatcher, context.flow)
        # Experts of a few tokens of generated text are computed in place, without sorting or
        # sending: all are local, on a CPU, and few rows share an expert.
        is_direct = (
            not (context.training or context.slices is NO_SLICES or torch.is_grad_enabled())
            and isinstance(self.dispatcher, LocalDispatcher)
            and routing.is_complete
            and experts_TK.device.type == "cpu"
            and experts_TK.numel() <= config.num_experts
            and self.experts.rest is None
        )
        if not is_direct:
            rows = exchange.dispatch(*given, is_complete=routing.is_complete)
        shared_TH = None
        if self.shared is not None:  # while rows are in flight
            shared_TH = self.shared(x_TH, context.num_tokens)
            if self.shared_gate is not None:
                shared_TH = linear(x_TH, self.shared_gate).sigmoid() * shared_TH
            shared_TH = context.flow.cut(shared_TH)
        if is_direct:
            y_TH = expert_mlp_of_few(*given, self.experts.weights)
        else:
            y_TH = exchange.compute(self.experts, rows)
        if config.router_scale_on == "output":
            y_TH = y_TH * config.router_scale
        if shared_TH is None:
            return y_TH
        return y_TH + shared_TH if config.shared_combine == "sum" else (y_TH + shared_TH) / 2
