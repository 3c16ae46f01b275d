"""Optimizers of spread experts: hooks for their states in torch's checkpoints, and their checks."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moemesh.parallel.expert.spread import LayerError, Spread, SpreadGradient, own_part, share_of
from moemesh.parallel.expert.transformers_trainer import caller, with_experts

#: Modules of torch: functions that save and load states of optimizers, and PostLocalSGDOptimizer.
_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"
#: Optimizers that have the hooks.
_WATCHED: WeakSet[Optimizer] = WeakSet()


@cache
def watch_optimizers() -> None:
    """Before the first step of each optimizer, add the hooks of its state."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    # Classes are compared by name: importing ZeroRedundancyOptimizer warns of deprecated parts of
    # torch.
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    mixes = None
    if "ZeroRedundancyOptimizer" in kinds:
        mixes = "ZeroRedundancyOptimizer sends each parameter from the rank that updates it to the"
        mixes += " others"
    elif caller("step", _LOCAL_SGD):  # it has no hooks, and calls an optimizer with them
        mixes = "PostLocalSGDOptimizer averages each parameter over the ranks"
    if mixes is not None and any(
        isinstance(parameter.grad, SpreadGradient)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise LayerError(
            f"{mixes}, and every rank has experts of its own: another optimizer for "
            "mm.expert_parameters(model).values()"
        )
    for group in optimizer.param_groups:
        for kernel in ("fused", "foreach"):
            parameters = group["params"] if group.get(kernel) else ()
            has_experts = any(isinstance(p.grad, SpreadGradient) for p in parameters)
            if has_experts and any(isinstance(p, DTensor) for p in parameters):
                raise LayerError(
                    f"{kernel}=True takes no DTensors of FSDP2 beside experts that are spread over "
                    "ranks: a parameter group of their own for "
                    f"mm.expert_parameters(model).values(), or {kernel}=False"
                )
    if optimizer not in _WATCHED:
        _WATCHED.add(optimizer)
        optimizer.register_state_dict_post_hook(_share)
        optimizer.register_load_state_dict_pre_hook(_take_own)


def _share(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """While torch saves a model, make each rank's states of experts local parts of DTensors:
    `torch.distributed.checkpoint` writes plain tensors from one rank only."""

    def shared(experts: Spread, name: str, value: Tensor) -> Tensor:
        if len(value) != len(experts.held):
            raise LayerError(
                f"{type(optimizer).__name__} keeps {list(value.shape)} for the "
                f"{len(experts.held)} experts of a rank, with no part of each expert's: save the "
                "model alone"
            )
        return share_of(experts, value)

    frame = caller("_get_optim_state_dict", _STATE_DICT)
    return frame and with_experts(frame.f_locals["model"], optimizer, state, shared)


def _take_own(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """The inverse of :func:`_share`, while torch loads a model."""
    frame = caller("_load_optim_state_dict", _STATE_DICT)
    return frame and with_experts(
        frame.f_locals["model"], optimizer, state, lambda experts, _, x: own_part(experts, x)
    )
