"""Experts spread over the ranks of a group: each rank holds others, a state dict holds all.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| state_dict | L own experts | E experts, by global id | all_gather | none |
| load_state_dict | E experts, by global id | L own experts | none | none |
| sync_gradients | partial over replicas | the whole | none | all_reduce over replicas |
| clip_grad_norm_ | own squares | the norm of all ranks | none | all_reduce |
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moemesh.comm import transfers
from moemesh.comm.collectives import all_reduce_
from moemesh.comm.mesh import Axis
from moemesh.config.errors import UserError, check_kind, check_limit, public
from moemesh.config.model import ModelConfig
from moemesh.model.experts import Experts
from moemesh.model.moe import swiglu_form

#: Whether state dicts hold this rank's experts as DTensors; see :func:`sharded_state_dicts`.
_SHARDED = ContextVar("_SHARDED", default=False)


class LayerError(UserError):
    """A layer cannot be built or called like this; names the numbers and the nearest choice."""


class SpreadExperts(Experts):
    """``num_experts / ranks.size`` consecutive experts of a layer, in rank order.

    DDP and FSDP2, which take parameters for equal on all ranks, must leave them alone: see
    :func:`expert_parameters`. Raises LayerError where FSDP2 shards them.
    """

    def __init__(self, config: ModelConfig, ranks: Axis) -> None:
        super().__init__(
            config.num_experts // ranks.size,
            config.hidden_size,
            config.expert_intermediate_size,
            bias=config.expert_bias,
            form=swiglu_form(config),
        )
        self.ranks, self.num_experts = ranks, config.num_experts
        self.register_state_dict_post_hook(_gather)
        self.register_load_state_dict_pre_hook(_take_own)

    @property
    def held(self) -> range:
        """Global ids of this rank's experts."""
        first = self.ranks.index * len(self.down)
        return range(first, first + len(self.down))

    @torch.no_grad()
    def sync_gradients(self, replicas: Axis, mean: bool) -> None:
        """Sum the gradients over other holders of the same experts, or take their mean."""
        for parameter in self.parameters():
            if parameter.requires_grad and replicas.size > 1:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce_(parameter.grad, replicas, caller="moe.sync", phase="backward")
                parameter.grad /= replicas.size if mean else 1

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(value, "device_mesh"):  # a DTensor: FSDP2 shards the parameter
            others = set(value.device_mesh.mesh.flatten().tolist()) & set(self.ranks.ranks)
            if len(others) > 1:
                raise LayerError(
                    f"fully_shard would mix the experts of ranks {sorted(others)}: each holds its "
                    "own. Give it ignored_params=set(moemesh.expert_parameters(model).values())"
                )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadExperts:
        return copy_sharing(self, memo, self.ranks)


def copy_sharing(module: Any, memo: dict[int, Any], *shared: object) -> Any:
    """A deep copy of `module` in which `shared` stay the same objects."""
    memo |= {id(one): one for one in shared}
    clone = module.__class__.__new__(module.__class__)
    memo[id(module)] = clone
    clone.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return clone


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the experts of `model` that are spread over ranks: those that DDP and
    FSDP2 must leave alone::

        model._ddp_params_and_buffers_to_ignore = list(expert_parameters(model))
        fully_shard(model, ignored_params=set(expert_parameters(model).values()))
    """
    check_kind("model", model, nn.Module)
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, experts in model.named_modules()
        if isinstance(experts, SpreadExperts)
        for name, parameter in experts.named_parameters()
    }


@public
@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of `model` to one norm of all its parameters on all ranks; returns it.

    For models with :class:`MoELayer` in place of torch's function, by which each rank would see its
    own experts alone, and clip parameters that all share by a factor of its own. All ranks call.
    """
    check_limit("max_norm", max_norm)
    spread = {id(p.grad) for p in expert_parameters(model).values() if p.grad is not None}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for is_sharded in (False, True):  # by FSDP2, as DTensors
        shared = [
            gradient
            for gradient in gradients
            if id(gradient) not in spread and hasattr(gradient, "full_tensor") == is_sharded
        ]
        norm = torch.nn.utils.get_total_norm(shared)
        total += (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).double().square()
    own: dict[tuple[int, ...], tuple[Axis, Tensor]] = {}
    for experts in (one for one in model.modules() if isinstance(one, SpreadExperts)):
        _, square = own.setdefault(experts.ranks.ranks, (experts.ranks, torch.zeros_like(total)))
        for parameter in experts.parameters():
            if parameter.grad is not None:
                square += parameter.grad.double().square().sum()
    for ranks, square in own.values():
        all_reduce_(square, ranks, caller="moe.clip", phase="backward")
        total += square
    norm = total.sqrt()
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for gradient in gradients:
        gradient *= factor
    return norm


@contextmanager
def sharded_state_dicts() -> Iterator[None]:
    """Inside, a `state_dict` sends nothing: experts are DTensors of global shape, each rank's part
    its own memory, as sharded checkpoints want them."""
    token = _SHARDED.set(True)
    try:
        yield
    finally:
        _SHARDED.reset(token)


@torch.no_grad()
def _gather(experts: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Experts of all ranks, by global id, in place of this rank's."""
    assert isinstance(experts, SpreadExperts) and experts.ranks.group is not None
    for name, _ in experts.named_parameters():
        own = state[prefix + name].detach()
        if _SHARDED.get():
            mesh = DeviceMesh.from_group(experts.ranks.group, own.device.type)
            found = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        else:
            found = transfers.all_gather(
                own, experts.ranks, phase="control", caller="moe.state_dict"
            )
        state[prefix + name] = found


def _take_own(
    experts: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """This rank's experts out of those of all ranks."""
    assert isinstance(experts, SpreadExperts)
    for name, own in experts.named_parameters():
        given = state.get(prefix + name)
        if given is None:
            continue
        expected = [experts.num_experts, *own.shape[1:]]
        if list(given.shape) != expected:
            errors.append(
                f"{prefix}{name}: the state has {list(given.shape)}, the layer needs {expected}: "
                "the experts of all ranks, by global id"
            )
            state[prefix + name] = own.detach()
            continue
        part = given.narrow(0, experts.held.start, len(experts.held))
        state[prefix + name] = part.clone() if metadata.get("assign_to_params_buffers") else part
