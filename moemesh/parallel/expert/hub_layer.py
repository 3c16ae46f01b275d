"""`use_experts`: the experts of a model of transformers, spread over the ranks of a group.

The model stays that of transformers: its routers, gates, norms and losses. Its experts modules,
which look their forward up by name, dispatch rows to the ranks that hold the experts.

Legend: T tokens of this rank, K choices of a token, H hidden, E experts of all ranks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Axis
from moemesh.config.errors import check_kind, public
from moemesh.config.plan import Dispatcher as DispatcherName
from moemesh.config.plan import Plan
from moemesh.config.suggest import choices_of
from moemesh.model.batch import token_context
from moemesh.parallel.expert.layer import (
    Connection,
    axes_of,
    check_choice,
    check_divides,
    model_config,
)
from moemesh.parallel.expert.misuse import refuse_misuse
from moemesh.parallel.expert.optimizers import watch_optimizers
from moemesh.parallel.expert.spread import (
    PARAMETRIZED,
    LayerError,
    Spread,
    copy_sharing,
    expert_parameters,
)
from moemesh.parallel.expert.transformers_trainer import caller, follow

#: Instruction to save a model with spread experts in the format of transformers.
_SAVE = "model.save_pretrained(folder, state_dict=state)"


@public
def use_experts(
    model: nn.Module | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    dispatcher: DispatcherName = "all_to_all",
    *,
    gradients: Literal["mean", "sum"] = "mean",
) -> None:
    """Change the experts of `model`, a model of transformers 5, in place: moemesh computes them,
    and each rank of `group` keeps its share of every stack.

    `group`, `dispatcher` and `gradients` are those of :class:`MoELayer`; gradients are reduced over
    replicas (a DeviceMesh of two dimensions) in the backward. All ranks call, with equal models,
    before the model is wrapped. Without a model the call only registers the name
    ``experts_implementation="moemesh"`` for ``from_pretrained``.

    Raises LayerError for a model without experts of transformers' interface, in a wrapper, with
    experts that are spread or sharded already, or with a number of experts that the ranks of the
    group do not divide.
    """
    try:
        from moemesh.model.hub import experts as seam  # late: it imports transformers
    except ImportError as error:
        raise LayerError(f"use_experts needs transformers 5: {error}") from error
    if model is None:
        return
    check_kind("model", model, nn.Module)
    check_choice("dispatcher", dispatcher, choices_of(DispatcherName))
    check_choice("gradients", gradients, ("mean", "sum"))
    ranks, replicas = axes_of(group)
    modules = {name: module for name, module in model.named_modules() if seam.is_experts(module)}
    if not modules:
        raise LayerError(
            f"{type(model).__name__} has no experts that pass through the interface of "
            "transformers 5 (use_experts_implementation)"
        )
    if not hasattr(model, "set_experts_implementation"):
        raise LayerError(
            f"{type(model).__name__} is not the model of transformers but a wrapper of it: call "
            "use_experts before the model is wrapped"
        )
    for name, module in modules.items():
        _check(name, cast("Any", module), ranks.size)
    cast("Any", model).set_experts_implementation(seam.IMPLEMENTATION)
    for module in modules.values():
        if ranks.size > 1:
            _spread(module, ranks)
            watch_optimizers()
        _Exchange(module, ranks, replicas, dispatcher, gradients)
    cast("Any", model)._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))


def _check(name: str, module: Any, size: int) -> None:
    """Raise LayerError unless the experts `module` can be spread over `size` ranks."""
    check_divides(module.num_experts, size)
    if isinstance(module, Spread) or "exchange" in module.__dict__:
        raise LayerError(f"{name}: moemesh computes these experts already")
    if size > 1 and name.endswith(".base_layer"):  # inside of a wrapper of PEFT
        raise LayerError(f"{name}: {PARAMETRIZED}")
    for leaf, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise LayerError(f"{name}.{leaf} is sharded already: use_experts before fully_shard")
        if parameter.shape[0] != module.num_experts and size > 1:
            raise LayerError(
                f"{name}.{leaf} has the shape {list(parameter.shape)}, not one entry for each of "
                f"the {module.num_experts} experts: a group of 1 rank"
            )


class _SpreadModule(Spread):
    """A module of transformers with the experts of one rank."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LayerError(
            f"a pickled model has only experts {self.held.start} to {self.held.stop - 1}: save "
            "mm.full_state_dict(model), which all ranks call"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> _SpreadModule:
        follow()
        return super()._apply(fn, recurse)


@torch.no_grad()
def _spread(module: nn.Module, ranks: Axis) -> None:
    """Keep the experts of this rank, and add :class:`_SpreadModule` to the class of `module`."""
    kind = type(module)
    module.__class__ = type(f"Spread{kind.__name__}", (_SpreadModule, kind), {})
    assert isinstance(module, Spread)
    module.ranks = ranks
    held = slice(module.held.start, module.held.stop)
    for leaf, parameter in module.named_parameters(recurse=False):
        # The parameter stays the same object: an optimizer may hold it.
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data[held].clone()
        parameter.grad = None if gradient is None else gradient[held].clone()
        # An accumulator of gradients that existed before still expects the old shape.
        node = get_gradient_edge(parameter).node if parameter.requires_grad else None
        if node is not None and node._input_metadata[0].shape != list(parameter.shape):
            raise LayerError(
                f"{leaf} of {kind.__name__} belongs to DDP or to a graph of an earlier forward: "
                "call use_experts before the model is wrapped or runs"
            )
    module.register_forward_pre_hook(_refuse_other_code)
    module.share_state()
    module.register_state_dict_post_hook(_refuse_one_rank)


def _refuse_other_code(module: Any, _: object) -> None:
    """A hook before forwards: other implementations would index the experts of all ranks."""
    if (name := module.config._experts_implementation) != "moemesh":
        raise LayerError(
            f"experts that are spread over ranks cannot be computed by {name}: "
            'set_experts_implementation("moemesh")'
        )


def _refuse_one_rank(*_: object) -> None:
    """A hook of state dicts: `save_pretrained` would save the experts of one rank."""
    if caller("save_pretrained", "transformers.modeling_utils"):
        raise LayerError(
            "save_pretrained is called by one rank, which has the experts of one rank: on all "
            f"ranks before, state = mm.full_state_dict(model), then {_SAVE}"
        )


class _Reduction(NamedTuple):
    """A hook of a parameter's gradient, which is summed over the ranks of the group: divides it,
    and sums it over the replicas."""

    replicas: Axis
    divisor: int

    def __call__(self, gradient: Tensor) -> Tensor:
        gradient = gradient / self.divisor
        all_reduce_(gradient, self.replicas, caller="moe.sync", phase="backward")
        return gradient


class _Exchange:
    """(x [T, H], experts [T, K], weights [T, K]) -> [T, H] by the experts of all ranks."""

    def __init__(
        self, module: nn.Module, ranks: Axis, replicas: Axis, dispatcher: Any, gradients: str
    ) -> None:
        from moemesh.model.hub.experts import HubMoE, set_exchange  # late: it imports transformers

        self.ranks = ranks
        num_ranks = ranks.size * replicas.size
        self.reduction = _Reduction(replicas, num_ranks if gradients == "mean" else 1)
        self.plan = Plan(dp=ranks.size, ep=ranks.size, dispatcher=dispatcher)
        self.moe = HubMoE(module, cast("Any", module).num_experts)
        self._connection: Connection | None = None
        set_exchange(module, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Exchange:
        """The exchange of a copied module, over the same group."""
        shared = (self.ranks, self.reduction, self._connection, self.moe.dispatcher)
        return copy_sharing(self, memo, *shared)

    def __call__(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            # Rows of an expert and messages are data: a graph cannot hold them.
            return torch.compiler.disable(self._computed)(x_TH, experts_TK, weights_TK)
        return self._computed(x_TH, experts_TK, weights_TK)

    def _computed(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        module = self.moe.module
        if isinstance(module, Spread):
            if self._connection is None:
                # The first forward: check that the ranks agree, then choose a dispatcher.
                refuse_misuse(module, self.ranks.size, self.reduction.replicas.size)
                connection = Connection.over(self.ranks, x_TH.device)
                (_, hidden), slots = x_TH.shape, experts_TK.shape[1]
                call = f"{self.plan} {hidden} {slots} {x_TH.dtype}"
                tokens = connection.agree(len(x_TH), {"have different models or dtypes": call})
                config = model_config(hidden, 1, module.num_experts, slots, {})
                self.moe.dispatcher = connection.dispatcher(config, self.plan, x_TH.dtype, tokens)
                self._connection = connection
            module.mark_gradients()
            is_reduced = self.reduction.replicas.size > 1 or self.reduction.divisor > 1
            for parameter in module.parameters() if is_reduced else ():
                hooks = (parameter._backward_hooks or {}).values()
                is_marked = any(isinstance(hook, _Reduction) for hook in hooks)
                if parameter.requires_grad and not is_marked:
                    parameter.register_hook(self.reduction)
            if torch.is_grad_enabled() and not x_TH.requires_grad:
                # All ranks must take part in the exchanges of the backward, as in `MoELayer`.
                is_trained = any(parameter.requires_grad for parameter in module.parameters())
                x_TH = x_TH.detach().requires_grad_(is_trained)
        self.moe.counts_E = None
        # Experts do not depend on sequences: all tokens count as one sequence.
        self.moe.context = token_context(x_TH, 1, len(x_TH))
        return self.moe(x_TH, experts_TK, weights_TK)
