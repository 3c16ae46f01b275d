"""Programs around a layer that would hang, or lose values in silence: a LayerError for each."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moemesh.config.model import ModelConfig
from moemesh.parallel.expert.spread import LayerError, expert_parameters
from moemesh.parallel.expert.transformers_trainer import caller, follow

#: Refusal of callers that need a graph of the layer.
NO_GRAPH = (
    "MoELayer computes rows whose number is data, and sends them: no graph of torch.export, "
    "torch.jit.trace, fullgraph=True, torch.func or forward_ad can hold it"
)


def refuse_form(x: Tensor) -> None:
    """Raise LayerError for an input that is not a dense tensor of this rank's values."""
    for is_wrong, words in (
        (isinstance(x, DTensor), "a DTensor: x.to_local()"),
        (x.is_nested, "a nested tensor: x.values()"),
        (x.layout is not torch.strided, f"{x.layout}: x.to_dense()"),
        (x.is_meta or is_fake(x), "without values, of the meta device or a FakeTensorMode"),
    ):
        if is_wrong:
            raise LayerError(f"x must be a dense tensor of this rank's tokens, not {words}")


def refuse_misuse(experts: nn.Module, size: int, replicas: int) -> None:
    """Raise LayerError where the program around a forward would overwrite or lose the parameters of
    `experts` that are spread over `size` ranks, or let their `replicas` drift apart."""
    if size == 1:
        return
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        if (num_ranks := dist.get_world_size(ddp.process_group)) != size * replicas:
            raise LayerError(
                f"DDP reduces gradients over {num_ranks} ranks, and the experts over "
                f"{size * replicas}: group = a DeviceMesh of DDP's ranks with two dimensions, "
                "(replicas, ranks that share the experts)"
            )
        reduced = {id(parameter) for parameter in ddp._module_parameters}
        if any(id(parameter) in reduced for parameter in expert_parameters(experts).values()):
            raise LayerError(
                "DDP has overwritten the experts of this rank with those of rank 0. Before "
                "wrapping the model: model._ddp_params_and_buffers_to_ignore = "
                "list(moemesh.expert_parameters(model))"
            )
    if (num_ranks := _ranks_of_fsdp()) > size * replicas:
        raise LayerError(
            f"FSDP2 reduces gradients over {num_ranks} ranks, and the experts over "
            f"{size * replicas}: group = a DeviceMesh of FSDP2's ranks with two dimensions, "
            "(replicas, ranks that share the experts)"
        )
    follow()  # so that a running Trainer saves and loads the experts of all ranks


def _ranks_of_fsdp() -> int:
    """Ranks over which FSDP2 reduces the gradients of the module that runs; 0 without FSDP2."""
    frame = inspect.currentframe()
    while frame:
        module = frame.f_locals.get("self")
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # Older versions of torch have one group of parameters, or None.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            if sizes := [group.mesh_info.mesh.size() for group in groups if group is not None]:
                return max(sizes)
        frame = frame.f_back
    return 0


def refuse_reentrant(layer: nn.Module, config: ModelConfig) -> None:
    """Raise LayerError if a reentrant checkpoint calls the layer, which has a loss."""
    losses = config.aux_loss_coefficient + config.z_loss_coefficient
    frame = caller("forward", "torch.utils.checkpoint") if losses else None
    if frame and frame.f_locals.get("run_function") is layer:
        raise LayerError(
            "checkpoint(layer, x, use_reentrant=True) loses the balancing loss inside of the "
            "result: use_reentrant=False, or aux_loss_coefficient = z_loss_coefficient = 0"
        )
