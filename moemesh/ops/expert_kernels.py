"""Experts' MLPs of other packages, in place of :func:`moemesh.ops.expert_mlp.expert_mlp`.

Legend: T tokens, K slots per token, E experts, F expert width, H hidden.

| name | package | computes |
|---|---|---|
| liger | liger-kernel | Triton: gather, products, SwiGLU fused; waits for the number of tiles |
| sonicmoe | sonic-moe (arXiv:2512.14080) | CuTe DSL: gather, products, SwiGLU fused |

A package is imported when it is first tried. The functions of packages compute their own gradients:
those of weights are never deferred, and those of the router's weights have the dtype of the tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from moemesh.config.python import installed_version
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.swiglu import PLAIN

#: (x [T, H], router's weights [T, K], ids of experts [T, K] without -1, gate and up [E, 2, F, H],
#: down [E, H, F]) -> the sum of the weighted outputs of each token's experts [T, H].
ExpertKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class KernelPackage(NamedTuple):
    """A package of PyPI, the compute capability it needs, and a loader of its kernel."""

    package: str
    capability: tuple[int, int]
    load: Callable[[], ExpertKernel]

    @property
    def version(self) -> str | None:
        """The installed version; None: the package is missing."""
        return installed_version(self.package)

    def missing(self, device: torch.device) -> str | None:
        """The first requirement that is not met, checked without an import; None: all are met."""
        if device.type != "cuda":
            return f"it needs a CUDA device, the experts are on {device.type}"
        capability = torch.cuda.get_device_capability(device)
        if capability < self.capability:
            needed, present = (".".join(map(str, pair)) for pair in (self.capability, capability))
            return f"it needs compute capability {needed}, the device has {present}"
        if self.version is None:
            return f"it needs the package {self.package} (pip install {self.package})"
        return None


def _liger() -> ExpertKernel:
    fused: Any = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def run(
        x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        return fused.apply(x_TH, gate_up.flatten(1, 2), down, experts_TK.int(), weights_TK)

    return run


def _sonicmoe() -> ExpertKernel:
    functional: Any = importlib.import_module("sonicmoe.functional")
    swiglu: Any = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU

    def run(
        x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        num_tokens, num_slots = experts_TK.shape
        tokens_T = torch.arange(num_tokens, dtype=torch.int32, device=x_TH.device)
        y_TH, _ = functional.moe_general_routing_inputs(
            x_TH,
            weights_TK.reshape(-1),
            tokens_T.repeat_interleave(num_slots, output_size=num_tokens * num_slots),
            experts_TK.reshape(-1).int(),
            gate_up.flatten(1, 2).permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            E=len(gate_up),
            stream_id=torch.cuda.current_stream(x_TH.device).cuda_stream,
            activation_type=swiglu,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
            concat_layout=True,  # all channels of the gate, then those of up
        )
        return y_TH

    return run


#: Kernels by their name in ``train.experts``.
KERNELS: dict[str, KernelPackage] = {
    "liger": KernelPackage("liger-kernel", (8, 0), _liger),
    "sonicmoe": KernelPackage("sonic-moe", (9, 0), _sonicmoe),
}


def computes(experts: ExpertWeights) -> bool:
    """Whether the kernels support these experts: plain SwiGLU, without biases, adapters and frozen
    experts beside trained ones, not packed."""
    is_plain = experts.form == PLAIN and experts.gate_up_bias is None
    is_packed = experts.gate_up.dtype == torch.uint8
    return is_plain and not (experts.adapters or experts.rest or is_packed)
