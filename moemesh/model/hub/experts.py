"""The seam of transformers' experts modules: our dispatcher and products in the place of theirs.

An experts module of transformers' interface looks its forward up by name among
`ALL_EXPERTS_FUNCTIONS` and calls it: (module, x [T, H], experts [T, K], weights [T, K]) -> [T, H].
:data:`IMPLEMENTATION` is the name of our :func:`forward`, which calls the module's `exchange`, or
its own eager forward if it has none.

Legend: T tokens, K slots per token, N source rows, R rows by expert, L experts of this rank, H
hidden, F expert width, G = 2 F (F without gates), I inputs and O outputs of a product.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from moemesh.config.lora import LoraConfig, TargetPart, factor_name, parts_of
from moemesh.model.batch import Context
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, LocalDispatcher
from moemesh.model.layers import adapters_of
from moemesh.model.moe import ExpertExchange, Observer, plain_exchange
from moemesh.model.seams import Flow, Tokens
from moemesh.ops.expert_mlp import DeferredProducts
from moemesh.ops.expert_weights import ExpertWeights, rows_of
from moemesh.ops.linear import Adapter, plain_linear
from moemesh.ops.permute import count_ids, permute

#: The name of our experts function among those of transformers.
IMPLEMENTATION = "moemesh"
#: Parameter names of the forward of an experts module.
_CALL = ["hidden_states", "top_k_index", "top_k_weights"]
#: (x [T, H], experts [T, K], weights [T, K]) -> [T, H]
Exchange: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward(module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The experts' weighted outputs, summed for each token."""
    exchange: Exchange | None = module.__dict__.get("exchange")
    if exchange is None:
        return eager_forward(module, x_TH, experts_TK, weights_TK)
    return exchange(x_TH, experts_TK, weights_TK)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def eager_forward(
    module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The forward of the module's class, without the decorator that looks it up by name."""
    decorated: Any = type(module).forward
    plain = getattr(decorated, "__wrapped__", decorated)
    return plain(module, x_TH, experts_TK, weights_TK)


def set_exchange(module: nn.Module, exchange: Exchange) -> None:
    """Let `exchange` compute the experts of `module`."""
    module.__dict__["exchange"] = exchange


def is_experts(module: nn.Module) -> bool:
    """Whether the module is an experts module of transformers' interface."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate")


def adopt(model: nn.Module) -> None:
    """Make part of the interface each module that has its stacks and its forward's parameters, but
    not its decorator."""
    for module in model.modules():
        stacks = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        count = getattr(module, "num_experts", None)
        are_stacks = all(
            isinstance(stack, nn.Parameter) and stack.dim() == 3 and len(stack) == count
            for stack in stacks
        )
        if is_experts(module) or not are_stacks or [*signature(module.forward).parameters] != _CALL:
            continue
        adopted: Any = module
        adopted.has_gate = adopted.is_concatenated = True
        adopted.has_bias = adopted.has_post_expert_norm = adopted.is_transposed = False
        adopted._is_expert_parallel = False
        adopted.forward = partial(forward, module)


def is_swiglu(module: Any) -> bool:
    """Whether the experts are plain SwiGLU MLPs with ``gate_up_proj`` [E, 2F, H], gates first."""
    return (
        module.has_gate
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias or module.has_post_expert_norm)
        and type(module)._apply_gate is _default_apply_gate
        and "SiLU" in type(getattr(module, "act_fn", None)).__name__
    )


def width_of(module: Any, leaf: str) -> tuple[int, int] | None:
    """The dim of a stack that ranks of etp shard, and its number of blocks (2: gates, then ups; a
    rank holds a part of each). The dim is the width of experts; in ``down_proj_bias``, the channels
    of the results. None for parameters that cannot be sharded."""
    outer, inner = (2, 1) if module.is_transposed else (1, 2)
    blocks = 2 if module.is_concatenated else 1
    cut = {
        "gate_up_proj": (outer, blocks),
        "up_proj": (outer, 1),
        "down_proj": (inner, 1),
        "gate_up_proj_bias": (1, blocks),
        "up_proj_bias": (1, 1),
        "down_proj_bias": (1, 1),
    }.get(leaf)
    # In a transposed stack the parts of both blocks would not be contiguous in memory.
    return None if cut == (2, 2) or module.has_post_expert_norm else cut


@torch.no_grad()
def adds_up(module: nn.Module) -> bool:
    """Whether the experts' results are the sum of the results of both halves of their width."""
    experts = cast("Any", module)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x_TH = torch.randn(experts.num_experts, hidden, dtype=experts.down_proj.dtype)
    experts_TK = torch.arange(len(x_TH))[:, None]

    def part(leaf: str, parameter: Tensor, index: int) -> Tensor:
        if leaf == "down_proj_bias":  # in the first part
            return parameter * (1 - index)
        width = width_of(experts, leaf)
        assert width is not None
        dim, blocks = width
        halves = parameter.unflatten(dim, (blocks, -1)).chunk(2, dim + 1)
        return halves[index].flatten(dim, dim + 1)

    total_TH = eager_forward(module, x_TH, experts_TK, x_TH.new_ones(len(x_TH), 1))
    for index in range(2):
        half = copy.copy(module)
        half.__dict__["_parameters"] = {
            leaf: part(leaf, weight, index)
            for leaf, weight in module.named_parameters(recurse=False)
        }
        total_TH = total_TH - eager_forward(half, x_TH, experts_TK, x_TH.new_ones(len(x_TH), 1))
    return bool(total_TH.abs().max() < 1e-9)


def _swiglu_weights(module: Any) -> tuple[Tensor, Tensor]:
    """The weights of plain SwiGLU experts in our form, [E, 2, F, H] and [E, H, F]."""
    return module.gate_up_proj.unflatten(1, (2, -1)), module.down_proj


def add_adapter(linear: nn.Module, owner: nn.Module, target: str, scale: float) -> None:
    """Change the forward of a linear layer: it adds the output of the adapter `target`, whose
    factors are parameters of the module `owner`."""
    inner: Callable[[Tensor], Tensor] = linear.forward

    def forward(x: Tensor) -> Tensor:
        a, b = (getattr(owner, factor_name(target, factor)) for factor in "AB")
        return inner(x) + F.linear(F.linear(x, a) * scale, b)

    linear.forward = forward


def unpack(linear: nn.Module) -> None:
    """Change the forward of a linear layer: it dequantizes the weight for each product."""
    layer = cast("Any", linear)
    linear.forward = lambda x: plain_linear(x, layer.weight, layer.bias)


class HeldExperts:
    """A rank's experts of one layer, with the interface of :class:`~moemesh.model.experts.Experts`.
    ``rest``: a module of frozen experts, after these in the order of rows."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.is_swiglu = self.can_defer = is_swiglu(module)
        self.rest: Any = None
        self.column, self.num_bounded = 0, 0
        self.max_rows: int | None = None
        self.scale = 1.0
        #: The name of a weight -> its parts with adapters.
        self._adapted: dict[str, list[TargetPart]] = {}

    def adapt(self, lora: LoraConfig) -> None:
        """Use the adapter parameters of the module."""
        self.scale = lora.scaling if lora.rank else 1.0
        for name, weight in self.module.named_parameters(recurse=False):
            parts = parts_of(name.removesuffix("_proj"), tuple(weight.shape))
            adapted = [
                part for part in parts if hasattr(self.module, factor_name(part.target, "A"))
            ]
            self._adapted |= {name: adapted} if adapted else {}

    @torch.no_grad()
    def split(self, own: Sequence[int], others: Sequence[int]) -> None:
        """Keep the experts in the places `own`, in this order; those in `others` become `rest`."""
        self.rest = copy.copy(self.module)
        self.rest._parameters, self.rest._modules = {}, dict(self.module._modules)
        for name, parameter in list(self.module._parameters.items()):
            if parameter is not None:
                self.rest._parameters[name] = nn.Parameter(parameter[list(others)])
                self.module._parameters[name] = nn.Parameter(parameter[list(own)])
        self.module._modules["rest"] = self.rest

    @property
    def weights(self) -> ExpertWeights:
        """Inputs of the products of plain SwiGLU experts."""
        rest = () if self.rest is None else _swiglu_weights(self.rest)
        adapters = (*self._adapters("gate_up_proj"), *self._adapters("down_proj"))
        return ExpertWeights(
            *_swiglu_weights(self.module), adapters=adapters, scale=self.scale, rest=rest
        )

    def _adapters(self, name: str) -> list[Adapter]:
        return adapters_of(self.module, self._adapted.get(name, ()))

    def __call__(self, rows: DispatchedRows, deferred: DeferredProducts | None = None) -> Tensor:
        """Weighted outputs [R, H]."""
        is_plain = self.rest is None and not self._adapted
        if is_plain and not self.is_swiglu and self.module.down_proj.dtype != torch.uint8:
            return self._computed_by_module(rows)
        if not self.is_swiglu:
            return self._computed_in_turn(rows)
        # With padding, the dispatcher has bounded the number of rows before the routing is known.
        max_rows = None if rows.map.has_rest else self.max_rows
        self.num_bounded += max_rows is not None and rows.map.num_rows > max_rows
        return rows.compute(self.weights, deferred=deferred, max_rows=max_rows)

    def _computed_in_turn(self, rows: DispatchedRows) -> Tensor:
        """Weighted outputs [R, H], one expert after the other, with the module's own activation
        between the products. For experts with adapters or a rest, which the module's own forward
        would ignore, or in NF4."""
        module, counts = self.module, rows.counts_L.tolist()
        x_RH = permute(rows.source_NH, rows.map)
        num_padded = len(x_RH) - sum(counts)
        name = "gate_up_proj" if module.has_gate else "up_proj"
        h_RG = self._product(name, x_RH[: len(x_RH) - num_padded], counts)
        h_RF = module._apply_gate(h_RG) if module.has_gate else module.act_fn(h_RG)
        y_RH = self._product("down_proj", h_RF, counts)
        if module.has_post_expert_norm:
            y_RH = module.post_expert_norm(y_RH)
        y_RH = F.pad(y_RH, (0, 0, 0, num_padded))
        return y_RH * rows.weights_R[:, None].to(y_RH.dtype)

    def _product(self, name: str, x_RI: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows times the weight `name` of their experts, with its bias and adapters [R, O]."""
        modules = [self.module] if self.rest is None else [self.module, self.rest]
        weights = [weight for module in modules for weight in getattr(module, name).unbind()]
        product = partial(plain_linear, is_transposed=self.module.is_transposed)
        biases: list[Any] = [None] * len(weights)
        if self.module.has_bias:
            biases = [b for module in modules for b in getattr(module, f"{name}_bias").unbind()]
        parts = x_RI.split(list(counts))
        inputs = zip(parts, weights, biases, strict=True)
        y_RO = torch.cat([product(x, weight, bias) for x, weight, bias in inputs])
        deltas: dict[int, Tensor] = {}
        for adapter in self._adapters(name):
            factors = zip(parts, adapter.a.unbind(), rows_of(adapter).unbind(), strict=True)
            deltas[adapter.start] = torch.cat(
                [F.linear(F.linear(x, a) * self.scale, b) for x, a, b in factors]
            )
        if not deltas:
            return y_RO
        if name != "gate_up_proj":
            return y_RO + deltas[0]
        zeros = torch.zeros_like(next(iter(deltas.values())))
        pair = [deltas.get(start, zeros) for start in range(2)]  # gates, ups
        return y_RO + torch.stack(pair, -2 if self.module.is_concatenated else -1).flatten(-2)

    def _computed_by_module(self, rows: DispatchedRows) -> Tensor:
        """Weighted outputs [R, H] by the module's own forward, for any layout and gate: each row is
        passed as a token with one expert of weight 1."""
        module, num_local = self.module, len(rows.counts_L)
        x_RH = permute(rows.source_NH, rows.map)
        places_R = torch.arange(len(x_RH), device=x_RH.device)
        # Padding rows come last, with the expert number that eager forwards skip.
        expert_R1 = torch.searchsorted(rows.counts_L.cumsum(0), places_R, right=True)[:, None]
        num_experts, parameters = module.num_experts, module._parameters
        module.num_experts = num_local
        if (bias := parameters.get("down_proj_bias")) is not None:
            # This rank's channels of the bias; other ranks of etp add the others.
            after = x_RH.shape[1] - self.column - bias.shape[1]
            padded = F.pad(bias, (self.column, after))
            module.__dict__["_parameters"] = {**parameters, "down_proj_bias": padded}
        try:
            y_RH = eager_forward(module, x_RH, expert_R1, x_RH.new_ones(len(x_RH), 1))
        finally:
            module.num_experts, module.__dict__["_parameters"] = num_experts, parameters
        # An eager forward without rows is not in the graph: the backward of this rank would skip
        # the exchange, and the other ranks would wait for it.
        zero = sum((weight.sum() * 0 for weight in module.parameters()), x_RH.sum() * 0)
        y_RH = y_RH + zero if not len(x_RH) else y_RH
        return y_RH * rows.weights_R[:, None].to(y_RH.dtype)


class _WithResults(Flow):
    """A flow whose recomputations also exchange the experts' results (the default `unread`):
    modelling code may multiply or normalize them, and its backward then reads them."""

    def __init__(self, flow: Flow) -> None:
        self.once, self.start, self.cut, self.pause = flow.once, flow.start, flow.cut, flow.pause


class HubMoE:
    """The exchange of one layer's experts module: calls dispatcher and experts, as
    :class:`~moemesh.model.moe.MoE` does, but the router is the family's own."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self.module, self.num_experts = module, num_experts
        self.experts = HeldExperts(module)
        self.dispatcher: Dispatcher = LocalDispatcher(num_experts)
        self.exchange: ExpertExchange = plain_exchange
        self.place_E: Tensor | None = None
        self.tokens = Tokens()
        #: Context of the running forward, and choices of each expert in it.
        self.context: Context | None = None
        self.counts_E: Tensor | None = None
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        set_exchange(module, self)

    def observe(self, observer: Observer) -> RemovableHandle:
        """Call `observer` in every forward, until the handle is removed."""
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def __call__(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        context = self.context
        assert context is not None
        # Routers mark dropped choices by a weight of exactly 0, or by an id of E or more.
        has_row_TK = (experts_TK < self.num_experts) & (weights_TK.detach() != 0)
        if context.valid_T is not None:
            has_row_TK = has_row_TK & context.valid_T[:, None]
        experts_TK = torch.where(has_row_TK, experts_TK, -1)
        context.flow.once(self._count, experts_TK)
        for observer in self._observers.values():
            observer(weights_TK, experts_TK)
        if self.place_E is not None:
            experts_TK = torch.where(has_row_TK, self.place_E[experts_TK.clamp(min=0)], -1)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        y_TH, _ = self.exchange(
            self.dispatcher,
            _WithResults(context.flow),
            cast("Any", self.experts),
            (x_TH, weights_TK.to(wide), experts_TK),
        )
        return y_TH.to(x_TH.dtype)

    def _count(self, experts_TK: Tensor) -> None:
        counts_E = count_ids(experts_TK.flatten(), self.num_experts)
        self.counts_E = counts_E if self.counts_E is None else self.counts_E + counts_E
